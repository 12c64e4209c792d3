"""Held-out evaluation: committed models are measured on the user's data, in a process of its own.

The process (``worker_process.py``) is given one model after the other. A version's result is stored
once (storage/held_out.py); a version that has none is measured by the next process, whoever died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetlearn_protocol import Bundle, open_bundle

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service import worker_process
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.worker_process import WorkerProcess
from fleetlearn_coordinator.storage.blobs import StoredModels
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


class HeldOut:
    """The measurement of one run's models. ``measured`` is called with each version and its
    metrics."""

    def __init__(
        self,
        bundle: Bundle,
        results: HeldOutResults,
        data: Path,
        models: StoredModels,
        digest_of: Callable[[int], str],
        is_due: Callable[[int], bool],
        log: RunLog | None = None,
    ) -> None:
        """``digest_of``: returns the SHA-256 of a version's model. ``is_due``: whether a version is
        to be measured."""
        self.bundle, self.data, self._results, self._models = bundle, data, results, models
        self._log = log or RunLog()
        self._digest_of, self._is_due = digest_of, is_due
        self.measured: Callable[[int, dict[str, float]], None] = lambda version, metrics: None
        self._done = {*results.read_all()}
        self._given_up: set[int] = set()
        self._worker = WorkerProcess("fleetlearn_device.measure", str(bundle.path), str(data))

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
        model = self._models.open_tensor(version)
        job = {"name": self._models.where_model(version), "sha256": self._digest_of(version)}
        text = "the process for held-out data died (%d) at model version %d"
        answer = await self._worker.ask(
            job, [model], lambda death: self._log.warning(text, death, version)
        )
        found = answer.fields
        if "error" in found:
            self._given_up.add(version)
            self._log.error(
                "model version %d is not measured on %s: %s", version, self.data, found["error"]
            )
            return
        sums = {"loss": found["loss_sum"], **found["metric_sums"]}
        metrics = {name: value / found["examples"] for name, value in sums.items()}
        self._results.write(version, {"examples": found["examples"], "metrics": metrics})
        self._done.add(version)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        known = said("held-out-measured", version=version, metrics=metrics)
        self._log.info("model version %d on held-out data: %s", version, shown, extra=known)
        self.measured(version, metrics)

    async def close(self) -> None:
        """End the process."""
        await self._worker.close()


def means_of_newest(results: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of the newest version that was measured, if there are any."""
    found: dict[str, float] = results[max(results)]["metrics"] if results else {}
    return found


def measure_by_hand(plan: Plan, data: Path) -> dict[int, dict[str, Any]]:
    """Measure every model of a run whose file is kept and that has no result. Returns all results.
    Raises PlanError, StoreError, BundleError."""
    check_installed()
    storage, bundle = find_storage(plan.data_dir), open_bundle(plan.bundle)
    results, models = storage.held_out, storage.models
    with storage.read_ledger() as ledger:
        known = ledger.models()

    async def measure() -> None:
        held_out = HeldOut(bundle, results, data, models, known.__getitem__, known.__contains__)
        try:
            await held_out.measure_all()
        finally:
            await held_out.close()

    asyncio.run(measure())
    return results.read_all()
