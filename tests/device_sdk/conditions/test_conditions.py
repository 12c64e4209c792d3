"""The table of conditions: what is made of the owner's settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_device.conditions.conditions import Conditions, make_conditions
from fleetlearn_device.driver.condition_looks import OWN_PAUSE
from fleetlearn_device.storage.status import PAUSES
from system_trees import BATTERY_12, SUPPLY, THERMAL, plant

COMPLETE: dict[str, object] = BATTERY_12 | {
    f"{THERMAL}/thermal_zone0/type": "cpu-thermal", f"{THERMAL}/thermal_zone0/temp": 90000,
    "sys/devices/platform/soc/soc:firmware/get_throttled": "4",
    "proc/stat": "cpu 1 0 0 1 0 0 0 0 0 0",
    "proc/meminfo": "MemAvailable: 10240 kB", "proc/self/statm": "1 0", "proc/self/cgroup": "",
}  # fmt: skip
ALL = Conditions(
    mains=True, battery=30, unmetered=True, load=50, temperature=70, full_speed=True,
    hours=("00:00-24:00",), free_memory=100, free_disk=2**40, check=lambda: False,
)  # fmt: skip


def test_every_condition_is_checked_and_says_why(tmp_path: Path) -> None:
    made = make_conditions(ALL, tmp_path, lambda: "metered", plant(tmp_path, COMPLETE))
    found = {condition.name: condition.why_not(True) for condition in made}
    assert {*found} == {*Conditions._fields} - {"check_timeout"}
    assert [name for name, why in found.items() if why is None] == ["load", "hours"]
    assert [condition.name for condition in made if not condition.sends] == ["unmetered"]
    assert [condition.name for condition in made if condition.opens_in] == ["hours"]


def test_nothing_is_checked_that_nobody_asked_for(tmp_path: Path) -> None:
    assert make_conditions(Conditions(), tmp_path, lambda: None) == ()


@pytest.mark.parametrize("name", ["battery", "load", "temperature", "full_speed", "free_memory"])
def test_what_cannot_be_read_here_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    """As on macOS and Windows, which have no such files."""
    files = plant(tmp_path)._replace(sys=tmp_path / "none", proc=tmp_path / "none")
    wanted = Conditions(**{name: getattr(ALL, name)})
    if name == "full_speed":
        assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match=f"the condition {name} cannot be read on this machine"):
        make_conditions(wanted, tmp_path, lambda: None, files)


def test_a_network_that_nobody_knows_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the condition unmetered cannot be read"):
        make_conditions(Conditions(unmetered=True), tmp_path, lambda: None, plant(tmp_path))


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Conditions(battery=101), "battery is 101; expected 0 to 100 percent"),
        (Conditions(load=-1), "load is -1; expected 0 to 100 percent of all processors"),
        (Conditions(temperature=7), "temperature is 7; expected 20 to 120 degrees Celsius"),
        (Conditions(free_disk=-5), "free_disk is -5; expected 0 to"),
        (Conditions(check_timeout=0), "check_timeout is 0; expected 0.1 to 600 seconds"),
        (Conditions(hours=("always",)), "hours are 'always'; expected"),
        (Conditions(check=""), "the check is empty"),
    ],
)
def test_what_cannot_be_a_condition_is_refused(
    tmp_path: Path, wanted: Conditions, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make_conditions(wanted, tmp_path, lambda: None, plant(tmp_path, COMPLETE))


def test_a_condition_that_does_not_hold_at_the_start_is_not_refused(tmp_path: Path) -> None:
    files = plant(tmp_path, BATTERY_12 | {f"{SUPPLY}/AC/type": "Mains", f"{SUPPLY}/AC/online": 0})
    (made,) = make_conditions(Conditions(battery=30), tmp_path, lambda: None, files)
    assert made.why_not(True) == "on battery (12 %, needs 30 %)"


def test_each_reason_for_a_pause_has_its_word_in_the_status_and_the_metrics() -> None:
    assert (*sorted_as_fields({*PAUSES} - {*OWN_PAUSE.names}), *OWN_PAUSE.names) == PAUSES
    assert {*PAUSES} - {*OWN_PAUSE.names} == {*Conditions._fields} - {"check_timeout"}


def sorted_as_fields(names: set[str]) -> list[str]:
    return [name for name in Conditions._fields if name in names]
