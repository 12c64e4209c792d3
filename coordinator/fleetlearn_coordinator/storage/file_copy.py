"""A copy of a run that is whole, also while its coordinator writes: a data directory.

The ledger is copied as of one moment into SQLite, by what ``LedgerMoments`` returns. The bytes
that its rows name are copied after that, and may be gone by then: a spool file has another update,
the sum was saved twice, a model was dropped. Checksums in the rows tell. The copy then begins again
with a newer ledger, and takes only what it does not have yet, so that each attempt is shorter than
the one before. If a fleet is faster than that for ATTEMPTS times, the copy gives up its open round,
as an operator may do with a damaged one: a start goes on from the newest model.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.stored_report import read_report
from fleetlearn_protocol.vector import checksum

from fleetlearn_coordinator.storage.blobs import PART_BYTES
from fleetlearn_coordinator.storage.database import connect
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_blobs import (
    MODELS,
    SUMS,
    SUMS_FOLDER,
    UPLOADS,
    load_model,
    model_path,
    model_versions,
    spool_path,
)
from fleetlearn_coordinator.storage.ledger import PRIVACY, PRIVACY_COPIED
from fleetlearn_coordinator.storage.run_storage import CopiedRun
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_coordinator.storage.stored_json import read_json

ATTEMPTS = 20
HELD_OPEN = 8
"""Models, the newest ones, that cannot vanish while they are copied."""


class LedgerMoment(NamedTuple):
    """A ledger as it was when this was made."""

    newest: int | None
    """Version of the newest model."""
    copy_to: Callable[[Path], None]
    """Writes the ledger into a new database of SQLite, one file."""


LedgerMoments: TypeAlias = Callable[[], AbstractContextManager[LedgerMoment]]
"""Opens a run's ledger as it is now. Raises StoreError (there is none yet, damaged)."""


class _Update(NamedTuple):
    """An accepted update that is in a spool file alone."""

    spool_file: int
    checks: tuple[tuple[int, int], ...]
    """Bytes and CRC-32 of each of its parts, in order."""


class _Rows(NamedTuple):
    """What a copied ledger says that there is."""

    models: dict[int, str]
    """Version -> SHA-256 of each committed model, also of those that are not kept."""
    updates: list[_Update]
    turn: int | None
    """Which of the two sums counts. None: neither."""
    sum: tuple[int, int] | None
    """Its bytes and CRC-32. None: an earlier version of fleetlearn did not write them down."""
    open_round: int | None
    releases: int | None
    """How many releases a private run has made. None: the run is not private."""


def copy_run(
    folder: Path, target: Path, moments: LedgerMoments, is_locked: Callable[[], bool]
) -> CopiedRun:
    """Write a copy of a run, whose bytes are in ``folder``, into another folder, which is made.

    ``is_locked``: whether a coordinator may be changing the bytes. Raises StoreError where there is
    no run, its ledger or newest model is damaged, or no coordinator runs and bytes that its rows
    name are missing or damaged; OSError.
    """
    target.mkdir(parents=True, exist_ok=True)
    copy = _Copy(folder, target, moments)
    for _ in range(ATTEMPTS):
        with ExitStack() as opened:
            rows = copy.take_ledger(opened)
            lacking = [*copy.take_models(rows), *copy.take_open_round(rows)]
        if not lacking:
            return copy.finish(rows, given_up=False)
        if not is_locked():
            text = (
                f"{lacking[0]} is missing or damaged, and no coordinator is changing it: the run "
                "cannot be copied whole. Repair it first: start the coordinator, whose error says "
                "what can be done"
            )
            raise StoreError(Code.WRONG_HASH, text)
    return copy.finish(rows, given_up=True)


class _Copy:
    """What was copied so far."""

    def __init__(self, folder: Path, target: Path, moments: LedgerMoments) -> None:
        self.folder, self.target, self._moments = folder, target, moments
        self._spool_files: dict[int, _Update] = {}
        self._sum: tuple[int, tuple[int, int]] | None = None
        self._models: set[int] = set()
        self._kept: list[int] = []
        """The models that were kept at the ledger's moment, in order."""
        self._open: dict[int, BinaryIO] = {}

    def take_ledger(self, opened: ExitStack) -> _Rows:
        """Copy the ledger as it is now. Returns what it says. The newest models of this moment are
        opened as long as ``opened`` is: a file that is open stays whole when its name is
        removed."""
        path = self.target / DATABASE
        path.unlink(missing_ok=True)
        with self._moments() as moment:
            newest = moment.newest
            self._open.clear()
            self._kept = [
                version
                for version in model_versions(self.folder)
                if newest is not None and version <= newest
            ]
            for version in self._kept[-HELD_OPEN:]:
                with suppress(FileNotFoundError):
                    file = model_path(self.folder, version).open("rb")
                    self._open[version] = opened.enter_context(file)
            moment.copy_to(path)
        with closing(connect(path)) as db:
            meta: dict[str, Any] = dict(db.execute("SELECT key, value FROM meta").fetchall())
            reports = db.execute(
                "SELECT task, slot, report FROM tasks WHERE state='accepted' AND slot IS NOT NULL"
            ).fetchall()
            models = dict(db.execute("SELECT version, sha256 FROM models").fetchall())
            round = db.execute("SELECT number FROM rounds WHERE closed IS NULL").fetchone()
        updates = [_update(slot, report, f"{path}: {task}") for task, slot, report in reports]
        turn, layout, crc32 = (meta.get(key) for key in ("sum", "sum_layout", "sum_crc32"))
        found = None
        if layout is not None and crc32 is not None:
            sizes = (np.dtype(dtype).itemsize * size for _, dtype, size in json.loads(layout))
            found = sum(sizes), crc32
        account = json.loads(meta.get(PRIVACY) or "null")
        releases = account and account["releases"]
        return _Rows(models, updates, turn, found, round and int(round[0]), releases)

    def take_models(self, rows: _Rows) -> list[Path]:
        """Copy the models that are kept, the newest first. Returns those that vanished meanwhile
        and are still needed."""
        newest = max(rows.models, default=None)
        lacking = []
        if newest is not None and newest not in self._kept:
            lacking.append(model_path(self.folder, newest))
        (self.target / MODELS).mkdir(exist_ok=True)
        for version in reversed(self._kept):
            if version in self._models:
                continue
            try:
                with ExitStack() as opened:
                    path = model_path(self.folder, version)
                    source = self._open.get(version) or opened.enter_context(path.open("rb"))
                    target = opened.enter_context(model_path(self.target, version).open("wb"))
                    shutil.copyfileobj(source, target, 2**20)
                self._models.add(version)
            except FileNotFoundError:
                lacking.append(model_path(self.folder, version))
        return lacking

    def take_open_round(self, rows: _Rows) -> list[Path]:
        """Copy the sum that counts, and the updates that it does not have. Returns the files whose
        bytes are not what the ledger says any more."""
        lacking = []
        if (self.folder / SUMS_FOLDER).is_dir():
            # Without this folder a start gives up the open round. What copies the copy may leave
            # empty folders out.
            (self.target / SUMS_FOLDER).mkdir(exist_ok=True)
            for name in SUMS:
                (self.target / SUMS_FOLDER / name).touch()
            if rows.turn is not None and not self._take_sum(rows.turn, rows.sum):
                lacking.append(self.folder / SUMS_FOLDER / SUMS[rows.turn])
        (self.target / UPLOADS).mkdir(exist_ok=True)
        for update in rows.updates:
            number = update.spool_file
            if self._spool_files.get(number) == update:
                continue
            self._spool_files.pop(number, None)
            if _copy_checked(
                spool_path(self.folder, number), spool_path(self.target, number), update.checks
            ):
                self._spool_files[number] = update
            else:
                lacking.append(spool_path(self.folder, number))
        return lacking

    def _take_sum(self, turn: int, check: tuple[int, int] | None) -> bool:
        if check is not None and self._sum == (turn, check):
            return True
        source, target = (each / SUMS_FOLDER / SUMS[turn] for each in (self.folder, self.target))
        if check is None:
            # An earlier version saved it. This one writes the other file next, with a CRC-32.
            shutil.copyfile(source, target)
            return True
        if not _copy_checked(source, target, [check]):
            return False
        self._sum = turn, check
        return True

    def finish(self, rows: _Rows, *, given_up: bool) -> CopiedRun:
        """Make the copy one that a start takes up. ``given_up``: without its open round. Raises
        StoreError where the newest model is damaged."""
        wanted = {update.spool_file for update in rows.updates}
        if given_up:
            wanted = set()
            shutil.rmtree(self.target / SUMS_FOLDER, ignore_errors=True)
        for path in (self.target / UPLOADS).glob("slot-*"):
            if path not in {spool_path(self.target, number) for number in wanted}:
                path.unlink()
        with closing(connect(self.target / DATABASE)) as db, db.transaction():
            db.execute("UPDATE meta SET value=NULL WHERE key='live'")  # of the original's process
            # What a private original releases from now on is not in the copy.
            db.execute(
                "INSERT OR REPLACE INTO meta SELECT ?, ? FROM meta WHERE key=? AND value NOTNULL",
                (PRIVACY_COPIED, time.time(), PRIVACY),
            )
            if given_up:
                # Reports that came before their round, whose updates could not be copied either.
                db.execute(
                    "UPDATE tasks SET state='lost' WHERE slot IS NOT NULL AND round>?",
                    (rows.open_round or 0,),
                )
                db.execute("UPDATE tasks SET slot=NULL")
        for version in self._models - {*self._kept}:
            model_path(self.target, version).unlink()
        newest = max(rows.models, default=None)
        if newest is not None:
            self._check_newest(newest, rows.models[newest])
        sha256 = None if newest is None else rows.models[newest]
        return CopiedRun(newest, sha256, rows.open_round, len(wanted), given_up, rows.releases)

    def _check_newest(self, version: int, sha256: str) -> None:
        path = model_path(self.folder, version)
        if version not in self._models:
            text = f"{path} was dropped before it was copied, {ATTEMPTS} times: try again"
            raise StoreError(Code.BUSY, text)
        try:
            load_model(model_path(self.target, version), sha256)
        except StoreError:
            text = f"{path} is damaged; put it back from a backup"
            raise StoreError(Code.WRONG_HASH, text) from None


def _update(spool_file: int, report: bytes, where: str) -> _Update:
    parts = read_json(read_report, report, where).parts
    return _Update(spool_file, tuple((part.size, part.crc32) for part in parts))


def _copy_checked(source: Path, target: Path, checks: Sequence[tuple[int, int]]) -> bool:
    """Copy the first bytes of a file: parts of these sizes in bytes, with these CRC-32. Returns
    whether all were so."""
    try:
        with source.open("rb") as read, target.open("wb") as write:
            for size, crc32 in checks:
                found = 0
                while size:
                    block = read.read(min(size, PART_BYTES))
                    if not block:
                        return False
                    found, size = checksum(block, found), size - len(block)
                    write.write(block)
                if found != crc32:
                    return False
    except FileNotFoundError:
        return False
    return True
