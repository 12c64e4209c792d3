"""``fleetlearn-device config``: what each setting is, and who said so."""

from __future__ import annotations

import argparse
import sys

from fleetlearn_device.settings.sources import (
    SettingValue,
    add_flags,
    read_settings,
    unknown_variables,
)
from fleetlearn_device.settings.table import SETTINGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting's flag: they count here as they do in ``run``."""
    parser.description = (
        "Show what each setting would be for `run` with the same flags, environment and file,\nand "
        "where each value comes from."
    )
    add_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Print a line for each setting. Returns the exit status."""
    values = read_settings(options)
    rows = [(row.key, _shown(values[row.key], row.secret)) for row in SETTINGS]
    key_width = max(len(key) for key, _ in rows)
    width = max(len(shown) for _, shown in rows)
    for key, shown in rows:
        print(f"{key:<{key_width}}  {shown:<{width}}  {values[key].source}")
    for name, near in unknown_variables():
        print(f"{name} is set and no setting; did you mean {near}?", file=sys.stderr)
    return 0


def _shown(found: SettingValue, secret: bool) -> str:
    value = found.value
    if value is None or value == ():
        return "-"
    if secret:
        return "(not shown)"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
