"""The canaries of a host: a second run beside another one, which a part of its devices serve. Rows
of the database of runs (runs.py).

A row says all that a canary is, and is changed by one statement. What follows from it for the two
runs is not written a second time: ``effective`` says it whenever the runs are read. So there is no
moment at which the two runs contradict each other, whoever is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.database import Database
from fleetlearn_coordinator.storage.errors import StoreError

TABLE = (
    "CREATE TABLE IF NOT EXISTS canaries(run INTEGER PRIMARY KEY, of INTEGER NOT NULL, phase TEXT "
    "NOT NULL, share REAL NOT NULL, devices TEXT NOT NULL, tags TEXT NOT NULL, about TEXT NOT "
    "NULL, state TEXT NOT NULL, changes INTEGER NOT NULL)"
)
_COLUMNS = "run, of, phase, share, devices, tags, about, state, changes"


class CanaryRow(NamedTuple):
    """A canary."""

    run: int
    """Number of its run."""
    of: int
    """Number of the old run, whose devices it takes over."""
    phase: Literal["running", "back", "finished"]
    share: float
    """Of the old run's devices, that the step is for. 1: the last step, for all of them."""
    devices: tuple[str, ...]
    """Devices that have the canary whatever the share is, since too few others were connected."""
    tags: tuple[str, ...]
    """Tags of the devices that have it before the last step."""
    about: str
    """What it is, as JSON: never changes."""
    state: str
    """Where it is, as JSON."""
    changes: int = 0
    """How many times it began another step or came to an end."""


class Split(NamedTuple):
    """Which part of the old run's devices serve one of the two runs."""

    key: str
    """What a device's place is found by, beside its name: another canary takes other devices."""
    of: str
    """The old run's name, by which devices know what they serve."""
    share: float
    """Of the devices, that has the canary (population.py)."""
    devices: tuple[str, ...]
    """Devices that have it whatever the share is."""
    tags: tuple[str, ...]
    is_canary: bool
    """Whether the run is the canary, and no device outside the part serves it; else none within it
    does."""


class Canaries:
    """The rows. Raises StoreUnavailableError where the disk is full."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def rows(self) -> list[CanaryRow]:
        """Return all canaries, the oldest first."""
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM canaries ORDER BY run")
        return [
            CanaryRow(run, of, phase, share, tuple(devices.split()), tuple(tags.split()), *rest)
            for run, of, phase, share, devices, tags, *rest in rows
        ]

    def add(self, row: CanaryRow) -> None:
        """Begin a canary, whose run was added in the same transaction."""
        self._db.execute(
            f"INSERT INTO canaries({_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row[:4], " ".join(row.devices), " ".join(row.tags), *row[6:]),
        )

    def note(self, row: CanaryRow, state: str) -> bool:
        """Remember what the arms did. Returns False, and remembers nothing, where somebody has
        changed the canary since the row was read."""
        return bool(
            self._db.execute(
                "UPDATE canaries SET state=? WHERE run=? AND changes=?",
                (state, row.run, row.changes),
            ).rowcount
        )

    def change(self, row: CanaryRow) -> None:
        """Begin another step of a canary, or end it, as this row says. Raises StoreError where
        somebody has changed it since the row was read: nothing changes then."""
        done = self._db.execute(
            "UPDATE canaries SET phase=?, share=?, devices=?, state=?, changes=changes+1 "
            "WHERE run=? AND changes=?",
            (row.phase, row.share, " ".join(row.devices), row.state, row.run, row.changes),
        ).rowcount
        if not done:
            text = "somebody else has just changed this canary: look at its status, and ask again"
            raise StoreError(Code.OUT_OF_TURN, text)

    def take_place(self, row: CanaryRow, put_away: str) -> None:
        """Let the canary's run be the old run: it gets the old run's name and population, and the
        old run is stopped under the name ``put_away``. In one transaction with ``change``."""
        name, population = self._db.execute(
            "SELECT name, population FROM runs WHERE number=?", (row.of,)
        ).fetchone()
        self._db.execute(
            "UPDATE runs SET name=?, wanted='stopped', asked=asked+1 WHERE number=?",
            (put_away, row.of),
        )
        self._db.execute(
            "UPDATE runs SET name=?, population=?, asked=asked+1 WHERE number=?",
            (name, population, row.run),
        )

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget the canaries of runs that were removed."""
        for number in numbers:
            self._db.execute("DELETE FROM canaries WHERE run=? OR of=?", (number, number))


def splits_of(row: CanaryRow, names: Mapping[int, str]) -> dict[int, Split]:
    """Return number of a run -> which of the old run's devices serve it, for both runs of a canary
    that goes on. ``names``: of all runs, by number."""
    key, of, share = f"canary {row.run}", names[row.of], row.share
    tags = () if share >= 1 else row.tags
    return {
        number: Split(key, of, share, row.devices, tags, number == row.run)
        for number in (row.of, row.run)
    }
