"""``fleetlearn-device rotate``: change the device's credential."""

from __future__ import annotations

import argparse

from fleetlearn_device.settings.sources import add_flags, state_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which device is meant."""
    add_flags(parser, only=["state"])


def run(options: argparse.Namespace) -> int:
    """Have the credential changed. Returns the exit status."""
    from fleetlearn_device.storage.credential import begin_change
    from fleetlearn_device.storage.state_directory import state_folder

    begin_change(state_folder(state_path(options)))
    print(
        "the device has a new credential, and shows it at its next connection; the old one is "
        "valid until then"
    )
    return 0
