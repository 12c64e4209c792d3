"""What a runtime is: it trains a bundle's model, one optimizer step at a time. ``open_runtime``
opens one."""

from __future__ import annotations

from typing import Literal, Protocol

from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.checks import Batch

Kind = Literal["auto", "onnx", "ort-training"]
KINDS = ("auto", "onnx", "ort-training")


class Runtime(Protocol):
    """A bundle's model in training. The first model is the bundle's initial one; ``load`` sets a
    round's model."""

    @property
    def kind(self) -> str:
        """``onnx`` or ``ort-training``."""

    @property
    def version(self) -> str:
        """The version of ONNX Runtime."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def parameters(self) -> Vector:
        """The travelling parameters now: float32, shape (P,), in manifest order. Read-only, and
        valid until the next ``step`` or ``load``, which reuse the memory; copy it to keep it."""

    @property
    def local(self) -> Vector:
        """The whole model now: float32, shape (local_size,); the personal parameters are last.
        Read-only, as above."""

    @property
    def state(self) -> Vector:
        """What the last step passes to the next: float32, shape (state_size,), in manifest order.
        As above."""

    @property
    def anchor(self) -> Vector:
        """The round's global model, which the proximal term pulls towards: float32, shape (P,).
        Read-only."""

    @property
    def metrics(self) -> dict[str, float]:
        """Mean metrics of the last step's batch, measured before its update."""

    def load(
        self,
        vector: Vector,
        *,
        anchor: Vector | None = None,
        correction: Vector | None = None,
        previous: Vector | None = None,
        state: Vector | None = None,
    ) -> None:
        """Copy a model in, for training to begin from. All are float32. Do not write to the anchor
        (``vector``, unless given) before the next ``load``: a runtime whose step does not read the
        anchor keeps no copy of the model.

        vector: shape (P,): the travelling parameters; the personal ones stay as they are. Or shape
        (local_size,): all. anchor: shape (P,). The travelling part of ``vector`` unless given.
        correction: shape (P,), added to the gradient (SCAFFOLD's c - c_k). Zeros unless given.
        previous: shape (P,), the model with which this device's last task ended (MOON). The anchor
        unless given. state: shape (state_size,). The bundle's initial state unless given; rows that
        are ``kept`` stay as they are.

        Raises ValueError on another dtype or shape, or a reference that the step does not read;
        nothing has changed.
        """

    def resume(self, local: Vector, state: Vector) -> None:
        """Set the whole model, float32, shape (local_size,), and the state, shape (state_size,),
        kept rows included, and leave the references as they are: training goes on from there."""

    def step(self, batch: Batch, /, *, seed: int = 0, **hyper: float) -> float:
        """One optimizer step. Returns the batch's mean loss, before the update and without the
        proximal penalty.

        The step is w <- optimizer(w, g + mu * (w - anchor) + ...) as the manifest's LocalStep says.
        With mu the objective is loss + mu/2 * ||w - anchor||^2 (Li et al. 2020, "Federated
        Optimization in Heterogeneous Networks", arXiv 1812.06127, equation 2: the factor 1/2 is the
        paper's). Hyper-parameters not given take the manifest's defaults. A random bundle's draws
        (dropout) follow from ``seed`` (0 to 2^53 - 1) alone: give each step another. Other bundles
        do not read it.

        Raises DataError (a ValueError), ValueError on a hyper-parameter or seed, StepError,
        MemoryError; then nothing has changed.
        """

    def evaluate(self, batch: Batch) -> Evaluation:
        """Return examples, summed loss and summed metrics of the model now. Raises DataError,
        StepError."""
