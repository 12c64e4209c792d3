"""Trains one part of a split model: a party's bottom, or the top.

Vepakomma, Gupta, Swedish, Raskar 2018, "Split learning for health", arXiv 1812.00564: the bottom's
activations go up, and the gradient for them comes down. ``SplitPart`` of the protocol's manifest
says what the graphs take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import ACTIVATIONS, STATE, TOP_STEP, SplitPart
from fleetlearn_protocol.vector import Vector, views
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import check_batch, check_hyper, check_seed, check_vector
from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime, read_only
from fleetlearn_device.runtimes.sessions import StepError, make_session


def part_of(bundle: Bundle, part: str) -> SplitPart:
    """Return which part of a split model the bundle is. Raises BundleError unless it is ``part``:
    bottom or top."""
    split = bundle.manifest.split
    if not isinstance(split, SplitPart) or split.part != part:
        raise BundleError(
            Code.BAD_MESSAGE,
            f"bundle {bundle.manifest.name} is not the {part} of a split model; export_vertical "
            "and export_bundle(split=) of fleetlearn_export write such bundles",
        )
    return split


class Bottom:
    """A party's part of the model, from its own arrays to the activations."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        """Begins with the bundle's initial model. Raises BundleError."""
        self.cut = part_of(bundle, "bottom").cuts[0]
        self.manifest = manifest = bundle.manifest
        self._runtime = OnnxRuntime(bundle, threads)
        names = [f"param.{row.name}" for row in manifest.parameters]
        names += [f"batch.{row.name}" for row in manifest.data_arrays]
        seed = ["seed"] if manifest.random else []
        self._session = make_session(bundle, ACTIVATIONS, threads, [*names, *seed], ["activations"])

    @property
    def local(self) -> Vector:
        """The parameters now: float32, shape (local_size,). Valid until the next step."""
        return self._runtime.local

    @property
    def state(self) -> Vector:
        """The optimizer's state now: float32, shape (state_size,). Valid until the next step."""
        return self._runtime.state

    def resume(self, local: Vector, state: Vector) -> None:
        """Go on from parameters and state of an earlier time. Raises ValueError on other shapes."""
        check_vector(local, self.manifest.local_size)
        check_vector(state, self.manifest.state_size, what="the state vector")
        self._runtime.resume(local, state)

    def activations(self, batch: Sequence[NDArray[Any]], *, seed: int = 0) -> Vector:
        """Return the activations of a batch: float32, shape (n, ...). Raises DataError, StepError.

        ``seed``: of the step that will have the same batch.
        """
        arrays = check_batch(batch, self.manifest.data_arrays)
        table = views(self._runtime.local, self.manifest.parameters)
        feed: dict[str, Any] = {f"param.{name}": array for name, array in table.items()}
        feed |= _named(self.manifest.data_arrays, arrays)
        if self.manifest.random:
            feed["seed"] = np.array(check_seed(seed), np.int64)
        made: Vector = _run(self._session, ACTIVATIONS, feed)["activations"]
        return made

    def step(
        self, batch: Sequence[NDArray[Any]], gradient: Vector, *, seed: int = 0, **hyper: float
    ) -> None:
        """Do one optimizer step. Raises DataError, StepError, ValueError.

        gradient: of each row's own loss with respect to its activations, shape (n, ...).
        """
        self._runtime.step((*batch, gradient), seed=seed, **hyper)


class TopResult(NamedTuple):
    """What a step of the top gives."""

    loss: float
    """The batch's mean loss before the step."""
    metrics: dict[str, float]
    """Means over the batch."""
    gradients: tuple[Vector, ...]
    """For each party, in the order of the top's cuts: float32, the shape of its activations."""


class Top:
    """The part of the model above the cut, with the loss."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        """Begins with the bundle's initial model. Raises BundleError."""
        self.cuts = part_of(bundle, "top").cuts
        self.manifest = manifest = bundle.manifest
        self._local = bundle.parameters()
        has_state = STATE in manifest.files
        self._state = bundle.state() if has_state else np.zeros(manifest.state_size, np.float32)
        carried = [f"param.{row.name}" for row in manifest.parameters]
        carried += [f"state.{row.name}" for row in manifest.state]
        inputs = [*carried, *(f"batch.{row.name}" for row in manifest.batch)]
        inputs += [f"hyper.{row.name}" for row in manifest.hyper]
        inputs += ["seed"] if manifest.random else []
        self._gradients = [f"gradient.{cut.activations.name}" for cut in self.cuts]
        outputs = [*(f"next.{name}" for name in carried), "loss", *self._gradients]
        outputs += [f"metric.{name}" for name in manifest.metrics]
        self._session = make_session(bundle, TOP_STEP, threads, inputs, outputs)

    @property
    def local(self) -> Vector:
        """The parameters now: float32, shape (local_size,)."""
        return read_only(self._local)

    @property
    def state(self) -> Vector:
        """The optimizer's state now: float32, shape (state_size,)."""
        return read_only(self._state)

    def resume(self, local: Vector, state: Vector) -> None:
        """Go on from parameters and state of an earlier time. Raises ValueError on other shapes."""
        check_vector(local, self.manifest.local_size)
        check_vector(state, self.manifest.state_size, what="the state vector")
        self._local, self._state = local.copy(), state.copy()

    def step(self, batch: Sequence[NDArray[Any]], *, seed: int = 0, **hyper: float) -> TopResult:
        """Do one optimizer step. Raises DataError, StepError, ValueError.

        batch: the activations of each party, in the order of the cuts, then the targets.
        """
        manifest = self.manifest
        arrays = check_batch(batch, manifest.batch)
        carried = {**self._tables(self._local, self._state)}
        feed: dict[str, Any] = {**carried, **_named(manifest.batch, arrays)}
        for name, value in check_hyper(hyper, manifest.hyper).items():
            feed[f"hyper.{name}"] = np.array(value, np.float32)
        if manifest.random:
            feed["seed"] = np.array(check_seed(seed), np.int64)
        found = _run(self._session, TOP_STEP, feed)
        local, state = np.empty_like(self._local), np.empty_like(self._state)
        for name, array in self._tables(local, state).items():
            array[...] = found[f"next.{name}"]
        self._local, self._state = local, state
        metrics = {name: float(found[f"metric.{name}"]) for name in manifest.metrics}
        gradients = tuple(found[name] for name in self._gradients)
        return TopResult(float(found["loss"]), metrics, gradients)

    def _tables(self, local: Vector, state: Vector) -> Mapping[str, Vector]:
        params = views(local, self.manifest.parameters)
        slots = views(state, self.manifest.state)
        return {f"param.{name}": array for name, array in params.items()} | {
            f"state.{name}": array for name, array in slots.items()
        }


def _named(rows: Sequence[Any], arrays: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {f"batch.{row.name}": array for row, array in zip(rows, arrays, strict=True)}


def _run(session: Any, file: str, feed: Mapping[str, Any]) -> dict[str, Any]:
    """Run a graph. Returns its outputs by name. Raises StepError with ONNX Runtime's own words."""
    names = [output.name for output in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, dict(feed)), strict=True))
    except Exception as error:
        shapes = [np.shape(value) for name, value in feed.items() if name.startswith("batch.")]
        raise StepError(
            f"ONNX Runtime could not run {file} on a batch of shapes {shapes}: {error}"
        ) from error
