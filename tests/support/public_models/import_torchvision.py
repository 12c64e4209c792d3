"""``torchvision``, imported beside PyTorch's CPU build too."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor a, Tensor b, float c) -> Tensor",
)
"""Operators of torchvision's compiled part for which its import demands that they exist."""

_declared: list[torch.library.Library] = []
"""A library's operators are forgotten with it."""


def torchvision() -> ModuleType:
    """Import torchvision and return it.

    The package index has it with a compiled part for CUDA's build of PyTorch. Beside the CPU build
    that part does not load, and the import fails: ``operator torchvision::nms does not exist``. No
    model here calls these operators, so it is enough to declare them.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    _declared.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
    for operator in OPERATORS:
        _declared[0].define(operator)  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision")
