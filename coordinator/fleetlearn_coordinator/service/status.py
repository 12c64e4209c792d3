"""Reading a data directory from outside, also while its coordinator runs: how far it is, and the
models it made."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.storage.blobs import PARAMETERS
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage


class Closed(msgspec.Struct, frozen=True):
    """A round that is over."""

    number: int
    outcome: str
    """``committed`` or ``abandoned``."""
    opened: float
    """Unix time."""
    closed: float
    summary: dict[str, Any]
    """reports, partial, dropped by cause, train, evaluation, metrics, behind (devices that measured
    each metric), left_out (devices not counted in a metric), change, bytes_up, bytes_down,
    seconds."""


class ClosedEvaluation(msgspec.Struct, frozen=True):
    """An evaluation that is over."""

    number: int
    version: int
    """Version of the model that was measured."""
    outcome: str
    """``valid``, or ``invalid`` where too few devices measured."""
    closed: float
    """Unix time."""
    summary: dict[str, Any]
    """devices, examples, metrics, behind, left_out, quantiles, tiers, dropped by cause."""


class Status(msgspec.Struct, frozen=True):
    """Where a run stands."""

    running: bool
    """Whether its coordinator holds the data directory and answers devices."""
    address: str | None
    version: int
    """Version of the newest model."""
    finished: str | None
    """Why training is over, or None."""
    finished_by: dict[str, Any] | None
    """The stop rule that is met: rule (``rounds``, ``epsilon``, ``metric``, ``patience`` or
    ``privacy budget``), value, limit, metric, reason, and for a metric the version of the model
    that was measured, for patience that of the best one. None while training is not over, or where
    an earlier version of fleetlearn was the last to run it."""
    live: dict[str, Any]
    """The coordinator's last look at itself: time, phase, round, connected, leases, accepted,
    ..."""
    rounds: list[Closed]
    evaluations: list[ClosedEvaluation]
    held_out: dict[int, dict[str, Any]]
    """Version -> what its model measures on held-out data: examples, metrics."""

    @property
    def met_by(self) -> int | None:
        """The version of the model whose metric met the target, or is the best with patience, where
        that ended the run. None: it did not."""
        found: int | None = (self.finished_by or {}).get("version")
        return found

    @property
    def died(self) -> bool:
        """Whether the coordinator ended without its own doing: it was killed, or the machine went
        down."""
        return not self.running and self.live.get("pid") is not None


def read_status(folder: str | os.PathLike[str], *, since: int = 0) -> Status:
    """The state of the run in a data directory, with its rounds from number ``since`` on. Raises
    StoreError."""
    storage = find_storage(folder)
    with storage.read_ledger() as ledger:
        meta, version = ledger.metadata(), max(ledger.models(), default=0)
        rounds = [Closed(*row) for row in ledger.closed_rounds(since)]
        evaluations = [ClosedEvaluation(*row[:5]) for row in ledger.exchanges(EVALUATION)]
    live = msgspec.json.decode(meta.get("live") or "{}")
    rule = msgspec.json.decode(meta.get("finished_by") or "null")
    # Its process id says nothing: in a container it is often 1, and elsewhere another process may
    # have it by now.
    running = live.get("pid") is not None and storage.is_locked()
    return Status(
        running,
        meta.get("address"),
        version,
        meta.get("finished"),
        rule,
        live,
        rounds,
        evaluations,
        storage.held_out.read_all(),
    )


def read_model(folder: str | os.PathLike[str], version: int | None = None) -> tuple[int, Vector]:
    """A committed model, the newest by default: its version and its float32 vector (P,).

    Raises StoreError: no run there, or that version's file is not kept any more.
    """
    storage = find_storage(folder)
    with storage.read_ledger() as ledger:
        known = ledger.models()
    there = storage.models.model_versions()
    version = max(known, default=0) if version is None else version
    if version not in known or version not in there:
        text = f"{storage.where} has no model of version {version}; it keeps versions {there}"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    return version, storage.models.load_model(version, known[version])[PARAMETERS]


class TaskRecord(msgspec.Struct, frozen=True):
    """A device's turn in a round."""

    task: str
    device: str
    state: str
    """``assigned`` while it runs, ``accepted``, or the cause of its end: ``lost``, ``late``,
    ``surplus``, ..."""
    member: str | None = None
    """Which of a family's models it is for. None: the run has one."""


def read_tasks(
    folder: str | os.PathLike[str], round: int | None = None
) -> tuple[int, list[TaskRecord]]:
    """A round's number and its tasks; by default the open round, or (0, []) where none is open.
    Raises StoreError."""
    with find_storage(folder).read_ledger() as ledger:
        round = (ledger.open_round() or 0) if round is None else round
        return round, [TaskRecord(*row) for row in ledger.tasks(round)]
