"""``fleetlearn-device status``: how a device is, and why nothing happens."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from fleetlearn_device.settings.sources import add_flags, state_path

if TYPE_CHECKING:
    from fleetlearn_device.commands.status_view import StatusView
    from fleetlearn_device.peers.peer_status import PeerStatus

NOT_RUNNING, NOT_CONNECTED = 3, 4
EXIT = f"""exit status:
  0    the device runs and is connected
  1    there is no such state directory, or it cannot be read
  2    wrong usage or settings
  {NOT_RUNNING}    no process uses the state directory
  {NOT_CONNECTED}    the device runs, and has no connection to its coordinator
"""
EVERY = 1.0
"""Seconds between two looks of ``--watch``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which device is meant, and how it is shown."""
    parser.description = (
        "Show how a device is: whether it runs and is connected, what it does, or why nothing\n"
        "happens, its last task and its last error. It may run, or have ended or been killed."
    )
    parser.epilog = EXIT
    add_flags(parser, only=["state"])
    parser.add_argument(
        "--json", action="store_true", help="print JSON: docs/start/device-status.schema.json"
    )
    parser.add_argument(
        "--watch", "-w", action="store_true", help="go on until Ctrl-C, and show what changes"
    )


def run(options: argparse.Namespace) -> int:
    """Print how the device is. Returns the exit status."""
    import msgspec

    from fleetlearn_device.commands.status_view import StatusView, lines_of, view_of
    from fleetlearn_device.peers.peer_status import peer_in, peer_lines
    from fleetlearn_device.storage.state_directory import describe

    path = state_path(options)

    def look() -> StatusView | PeerStatus:
        return peer_in(path) or view_of(describe(path))

    def text_of(view: StatusView | PeerStatus) -> str:
        if options.json:
            return msgspec.json.encode(view).decode()
        lines = lines_of(view, time.time()) if isinstance(view, StatusView) else peer_lines(view)
        return "\n".join(f"{about:<8} {text}" for about, text in lines)

    view = look()
    if not options.watch:
        print(text_of(view))
        return _status_of(view)
    try:
        before = None
        while True:
            if view != before:
                if not options.json and sys.stdout.isatty():
                    print("\033[H\033[2J", end="")  # to the top, on an empty screen
                print(text_of(view), end="\n" if options.json else "\n\n", flush=True)
                before = view
            time.sleep(EVERY)
            view = look()
    except KeyboardInterrupt:
        return _status_of(view)


def _status_of(view: StatusView | PeerStatus) -> int:
    if not view.running:
        return NOT_RUNNING
    return 0 if view.connected else NOT_CONNECTED
