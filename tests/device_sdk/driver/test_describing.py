"""What a device states: what its user says, and what Linux says of its power."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_device.driver.describing import Description, is_charging, memory
from fleetlearn_device.session.statement import Statement

BATTERY = {"type": "Battery", "status": "Discharging"}


def supplies(folder: Path, **rows: dict[str, str]) -> Path:
    for name, files in rows.items():
        (folder / name).mkdir()
        for file, text in files.items():
            (folder / name / file).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("rows", "charging"),
    [
        ({}, None),
        ({"BAT0": BATTERY}, False),
        ({"BAT0": BATTERY | {"status": "Charging"}}, True),
        ({"BAT0": BATTERY | {"status": "Full"}}, True),
        (
            {"BAT0": BATTERY | {"status": "Not charging"}, "AC": {"type": "Mains", "online": "1"}},
            True,
        ),
        ({"AC": {"type": "Mains", "online": "0"}}, False),
        ({"usb": {"type": "USB", "online": "1"}}, True),
        ({"mouse": BATTERY | {"scope": "Device", "status": "Charging"}}, None),
        ({"odd": {}}, None),
    ],
)
def test_linux_says_whether_a_charger_is_there(
    tmp_path: Path, rows: dict[str, dict[str, str]], charging: bool | None
) -> None:
    assert is_charging(supplies(tmp_path, **rows)) is charging


def test_without_linux_s_folder_nothing_is_known(tmp_path: Path) -> None:
    assert is_charging(tmp_path / "none") is None


def test_memory_is_the_machine_s() -> None:
    found = memory()
    assert found is not None
    assert 2**26 < found < 2**50


def test_functions_are_asked_each_time() -> None:
    answers = iter([True, False])
    description = Description(["eu", "roof"], "pi-5", lambda: next(answers), "unmetered")
    assert description.state() == Statement(memory(), ("eu", "roof"), "pi-5", True, "unmetered")
    assert description.state().charging is False


def test_what_a_function_cannot_say_is_not_stated(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise RuntimeError("no bus")

    stated = Description(charging=broken, network=broken).state()
    assert stated.network is None
    assert (
        "what broken says is not stated: RuntimeError: no bus (in broken, test_describing.py line "
        in caplog.text
    )
    assert Description(charging=lambda: sys.exit("unplugged")).state().charging is not True
    assert "says is not stated: SystemExit: unplugged" in caplog.text
    assert Description(network=lambda: "wifi").state().network is None  # type: ignore[arg-type, return-value]
    assert "'wifi'" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"tags": ["a b"]},
        {"tags": [f"t{number}" for number in range(17)]},
        {"tier": ""},
        {"network": "wifi"},
    ],
)
def test_what_the_protocol_does_not_take_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Description(**wrong)
