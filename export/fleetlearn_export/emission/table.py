"""The table of ATen operators that the emission writes, and what tracing makes of all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fleetlearn_export.emission.emitter import Handler
from fleetlearn_export.emission.operators import (
    activations,
    arithmetic,
    batch_norm,
    comparisons,
    convolution,
    creation,
    indexing,
    losses,
    matrices,
    max_pooling,
    normalization,
    padding,
    pooling,
    recurrent,
    reductions,
    scan,
    shapes,
    slices,
    softmax,
)
from fleetlearn_export.tracing.decompositions import BACKWARD, FORWARD, tracing_decompositions
from fleetlearn_export.tracing.formulas import ctc

Operator = torch._ops.OpOverload
core_aten_decompositions = cache(torch._decomp.core_aten_decompositions)
"""PyTorch's own. It takes 40 ms to collect them, two or three times in each export: a tenth of a
small one."""

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
    **max_pooling.OPERATORS,
    **batch_norm.OPERATORS,
    **normalization.OPERATORS,
    **recurrent.OPERATORS,
    **scan.OPERATORS,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return, for operators that are not in the table, functions that compute them with other
    operators."""
    table = {
        **core_aten_decompositions(),
        **tracing_decompositions(),
        **FORWARD,
        **BACKWARD,
        **ctc.DECOMPOSITIONS,
    }
    return {operator: function for operator, function in table.items() if not _is_emitted(operator)}


def _is_emitted(operator: Operator) -> bool:
    """Whether the table has the operator, or the one that returns a new tensor where this one
    writes into its own."""
    packet = getattr(
        torch.ops.aten, operator._schema.name.removeprefix("aten::").removesuffix("_"), None
    )
    return operator in OPERATORS or getattr(packet, operator._overloadname, None) in OPERATORS
