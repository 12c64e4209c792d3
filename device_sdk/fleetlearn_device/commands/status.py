"""``fleetlearn-device status``: how a device is, and why nothing happens."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from fleetlearn_device.settings.sources import add_flags, state_path

if TYPE_CHECKING:
    from fleetlearn_device.commands.status_view import StatusView

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

    from fleetlearn_device.commands.status_view import lines_of, view_of
    from fleetlearn_device.storage.state_directory import describe

    path = state_path(options)
    if (peer := show_peer(path, json=options.json)) is not None:
        return peer

    def text_of(view: StatusView) -> str:
        if options.json:
            return msgspec.json.encode(view).decode()
        return "\n".join(f"{about:<8} {text}" for about, text in lines_of(view, time.time()))

    view = view_of(describe(path))
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
            view = view_of(describe(path))
    except KeyboardInterrupt:
        return _status_of(view)


def show_peer(path: str, *, json: bool) -> int | None:
    """Print how a device is that trains with peers. Returns the exit status; None: it is none."""
    import msgspec

    from fleetlearn_device.storage.state_directory import is_running, state_folder

    folder = state_folder(path) / "peer"
    if not folder.exists():
        return None
    from fleetlearn_device.peers.peer_status import peer_lines, read_peer_status

    status = read_peer_status(folder)
    if status is None:
        return None
    running = is_running(folder.parent)
    status = msgspec.structs.replace(status, running=running)
    if json:
        print(msgspec.json.encode(status).decode())
    else:
        for about, text in peer_lines(status, running=running):
            print(f"{about:<8} {text}")
    if not running:
        return NOT_RUNNING
    return 0 if any(each.connected for each in status.neighbours.values()) else NOT_CONNECTED


def _status_of(view: StatusView) -> int:
    if not view.running:
        return NOT_RUNNING
    return 0 if view.connected else NOT_CONNECTED
