"""The runtime ``onnx``: graphs/train.onnx, standard operators only, on any ONNX Runtime's InferenceSession."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import (
    EVAL,
    EVAL_FROM_FEATURES,
    FROZEN,
    STATE,
    TRAIN,
    TRAIN_FROM_FEATURES,
    TRAIN_MANY,
    Reference,
)
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, views
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import Arrays, Batch, check_batch, check_hyper, check_load, check_seed, copy_all
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime, ran_out_of_memory

if TYPE_CHECKING:
    from fleetlearn_device.runtimes.runtime import Runtime


class StepError(RuntimeError):
    """ONNX Runtime could not run a graph on a batch that fits the signature, such as a label out of range."""


class OnnxRuntime:
    """Two flat buffers of parameters and state. A step reads one and writes the other, and they change places after it.

    ONNX Runtime reads and writes the buffers' own memory: an OrtValue made from a numpy array on the CPU borrows it,
    so a tensor is a view into the vector. The arrays must outlive the bindings; they are attributes for that reason.
    """

    kind = "onnx"

    def __init__(
        self, bundle: Bundle, threads: int = 1, model: Vector | None = None, from_features: bool = False
    ) -> None:
        """from_features: the batch has what features.onnx computes, as ``open_runtime`` says."""
        self._train, self._eval = TRAIN, EVAL
        if from_features:
            self._train, self._eval = TRAIN_FROM_FEATURES, EVAL_FROM_FEATURES
            bundle = bundle._replace(manifest=bundle.manifest.with_features_as_batch())
        manifest = self.manifest = bundle.manifest
        self.version: str = import_onnxruntime().__version__
        self._bundle, self._threads = bundle, threads
        self._evaluator: Evaluator | None = None
        self._now, self._next = (np.zeros(manifest.local_size + manifest.state_size, np.float32) for _ in range(2))
        names: tuple[Reference, ...] = ("anchor", *(name for name in manifest.references if name != "anchor"))
        self._references = {name: np.zeros(manifest.size, np.float32) for name in names}
        self._initial = bundle.state() if STATE in manifest.files else None
        self._now[manifest.local_size :] = 0 if self._initial is None else self._initial
        load_first(self, bundle, model)
        # Scalars are views into one array too: bound once, their values are set before each step.
        self._hyper = np.zeros(len(manifest.hyper), np.float32)
        self._seed = np.zeros((), np.int64)
        self._results = np.zeros(1 + len(manifest.metrics), np.float32)

        fixed: dict[str, NDArray[Any]] = {
            f"{reference}.{name}": array
            for reference in manifest.references
            for name, array in views(self._references[reference], manifest.travelling).items()
        }
        fixed |= {f"hyper.{row.name}": _scalar(self._hyper, i) for i, row in enumerate(manifest.hyper)}
        if manifest.random:
            fixed["seed"] = self._seed
        outputs = ["loss", *(f"metric.{name}" for name in manifest.metrics)]
        results = {name: _scalar(self._results, i) for i, name in enumerate(outputs)}
        carried = list(self._tensors(self._now))
        self._session = make_session(
            bundle,
            self._train,
            threads,
            [*carried, *fixed, *(f"batch.{row.name}" for row in manifest.batch)],
            [*(f"next.{name}" for name in carried), *results],
        )
        self._binding, self._next_binding = (
            self._bind(read, write, fixed, results)
            for read, write in ((self._now, self._next), (self._next, self._now))
        )

    def _tensors(self, buffer: Vector) -> dict[str, Vector]:
        """Return the parameters and the state in one of the buffers, by the graph's names."""
        table = views(buffer, self.manifest.parameters)
        state = views(buffer[self.manifest.local_size :], self.manifest.state)
        return {f"param.{name}": array for name, array in table.items()} | {
            f"state.{name}": array for name, array in state.items()
        }

    def _bind(
        self, read: Vector, write: Vector, fixed: dict[str, NDArray[Any]], results: dict[str, NDArray[Any]]
    ) -> Any:
        """Bind the step from one buffer to the other: everything except the batch."""
        binding = self._session.io_binding()
        inputs = fixed | self._tensors(read)
        outputs = results | {f"next.{name}": array for name, array in self._tensors(write).items()}
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, borrow(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, borrow(array))
        return binding

    @property
    def parameters(self) -> Vector:
        return read_only(self._now[: self.manifest.size])

    @property
    def local(self) -> Vector:
        return read_only(self._now[: self.manifest.local_size])

    @property
    def state(self) -> Vector:
        return read_only(self._now[self.manifest.local_size :])

    @property
    def anchor(self) -> Vector:
        return read_only(self._references["anchor"])

    def load(
        self,
        vector: Vector,
        *,
        anchor: Vector | None = None,
        correction: Vector | None = None,
        previous: Vector | None = None,
        state: Vector | None = None,
    ) -> None:
        manifest = self.manifest
        given = {"anchor": anchor, "correction": correction, "previous": previous}
        check_load(manifest, vector, given, state)
        if anchor is None:
            anchor = vector[: manifest.size]
        if previous is None:
            previous = anchor
        pairs = [(vector, self._now[: vector.size]), (anchor, self._references["anchor"])]
        if correction is not None:
            pairs.append((correction, self._references["correction"]))
        if "previous" in self._references:
            pairs.append((previous, self._references["previous"]))
        if state is not None:
            pairs.append((state, self._now[manifest.local_size :]))
        copy_all(pairs)
        if correction is None and "correction" in self._references:
            self._references["correction"][:] = 0
        if state is None:
            self._reset_state()
        self.metrics: dict[str, float] = {}

    def _reset_state(self) -> None:
        begun = [row for row in self.manifest.state if not row.kept]
        initial = {} if self._initial is None else views(self._initial, begun)
        for name, array in views(self._now[self.manifest.local_size :], begun).items():
            array[...] = initial.get(name, 0)

    def step(self, batch: Batch, /, *, seed: int = 0, **hyper: float) -> float:
        arrays = check_batch(batch, self.manifest.batch)
        self._hyper[:] = list(check_hyper(hyper, self.manifest.hyper).values())
        self._seed[...] = check_seed(seed)
        # The binding only borrows these arrays. The next run of this binding is given other arrays first.
        for row, array in zip(self.manifest.batch, arrays, strict=True):
            self._binding.bind_ortvalue_input(f"batch.{row.name}", borrow(array))
        run(self._session, self._binding, self._train, arrays)
        self._now, self._next = self._next, self._now
        self._binding, self._next_binding = self._next_binding, self._binding
        loss, *metrics = self._results.tolist()
        self.metrics = dict(zip(self.manifest.metrics, metrics, strict=True))
        return float(loss)

    def evaluate(self, batch: Batch) -> Evaluation:
        if self._evaluator is None:
            self._evaluator = Evaluator(self._bundle, self._threads, self._eval)
        return self._evaluator.evaluate(self.local, batch)


class Evaluator:
    """Runs graphs/eval.onnx, which sums over a batch, or eval_from_features.onnx. Both runtimes use it."""

    def __init__(self, bundle: Bundle, threads: int, file: str = EVAL) -> None:
        self._manifest, self._file = bundle.manifest, file
        self._outputs = ["examples", "loss_sum", *(f"metric_sum.{name}" for name in self._manifest.metrics)]
        parameters = [f"param.{row.name}" for row in self._manifest.parameters]
        batch = [f"batch.{row.name}" for row in self._manifest.batch]
        self._session = make_session(bundle, file, threads, [*parameters, *batch], self._outputs)

    def evaluate(self, vector: Vector, batch: Batch) -> Evaluation:
        """Return the sums for the model ``vector`` (float32, shape (local_size,)). Raises DataError, StepError."""
        arrays = check_batch(batch, self._manifest.batch)
        binding = self._session.io_binding()
        for name, array in views(vector, self._manifest.parameters).items():
            binding.bind_ortvalue_input(f"param.{name}", borrow(array))
        for row, array in zip(self._manifest.batch, arrays, strict=True):
            binding.bind_ortvalue_input(f"batch.{row.name}", borrow(array))
        for name in self._outputs:
            binding.bind_output(name)
        run(self._session, binding, self._file, arrays)
        examples, loss, *metrics = (float(value) for value in binding.copy_outputs_to_cpu())
        return Evaluation(round(examples), loss, dict(zip(self._manifest.metrics, metrics, strict=True)))


def load_first(runtime: Runtime, bundle: Bundle, model: Vector | None) -> None:
    """Load the model with which a runtime is opened, and from the bundle the parameters that ``model`` lacks."""
    whole = bundle.manifest.local_size
    if model is None or bundle.manifest.size < whole != np.size(model):
        runtime.load(bundle.parameters())
    if model is not None:
        runtime.load(model)


def make_session(bundle: Bundle, file: str, threads: int, inputs: Iterable[str], outputs: Iterable[str]) -> Any:
    """Return an InferenceSession for a graph of the bundle.

    Raises BundleError: it cannot be loaded, or has other names; MemoryError.
    """
    onnxruntime = import_onnxruntime()
    options = session_options(threads)
    if file != TRAIN_MANY:
        # A memory pattern is one block for all results, beside the arena that the first step filled. Reuse keeps the
        # memory of a dead result until another of the same shape needs it. Without both, a result's memory is free
        # after its last reader: half the peak for MobileNetV3 at 224 x 224, at the same speed (benchmarks/memory.py).
        # A step of a few microseconds takes 4 more, which a simulation, with many of them, would feel.
        options.enable_mem_pattern = False
        options.enable_mem_reuse = False
    if FROZEN in bundle.manifest.files:
        _read_frozen_in_place(options, file)
    try:
        with _graph_source(bundle, file) as source:
            session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except BundleError:
        raise
    except Exception as error:
        # Each of ONNX Runtime's exceptions derives from Exception itself.
        if ran_out_of_memory(error):
            raise MemoryError(f"there was not enough memory to load {file}: {error}") from error
        raise BundleError(
            Code.BAD_MESSAGE, f"{bundle.path}: ONNX Runtime {onnxruntime.__version__} cannot load {file}: {error}"
        ) from error
    for what, found, expected in (
        ("inputs", session.get_inputs(), inputs),
        ("outputs", session.get_outputs(), outputs),
    ):
        differing = {value.name for value in found} ^ set(expected)
        if differing:
            raise BundleError(
                Code.BAD_MESSAGE,
                f"{bundle.path}: {file} and the manifest differ in these {what}: {sorted(differing)}",
            )
    return session


def _read_frozen_in_place(options: Any, file: str) -> None:
    """Let a session read frozen constants where they are mapped, rather than from rearranged copies of its own.

    A frozen network of 13 million parameters (51 MiB), training and evaluation together, batch 16: 40 MiB of private
    memory, not 136, and up to 8 % more time for a step. For evaluation, which runs once in a task, convolutions do not
    rearrange their weights either.
    """
    options.add_session_config_entry("session.disable_prepacking", "1")
    if file in (EVAL, EVAL_FROM_FEATURES):
        options.graph_optimization_level = import_onnxruntime().GraphOptimizationLevel.ORT_ENABLE_EXTENDED


@contextmanager
def _graph_source(bundle: Bundle, file: str) -> Iterator[str | bytes]:
    """Yield the graph's path, or its bytes.

    Given a path, ONNX Runtime reads the file itself, so that no copy of it stays in memory. It maps the file of frozen
    constants beside it, so that all sessions, and all processes, have one copy of these.
    """
    if bundle.path.is_dir():
        yield str(bundle.path / file)
    elif FROZEN not in bundle.manifest.files:
        yield bundle.read(file)
    else:
        with TemporaryDirectory(prefix="fleetlearn-", ignore_cleanup_errors=True) as folder:
            paths = [Path(folder, PurePosixPath(name).name) for name in (file, FROZEN)]
            for path, name in zip(paths, (file, FROZEN), strict=True):
                path.write_bytes(bundle.read(name))
            yield str(paths[0])


def session_options(threads: int) -> Any:
    """Return the SessionOptions: one operator at a time, with this many threads, which sleep when they wait."""
    options = import_onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Errors are raised; without this they are printed as well.
    options.log_severity_level = 4
    # Spinning threads take a device's other cores, and its battery, to save microseconds.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def run(session: Any, binding: Any, file: str, arrays: Arrays) -> None:
    """Run a bound graph. Raises StepError with ONNX Runtime's own words, MemoryError."""
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        shapes = [array.shape for array in arrays]
        if ran_out_of_memory(error):
            text = f"there was not enough memory to run {file} on a batch of shapes {shapes}: {error}"
            raise MemoryError(text) from error
        raise StepError(f"ONNX Runtime could not run {file} on a batch of shapes {shapes}: {error}") from error


def borrow(array: NDArray[Any]) -> Any:
    """Return an OrtValue in the array's own memory. It does not keep the array alive: the caller must."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array)


def read_only(vector: Vector) -> Vector:
    """Return a view of the vector that cannot be written to."""
    view = vector.view()
    view.flags.writeable = False
    return view


def _scalar(values: Vector, place: int) -> Vector:
    """Return a view without axes: ONNX Runtime refuses numpy's scalars."""
    return values[place : place + 1].reshape(())
