"""The data directory: everything that must survive the coordinator's death, in SQLite (WAL) and plain files.

An update's bytes are spooled to a *slot* file as they arrive. ``accept`` writes one row that makes slot and report
count together; only then is the device told. Accepted updates are added to the round's running sum in memory, and
every SLOTS_HELD of them the sum itself is written, in turns to two files, which frees their slots. So the disk holds
at most that many updates however large the cohort is, and slot files are reused, which matters: the first write to a
fresh 4 MiB file costs ten times as much CPU as writing it again (page allocation).

``kill -9`` loses nothing that was accepted: written data outlives the process. ``durable="power"`` also fsyncs slot,
sum and database before the device is told, so that a power cut loses nothing either.
"""

from __future__ import annotations

import fcntl
import os
import random
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from fleetlearn_protocol.encodings import ENCODINGS
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import UPDATE, Part, Report
from fleetlearn_protocol.stored_report import read_report
from fleetlearn_protocol.vector import Vector, checksum, digest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.exact_mean import BLOCK, Sum
from fleetlearn_coordinator.aggregation.optimizers import State

DATABASE, LOCK = "coordinator.sqlite3", "lock"
SCHEMA_VERSION = 1
SLOTS_HELD = 32
"""Accepted updates kept as files before the sum is written and their slots are freed."""
MODELS_KEPT = 3
LOCK_TIMEOUT = 10.0
"""Seconds that a start waits for those who only look whether a coordinator runs."""
ROUNDS_KEPT = 100
"""Closed rounds whose tasks and reports are kept one by one; of older ones the summary stays."""
SUMS_FOLDER, SUMS = "sums", ("a", "b")

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE models(version INTEGER PRIMARY KEY, sha256 TEXT NOT NULL, round INTEGER NOT NULL, created REAL NOT NULL);
CREATE TABLE rounds(number INTEGER PRIMARY KEY, opened REAL NOT NULL, closed REAL, outcome TEXT, summary TEXT);
CREATE TABLE tasks(
    task TEXT PRIMARY KEY, round INTEGER NOT NULL, device TEXT NOT NULL,
    state TEXT NOT NULL,                    -- assigned, accepted, or the cause of its end
    report BLOB, weight INTEGER, slot INTEGER
) WITHOUT ROWID;
CREATE INDEX tasks_of_round ON tasks(round);
"""


T = TypeVar("T")


class StoreError(FleetError):
    """The data directory cannot be used."""


class Open(NamedTuple):
    """What is known of a round that was open when the coordinator ended."""

    number: int
    leases: list[tuple[str, str]]
    """(task, device)"""
    dropped: list[tuple[str, str, str]]
    """(task, device, cause)"""
    reports: list[tuple[str, str, Report]]
    """(task, device, report) of the accepted ones"""
    total: Sum
    given_up: bool
    """The round is to be abandoned: somebody removed its sums, since its files were damaged."""


class Store:
    """One run's data directory, locked while open. All calls are quick and synchronous."""

    def __init__(self, folder: Path, bundle: str, *, durable: str = "process") -> None:
        """Open ``folder`` or make it. Raises StoreError: locked, another bundle's, made by a newer version, or its
        database is lost."""
        self.folder, self._power = folder, durable == "power"
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder / LOCK)
        (folder / "models").mkdir(exist_ok=True)
        (folder / "uploads").mkdir(exist_ok=True)
        self._db = sqlite3.connect(folder / DATABASE, isolation_level=None)
        try:
            self._open_database(bundle)
        except BaseException:
            self._db.close()
            os.close(self._lock)
            raise
        self.run: str = self.get("run")
        """The run's name: random, so that no other run has it."""
        self._slots: dict[int, int] = {}
        """Slot -> open file descriptor."""
        self._free: list[int] = []
        self._held: dict[str, int] = {}
        """Accepted task -> its slot, until the sum is written."""
        if not (folder / SUMS_FOLDER).exists():  # a new run, or somebody gives the open round up
            self.put("given_up", self.last_round())
            (folder / SUMS_FOLDER).mkdir()
        self._sums = [os.open(self._sum_path(turn), os.O_RDWR | os.O_CREAT) for turn in range(len(SUMS))]
        if self._power:  # a file is safe only once its name is
            sync(folder / SUMS_FOLDER)
            sync(folder)

    def _open_database(self, bundle: str) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'FULL' if self._power else 'OFF'}")
        new = not self._db.execute("PRAGMA user_version").fetchone()[0]
        self._refuse_lost(new)
        if new:
            with self.transaction():
                for statement in SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                self.put("bundle", bundle)
                self.put("run", token_hex(4))
        self._check(bundle)
        self.put("live", None)  # what an earlier process said of itself

    def _refuse_lost(self, new: bool) -> None:
        """Raise StoreError where there are models of which the database knows nothing: training would begin at version
        0, beside them. The first start may have been killed when it had written version 0, not recorded it."""
        versions = sorted(int(file.stem[1:]) for file in (self.folder / "models").glob("v*.safetensors"))
        if versions if new else versions[-1:] > [0] and self.newest() is None:
            raise StoreError(
                Code.UNKNOWN_CONTENT,
                f"{self.folder} has models up to version {versions[-1]}, but {DATABASE} there is lost or empty. Put it "
                f"back from a backup (with {DATABASE}-wal, if there is one). Or give the plan another data_dir, or "
                "remove that one: training then begins at version 0.",
            )

    def _check(self, bundle: str) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise StoreError(
                Code.BAD_VERSION,
                f"{self.folder} has a database of version {version}; this fleetlearn reads version {SCHEMA_VERSION}",
            )
        if self.get("bundle") != bundle:
            raise StoreError(
                Code.WRONG_HASH,
                f"{self.folder} holds the run of another bundle ({str(self.get('bundle'))[:12]}..., the plan's is "
                f"{bundle[:12]}...). Give the plan another data_dir, or remove that one.",
            )

    def close(self) -> None:
        for descriptor in (*self._slots.values(), *self._sums):
            os.close(descriptor)
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes within count together or not at all; nests into an outer one."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("ROLLBACK")
            raise

    def get(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return row and row[0]

    def put(self, key: str, value: str | float | None) -> None:
        """Keep a small value under a name."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))

    # --- models ---

    def model(self) -> tuple[int, Vector, State] | None:
        """The newest committed model: version, float32 vector (P,), optimizer state. None before the first."""
        row = self.newest()
        if row is None:
            return None
        path = self.model_path(row[0])
        tensors = load_model(path, row[1])
        vector = tensors.pop("parameters")
        state = {name.removeprefix("state."): tensor for name, tensor in tensors.items()}
        if self.get("state_crc32") not in (None, checksum_of(state)):
            raise StoreError(
                Code.WRONG_HASH, f"{path}: the server optimizer's state was changed after it was committed"
            )
        return row[0], vector, state

    def newest(self) -> tuple[int, str] | None:
        """The version of the newest model, and its SHA-256."""
        row: tuple[int, str] | None = self._db.execute(
            "SELECT version, sha256 FROM models ORDER BY version DESC LIMIT 1"
        ).fetchone()
        return row

    def model_path(self, version: int) -> Path:
        return model_path(self.folder, version)

    def save_model(self, version: int, round: int, vector: Vector, state: State, now: float) -> str:
        """Write a model and make it the newest; returns its SHA-256. Call within the transaction of its round's end."""
        path = self.model_path(version)
        draft = path.with_suffix(".draft")
        try:
            save_file({"parameters": vector, **{f"state.{name}": tensor for name, tensor in state.items()}}, draft)
        except SafetensorError as error:  # its way to say that the disk is full
            raise StoreError(Code.BUSY, f"{draft} cannot be written: {error}") from None
        if self._power:
            sync(draft)
        draft.replace(path)
        if self._power:
            sync(path.parent)
        sha256 = digest(vector)
        self.put("state_crc32", checksum_of(state))
        self._db.execute("INSERT OR REPLACE INTO models VALUES(?, ?, ?, ?)", (version, sha256, round, now))
        return sha256

    def drop_old_models(self, version: int) -> None:
        """Remove the files of models older than the last MODELS_KEPT, the initial one excepted."""
        if version > MODELS_KEPT:
            self.model_path(version - MODELS_KEPT).unlink(missing_ok=True)

    # --- rounds and leases ---

    def open_round(self, number: int, now: float) -> None:
        self._db.execute("INSERT INTO rounds(number, opened) VALUES(?, ?)", (number, now))
        self.put("sum", None)

    def assign(self, task: str, round: int, device: str) -> None:
        """A new lease."""
        self._db.execute(
            "INSERT INTO tasks(task, round, device, state) VALUES(?, ?, ?, 'assigned')", (task, round, device)
        )

    def end(self, task: str, cause: str) -> None:
        """A lease ended without an accepted report."""
        self._db.execute("UPDATE tasks SET state=? WHERE task=?", (cause, task))

    def close_round(self, number: int, outcome: str, summary: Mapping[str, Any], now: float) -> None:
        """End a round as ``committed`` or ``abandoned``; the slots of its updates are free."""
        self._db.execute(
            "UPDATE rounds SET closed=?, outcome=?, summary=? WHERE number=?",
            (now, outcome, msgspec.json.encode(summary).decode(), number),
        )
        self._db.execute("UPDATE tasks SET slot=NULL WHERE round=?", (number,))
        self._db.execute("DELETE FROM tasks WHERE round<=?", (number - ROUNDS_KEPT,))
        self.put("sum", None)
        self._free_held()

    def last_committed(self) -> dict[str, Any] | None:
        """The summary of the last round that was committed. None before the first."""
        row = self._db.execute(
            "SELECT summary, number FROM rounds WHERE outcome='committed' ORDER BY number DESC LIMIT 1"
        ).fetchone()
        if row is None:
            return None
        return decode(row[0], dict[str, Any], f"{self.folder / DATABASE}: the summary of round {row[1]}")

    def last_round(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM rounds").fetchone()[0])

    # --- updates ---

    def take_slot(self) -> int:
        """A slot to spool an update into; its file may hold old bytes."""
        if not self._free:
            self._add_slot()
        return self._free.pop()

    def free_slot(self, slot: int) -> None:
        self._free.append(slot)

    def _free_held(self) -> None:
        self._free += self._held.values()
        self._held.clear()

    def write_slot(self, slot: int, offset: int, content: Buffer) -> None:
        write_all(self._slots[slot], content, offset)

    def read_slot(self, slot: int, part: Part) -> Iterator[memoryview]:
        """The bytes of the slot's only part, in blocks of BLOCK elements that share one buffer. Raises StoreError (a
        short file)."""
        buffer = np.empty(min(part.size, ENCODINGS[part.encoding].size(BLOCK)), np.uint8).data
        for place in range(0, part.size, len(buffer)):
            block = buffer[: part.size - place]
            if os.preadv(self._slots[slot], [block], place) != len(block):
                raise StoreError(
                    Code.WRONG_LENGTH,
                    f"{self._slot_path(slot)} ends before its update's {part.size} bytes: it is damaged",
                )
            yield block

    def accept(self, report: Report, weight: int, slot: int) -> None:
        """From here on the update counts, whatever happens to this process."""
        if self._power:
            os.fsync(self._slots[slot])
        self._db.execute(
            "UPDATE tasks SET state='accepted', report=?, weight=?, slot=? WHERE task=?",
            (msgspec.json.encode(report), weight, slot, report.task),
        )
        self._held[report.task] = slot

    def fold(self, total: Sum) -> None:
        """Write the sum of all accepted updates if SLOTS_HELD slots are held, and free these."""
        if len(self._held) < SLOTS_HELD:
            return
        turn = 1 - int(self.get("sum") or 0)
        place = crc32 = 0
        for tensor in exact_mean.to_tensors(total).values():
            content = np.ascontiguousarray(tensor).data.cast("B")
            write_all(self._sums[turn], content, place)
            place, crc32 = place + len(content), checksum(content, crc32)
        if self._power:
            os.fsync(self._sums[turn])
        with self.transaction():
            self.put("sum", turn)
            self.put("sum_crc32", crc32)
            self._db.executemany("UPDATE tasks SET slot=NULL WHERE task=?", [(task,) for task in self._held])
        self._free_held()

    def recover(self, size: int) -> Open | None:
        """The open round, if there is one: its leases, and its sum (of vectors of ``size`` elements) made again.

        Where the round is ``given_up`` the sum is empty. Raises StoreError (damaged files).
        """
        row = self._db.execute("SELECT number FROM rounds WHERE closed IS NULL").fetchone()
        if row is None:
            return None
        try:
            return self._recover(int(row[0]), size)
        except StoreError as error:
            raise StoreError(
                error.code,
                f"{error.text}. Put the data directory back from a backup. Or remove {self.folder / SUMS_FOLDER}: the "
                f"next start then gives up what was reported in round {row[0]}, and goes on from the newest model.",
            ) from None

    def _recover(self, number: int, size: int) -> Open:
        given_up = self.get("given_up") == number
        opened = Open(number, [], [], [], exact_mean.init(size) if given_up else self._read_sum(size), given_up)
        rows = self._db.execute(
            "SELECT task, device, state, report, weight, slot FROM tasks WHERE round=? ORDER BY task", (number,)
        ).fetchall()
        for task, device, state, report, weight, slot in rows:
            if state == "assigned":
                opened.leases.append((task, device))
            elif state != "accepted":
                opened.dropped.append((task, device, state))
            else:
                opened.reports.append((task, device, self._decode_report(task, report)))
                if slot is not None and not given_up:
                    self._add_again(opened.total, task, opened.reports[-1][2], weight, slot)
        return opened

    def _decode_report(self, task: str, content: bytes) -> Report:
        try:
            return read_report(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            text = f"{self.folder / DATABASE}: the report of {task} is damaged: {error}"
            raise StoreError(Code.WRONG_HASH, text) from None

    def _add_again(self, total: Sum, task: str, report: Report, weight: int, slot: int) -> None:
        while len(self._slots) <= slot:
            self._add_slot()
        self._free.remove(slot)
        self._held[task] = slot
        part = report.part(UPDATE)
        crc32, blocks = 0, []
        for block in self.read_slot(slot, part):
            crc32 = checksum(block, crc32)
            blocks.append(ENCODINGS[part.encoding].decode(block).copy())
        if crc32 != part.crc32:
            raise StoreError(Code.WRONG_HASH, f"{self._slot_path(slot)}: the update of {task} is damaged")
        exact_mean.add(total, np.concatenate(blocks), weight)

    def _read_sum(self, size: int) -> Sum:
        total = exact_mean.init(size)
        turn = self.get("sum")
        if turn is None:
            return total
        path, place, crc32, tensors = self._sum_path(int(turn)), 0, 0, {}
        for name, like in exact_mean.to_tensors(total).items():
            tensors[name] = np.fromfile(path, like.dtype, like.size, offset=place)
            if tensors[name].size != like.size:
                raise StoreError(Code.WRONG_LENGTH, f"{path} is shorter than the sum of a round: it is damaged")
            place, crc32 = place + like.nbytes, checksum(tensors[name].data.cast("B"), crc32)
        if self.get("sum_crc32") not in (None, crc32):  # one that an earlier version wrote has none
            raise StoreError(Code.WRONG_HASH, f"{path} was changed after it was written: it is damaged")
        try:
            return exact_mean.from_tensors(tensors)
        except ValueError as error:
            raise StoreError(Code.WRONG_HASH, f"{path}: {error}") from None

    def _add_slot(self) -> None:
        slot = len(self._slots)
        self._slots[slot] = os.open(self._slot_path(slot), os.O_RDWR | os.O_CREAT)
        if self._power:
            sync(self.folder / "uploads")
        self._free.append(slot)

    def _sum_path(self, turn: int) -> Path:
        return self.folder / SUMS_FOLDER / SUMS[turn]

    def _slot_path(self, slot: int) -> Path:
        return self.folder / "uploads" / f"slot-{slot:04d}"


def descriptors(uploads: int) -> int:
    """File descriptors of the slots when so many uploads are granted, and as many were broken off."""
    return SLOTS_HELD + 2 * uploads


def model_path(folder: Path, version: int) -> Path:
    """Where the model of a version lies below a data directory."""
    return folder / "models" / f"v{version:08d}.safetensors"


def decode(content: str | bytes, kind: type[T], what: str) -> T:
    """Read JSON out of the database. Raises StoreError, naming ``what`` is damaged."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(Code.WRONG_HASH, f"{what} is damaged: {error}") from None


def load_model(path: Path, sha256: str) -> dict[str, Vector]:
    """The tensors of a model's file. Raises StoreError where it is missing, damaged, or another than was committed."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise StoreError(Code.UNKNOWN_CONTENT, f"{path} is missing; put it back from a backup") from None
    except SafetensorError as error:
        raise StoreError(Code.WRONG_HASH, f"{path} is damaged: {error}") from None
    if "parameters" not in tensors or digest(tensors["parameters"]) != sha256:
        raise StoreError(Code.WRONG_HASH, f"{path} was changed after it was committed")
    return tensors


def checksum_of(state: State) -> int:
    """CRC-32 of a server optimizer's state, names included."""
    found = 0
    for name in sorted(state):
        found = checksum(state[name], checksum(name.encode(), found))
    return found


def lock(path: Path) -> int:
    """Hold ``path`` as long as the returned descriptor is open. Raises StoreError where another coordinator does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    until = time.monotonic() + LOCK_TIMEOUT
    while not _flock(descriptor, fcntl.LOCK_EX):
        # A coordinator's lock is exclusive. A shared one is that of ``is_locked``, and over in a moment.
        if not _flock(descriptor, fcntl.LOCK_SH) or time.monotonic() > until:
            os.close(descriptor)
            raise StoreError(Code.BUSY, f"{path.parent} is in use by another coordinator; stop that one first")
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(random.uniform(0.0, 0.002))
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a coordinator holds ``path``: in whatever container or process namespace it runs."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_all(descriptor: int, content: Buffer, offset: int) -> None:
    """pwrite everything: one call may write less, where the disk becomes full or above 2 GiB. Raises OSError."""
    written = os.pwrite(descriptor, content, offset)
    while written < len(content):
        written += os.pwrite(descriptor, memoryview(content)[written:], offset + written)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
