"""The runtime ``onnx``: graphs/train.onnx, standard operators only, on any ONNX Runtime's InferenceSession."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
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
    Manifest,
    Reference,
)
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, views

from fleetlearn_device.runtimes.checks import Arrays, Batch, check_batch, check_hyper, check_load, check_seed, copy_all
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime, ran_out_of_memory
from fleetlearn_device.runtimes.providers import PROVIDERS, Provider, Tensors, borrow, open_provider, unusable

if TYPE_CHECKING:
    from fleetlearn_device.runtimes.runtime import Runtime


UNUSED_IN_A_PIECE = 2**16
"""Bytes by which a piece of the arena may be larger than the result in it."""
NOTHING_TO_FIND = (
    "DoubleQDQPairsRemover",
    "DynamicQuantizeMatMulFusion",
    "EnsureUniqueDQForNodeUnit",
    "MatMulIntegerToFloatFusion",
    "MatMulNBitsFusion",
    "QDQFinalCleanupTransformer",
    "QDQPropagationTransformer",
    "QDQS8ToU8Transformer",
    "QDQSelectorActionTransformer",
    "WeightBiasQuantization",
    "WhereDummyDq",
    "AttentionFusion",
    "EmbedLayerNormFusion",
    "GroupQueryAttentionFusion",
    "GroupQueryAttentionPreNormFusion",
)
"""ONNX Runtime's optimizers that look for quantized operators, for constant weights, or for operators of its own.

A graph without frozen weights has none of these, so a session runs the same without them. Loading the train.onnx of
DenseNet-121, 7,177 nodes, takes a tenth less CPU time, of MobileNetV3-small a sixth. Versions that lack one ignore its
name.
"""


class StepError(RuntimeError):
    """ONNX Runtime could not run a graph on a batch that fits the signature, such as a label out of range."""


class OnnxRuntime:
    """Two flat buffers of parameters and state. A step reads one and writes the other, and they change places after it.

    On the CPU, ONNX Runtime reads and writes the buffers' own memory: a tensor is a view into the vector. On a GPU the
    buffers' tensors stay there. A step sends the batch and brings back the loss and the metrics; ``load`` sends
    parameters, and what reads them after steps fetches them once.
    """

    kind = "onnx"

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 1,
        model: Vector | None = None,
        provider: str = "cpu",
        from_features: bool = False,
    ) -> None:
        """from_features: the batch has what features.onnx computes, as ``open_runtime`` says."""
        self._train, self._eval = TRAIN, EVAL
        if from_features:
            self._train, self._eval = TRAIN_FROM_FEATURES, EVAL_FROM_FEATURES
            bundle = bundle._replace(manifest=bundle.manifest.with_features_as_batch())
        manifest = self.manifest = bundle.manifest
        self.version: str = import_onnxruntime().__version__
        self._bundle, self._threads, self._provider = bundle, threads, provider
        memory = open_provider(provider).memory
        self._copied = memory is not None
        """Whether tensors are in another memory than the host's."""
        self._evaluator: Evaluator | None = None
        first = np.zeros(manifest.local_size + manifest.state_size, np.float32)
        # Not zeros_like, which writes the zeros. The host needs no copy of what is on a GPU.
        second = np.zeros(first.size, np.float32) if memory is None else first
        self._now, self._next = (Tensors(vector, self._views(vector), memory) for vector in (first, second))
        self._fetched = True
        """Whether ``_now.vector`` has the tensors' values."""
        self._references = {name: self._reference(name, memory) for name in manifest.references}
        self._initial = bundle.state() if STATE in manifest.files else None
        self._now.vector[manifest.local_size :] = 0 if self._initial is None else self._initial
        load_first(self, bundle, model)
        # Scalars are views into one array too: bound once, their values are set before each step.
        self._hyper = np.zeros(len(manifest.hyper), np.float32)
        self._seed = np.zeros((), np.int64)
        self._results = np.zeros(1 + len(manifest.metrics), np.float32)

        self._fixed = {name: value for part in self._references.values() for name, value in part.values.items()}
        self._fixed |= {f"hyper.{row.name}": borrow(_scalar(self._hyper, i)) for i, row in enumerate(manifest.hyper)}
        if manifest.random:
            self._fixed["seed"] = borrow(self._seed)
        outputs = ["loss", *(f"metric.{name}" for name in manifest.metrics)]
        results = {name: borrow(_scalar(self._results, i)) for i, name in enumerate(outputs)}
        carried = list(self._now.values)
        self._session = make_session(
            bundle,
            self._train,
            threads,
            [*carried, *self._fixed, *(f"batch.{row.name}" for row in manifest.batch)],
            [*(f"next.{name}" for name in carried), *results],
            provider,
        )
        self._binding, self._next_binding = (
            self._bind(read, write, results) for read, write in ((self._now, self._next), (self._next, self._now))
        )

    def _views(self, buffer: Vector) -> dict[str, Vector]:
        """Return the parameters and the state in one of the buffers, by the graph's names."""
        table = views(buffer, self.manifest.parameters)
        state = views(buffer[self.manifest.local_size :], self.manifest.state)
        return {f"param.{name}": array for name, array in table.items()} | {
            f"state.{name}": array for name, array in state.items()
        }

    def _reference(self, reference: Reference, memory: str | None) -> Tensors:
        """Return zeros for a reference that the graph reads. The tensors are by the graph's names."""
        vector = np.zeros(self.manifest.size, np.float32)
        read = views(vector, self.manifest.travelling)
        return Tensors(vector, {f"{reference}.{name}": array for name, array in read.items()}, memory)

    def _bind(self, read: Tensors, write: Tensors, results: Mapping[str, Any]) -> Any:
        """Bind the step from one buffer to the other: everything except the batch."""
        binding = self._session.io_binding()
        outputs = {**results, **{f"next.{name}": value for name, value in write.values.items()}}
        for name, value in (self._fixed | read.values).items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding

    def _fetch(self) -> None:
        """Bring the present buffer's vector up to date with its tensors."""
        if not self._fetched:
            self._now.fetch()
            self._fetched = True

    @property
    def parameters(self) -> Vector:
        self._fetch()
        return read_only(self._now.vector[: self.manifest.size])

    @property
    def local(self) -> Vector:
        self._fetch()
        return read_only(self._now.vector[: self.manifest.local_size])

    @property
    def state(self) -> Vector:
        self._fetch()
        return read_only(self._now.vector[self.manifest.local_size :])

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
        manifest = self.manifest
        given = {"anchor": anchor, "correction": correction, "previous": previous}
        check_load(manifest, vector, given, state)
        if anchor is None:
            anchor = vector[: manifest.size]
        if previous is None:
            previous = anchor
        self._fetch()  # what is not given stays as it is
        now, references = self._now.vector, {name: tensors.vector for name, tensors in self._references.items()}
        if "anchor" in references:
            self._anchor = references["anchor"]
        else:  # the step does not read it: a copy would cost time and memory for nothing
            own = any(np.may_share_memory(anchor, tensors.vector) for tensors in (self._now, self._next))
            self._anchor = anchor.copy() if own else anchor
        pairs = [(vector, now[: vector.size])]
        for name, reference in (("anchor", anchor), ("previous", previous), ("correction", correction)):
            if name in references and reference is not None:
                pairs.append((reference, references[name]))
        if state is not None:
            pairs.append((state, now[manifest.local_size :]))
        copy_all(pairs)
        if correction is None and "correction" in references:
            references["correction"][:] = 0
        if state is None:
            self._reset_state()
        for tensors in (self._now, *self._references.values()):
            tensors.send()
        self.metrics: dict[str, float] = {}

    def _reset_state(self) -> None:
        begun = [row for row in self.manifest.state if not row.kept]
        initial = {} if self._initial is None else views(self._initial, begun)
        for name, array in views(self._now.vector[self.manifest.local_size :], begun).items():
            array[...] = initial.get(name, 0)

    def step(self, batch: Batch, /, *, seed: int = 0, **hyper: float) -> float:
        arrays = check_batch(batch, self.manifest.batch)
        self._hyper[:] = list(check_hyper(hyper, self.manifest.hyper).values())
        self._seed[...] = check_seed(seed)
        # The binding only borrows these arrays. The next run of this binding is given other arrays first.
        inputs = _batch_values(self.manifest, arrays)
        if self._copied:
            # What a session reads in another memory is copied when it is bound: the scalars here, and tensors that an
            # operator without a kernel for the GPU reads on the host. Tensors that are where they are read stay there.
            inputs |= self._fixed | self._now.values
        run(self._session, self._binding, self._train, arrays, inputs, wait=self._copied)
        self._now, self._next = self._next, self._now
        self._binding, self._next_binding = self._next_binding, self._binding
        self._fetched = not self._copied
        loss, *metrics = self._results.tolist()
        self.metrics = dict(zip(self.manifest.metrics, metrics, strict=True))
        return float(loss)

    def evaluate(self, batch: Batch) -> Evaluation:
        if self._evaluator is None:
            self._evaluator = Evaluator(self._bundle, self._threads, self._provider, self._eval)
        return self._evaluator.evaluate(self._now.values, batch)


class Evaluator:
    """Runs graphs/eval.onnx, which sums over a batch, or eval_from_features.onnx. Both runtimes use it."""

    def __init__(self, bundle: Bundle, threads: int, provider: str = "cpu", file: str = EVAL) -> None:
        self._manifest, self._file, self._copied = bundle.manifest, file, PROVIDERS[provider].memory is not None
        self._outputs = ["examples", "loss_sum", *(f"metric_sum.{name}" for name in self._manifest.metrics)]
        self._parameters = [f"param.{row.name}" for row in self._manifest.parameters]
        batch = [f"batch.{row.name}" for row in self._manifest.batch]
        inputs = [*self._parameters, *batch]
        self._session = make_session(bundle, file, threads, inputs, self._outputs, provider)

    def evaluate(self, values: Mapping[str, Any], batch: Batch) -> Evaluation:
        """Return the sums for a model, given as OrtValues by the graph's names. Raises DataError, StepError."""
        arrays = check_batch(batch, self._manifest.batch)
        binding = self._session.io_binding()
        for name in self._outputs:
            binding.bind_output(name)
        inputs = {name: values[name] for name in self._parameters} | _batch_values(self._manifest, arrays)
        run(self._session, binding, self._file, arrays, inputs, wait=self._copied)
        examples, loss, *metrics = (float(value) for value in binding.copy_outputs_to_cpu())
        return Evaluation(round(examples), loss, dict(zip(self._manifest.metrics, metrics, strict=True)))


def load_first(runtime: Runtime, bundle: Bundle, model: Vector | None) -> None:
    """Load the model with which a runtime is opened, and from the bundle the parameters that ``model`` lacks."""
    whole = bundle.manifest.local_size
    if model is None or bundle.manifest.size < whole != np.size(model):
        runtime.load(bundle.parameters())
    if model is not None:
        runtime.load(model)


def make_session(
    bundle: Bundle, file: str, threads: int, inputs: Iterable[str], outputs: Iterable[str], provider: str = "cpu"
) -> Any:
    """Return an InferenceSession for a graph of the bundle.

    Raises BundleError: it cannot be loaded, or has other names; RuntimeUnavailableError, MemoryError.
    """
    chosen = open_provider(provider)
    onnxruntime = import_onnxruntime()
    options = session_options(threads)
    # Sums that many threads of a GPU make together are then added in the same order each time.
    options.use_deterministic_compute = chosen.memory is not None
    if file != TRAIN_MANY:
        # A memory pattern is one block for all results, beside the arena that the first step filled. Reuse keeps the
        # memory of a dead result until another of the same shape needs it. Without both, a result's memory is free
        # after its last reader: half the peak for MobileNetV3 at 224 x 224, at the same speed (benchmarks/memory.py).
        # A step of a few microseconds takes 4 more, which a simulation, with many of them, would feel.
        options.enable_mem_pattern = False
        options.enable_mem_reuse = False
        if chosen.memory is None:
            share_arena()
            options.add_session_config_entry("session.use_env_allocators", "1")
    if FROZEN in bundle.manifest.files:
        _read_frozen_in_place(options, file)
    else:
        options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(NOTHING_TO_FIND))
    try:
        with _graph_source(bundle, file, chosen) as source:
            session = onnxruntime.InferenceSession(source, options, **chosen.session_arguments())
    except BundleError:
        raise
    except Exception as error:
        # Each of ONNX Runtime's exceptions derives from Exception itself.
        if ran_out_of_memory(error):
            raise MemoryError(f"there was not enough memory to load {file}: {error}") from error
        raise BundleError(
            Code.BAD_MESSAGE, f"{bundle.path}: ONNX Runtime {onnxruntime.__version__} cannot load {file}: {error}"
        ) from error
    if session.get_providers()[0] != chosen.name:
        raise unusable(provider, f"ONNX Runtime gave a session on {session.get_providers()[0]}")
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


@cache
def share_arena() -> None:
    """Make one arena of the host's memory, for all sessions of this process that ask for it.

    Each session's own arena, ONNX Runtime's default, stays as large as its largest run: training's and evaluation's
    add up. And it gives a free piece whole to a result of more than half of it, where this one cuts off all but 64 KiB.
    MobileNetV2 at 224 x 224 takes 1,013 MiB, not 1,111, in the same time (benchmarks/memory.py).
    """
    onnxruntime = import_onnxruntime()
    kind, memory = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    # No limit; -1 is ONNX Runtime's default, here for how the arena grows and for its first region.
    arena = onnxruntime.OrtArenaCfg(0, -1, -1, UNUSED_IN_A_PIECE)
    with suppress(RuntimeError):  # older versions refuse a second arena: the program's own serves as well
        onnxruntime.create_and_register_allocator(onnxruntime.OrtMemoryInfo("Cpu", kind, 0, memory), arena)


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
def _graph_source(bundle: Bundle, file: str, provider: Provider) -> Iterator[str | bytes]:
    """Yield the graph's path, or its bytes; as the provider can run it.

    Given a path, ONNX Runtime reads the file itself, so that no copy of it stays in memory. It maps the file of frozen
    constants beside it, so that all sessions, and all processes, have one copy of these.
    """
    rewritten = provider.rewrite(bundle.read(file)) if provider.rewrite else None
    if bundle.path.is_dir() and rewritten is None:
        yield str(bundle.path / file)
    elif FROZEN not in bundle.manifest.files:
        yield rewritten or bundle.read(file)
    else:
        with TemporaryDirectory(prefix="fleetlearn-", ignore_cleanup_errors=True) as folder:
            paths = [Path(folder, PurePosixPath(name).name) for name in (file, FROZEN)]
            for path, name in zip(paths, (file, FROZEN), strict=True):
                path.write_bytes(rewritten if rewritten and name == file else bundle.read(name))
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


def run(
    session: Any, binding: Any, file: str, arrays: Arrays, inputs: Mapping[str, Any] | None = None, wait: bool = False
) -> None:
    """Bind ``inputs`` too, and run. ``wait``: until what was bound has arrived in another memory.

    Raises StepError with ONNX Runtime's own words, MemoryError.
    """
    try:
        for name, value in (inputs or {}).items():
            binding.bind_ortvalue_input(name, value)
        if wait:
            binding.synchronize_inputs()
        session.run_with_iobinding(binding)
    except Exception as error:
        shapes = [array.shape for array in arrays]
        if ran_out_of_memory(error):
            text = f"there was not enough memory to run {file} on a batch of shapes {shapes}: {error}"
            raise MemoryError(text) from error
        raise StepError(f"ONNX Runtime could not run {file} on a batch of shapes {shapes}: {error}") from error


def _batch_values(manifest: Manifest, arrays: Arrays) -> dict[str, Any]:
    """Return the batch as OrtValues in the arrays' own memory, by the graph's names."""
    return {f"batch.{row.name}": borrow(array) for row, array in zip(manifest.batch, arrays, strict=True)}


def read_only(vector: Vector) -> Vector:
    """Return a view of the vector that cannot be written to."""
    view = vector.view()
    view.flags.writeable = False
    return view


def _scalar(values: Vector, place: int) -> Vector:
    """Return a view without axes: ONNX Runtime refuses numpy's scalars."""
    return values[place : place + 1].reshape(())
