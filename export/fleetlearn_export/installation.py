"""Checks that this environment can export, before anything that exporting needs is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

MODULES = ("torch", "onnx", "onnxscript", "onnxruntime")
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-training", "onnxruntime-training-cpu")
"""Distributions that install into the same folder, ``onnxruntime``."""


def installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def check_installation() -> None:
    """Raise ImportError if a package is missing, or if two builds of ONNX Runtime are installed
    over one another."""
    runtimes = [name for name in RUNTIMES if installed(name)]
    if len(runtimes) > 1:
        raise ImportError(
            f"{' and '.join(runtimes)} are installed in one environment, into one and the same "
            f"folder. Remove all of them (pip uninstall {' '.join(runtimes)}), then install one: "
            "onnxruntime; or, in an environment apart, onnxruntime-training-cpu for its training "
            'artifacts (pip install "fleetlearn[ort-training]")'
        )
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"exporting needs {', '.join(missing)}, not installed here: pip install "
            '"fleetlearn[export]"'
        )
