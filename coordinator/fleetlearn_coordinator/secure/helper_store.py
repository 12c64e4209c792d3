"""What a helper remembers, in one SQLite file: its private key, its devices, and every seed that is
in an answered set.

The key is in the same file as the seeds, so that nobody has the one without the other: a helper
whose file is lost has lost its key, and opens none of the old seeds again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.secure.helper_messages import MaskSumRequest

from fleetlearn_coordinator.secure.helper_book import OnRecord, RunOnRecord, seed_name
from fleetlearn_coordinator.storage.database import Tables, open_shared
from fleetlearn_coordinator.storage.errors import StoreError

TABLES = Tables(
    1,
    (
        "CREATE TABLE helper (key BLOB NOT NULL, made REAL NOT NULL)",
        "CREATE TABLE devices (name TEXT PRIMARY KEY, key BLOB NOT NULL UNIQUE, "
        "enrolled REAL NOT NULL, revoked REAL) WITHOUT ROWID",
        "CREATE TABLE runs (run TEXT PRIMARY KEY, bundle TEXT NOT NULL, size INTEGER NOT NULL) "
        "WITHOUT ROWID",
        "CREATE TABLE sets (digest BLOB PRIMARY KEY, run TEXT NOT NULL, devices INTEGER NOT NULL, "
        "at REAL NOT NULL) WITHOUT ROWID",
        "CREATE TABLE seeds (name BLOB PRIMARY KEY) WITHOUT ROWID",
        "CREATE TABLE updates (run TEXT NOT NULL, model BLOB NOT NULL, device TEXT NOT NULL, "
        "PRIMARY KEY (run, model, device)) WITHOUT ROWID",
    ),
    (),
)
"""``seeds``: by ``seed_name``. ``updates``: whose update of which model is in an answered set.
``sets`` has the answered sets, so that the same request again is answered again."""
BUSY_TIMEOUT = 10.0
"""Seconds to wait for another process's transaction, which takes milliseconds."""


class EnrolledDevice(NamedTuple):
    """A device that the helper's operator let in."""

    name: str
    key: bytes
    """Its public Ed25519 key, 32 bytes."""
    enrolled: float
    """Unix time."""
    revoked: float | None
    """Unix time. None: its reports count."""


class HelperCounts(NamedTuple):
    """How much a helper has done."""

    devices: int
    """Enrolled, and not revoked."""
    runs: int
    sets: int
    seeds: int
    last: float | None
    """Unix time of the last set that was new. None: there is none."""


class HelperStore:
    """The open file. One thread uses it at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises StoreError where there is none, or it cannot be used."""
        if not path.exists():
            raise StoreError(
                Code.UNKNOWN_CONTENT,
                f"{path} does not exist. It has the helper's key and every seed that was used, and "
                "is never made again: begin with a new key (`fleetlearn-coordinator helper init` "
                "in another folder), which devices must be given",
            )
        self._database = open_shared(path, TABLES, timeout=BUSY_TIMEOUT, mode=0o600)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def private_key(self) -> X25519PrivateKey:
        """Return the key that seeds are sealed for. Raises StoreError where the file has none."""
        rows = self._database.execute("SELECT key FROM helper").fetchall()
        if len(rows) != 1 or len(rows[0][0]) != 32:
            text = f"{self._database.path} has no key of a helper: its content is lost"
            raise StoreError(Code.WRONG_HASH, text)
        return X25519PrivateKey.from_private_bytes(rows[0][0])

    # What was answered

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What the block reads stays true until all that it writes is on the disk."""
        with self._database.transaction():
            yield

    def was_answered(self, asked: MaskSumRequest) -> bool:
        """Return whether this very set is on record."""
        statement = "SELECT 1 FROM sets WHERE digest = ?"
        return self._database.execute(statement, (asked.digest(),)).fetchone() is not None

    def on_record(self, asked: MaskSumRequest, seeds: Sequence[bytes]) -> OnRecord:
        """Return what is known of the things that a request names. ``seeds``: in the order of its
        reports."""
        read = self._database.execute
        run = read("SELECT bundle, size FROM runs WHERE run = ?", (asked.run,)).fetchone()
        names = [seed_name(seed) for seed in seeds]
        used = self._found("SELECT 1 FROM seeds WHERE name = ?", ((name,) for name in names))
        taken = self._found(
            "SELECT 1 FROM updates WHERE run = ? AND model = ? AND device = ?", _updates(asked)
        )
        return OnRecord(
            None if run is None else RunOnRecord(*run),
            self.was_answered(asked),
            {name for name, there in zip(names, used, strict=True) if there},
            {each.device for each, there in zip(asked.reports, taken, strict=True) if there},
        )

    def record(self, asked: MaskSumRequest, seeds: Iterable[bytes], at: float) -> None:
        """Remember a set that is about to be answered, within ``transaction``. ``at``: Unix
        time. Raises DuplicateRowError where a seed or an update is on record already."""
        write = self._database.execute
        terms = (asked.run, asked.bundle, asked.size)
        write("INSERT OR IGNORE INTO runs VALUES (?, ?, ?)", terms)
        devices = len({report.device for report in asked.reports})
        write("INSERT INTO sets VALUES (?, ?, ?, ?)", (asked.digest(), asked.run, devices, at))
        names = sorted(seed_name(seed) for seed in seeds)  # in the order of the file's pages
        self._database.executemany("INSERT INTO seeds VALUES (?)", ((name,) for name in names))
        self._database.executemany("INSERT INTO updates VALUES (?, ?, ?)", _updates(asked))

    def _found(self, statement: str, rows: Iterable[tuple[object, ...]]) -> list[bool]:
        cursor = self._database.cursor()
        return [cursor.execute(statement, row).fetchone() is not None for row in rows]

    # Devices

    def keys(self, names: Iterable[str], *, also_revoked: bool = False) -> dict[str, bytes]:
        """Return device -> key, for each name that is enrolled. ``also_revoked``: the keys of
        revoked devices too."""
        statement = "SELECT key FROM devices WHERE name = ? AND (revoked IS NULL OR ?)"
        found = {}
        for name in names:
            if row := self._database.execute(statement, (name, also_revoked)).fetchone():
                found[name] = row[0]
        return found

    def devices(self) -> list[EnrolledDevice]:
        """Return all devices, by name."""
        rows = self._database.execute("SELECT name, key, enrolled, revoked FROM devices").fetchall()
        return [EnrolledDevice(*row) for row in rows]

    def enrol(self, roster: Sequence[tuple[str, bytes]], at: float) -> int:
        """Let devices in, all or none of them. Returns how many of them were not enrolled before.

        roster: names and public Ed25519 keys, each name and each key once. Raises StoreError where
        a device has another key, or another device has that key.
        """
        new = 0
        with self._database.transaction():
            by_name = {each.name: each for each in self.devices()}
            by_key = {each.key: each for each in by_name.values()}
            for name, key in roster:
                known, holder = by_name.get(name), by_key.get(key)
                if known is not None and known.key == key and known.revoked is None:
                    continue
                _check_enrolment(name, known, holder)
                self._database.execute(
                    "INSERT OR REPLACE INTO devices VALUES (?, ?, ?, NULL)", (name, key, at)
                )
                new += 1
        return new

    def revoke(self, name: str, at: float) -> bool:
        """End a device's part. Returns False where no such device is enrolled."""
        statement = "UPDATE devices SET revoked = ? WHERE name = ? AND revoked IS NULL"
        return self._database.execute(statement, (at, name)).rowcount > 0

    def counts(self) -> HelperCounts:
        """Return how much is on record."""

        def one(statement: str) -> int:
            found: int = self._database.execute(f"SELECT {statement}").fetchone()[0]
            return found

        return HelperCounts(
            one("COUNT(*) FROM devices WHERE revoked IS NULL"),
            one("COUNT(*) FROM runs"),
            one("COUNT(*) FROM sets"),
            one("COUNT(*) FROM seeds"),
            self._database.execute("SELECT MAX(at) FROM sets").fetchone()[0],
        )


def make_helper_store(path: Path, at: float) -> None:
    """Make the file with a new key. Raises StoreError where there is one already."""
    if path.exists():
        text = f"{path} is there already, with a key and what was done with it: it stays as it is"
        raise StoreError(Code.DUPLICATE, text)
    database = open_shared(path, TABLES, timeout=BUSY_TIMEOUT, mode=0o600)
    try:
        with database.transaction():
            # Two at a time: the second finds the first one's key.
            if database.execute("SELECT 1 FROM helper").fetchone() is None:
                key = X25519PrivateKey.generate().private_bytes_raw()
                database.execute("INSERT INTO helper VALUES (?, ?)", (key, at))
    finally:
        database.close()


def _check_enrolment(
    name: str, known: EnrolledDevice | None, holder: EnrolledDevice | None
) -> None:
    if holder is not None and holder.name != name:
        raise StoreError(
            Code.DUPLICATE,
            f"{name} was given the key of {holder.name}. A key is one device's: otherwise one "
            "device could stand for several in a sum",
        )
    if known is not None and known.revoked is None:
        raise StoreError(
            Code.DUPLICATE,
            f"{name} is enrolled with another key. If the device has a new one, end the old one "
            f"first: `fleetlearn-coordinator helper revoke HELPER.toml {name}`",
        )


def _updates(asked: MaskSumRequest) -> list[tuple[str, bytes, str]]:
    return [(asked.run, bytes.fromhex(each.model), each.device) for each in asked.reports]
