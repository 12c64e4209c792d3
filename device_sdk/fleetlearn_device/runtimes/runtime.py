"""What a runtime is, and how one is opened: it trains a bundle's model, one optimizer step at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, Protocol

from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.manifest import EVAL, FROZEN, OF_FEATURES, TRAIN, Manifest
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.checks import Batch
from fleetlearn_device.runtimes.providers import ProviderName, check_provider_name

Kind = Literal["auto", "onnx", "ort-training"]
KINDS = ("auto", "onnx", "ort-training")


class Runtime(Protocol):
    """A bundle's model in training. The first model is the bundle's initial one; ``load`` sets a round's model."""

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
        """The travelling parameters now: float32, shape (P,), in manifest order. Read-only, and valid until the next
        ``step`` or ``load``, which reuse the memory; copy it to keep it."""

    @property
    def local(self) -> Vector:
        """The whole model now: float32, shape (local_size,); the personal parameters are last. Read-only, as above."""

    @property
    def state(self) -> Vector:
        """What the last step passes to the next: float32, shape (state_size,), in manifest order. As above."""

    @property
    def anchor(self) -> Vector:
        """The round's global model, which the proximal term pulls towards: float32, shape (P,). Read-only."""

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
        """Copy a model in, for training to begin from. All are float32. Do not write to the anchor (``vector``, unless
        given) before the next ``load``: a runtime whose step does not read the anchor keeps no copy of it.

        vector: shape (P,): the travelling parameters; the personal ones stay as they are. Or shape (local_size,): all.
        anchor: shape (P,). The travelling part of ``vector`` unless given.
        correction: shape (P,), added to the gradient (SCAFFOLD's c - c_k). Zeros unless given.
        previous: shape (P,), the model with which this device's last task ended (MOON). The anchor unless given.
        state: shape (state_size,). The bundle's initial state unless given; rows that are ``kept`` stay as they are.

        Raises ValueError on another dtype or shape, or a reference that the step does not read; nothing has changed.
        """

    def step(self, batch: Batch, /, *, seed: int = 0, **hyper: float) -> float:
        """One optimizer step. Returns the batch's mean loss, before the update and without the proximal penalty.

        The step is w <- optimizer(w, g + mu * (w - anchor) + ...) as the manifest's LocalStep says. With mu the
        objective is loss + mu/2 * ||w - anchor||^2 (Li et al. 2020, "Federated Optimization in Heterogeneous
        Networks", arXiv 1812.06127, equation 2: the factor 1/2 is the paper's). Hyper-parameters not given take the
        manifest's defaults. A random bundle's draws (dropout) follow from ``seed`` (0 to 2^53 - 1) alone: give each
        step another. Other bundles do not read it.

        Raises DataError (a ValueError), ValueError on a hyper-parameter or seed, StepError, MemoryError; then nothing
        has changed.
        """

    def evaluate(self, batch: Batch) -> Evaluation:
        """Return examples, summed loss and summed metrics of the model now. Raises DataError, StepError."""


def open_runtime(
    bundle: str | os.PathLike[str] | Bundle,
    kind: Kind = "auto",
    threads: int = 1,
    *,
    provider: ProviderName = "cpu",
    model: Vector | None = None,
    from_features: bool = False,
) -> Runtime:
    """Open a bundle (folder, zip, or one already opened) for training, with ``threads`` threads in an operator.

    ``onnx`` runs graphs/train.onnx on any ONNX Runtime; ``ort-training`` runs ort_training/ on
    onnxruntime-training-cpu. ``auto`` is ``onnx``: it runs everywhere, on a runtime that is still maintained,
    measures metrics in the step itself, and gives the same numbers.

    ``provider`` is where ``onnx`` computes: ``cpu``, or ``cuda`` with onnxruntime-gpu and an NVIDIA GPU, the first one
    that CUDA_VISIBLE_DEVICES names. ``ort-training`` computes on the CPU.

    ``model`` (float32, shape (P,) or (local_size,)) is loaded instead of the bundle's initial parameters. These are
    then read only for personal parameters that ``model`` lacks, and may be missing otherwise.

    With ``from_features`` the runtime's batch, and its manifest's, are the manifest's features
    (``training.features.FeatureCache`` computes them). ``ort-training`` cannot do that.

    Raises ValueError (kind, threads, provider, model, from_features), BundleError (damaged, or without ort_training/ or
    features), RuntimeUnavailableError, MemoryError.
    """
    check_choices(kind, threads, provider)
    if from_features and kind == "ort-training":
        raise ValueError("the runtime ort-training trains whole models; only the runtime onnx trains from features")
    # Each kind has a module, so that opening one imports nothing of the other.
    if kind == "ort-training":
        from fleetlearn_device.runtimes.runtime_ort_training import OrtTrainingRuntime

        if not isinstance(bundle, Bundle):
            bundle = _open(bundle, [EVAL])
        return OrtTrainingRuntime(bundle, threads, model)
    from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime

    if not isinstance(bundle, Bundle):
        bundle = _open(bundle, OF_FEATURES if from_features else (TRAIN, EVAL))
    return OnnxRuntime(bundle, threads, model, provider, from_features)


def check_choices(kind: str, threads: int, provider: str) -> None:
    """Raise ValueError unless ``open_runtime`` allows these together."""
    if kind not in KINDS:
        raise ValueError(f"runtime kind {kind!r}; expected one of {', '.join(KINDS)}")
    if threads < 1:
        raise ValueError(f"{threads} threads; expected at least 1")
    check_provider_name(provider)
    if kind == "ort-training" and provider != "cpu":
        raise ValueError(f"provider {provider!r}; the runtime 'ort-training' computes on the CPU. Use 'onnx'")


def _open(path: str | os.PathLike[str], files: Sequence[str]) -> Bundle:
    """Open a bundle, and check these files and what they refer to. Raises BundleError.

    The parameters are checked when they are read: a hash takes 0.05 s for each 100 MB.
    """
    bundle = open_bundle(path, files=files)
    if FROZEN in bundle.manifest.files:
        bundle.check(FROZEN)
    return bundle
