"""Where a setting's value comes from: a flag, else the environment, else the settings file, else
the default. Every value says its source, and so does every error."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetlearn_device.settings.kinds import SettingKind
from fleetlearn_device.settings.table import GROUPS, OF_PEERS, SETTINGS, Setting

if TYPE_CHECKING:
    from fleetlearn_device.settings.settings_file import SettingsFile

CONFIG_VARIABLE = "FLEETLEARN_CONFIG"


class SettingError(ValueError):
    """A setting that cannot be used. The text says where it stands, what was given, and what was
    expected."""


class SettingValue(NamedTuple):
    """A setting's value."""

    value: Any
    source: str
    """A flag, a variable, ``FILE, line N``, or ``default``."""


Values = dict[str, SettingValue]
"""Key of a setting -> its value."""


def add_flags(parser: argparse.ArgumentParser, only: Iterable[str] | None = None) -> None:
    """Add ``--config`` and the flags of the table. ``only``: the keys of those that the command
    has; None: all but those of peers."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file with settings; default: ${CONFIG_VARIABLE}",
    )
    if only is None:
        only = [row.key for row in SETTINGS if _group(row) != OF_PEERS]
    wanted = {*only}
    for group, title in GROUPS.items():
        rows = [row for row in SETTINGS if _group(row) == group and row.key in wanted]
        if rows:
            section = parser.add_argument_group(f"{title}, [{group}]" if group else title)
            for row in rows:
                _add_flag(section, row)


def _add_flag(section: argparse._ArgumentGroup, row: Setting) -> None:
    default = row.unset or ("" if row.default in (None, (), False) else str(row.default))
    about = f"{row.help}; default: {default}" if default else row.help
    options: dict[str, Any] = {
        "dest": row.key,
        "default": None,
        "help": about.replace("%", "%%"),
    }
    if row.kind.switch:
        section.add_argument(row.flag, action=argparse.BooleanOptionalAction, **options)
    else:
        action = "append" if row.kind.many else "store"
        section.add_argument(row.flag, action=action, metavar=row.kind.metavar, **options)


def read_settings(
    options: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> Values:
    """Return the value of each setting.

    ``options``: parsed by a parser that ``add_flags`` made. ``environment``: None: the process's.
    An empty variable is as none. Raises SettingError.
    """
    environment = os.environ if environment is None else environment
    path = config_path(options, environment)
    file = _file(path) if path else None
    return {row.key: _value(row, options, environment, file) for row in SETTINGS}


def config_path(
    options: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> str | None:
    """Return the settings file's path, or None where there is none."""
    environment = os.environ if environment is None else environment
    found: str | None = options.config or environment.get(CONFIG_VARIABLE) or None
    return found


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Return (variable, the one that may have been meant) of those that look like a setting's and
    are none. Other programs of fleetlearn have variables too, so such a name is no error."""
    environment = os.environ if environment is None else environment
    known = [CONFIG_VARIABLE, *(row.variable for row in SETTINGS)]
    found = []
    for name in environment:
        if name.startswith("FLEETLEARN_") and name not in known:
            found += [(name, near) for near in get_close_matches(name, known, n=1, cutoff=0.88)]
    return found


def _file(path: str) -> SettingsFile:
    # Imported late: a device without a file needs no TOML.
    from fleetlearn_device.settings.settings_file import SettingsFile

    file = SettingsFile.load(path, SettingError)
    file.refuse_unknown([row.key for row in SETTINGS], GROUPS)
    return file


def _value(
    row: Setting,
    options: argparse.Namespace,
    environment: Mapping[str, str],
    file: SettingsFile | None,
) -> SettingValue:
    given = getattr(options, row.key, None)
    if given is not None:
        flag = f"--no-{row.flag[2:]}" if given is False else row.flag
        return SettingValue(_read(row.kind, given, flag, secret=row.secret), flag)
    if given := environment.get(row.variable):
        words = given.split() if row.kind.many else given
        return SettingValue(_read(row.kind, words, row.variable, secret=row.secret), row.variable)
    if file is not None and row.key in file.values:
        where = file.where(row.key)
        value = _read(row.kind, file.values[row.key], f"{where}: {row.key}", secret=row.secret)
        return SettingValue(
            file.beside(value, row.kind.before_path) if row.kind.path else value, where
        )
    return SettingValue(row.default, "default")


def _read(kind: SettingKind, given: Any, where: str, *, secret: bool) -> Any:
    try:
        if not kind.many:
            return kind.read(given)
        if not isinstance(given, list):
            raise ValueError
        return tuple(kind.read(each) for each in given)
    except ValueError:
        shown = "a value that is not shown" if secret else repr(given)
        raise SettingError(f"{where}: {shown} was given; expected {kind.expected}") from None


def required(values: Values, key: str) -> Any:
    """Return a setting that a command cannot do without. Raises SettingError where it is not
    set."""
    value = values[key].value
    if value is None:
        row = next(row for row in SETTINGS if row.key == key)
        raise SettingError(
            f"{key} is not set: give {row.flag} {row.kind.metavar}, the variable {row.variable}, "
            f"or {key} in the file that --config names"
        )
    return value


def _group(row: Setting) -> str:
    return row.key.rpartition(".")[0]


def state_path(options: argparse.Namespace) -> str:
    """Return the state directory of a command whose flags are ``--config`` and ``--state``. Raises
    SettingError."""
    found: str = required(read_settings(options), "state")
    return found
