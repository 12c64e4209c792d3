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
from safetensors.numpy import load_file

from fleetlearn_coordinator.store import DATABASE, StoreError, model_path


class Closed(msgspec.Struct, frozen=True):
    """A round that is over."""

    number: int
    outcome: str
    """``committed`` or ``abandoned``."""
    opened: float
    """Unix time."""
    closed: float
    summary: dict[str, Any]
    """reports, partial, dropped by cause, train, evaluation, metrics, change, bytes_up, bytes_down, seconds."""


class Status(msgspec.Struct, frozen=True):
    """Where a run stands."""

    running: bool
    """Whether its coordinator's process is alive."""
    address: str | None
    version: int
    """Of the newest model: the number of committed rounds."""
    finished: str | None
    """Why training is over, or None."""
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
    names = ("number", "outcome", "opened", "closed", "summary")
    rounds = [
        msgspec.convert(dict(zip(names, (*row[:4], msgspec.json.decode(row[4])), strict=True)), Closed) for row in rows
    ]
    return Status(_alive(live.get("pid")), meta.get("address"), version, meta.get("finished"), live, rounds)


def read_model(folder: str | os.PathLike[str], version: int | None = None) -> tuple[int, Vector]:
    """A committed model, the newest by default: its version and its float32 vector (P,).

    Raises StoreError: no run there, or that version's file is not kept any more.
    """
    folder = Path(folder)
    with closing(_open(folder)) as db:
        newest = db.execute("SELECT MAX(version) FROM models").fetchone()[0]
    version = newest if version is None else version
    path = model_path(folder, version or 0)
    try:
        return version or 0, load_file(path)["parameters"]
    except FileNotFoundError:
        kept = sorted(int(file.stem[1:]) for file in path.parent.glob("v*.safetensors"))
        text = f"{folder} has no model of version {version}; it keeps versions {kept}"
        raise StoreError(Code.UNKNOWN_CONTENT, text) from None


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


def _alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
