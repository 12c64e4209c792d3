"""``fleetlearn-device info``: how a device is, and what its state directory holds."""

from __future__ import annotations

import argparse

from fleetlearn_device.settings.sources import add_flags, state_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which device is meant."""
    add_flags(parser, only=["state"])


def run(options: argparse.Namespace) -> int:
    """Print how the device is. Returns the exit status."""
    from fleetlearn_device.storage.state_directory import describe
    from fleetlearn_device.storage.status import in_lines

    summary = describe(state_path(options))
    print(f"device   {summary.device or '(not named yet)'}")
    if summary.status is not None:
        for about, text in in_lines(summary.status, summary.running):
            print(f"{about:<8} {text}")
    for key in summary.trusted:
        print(f"trusts   {key}")
    for sha256, name in summary.bundles:
        print(f"bundle   {sha256[:12]}  {name}")
    for name, size in summary.kept_states:
        bundle, _, kind = name.partition(".")
        print(
            f"own      {bundle[:12]}  {size} bytes that never leave the "
            f"device{kind and f' ({kind})'}"
        )
    for tied in summary.tied_sets:
        print(
            f"tied     {tied.bundle[:12]}  {tied.size} bytes that never leave the device, of task "
            f"{tied.task}"
        )
    if summary.pending is None:
        print("update   none waits for its acknowledgement")
    else:
        held = summary.pending
        print(
            f"update   task {held.task} of round {held.round}, {held.size} bytes, waits for its "
            "acknowledgement"
        )
    return 0
