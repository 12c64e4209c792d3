"""Runs a coordinator or a device with a mistake planted, to show that the suite finds it.

python mistakes.py MISTAKE serve PLAN.toml ...
python mistakes.py MISTAKE run --coordinator URL ...

The mistakes are placed here, around the real functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


def acknowledge_early() -> None:
    """The row of an accepted update is written with the next batch of rows."""
    from fleetlearn_coordinator.storage.ledger import ReportAccepted
    from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger

    write, late = SqliteLedger.write, list[Any]()

    def write_later(self: Any, rows: Sequence[Any]) -> None:
        if all(isinstance(row, ReportAccepted) for row in rows):
            late.extend(rows)
            return
        write(self, [*late, *rows])
        late.clear()

    SqliteLedger.write = write_later  # type: ignore[method-assign]


def acknowledge_unsynced() -> None:
    """Updates are not synced before they are acknowledged, although a loss of power is to lose
    nothing."""
    from fleetlearn_coordinator.storage.file_blobs import FileBlobs

    FileBlobs.settle_spool_files = lambda self, sizes: None  # type: ignore[method-assign]


def count_twice() -> None:
    """After a restart, the updates that were accepted before are added twice."""
    from fleetlearn_coordinator.service.training_run.round_reports import RoundReports

    load_sums, add = RoundReports.load_sums, RoundReports._add

    def load_twice(self: Any, reports: Any) -> None:
        def add_twice(*arguments: Any) -> None:
            add(self, *arguments)
            add(self, *arguments)

        self._add = add_twice
        load_sums(self, reports)
        del self._add

    RoundReports.load_sums = load_twice  # type: ignore[method-assign]


def drop_update() -> None:
    """After a restart, the last update that was accepted before is not added."""
    from fleetlearn_coordinator.service.training_run.round_reports import RoundReports

    load_sums = RoundReports.load_sums

    def load_fewer(self: Any, reports: Any) -> None:
        load_sums(self, list(reports)[:-1])

    RoundReports.load_sums = load_fewer  # type: ignore[method-assign]


def forget_control() -> None:
    """A device that was started again has forgotten its control variate."""
    from fleetlearn_device.storage.tied_vectors import TiedVectors

    begin, begun = TiedVectors.begin, list[bool]()

    def begin_empty(self: Any, *arguments: Any) -> Any:
        found = begin(self, *arguments)
        first = not begun
        begun.append(True)
        return {} if first else found

    TiedVectors.begin = begin_empty  # type: ignore[method-assign]


def leak_files() -> None:
    """The coordinator forgets to close 50 files for each connection."""
    from fleetlearn_coordinator.network.connection import DeviceConnection

    begin = DeviceConnection.__init__

    def begin_and_leak(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        for _ in range(50):
            os.open("/dev/null", os.O_RDONLY)

    DeviceConnection.__init__ = begin_and_leak  # type: ignore[method-assign]


def give_up() -> None:
    """A device whose connection broke three times does not come back."""
    from fleetlearn_device.driver import connection

    wait, waits = connection.seconds_to_wait, list[bool]()

    def longer(*arguments: Any) -> float:
        waits.append(True)
        return 1e6 if len(waits) > 3 else wait(*arguments)

    connection.seconds_to_wait = longer


class Mistake(NamedTuple):
    """A planted mistake."""

    of: str
    """The command's word: serve, of coordinators, or run, of devices."""
    plant: Callable[[], None]
    plan: str
    """A plan whose runs show it."""
    found: str
    """What the suite says, in part."""


MISTAKES = {
    "acknowledge-early": Mistake(
        "serve", acknowledge_early, "fedavg", "update-accepted, then update-accepted"
    ),
    "acknowledge-unsynced": Mistake("serve", acknowledge_unsynced, "fedprox", "is damaged"),
    "count-twice": Mistake("serve", count_twice, "fedavg", "is not the undisturbed run's"),
    "drop-update": Mistake("serve", drop_update, "median", "is not the undisturbed run's"),
    "forget-control": Mistake("run", forget_control, "scaffold", "is not the undisturbed run's"),
    "leak-files": Mistake("serve", leak_files, "fedavg", "open files"),
    "give-up": Mistake("run", give_up, "fedavg", "without faults"),
}


def main() -> None:
    name, word = sys.argv[1:3]
    if MISTAKES[name].of == word:
        MISTAKES[name].plant()
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    if word == "run":
        from fleetlearn_device.__main__ import main as command
    else:
        from fleetlearn_coordinator.__main__ import main as command
    sys.exit(command())


if __name__ == "__main__":
    main()
