"""Temperatures and throttling, against folders as Linux, a Raspberry Pi and a Jetson have them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fleetlearn_device.conditions.condition import UnreadableError
from fleetlearn_device.conditions.heat import needs_cool, needs_full_speed, read_temperature
from system_trees import THERMAL, plant, program

PI = "sys/devices/platform/soc/soc:firmware/get_throttled"
PI_5 = "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled"
JETSON = {
    f"{THERMAL}/thermal_zone0/type": "CPU-therm", f"{THERMAL}/thermal_zone0/temp": 61500,
    f"{THERMAL}/thermal_zone1/type": "GPU-therm", f"{THERMAL}/thermal_zone1/temp": 64000,
    f"{THERMAL}/thermal_zone2/type": "PMIC-Die", f"{THERMAL}/thermal_zone2/temp": 100000,
    f"{THERMAL}/thermal_zone3/type": "cv0-thermal", f"{THERMAL}/thermal_zone3/temp": -256000,
    f"{THERMAL}/thermal_zone4/type": "cv1-thermal",
}  # fmt: skip


def nobody() -> None:
    """There is no vcgencmd."""


def test_the_hottest_zone_counts_and_zones_that_say_nothing_do_not(tmp_path: Path) -> None:
    assert read_temperature(plant(tmp_path, JETSON).sys / "class/thermal") == (64.0, "GPU-therm")


@pytest.mark.parametrize(
    ("most", "held", "why"),
    [
        (64, True, None),
        (63, True, "too hot (64 °C at GPU-therm, needs at most 63 °C)"),
        (68, False, "too hot (64 °C at GPU-therm, needs at most 63 °C)"),
        (69, False, None),
    ],
)
def test_a_hot_device_goes_on_when_it_has_cooled_a_little_below_its_bound(
    tmp_path: Path, most: float, held: bool, why: str | None
) -> None:
    assert needs_cool(plant(tmp_path, JETSON), most)(held) == why


def test_without_a_zone_nobody_can_tell(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="has no zone that says a temperature"):
        needs_cool(plant(tmp_path), 70.0)(True)


@pytest.mark.parametrize("file", [PI, PI_5])
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("0", None),
        ("50000", None),  # it was so since the start, and is not so now
        ("0x50005", "the processor is slowed down "
                    "(its supply voltage is too low; it is throttled)"),
        ("8", "the processor is slowed down (it is near its limit of temperature)"),
    ],
)  # fmt: skip
def test_a_raspberry_pi_s_firmware(tmp_path: Path, file: str, flags: str, why: str | None) -> None:
    assert needs_full_speed(plant(tmp_path, {file: flags}), nobody)(True) == why


def test_where_the_kernel_has_no_such_file_the_pi_s_program_is_asked(tmp_path: Path) -> None:
    why_not = needs_full_speed(plant(tmp_path), lambda: "throttled=0x2")
    assert why_not(True) == "the processor is slowed down (its frequency is capped)"


def test_cooling_devices_of_the_processor_alone_count(tmp_path: Path) -> None:
    rows: dict[str, object] = {
        f"{THERMAL}/cooling_device0/type": "pwm-fan", f"{THERMAL}/cooling_device0/cur_state": 3,
        f"{THERMAL}/cooling_device1/type": "thermal-cpufreq-0",
        f"{THERMAL}/cooling_device1/cur_state": 0,
    }  # fmt: skip
    assert needs_full_speed(plant(tmp_path, rows), nobody)(True) is None
    files = plant(tmp_path, {f"{THERMAL}/cooling_device1/cur_state": 2})
    why = "the processor is slowed down to cool it (thermal-cpufreq-0)"
    assert needs_full_speed(files, nobody)(True) == why


def test_without_either_nobody_can_tell(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="neither a Raspberry Pi's get_throttled nor"):
        needs_full_speed(plant(tmp_path), nobody)(True)


@pytest.mark.skipif(sys.platform == "win32", reason="programs are scripts of sh")
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('test "$*" = get_throttled && echo throttled=0x4',
         "the processor is slowed down (it is throttled)"),
        ("echo throttled=0x0", None),
    ],
)  # fmt: skip
def test_the_pi_s_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str | None
) -> None:
    program(tmp_path / "bin", "vcgencmd", script, monkeypatch)
    assert needs_full_speed(plant(tmp_path))(True) == why


def test_what_the_program_says_without_a_pi_s_firmware_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "vcgencmd", "echo VCHI initialization failed", monkeypatch)
    with pytest.raises(UnreadableError):
        needs_full_speed(plant(tmp_path))(True)
