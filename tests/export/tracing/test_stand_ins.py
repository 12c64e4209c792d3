from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.tracing.stand_ins import SHAPES, shapes_known
from torch import Tensor
from torch._decomp import decomposition_table
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

aten = torch.ops.aten
X = torch.randn(4, 3, 5, 6)
LAST = X.to(memory_format=torch.channels_last)
VECTORS = [torch.rand(3) for _ in range(4)]
NORM = aten._native_batch_norm_legit.default
BACKWARD = aten.native_batch_norm_backward.default
CALLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "training": (NORM, [X, *VECTORS, True, 0.1, 1e-5]),
    "without weight": (NORM, [X, None, None, *VECTORS[2:], True, 0.1, 1e-5]),
    "evaluation": (NORM, [X, *VECTORS, False, 0.1, 1e-5]),
    "without training": (
        aten._native_batch_norm_legit_no_training.default,
        [X, *VECTORS, 0.1, 1e-5],
    ),
    "one axis": (NORM, [X[:, :, 0, 0].contiguous(), *VECTORS, True, 0.1, 1e-5]),
    "channels last": (NORM, [LAST, *VECTORS, True, 0.1, 1e-5]),
    "float64": (NORM, [X.double(), *(row.double() for row in VECTORS), True, 0.1, 1e-5]),
    "backward": (BACKWARD, [X, X, *VECTORS[:1], *VECTORS, True, 1e-5, [True, True, True]]),
    "backward of input": (
        BACKWARD,
        [X, X, *VECTORS[:1], *VECTORS, True, 1e-5, [True, False, False]],
    ),
    "backward, channels last": (
        BACKWARD,
        [LAST, X, *VECTORS[:1], *VECTORS, True, 1e-5, [True, True, True]],
    ),
    "threshold": (aten.threshold_backward.default, [X, X, 0]),
    "threshold, other layout": (aten.threshold_backward.default, [LAST, X, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_shapes_are_those_of_pytorch(name: str) -> None:
    operator, arguments = CALLS[name]
    expected = described(operator, arguments)
    with shapes_known():
        assert described(operator, arguments) == expected


def test_pytorch_has_its_formulas_again() -> None:
    before = [decomposition_table[operator] for operator in SHAPES]
    with shapes_known():
        assert not set(before) & {decomposition_table[operator] for operator in SHAPES}
    assert [decomposition_table[operator] for operator in SHAPES] == before


def described(operator: Callable[..., Any], arguments: list[Any]) -> list[str]:
    """Call on stand-ins whose first size is free. Return shape, strides and dtype of each
    result."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        axes = [
            DimDynamic.DUCK if axis == 0 < value.dim() - 1 else DimDynamic.STATIC
            for axis in range(value.dim())
        ]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=axes)
        return mode.from_tensor(value, source=ConstantSource("x"), symbolic_context=context)

    with mode:
        results = operator(*map(stand_in, arguments))
    rows = [results] if isinstance(results, Tensor) else results
    return [str(row if row is None else (row.shape, row.stride(), row.dtype)) for row in rows]
