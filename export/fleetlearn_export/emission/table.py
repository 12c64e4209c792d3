"""The table of ATen operators that the emission writes, and what tracing makes of all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from fleetlearn_export.emission.emitter import Handler
from fleetlearn_export.emission.operators import (
    activations,
    arithmetic,
    comparisons,
    convolution,
    creation,
    indexing,
    losses,
    matrices,
    normalization,
    padding,
    pooling,
    reductions,
    shapes,
    slices,
    softmax,
)
from fleetlearn_export.tracing.decompositions import BACKWARD, FORWARD, tracing_decompositions

Operator = torch._ops.OpOverload

OPERATORS: dict[Operator, Handler] = {
    **arithmetic.OPERATORS,
    **activations.OPERATORS,
    **comparisons.OPERATORS,
    **softmax.OPERATORS,
    **reductions.OPERATORS,
    **losses.OPERATORS,
    **shapes.OPERATORS,
    **slices.OPERATORS,
    **padding.OPERATORS,
    **creation.OPERATORS,
    **indexing.OPERATORS,
    **matrices.OPERATORS,
    **convolution.OPERATORS,
    **pooling.OPERATORS,
    **normalization.OPERATORS,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return, for operators that are not in the table, functions that compute them with other operators."""
    table = {**core_aten_decompositions(), **tracing_decompositions(), **FORWARD, **BACKWARD}
    return {operator: function for operator, function in table.items() if operator not in OPERATORS}
