"""The back end ``computation``: what devices compute where the bundle has no graphs, with the
device's own function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.registry import BATCH, sum_up
from fleetlearn_device.own_code import FunctionError, OwnFunctions
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_protocol import Bundle, extensions
from fleetlearn_protocol.computations.function_settings import DEVICE_FUNCTION, FunctionSums
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.private_sums import clip_sums
from fleetlearn_protocol.computations.settings import ComputationSettings, kind_of
from fleetlearn_protocol.messages import SUMS, Evaluation
from fleetlearn_protocol.vector import Vector
from msgspec import UNSET

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.backend import Job, LocalSettings, RoundInputs
from fleetlearn_simulator.training.kept_rows import NOTHING_KEPT, KeptRows, RowReader
from fleetlearn_simulator.training.trained_devices import (
    PendingResults,
    ResultReader,
    TrainedDevices,
)

MOST_TOGETHER, BYTES_TOGETHER = 1024, 2**25
"""Devices, and bytes of their sums, that are computed together."""


class ComputesSums:
    """Computes the sums of devices, one after the other, in this process."""

    def __init__(
        self,
        bundle: Bundle,
        task: LocalSettings,
        source: Source,
        provider: ProviderName = "cpu",
        kept: KeptRows[RowReader] = NOTHING_KEPT,
    ) -> None:
        """The arguments are those of ``PerDevice``; nothing is kept, and NumPy computes."""
        settings = bundle.manifest.computation
        assert settings is not UNSET, "the plan's rules see to that"
        self._settings, self._source = settings, source
        self._names = [row.name for row in bundle.manifest.batch]
        self._size = bundle.manifest.elements_of(SUMS)
        self._functions = _own_functions(settings)
        self._clip, self._groups = task.clip, KINDS[kind_of(settings)].groups

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        """Return the devices' sums as the vectors ``sums``, int64, shape (n, S). There is no
        update: (n, 0)."""
        count = len(jobs)
        sums, examples = np.zeros((count, self._size), np.int64), np.zeros(count, np.int64)
        failed = np.zeros(count, np.bool_)
        for row, job in enumerate(jobs):
            arrays = self._source.arrays(job.device)
            columns = dict(zip(self._names, arrays, strict=True))
            examples[row] = len(arrays[0])
            try:
                sums[row] = self._sums(inputs.model, columns)
            except FunctionError as error:  # a rehearsal finds what is wrong with a function
                raise SimulatorError(f"device {job.device}: {error}") from error
            except ValueError:  # too large: the device gives its task back
                failed[row] = True
        return TrainedDevices(
            updates=np.zeros((count, 0), np.float32),
            metrics={},
            examples=examples,
            steps=-(-examples // BATCH),
            seen=examples,
            complete=np.ones(count, np.bool_),
            loss=np.zeros(count),
            largest=np.zeros(count),
            diverged=failed,
            # Whole numbers among vectors of floats: they are only handed on.
            vectors={SUMS: sums},  # type: ignore[dict-item]
        )

    def _sums(self, state: Vector, columns: Columns) -> Sums:
        """Return what a device sends. Raises ValueError where a sum is too large."""
        sums = sum_up(state, _batches(columns), self._settings, self._functions)
        if self._clip is None:
            return sums
        assert self._groups is not None, "the plan's rules see to that"
        return clip_sums(sums, self._groups(self._settings, state), self._clip).sums

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        """Compute devices' sums when the first of them are read, some together: whoever waits for
        one looks at all that it wants."""
        together = max(1, min(MOST_TOGETHER, BYTES_TOGETHER // (8 * self._size)))

        def compute(pending: PendingResults, index: int) -> None:
            chosen = range(index, min(index + together, len(jobs)))
            missing = [each for each in chosen if each not in done]
            done.update(missing)
            pending.put(missing, self.train(inputs, [jobs[each] for each in missing]))

        done = set[int]()
        return PendingResults(compute).read

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        raise NotImplementedError("a run without a model has nothing to evaluate")

    def evaluate_personal(
        self, inputs: RoundInputs, jobs: Sequence[Job]
    ) -> list[Evaluation | None]:
        raise NotImplementedError("a run without a model has no personal models")

    def close(self) -> None:
        """Does nothing: only memory is held."""


def _own_functions(settings: ComputationSettings) -> OwnFunctions:
    """Return the function that all simulated devices allow: an extension, whose module the
    simulation lists. Raises SimulatorError."""
    if not isinstance(settings, FunctionSums):
        return {}
    try:
        return {settings.device: extensions.find(DEVICE_FUNCTION, settings.device, "device")}
    except extensions.ExtensionError as error:
        raise SimulatorError(f"the computation's function: {error}") from None


def _batches(columns: Columns) -> Iterator[Columns]:
    rows = len(next(iter(columns.values())))
    for start in range(0, rows, BATCH):
        yield {name: values[start : start + BATCH] for name, values in columns.items()}
