"""Imports ONNX Runtime: only one of its distributions, and without PyTorch."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
)
"""All of these install into the same folder ``onnxruntime``, so an environment can hold only
one."""

_TRAINING = "onnxruntime.training"
_NO_MEMORY = re.compile(
    r"bad_alloc|bad allocation|failed to allocate|cannot allocate memory|memory "
    r"resources|pthread_create failed|out of memory|_ALLOC_FAILED",  # CUDA; cuBLAS and cuDNN
    re.I,
)
"""What ONNX Runtime's errors say when memory ran out. They have the same types as all other
failures."""


class RuntimeUnavailableError(RuntimeError):
    """This environment cannot run the runtime that was asked for. The text says what to install or
    remove."""


def installed() -> list[str]:
    """Return which of ``DISTRIBUTIONS`` are installed in this environment."""
    distributions = []
    for name in DISTRIBUTIONS:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        distributions.append(name)
    return distributions


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of ONNX Runtime, numpy or Python says that there was not enough
    memory."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


@cache
def import_onnxruntime() -> ModuleType:
    """Return the package ``onnxruntime``. Raises RuntimeUnavailableError where it is missing or
    installed twice.

    The training build of onnxruntime also imports its PyTorch front end, if it can (torch, onnx,
    sympy: more than a second, 200 MB). Nothing here uses the front end, so this function makes that
    import fail.
    """
    present = installed()
    if len(present) > 1:
        raise RuntimeUnavailableError(
            f"{' and '.join(present)} are installed in one environment; they overwrite each "
            "other's files. Uninstall all of them, then install one: pip uninstall "
            f"{' '.join(present)}"
        )
    if "onnxruntime" not in sys.modules and _TRAINING not in sys.modules:
        # None in sys.modules makes an import raise ModuleNotFoundError (The Python Language
        # Reference, 5.3.1).
        sys.modules[_TRAINING] = None  # type: ignore[assignment]
        try:
            return importlib.import_module("onnxruntime")
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise
            raise RuntimeUnavailableError(
                'onnxruntime is not installed: pip install "fleetlearn[device]"'
            ) from None
        finally:
            del sys.modules[_TRAINING]
    return importlib.import_module("onnxruntime")


def import_training_api() -> ModuleType:
    """Return the package ``onnxruntime.training.api``. Raises RuntimeUnavailableError where it is
    not installed.

    Its parent's ``__init__`` imports onnx and torch for making bundles; the API itself needs
    neither. So the parent is replaced by an empty package while the API is imported, unless the
    program has imported the parent already.
    """
    onnxruntime = import_onnxruntime()
    folder = Path(onnxruntime.__path__[0], "training")
    if not (folder / "api" / "__init__.py").is_file():
        raise RuntimeUnavailableError(
            "the runtime 'ort-training' needs onnxruntime-training-cpu; this environment has "
            f"{installed()}. Use the runtime 'onnx'; or, in an environment apart (x86-64, Python "
            '3.11 or 3.12), pip install "fleetlearn[ort-training]"'
        )
    if _TRAINING in sys.modules:
        return importlib.import_module(f"{_TRAINING}.api")
    bare = ModuleType(_TRAINING)
    bare.__path__ = [str(folder)]
    sys.modules[_TRAINING] = bare
    try:
        return importlib.import_module(f"{_TRAINING}.api")
    finally:
        del sys.modules[_TRAINING]
        # The import system made it an attribute of its parent as well.
        vars(onnxruntime).pop("training", None)
