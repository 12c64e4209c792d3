"""The table of settings: its names meet nowhere, and its defaults are those of the class."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
from fleetlearn_device import Device
from fleetlearn_device.commands.run import device_arguments
from fleetlearn_device.settings.sources import SettingValue
from fleetlearn_device.settings.table import GROUPS, SETTINGS, Setting

DEFAULTS = {row.key: SettingValue(row.default, "default") for row in SETTINGS}


@pytest.mark.parametrize("name", ["key", "flag", "variable"])
def test_no_two_settings_have_one_name(name: str) -> None:
    names = Counter(getattr(row, name) for row in SETTINGS)
    assert max(names.values()) == 1, names.most_common(1)


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_a_setting_is_in_a_group_that_the_help_has_and_its_default_is_allowed(
    row: Setting,
) -> None:
    assert row.key.rpartition(".")[0] in GROUPS
    assert row.key not in GROUPS, "a key and a table of a file cannot have one name"
    assert row.help
    if row.kind.many:
        assert row.default == ()
    elif row.default is not None:
        assert row.kind.read(row.default) == row.default


def test_flags_and_variables_are_made_from_one_name() -> None:
    level = next(row for row in SETTINGS if row.key == "log.level")
    assert (level.flag, level.variable) == ("--log-level", "FLEETLEARN_LOG_LEVEL")


def test_the_command_and_the_class_have_the_same_defaults() -> None:
    parameters = inspect.signature(Device).parameters
    for name, value in device_arguments(DEFAULTS).items():
        default = parameters[name].default
        if default is not inspect.Parameter.empty:
            assert value == default, name


def test_every_argument_of_the_class_is_a_setting_or_named_here() -> None:
    of_programs_alone = {"examples", "on_better_model", "timing"}
    assert {*inspect.signature(Device).parameters} == {
        *device_arguments(DEFAULTS), *of_programs_alone,
    }  # fmt: skip
