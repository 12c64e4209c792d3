"""The runtime ``ort-training``: ONNX Runtime's own training API, which ended with
onnxruntime-training-cpu 1.19.2."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import ORT_TRAINING
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, views

from fleetlearn_device.runtimes.checks import (
    Batch,
    check_batch,
    check_hyper,
    check_load,
    check_seed,
    copy_all,
)
from fleetlearn_device.runtimes.import_onnxruntime import (
    import_onnxruntime,
    import_training_api,
    ran_out_of_memory,
)
from fleetlearn_device.runtimes.providers import borrow
from fleetlearn_device.runtimes.runtime_onnx import Evaluator, load_first, read_only
from fleetlearn_device.runtimes.sessions import StepError, session_options


class OrtTrainingRuntime:
    """The parameters live inside ONNX Runtime; its one contiguous copy of them is read and written
    as a whole.

    A step without proximal term copies nothing. With it, the step is ONNX Runtime's, and the term's
    part, lr * mu * (w - anchor) with w from before the step, is subtracted from the parameters
    after it: for SGD that is the same step.
    """

    kind = "ort-training"

    def __init__(self, bundle: Bundle, threads: int = 1, model: Vector | None = None) -> None:
        manifest = self.manifest = bundle.manifest
        needs = {
            "a state": bool(manifest.state),
            "a correction": "correction" in manifest.references,
            "the previous model": "previous" in manifest.references,
            "personal parameters": manifest.local_size > manifest.size,
            "a seed": manifest.random,
        }
        if any(needs.values()):
            named = ", ".join(what for what, needed in needs.items() if needed)
            raise BundleError(
                Code.BAD_MESSAGE,
                f"{bundle.path}: its step has {named}, which the runtime 'ort-training' cannot "
                "run; use 'onnx'",
            )
        if not manifest.has_ort_training:
            raise BundleError(
                Code.UNKNOWN_CONTENT,
                f"{bundle.path} has no ort_training/ files: export again where "
                "onnxruntime-training-cpu is installed",
            )
        api = import_training_api()
        self.version: str = import_onnxruntime().__version__
        self._bundle, self._threads = bundle, threads
        self._evaluator: Evaluator | None = None
        self.metrics: dict[str, float] = {}
        with ExitStack() as stack:
            folder = bundle.path / "ort_training"
            if not bundle.path.is_dir():
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="fleetlearn-")))
            for name in ORT_TRAINING:
                content = bundle.read(f"ort_training/{name}")
                if not bundle.path.is_dir():
                    (folder / name).write_bytes(content)
            options = session_options(threads)
            try:
                state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
                self._module = api.Module(
                    folder / "training_model.onnx", state, session_options=options
                )
                self._optimizer = api.Optimizer(folder / "optimizer_model.onnx", self._module)
            except (RuntimeError, MemoryError) as error:
                if ran_out_of_memory(error):
                    raise MemoryError(
                        f"there was not enough memory to load ort_training/: {error}"
                    ) from error
                raise BundleError(
                    Code.BAD_MESSAGE,
                    f"{bundle.path}: onnxruntime-training {self.version} cannot load "
                    f"ort_training/: {error}",
                ) from error
        self._outputs: list[str] = self._module.output_names()
        for what, actual, expected in (
            (
                "inputs",
                self._module.input_names(),
                [f"batch.{array.name}" for array in manifest.batch],
            ),
            (
                "outputs",
                sorted(self._outputs),
                sorted(["loss", *(f"metric.{name}" for name in manifest.metrics)]),
            ),
        ):
            if actual != expected:
                raise BundleError(
                    Code.BAD_MESSAGE,
                    f"{bundle.path}: training_model.onnx has {what} {actual}; the manifest has "
                    f"{expected}. Export again",
                )
        self._state = state
        self._stale = False
        self._buffer, self._places = self._map_buffer()
        self._vector = np.empty(manifest.size, np.float32)
        self._anchor = np.empty(manifest.size, np.float32)
        load_first(self, bundle, model)

    def _map_buffer(self) -> tuple[Vector, list[tuple[slice, slice]]]:
        """Return the contiguous copy, and for each parameter its places in (buffer, vector).

        The API does not say in which order the copy has the parameters (1.19.2: as the training
        graph's inputs), so each parameter is filled with its own number, and the numbers are looked
        up. What the checkpoint has beyond the manifest (frozen parameters) keeps its values, which
        the returned buffer holds.
        """
        buffer = self._read_buffer()
        # Numbers of parameters are far below 2^24, so float32 holds them exactly.
        numbers = {name: float(number) for number, (name, _) in enumerate(self._state.parameters)}
        for name, number in numbers.items():
            self._state.parameters[name] = np.full(
                self._state.parameters[name].data.shape, number, np.float32
            )
        filled = self._read_buffer()
        starts = {float(filled[i]): int(i) for i in (0, *(np.flatnonzero(np.diff(filled)) + 1))}
        places = []
        for row in self.manifest.parameters:
            size = prod(row.shape)
            start = starts.get(numbers.get(row.name, -1.0))
            if start is None or np.count_nonzero(filled == numbers[row.name]) != size:
                raise BundleError(
                    Code.BAD_MESSAGE,
                    f"{self._bundle.path}: the manifest has parameter {row.name} of shape "
                    f"{row.shape}; ort_training/checkpoint has {sorted(numbers)}. Export again",
                )
            places.append((slice(start, start + size), slice(row.offset, row.offset + size)))
        return buffer, places

    def _read_buffer(self) -> Vector:
        contiguous: Vector = self._module.get_contiguous_parameters(trainable_only=False).numpy()
        return contiguous

    def _read(self) -> None:
        """Bring ``_vector`` up to date with the parameters inside ONNX Runtime."""
        if self._stale:
            buffer = self._read_buffer()
            for here, there in self._places:
                self._vector[there] = buffer[here]
            self._stale = False

    def _write(self) -> None:
        """Bring the parameters inside ONNX Runtime up to date with ``_vector``."""
        for here, there in self._places:
            self._buffer[here] = self._vector[there]
        self._module.copy_buffer_to_parameters(borrow(self._buffer)._ortvalue, trainable_only=False)
        self._stale = False

    @property
    def parameters(self) -> Vector:
        self._read()
        return read_only(self._vector)

    @property
    def local(self) -> Vector:
        return self.parameters

    @property
    def state(self) -> Vector:
        return np.zeros(0, np.float32)

    @property
    def anchor(self) -> Vector:
        return read_only(self._anchor)

    def load(
        self,
        vector: Vector,
        *,
        anchor: Vector | None = None,
        correction: Vector | None = None,
        previous: Vector | None = None,
        state: Vector | None = None,
    ) -> None:
        given = {"anchor": anchor, "correction": correction, "previous": previous}
        check_load(self.manifest, vector, given, state)
        copy_all([(vector, self._vector), (vector if anchor is None else anchor, self._anchor)])
        self._write()

    def resume(self, local: Vector, state: Vector) -> None:
        copy_all([(local, self._vector)])
        self._write()

    def step(self, batch: Batch, /, *, seed: int = 0, **hyper: float) -> float:
        arrays = check_batch(batch, self.manifest.batch)
        values = check_hyper(hyper, self.manifest.hyper)
        check_seed(seed)
        mu = values.get("mu", 0.0)
        pull = None
        if mu:
            self._read()
            pull = self._vector - self._anchor
            pull *= np.float32(values["lr"] * mu)
            for row in self.manifest.parameters:
                if row.buffer:
                    pull[row.offset : row.offset + prod(row.shape)] = 0
        self._optimizer.set_learning_rate(values["lr"])
        try:
            outputs = self._module(*arrays)
        except RuntimeError as error:
            shapes = [array.shape for array in arrays]
            if ran_out_of_memory(error):
                text = (
                    "there was not enough memory to run ort_training/ on a batch of shapes "
                    f"{shapes}: {error}"
                )
                raise MemoryError(text) from error
            raise StepError(
                f"ort_training/ could not be run on a batch of shapes {shapes}: {error}"
            ) from error
        self._optimizer.step()
        self._module.lazy_reset_grad()
        self._stale = True
        if pull is not None:
            self._read()
            self._vector -= pull
            self._write()
        results = dict(
            zip(self._outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
        )
        self.metrics = {name: float(results[f"metric.{name}"]) for name in self.manifest.metrics}
        return float(results["loss"])

    def evaluate(self, batch: Batch) -> Evaluation:
        # The same graph as the other runtime's, not eval_model.onnx: that one has no metrics and no
        # sums.
        if self._evaluator is None:
            self._evaluator = Evaluator(self._bundle, self._threads)
        self._read()
        values = {
            f"param.{name}": borrow(array)
            for name, array in views(self._vector, self.manifest.parameters).items()
        }
        return self._evaluator.evaluate(values, batch)
