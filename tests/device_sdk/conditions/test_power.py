"""Mains power and batteries, against folders as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_device.conditions.condition import SystemFiles, UnreadableError
from fleetlearn_device.conditions.power import needs_battery, needs_mains, read_power
from system_trees import BATTERY_12, SUPPLY, plant

PLUGGED = {f"{SUPPLY}/AC/type": "Mains", f"{SUPPLY}/AC/online": 1}
UNPLUGGED = {f"{SUPPLY}/AC/type": "Mains", f"{SUPPLY}/AC/online": 0}
MOUSE = {f"{SUPPLY}/m/type": "Battery", f"{SUPPLY}/m/scope": "Device", f"{SUPPLY}/m/capacity": 3}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (BATTERY_12, "on battery (12 %, needs mains power)"),
        (BATTERY_12 | UNPLUGGED, "on battery (12 %, needs mains power)"),
        (BATTERY_12 | PLUGGED, None),
        (BATTERY_12 | {f"{SUPPLY}/BAT0/status": "Charging"}, None),
        (MOUSE | {f"{SUPPLY}/.there": ""}, None),  # a Raspberry Pi with a wireless mouse
        ({f"{SUPPLY}/ups/type": "UPS", f"{SUPPLY}/ups/status": "Discharging"},
         "on battery (needs mains power)"),
    ],
)  # fmt: skip
def test_mains_power(tmp_path: Path, rows: dict[str, object], why: str | None) -> None:
    assert needs_mains(plant(tmp_path, rows))(True) == why


def test_without_the_folder_nobody_can_tell(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="power_supply cannot be read"):
        needs_mains(SystemFiles(tmp_path, tmp_path))(True)


@pytest.mark.parametrize(
    ("level", "held", "why"),
    [
        (30, True, None),
        (29, True, "on battery (29 %, needs 30 %)"),
        (34, False, "on battery (34 %, needs 35 %)"),  # paused: 5 % more is asked
        (35, False, None),
    ],
)
def test_a_battery_goes_on_a_little_above_its_bound(
    tmp_path: Path, level: int, held: bool, why: str | None
) -> None:
    files = plant(tmp_path, BATTERY_12 | {f"{SUPPLY}/BAT0/capacity": level})
    assert needs_battery(files, 30.0)(held) == why


def test_a_bound_of_100_percent_can_be_reached(tmp_path: Path) -> None:
    files = plant(tmp_path, BATTERY_12 | {f"{SUPPLY}/BAT0/capacity": 100})
    assert needs_battery(files, 100.0)(False) is None


def test_with_mains_power_the_battery_s_level_does_not_matter(tmp_path: Path) -> None:
    assert needs_battery(plant(tmp_path, BATTERY_12 | PLUGGED), 30.0)(True) is None


def test_two_batteries_count_in_the_mean(tmp_path: Path) -> None:
    second = {f"{SUPPLY}/BAT1/type": "Battery", f"{SUPPLY}/BAT1/capacity": 40}
    assert read_power(plant(tmp_path, BATTERY_12 | second).sys / "class/power_supply").level == 26


def test_a_battery_without_a_level_is_said(tmp_path: Path) -> None:
    files = plant(tmp_path, {f"{SUPPLY}/BAT0/type": "Battery"})
    with pytest.raises(UnreadableError, match="no battery says its level"):
        needs_battery(files, 30.0)(True)
