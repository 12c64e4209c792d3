"""The runtime ``onnx``: graphs/train.onnx, standard operators only, on any ONNX Runtime's
InferenceSession."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.manifest import (
    EVAL,
    EVAL_FROM_FEATURES,
    STATE,
    TRAIN,
    TRAIN_FROM_FEATURES,
    Reference,
)
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, views
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import (
    Arrays,
    Batch,
    check_batch,
    check_hyper,
    check_load,
    check_seed,
    copy_all,
)
from fleetlearn_device.runtimes.cuda.recorded_step import (
    RecordedStep,
    check_read_in,
    records_two_steps,
)
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.providers import PROVIDERS, Tensors, borrow, open_provider
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.runtimes.sessions import batch_values, make_session, run


class OnnxRuntime:
    """Two flat buffers of parameters and state. A step reads one and writes the other, and they
    change places after it.

    On the CPU, ONNX Runtime reads and writes the buffers' own memory: a tensor is a view into the
    vector. On a GPU the buffers' tensors stay there. A step sends the batch and brings back the
    loss and the metrics; ``load`` sends parameters, and what reads them after steps fetches them
    once.
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
        self._now, self._next = (
            Tensors(vector, self._views(vector), memory) for vector in (first, second)
        )
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
        self._scalars: dict[str, NDArray[Any]] = {
            f"hyper.{row.name}": _scalar(self._hyper, i) for i, row in enumerate(manifest.hyper)
        }
        if manifest.random:
            self._scalars["seed"] = self._seed
        outputs = ["loss", *(f"metric.{name}" for name in manifest.metrics)]
        self._result_views = {name: _scalar(self._results, i) for i, name in enumerate(outputs)}

        self._reference_values = {
            name: value for part in self._references.values() for name, value in part.values.items()
        }
        self._fixed = self._reference_values | {
            name: borrow(array) for name, array in self._scalars.items()
        }
        carried = list(self._now.values)
        self._inputs = [
            *carried,
            *self._fixed,
            *(f"batch.{array.name}" for array in manifest.batch),
        ]
        self._outputs = [*(f"next.{name}" for name in carried), *self._result_views]
        self._session = make_session(
            bundle, self._train, threads, self._inputs, self._outputs, provider
        )
        self._binding, self._next_binding = (
            self._bind(read, write)
            for read, write in ((self._now, self._next), (self._next, self._now))
        )
        self._recorded: RecordedStep | None = None
        self._may_record = PROVIDERS[provider].recording is not None and records_two_steps()
        self._last_examples = 0

    def _views(self, buffer: Vector) -> dict[str, Vector]:
        """Return the parameters and the state in one of the buffers, by the graph's names."""
        table = views(buffer, self.manifest.parameters)
        state = views(buffer[self.manifest.local_size :], self.manifest.state)
        return {f"param.{name}": array for name, array in table.items()} | {
            f"state.{name}": array for name, array in state.items()
        }

    def _reference(self, reference: Reference, memory: str | None) -> Tensors:
        """Return zeros for a reference that the graph reads. The tensors are by the graph's
        names."""
        vector = np.zeros(self.manifest.size, np.float32)
        read = views(vector, self.manifest.travelling)
        return Tensors(
            vector, {f"{reference}.{name}": array for name, array in read.items()}, memory
        )

    def _bind(self, read: Tensors, write: Tensors) -> Any:
        """Bind the step from one buffer to the other: everything except the batch."""
        binding = self._session.io_binding()
        outputs = {name: borrow(array) for name, array in self._result_views.items()}
        outputs |= {f"next.{name}": value for name, value in write.values.items()}
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
        now, references = (
            self._now.vector,
            {name: tensors.vector for name, tensors in self._references.items()},
        )
        if "anchor" in references:
            self._anchor = references["anchor"]
        else:  # the step does not read it: a copy would cost time and memory for nothing
            own = any(
                np.may_share_memory(anchor, tensors.vector) for tensors in (self._now, self._next)
            )
            self._anchor = anchor.copy() if own else anchor
        pairs = [(vector, now[: vector.size])]
        for name, reference in (
            ("anchor", anchor),
            ("previous", previous),
            ("correction", correction),
        ):
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

    def resume(self, local: Vector, state: Vector) -> None:
        size = self.manifest.local_size
        copy_all([(local, self._now.vector[:size]), (state, self._now.vector[size:])])
        self._now.send()
        self._fetched = True
        self.metrics = {}

    def _reset_state(self) -> None:
        begun = [slot for slot in self.manifest.state if not slot.kept]
        initial = {} if self._initial is None else views(self._initial, begun)
        for name, array in views(self._now.vector[self.manifest.local_size :], begun).items():
            array[...] = initial.get(name, 0)

    def step(self, batch: Batch, /, *, seed: int = 0, **hyper: float) -> float:
        arrays = check_batch(batch, self.manifest.batch)
        self._hyper[:] = list(check_hyper(hyper, self.manifest.hyper).values())
        self._seed[...] = check_seed(seed)
        if not self._replay(arrays):
            # The binding only borrows these arrays. The next run of this binding is given other
            # arrays first.
            inputs = batch_values(self.manifest, arrays)
            if self._copied:
                # What a session reads in another memory is copied when it is bound: the scalars
                # here, and tensors that an operator without a kernel for the GPU reads on the host.
                # What is where it is read stays there.
                inputs |= self._fixed | self._now.values
            run(self._session, self._binding, self._train, arrays, inputs, wait=self._copied)
        # The graph cannot write where it reads. Two buffers take turns, and nothing is copied.
        self._now, self._next = self._next, self._now
        self._binding, self._next_binding = self._next_binding, self._binding
        self._fetched = not self._copied
        loss, *metrics = self._results.tolist()
        self.metrics = dict(zip(self.manifest.metrics, metrics, strict=True))
        return float(loss)

    def _replay(self, arrays: Arrays) -> bool:
        """Do the step by replaying a recorded one. Return whether it could be done; if not, nothing
        has changed.

        A step is recorded when two batches in a row have the same number of examples. Not every
        step can be: not one with loops, or with operators that run on the host, or without memory
        for a second session.
        """
        examples, last = len(arrays[0]), self._last_examples
        self._last_examples = examples
        try:
            # Recording costs a second session. A first batch of its size may be the only one, as
            # the last of a pass is.
            if self._may_record and examples == last:
                self._may_record = False
                self._recorded = self._record(arrays)
            if self._recorded is None or self._recorded.examples != examples:
                return False
            self._recorded.run(self._now, arrays)
        except Exception:
            # The step is launched operator by operator instead. If that fails too, its error says
            # why.
            self._recorded = None
            return False
        return True

    def _record(self, arrays: Arrays) -> RecordedStep:
        """Return a step for batches of as many examples. Raises what ONNX Runtime raises."""
        batch = {
            f"batch.{input_.name}": array
            for input_, array in zip(self.manifest.batch, arrays, strict=True)
        }
        symbols = {value.shape[0] for value in self._session.get_inputs() if value.name in batch}
        sizes = {symbol: len(arrays[0]) for symbol in symbols if isinstance(symbol, str)}
        session = make_session(
            self._bundle,
            self._train,
            self._threads,
            self._inputs,
            self._outputs,
            self._provider,
            sizes,
        )
        memory = PROVIDERS[self._provider].memory or "cpu"
        check_read_in(session, memory, [*batch, *self._scalars])
        buffers, fixed = (self._now, self._next), self._reference_values
        return RecordedStep(
            session, self._train, memory, buffers, fixed, batch, self._scalars, self._result_views
        )

    def evaluate(self, batch: Batch) -> Evaluation:
        if self._evaluator is None:
            # Late: a device that never evaluates needs no second session.
            self._evaluator = Evaluator(self._bundle, self._threads, self._provider, self._eval)
        return self._evaluator.evaluate(self._now.values, batch)


class Evaluator:
    """Runs graphs/eval.onnx, which sums over a batch, or eval_from_features.onnx. Both runtimes use
    it."""

    def __init__(
        self, bundle: Bundle, threads: int, provider: str = "cpu", file: str = EVAL
    ) -> None:
        self._manifest, self._file, self._copied = (
            bundle.manifest,
            file,
            PROVIDERS[provider].memory is not None,
        )
        self._outputs = [
            "examples",
            "loss_sum",
            *(f"metric_sum.{name}" for name in self._manifest.metrics),
        ]
        self._parameters = [f"param.{row.name}" for row in self._manifest.parameters]
        batch = [f"batch.{row.name}" for row in self._manifest.batch]
        inputs = [*self._parameters, *batch]
        self._session = make_session(bundle, file, threads, inputs, self._outputs, provider)

    def evaluate(self, values: Mapping[str, Any], batch: Batch) -> Evaluation:
        """Return the sums for a model, given as OrtValues by the graph's names. Raises DataError,
        StepError."""
        arrays = check_batch(batch, self._manifest.batch)
        binding = self._session.io_binding()
        for name in self._outputs:
            binding.bind_output(name)
        inputs = {name: values[name] for name in self._parameters} | batch_values(
            self._manifest, arrays
        )
        run(self._session, binding, self._file, arrays, inputs, wait=self._copied)
        examples, loss, *metrics = (float(value) for value in binding.copy_outputs_to_cpu())
        return Evaluation(
            round(examples), loss, dict(zip(self._manifest.metrics, metrics, strict=True))
        )


def load_first(runtime: Runtime, bundle: Bundle, model: Vector | None) -> None:
    """Load the model with which a runtime is opened, and from the bundle the parameters that
    ``model`` lacks."""
    whole = bundle.manifest.local_size
    if model is None:
        model = bundle.parameters()
    elif bundle.manifest.size < whole != np.size(model):
        model = np.concatenate([model, bundle.personal_parameters()])
    runtime.load(model)


def read_only(vector: Vector) -> Vector:
    """Return a view of the vector that cannot be written to."""
    view = vector.view()
    view.flags.writeable = False
    return view


def _scalar(values: Vector, place: int) -> Vector:
    """Return a view without axes: ONNX Runtime refuses numpy's scalars."""
    return values[place : place + 1].reshape(())
