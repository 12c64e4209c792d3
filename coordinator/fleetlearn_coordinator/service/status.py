"""Reading a data directory from outside, also while its coordinator runs: how far it is, and the models it made."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.storage.store import DATABASE, LOCK, StoreError, decode, is_locked, load_model, model_path


class Closed(msgspec.Struct, frozen=True):
    """A round that is over."""

    number: int
    outcome: str
    """``committed`` or ``abandoned``."""
    opened: float
    """Unix time."""
    closed: float
    summary: dict[str, Any]
    """reports, partial, dropped by cause, train, evaluation, metrics, behind (devices that measured each metric),
    left_out (devices not counted in a metric), change, bytes_up, bytes_down, seconds."""


class Status(msgspec.Struct, frozen=True):
    """Where a run stands."""

    running: bool
    """Whether its coordinator holds the data directory and answers devices."""
    address: str | None
    version: int
    """Of the newest model: the number of committed rounds."""
    finished: str | None
    """Why training is over, or None."""
    finished_by: dict[str, Any] | None
    """The stop rule that is met: rule (``rounds``, ``epsilon`` or ``metric``), value, limit, metric, reason. None while
    training is not over, or where an earlier version was the last to run it."""
    live: dict[str, Any]
    """The coordinator's last look at itself: time, phase, round, connected, leases, accepted, ..."""
    rounds: list[Closed]


def read_status(folder: str | os.PathLike[str], *, since: int = 0) -> Status:
    """The state of the run in a data directory, with its rounds from number ``since`` on. Raises StoreError."""
    with closing(_open(Path(folder))) as db:
        meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
        version = db.execute("SELECT COALESCE(MAX(version), 0) FROM models").fetchone()[0]
        rows = db.execute(
            "SELECT number, outcome, opened, closed, summary FROM rounds "
            "WHERE closed IS NOT NULL AND number >= ? ORDER BY number",
            (since,),
        ).fetchall()
    live = msgspec.json.decode(meta.get("live") or "{}")
    rounds = []
    for number, outcome, opened, closed, content in rows:
        summary = decode(content, dict[str, Any], f"{folder}/{DATABASE}: the summary of round {number}")
        rounds.append(Closed(number, outcome, opened, closed, summary))
    rule = msgspec.json.decode(meta.get("finished_by") or "null")
    # Its process id says nothing: in a container it is often 1, and elsewhere another process may have it by now.
    running = live.get("pid") is not None and is_locked(Path(folder) / LOCK)
    return Status(running, meta.get("address"), version, meta.get("finished"), rule, live, rounds)


def read_model(folder: str | os.PathLike[str], version: int | None = None) -> tuple[int, Vector]:
    """A committed model, the newest by default: its version and its float32 vector (P,).

    Raises StoreError: no run there, or that version's file is not kept any more.
    """
    folder = Path(folder)
    with closing(_open(folder)) as db:
        known = dict(db.execute("SELECT version, sha256 FROM models").fetchall())
    version = max(known, default=0) if version is None else version
    path = model_path(folder, version)
    if version not in known or not path.exists():
        kept = sorted(int(file.stem[1:]) for file in path.parent.glob("v*.safetensors"))
        text = f"{folder} has no model of version {version}; it keeps versions {kept}"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    return version, load_model(path, known[version])["parameters"]


class Task(msgspec.Struct, frozen=True):
    """A device's turn in a round."""

    task: str
    device: str
    state: str
    """``assigned`` while it runs, ``accepted``, or the cause of its end: ``lost``, ``late``, ``surplus``, ..."""


def read_tasks(folder: str | os.PathLike[str], round: int | None = None) -> tuple[int, list[Task]]:
    """A round's number and its tasks; by default the open round, or (0, []) where none is open. Raises StoreError."""
    with closing(_open(Path(folder))) as db:
        db.execute("BEGIN")  # both looks see the same moment
        if round is None:
            row = db.execute("SELECT number FROM rounds WHERE closed IS NULL").fetchone()
            round = row[0] if row else 0
        rows = db.execute("SELECT task, device, state FROM tasks WHERE round=? ORDER BY task", (round,)).fetchall()
    return round or 0, [Task(*row) for row in rows]


def _open(folder: Path) -> sqlite3.Connection:
    path = folder / DATABASE
    if not path.is_file():
        text = f"{folder} is not a coordinator's data directory: it has no {DATABASE}"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)
    if not db.execute("PRAGMA user_version").fetchone()[0]:  # set in the transaction that makes the tables
        db.close()
        raise StoreError(Code.UNKNOWN_CONTENT, f"{folder} is still being made by a coordinator that starts; ask again")
    return db
