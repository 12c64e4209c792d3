"""Operators that PyTorch takes apart into more passes over memory than ONNX Runtime needs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

aten = torch.ops.aten


def relu_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """ONNX Runtime's Where takes several times longer than a product: ten times in version 1.19."""
    if threshold != 0:
        found: Tensor = decomposition_table[aten.threshold_backward.default](grad, x, threshold)
        return found
    return grad * (x > 0).to(grad.dtype)


CHEAPER: dict[Any, Callable[..., Any]] = {aten.threshold_backward.default: relu_backward}
