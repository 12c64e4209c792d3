"""Opens a bundle for training on one of the runtimes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.manifest import EVAL, FROZEN, OF_FEATURES, TRAIN
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.providers import ProviderName, check_provider_name
from fleetlearn_device.runtimes.runtime import KINDS, Kind, Runtime


def open_runtime(
    bundle: str | os.PathLike[str] | Bundle,
    kind: Kind = "auto",
    threads: int = 1,
    *,
    provider: ProviderName = "cpu",
    model: Vector | None = None,
    from_features: bool = False,
) -> Runtime:
    """Open a bundle (folder, zip, or one already opened) for training, with ``threads`` threads in
    an operator.

    ``onnx`` runs graphs/train.onnx on any ONNX Runtime; ``ort-training`` runs ort_training/ on
    onnxruntime-training-cpu. ``auto`` is ``onnx``: it runs everywhere, on a runtime that is still
    maintained, measures metrics in the step itself, and gives the same numbers.

    ``provider`` is where ``onnx`` computes: ``cpu``, or ``cuda`` with onnxruntime-gpu and an NVIDIA
    GPU, the first one that CUDA_VISIBLE_DEVICES names. ``ort-training`` computes on the CPU.

    ``model`` (float32, shape (P,) or (local_size,)) is loaded instead of the bundle's initial
    parameters. These are then read only for personal parameters that ``model`` lacks, and may be
    missing otherwise.

    With ``from_features`` the runtime's batch, and its manifest's, are the manifest's features
    (``training.features.FeatureCache`` computes them). ``ort-training`` cannot do that.

    Raises ValueError (kind, threads, provider, model, from_features), BundleError (damaged, or
    without ort_training/ or features), RuntimeUnavailableError, MemoryError.
    """
    check_choices(kind, threads, provider)
    if from_features and kind == "ort-training":
        raise ValueError(
            "the runtime ort-training trains whole models; only the runtime onnx trains from "
            "features"
        )
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
        raise ValueError(
            f"provider {provider!r}; the runtime 'ort-training' computes on the CPU. Use 'onnx'"
        )


def _open(path: str | os.PathLike[str], files: Sequence[str]) -> Bundle:
    """Open a bundle, and check these files and what they refer to. Raises BundleError.

    The parameters are checked when they are read: a hash takes 0.05 s for each 100 MB.
    """
    bundle = open_bundle(path, files=files)
    if FROZEN in bundle.manifest.files:
        bundle.check(FROZEN)
    return bundle
