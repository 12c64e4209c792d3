"""Held-out evaluation: committed models are measured on the user's data, in a process of its own.

The process (``worker_process.py``) is given one model after the other. A version's result is stored
once (storage/held_out.py); a version that has none is measured by the next process, whoever died.
The members of a family are measured on the same data, each by its own process; what is said of
the version is the mean over the members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.vector import digest

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service import worker_process
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.worker_process import WorkerProcess
from fleetlearn_coordinator.storage.blobs import (
    PARAMETERS,
    BytesWithin,
    StoredBytes,
    StoredModels,
)
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.held_out import HeldOutResults

MAX_WAITING = 16
"""Models that are kept for their measurement. Where training is faster, older ones are passed
over."""
PAUSE = 1.0
"""Seconds between looks for new models."""


def check_installed() -> None:
    """Raise PlanError if the process could not run."""
    worker_process.check_installed("held-out evaluation", "leave evaluation.data out")


class HeldOutMember(NamedTuple):
    """One of a run's models, to be measured."""

    name: str
    """Empty where the run has one model."""
    bundle: Bundle
    begin: int
    """Where its elements begin in the run's vector."""
    digest_of: Callable[[int], str]
    """Version -> SHA-256 of its model."""


class HeldOut:
    """The measurement of one run's models. ``measured`` is called with each version and its
    metrics."""

    def __init__(
        self,
        members: Sequence[HeldOutMember],
        results: HeldOutResults,
        data: Path,
        models: StoredModels,
        is_due: Callable[[int], bool],
        log: RunLog | None = None,
    ) -> None:
        """``is_due``: whether a version is to be measured."""
        self.members, self.data, self._results, self._models = members, data, results, models
        self._log = log or RunLog()
        self._is_due = is_due
        self.measured: Callable[[int, dict[str, float]], None] = lambda version, metrics: None
        self._done = {*results.read_all()}
        self._given_up: set[int] = set()
        self._workers = [
            WorkerProcess("fleetlearn_device.measure", str(member.bundle.path), str(data))
            for member in members
        ]

    def waiting(self) -> list[int]:
        """Return the versions that are to be measured, the oldest first."""
        versions = filter(self._is_due, self._models.model_versions())
        return [version for version in versions if version not in self._done | self._given_up][
            -MAX_WAITING:
        ]

    async def run(self) -> None:
        """Measure models as they are made, for ever."""
        while True:
            await self.measure_all()
            await asyncio.sleep(PAUSE)

    async def measure_all(self) -> None:
        """Measure what waits, the oldest first."""
        while waiting := self.waiting():
            await self._measure(waiting[0])

    async def _measure(self, version: int) -> None:
        members, examples = dict[str, dict[str, float]](), 0
        for member, worker in zip(self.members, self._workers, strict=True):
            found = await self._ask(member, worker, version)
            if "error" in found:
                self._given_up.add(version)
                of = f" of {member.name}" if member.name else ""
                text = "model version %d%s is not measured on %s: %s"
                self._log.error(text, version, of, self.data, found["error"])
                return
            examples = found["examples"]
            sums = {"loss": found["loss_sum"], **found["metric_sums"]}
            members[member.name] = {name: value / examples for name, value in sums.items()}
        metrics = mean_of(members)
        result: dict[str, Any] = {"examples": examples, "metrics": metrics}
        if [*members] != [""]:
            result["members"] = members
        self._results.write(version, result)
        self._done.add(version)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        for name, own in result.get("members", {}).items():
            shown += f"; {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in own.items())
        known = said("held-out-measured", version=version, metrics=metrics)
        self._log.info("model version %d on held-out data: %s", version, shown, extra=known)
        self.measured(version, metrics)

    async def _ask(
        self, member: HeldOutMember, worker: WorkerProcess, version: int
    ) -> dict[str, Any]:
        """Return what a member's process answers of its model of this version."""
        model: StoredBytes = self._models.open_tensor(version)
        job = {"name": self._models.where_model(version), "sha256": member.digest_of(version)}
        if member.name:
            job["name"] = f"{member.name} of {job['name']}"
            size = FLOAT32.size(member.bundle.manifest.size)
            model = BytesWithin(model, FLOAT32.size(member.begin), size)
        text = "the process for held-out data died (%d) at model version %d"
        answer = await worker.ask(
            job, [model], lambda death: self._log.warning(text, death, version)
        )
        return answer.fields

    async def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            await worker.close()


def mean_of(members: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the means of each metric over the members, which count the same: all were measured on
    the same examples."""
    first = next(iter(members.values()))
    return {name: sum(own[name] for own in members.values()) / len(members) for name in first}


def means_of_newest(results: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of the newest version that was measured, if there are any."""
    found: dict[str, float] = results[max(results)]["metrics"] if results else {}
    return found


def measure_by_hand(plan: Plan, data: Path) -> dict[int, dict[str, Any]]:
    """Measure every model of a run whose file is kept and that has no result. Returns all results.
    Raises PlanError, StoreError, BundleError."""
    check_installed()
    storage = find_storage(plan.data_dir)
    results, models = storage.held_out, storage.models
    with storage.read_ledger() as ledger:
        known = ledger.models()
    members, begin = [], 0
    for name, path in plan.members.items():
        bundle = open_bundle(path)
        place = slice(begin, begin + bundle.manifest.size)
        begin = place.stop

        def digest_of(version: int, place: slice = place) -> str:
            if not plan.is_family:
                return known[version]
            return digest(models.load_model(version, known[version])[PARAMETERS][place])

        members.append(HeldOutMember(name, bundle, place.start, digest_of))

    async def measure() -> None:
        held_out = HeldOut(members, results, data, models, known.__contains__)
        try:
            await held_out.measure_all()
        finally:
            await held_out.close()

    asyncio.run(measure())
    return results.read_all()
