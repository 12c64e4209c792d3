"""Emission of single operators, compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from fleetlearn_export.checks.comparison import open_session
from fleetlearn_export.emission.complex_numbers import without_complex_numbers
from fleetlearn_export.emission.emit import Emission, emit
from fleetlearn_export.emission.functional import without_writes
from fleetlearn_export.emission.table import decompositions
from fleetlearn_export.graphs.conversion import IR_VERSION, OPSET
from fleetlearn_export.tracing.formulas.recording import FORMULAS, Formulas
from fleetlearn_export.tracing.trace import trace
from torch import Tensor

SIZES = (3, 1, 5)
"""Numbers of examples that an emitted graph is run with; it is traced with the first."""


def emitted(
    function: Callable[..., Any],
    arrays: list[Tensor],
    names: list[str],
    formulas: Formulas = FORMULAS,
) -> tuple[Emission, list[str]]:
    """Trace the function with a free first axis of each array, and emit it. Returns it with its
    outputs' names."""
    outputs: list[str] = []

    def named(given: dict[str, Tensor]) -> dict[str, Tensor]:
        results = function(*given.values())
        results = results if isinstance(results, tuple | list) else (results,)
        outputs[:] = [f"out{place}" for place in range(len(results))]
        return {name: value.clone() for name, value in zip(outputs, results, strict=True)}

    arguments = dict(zip(names, arrays, strict=True))
    rows = {name: 0 for name, value in arguments.items() if value.dim()}
    module = without_complex_numbers(
        without_writes(trace(named, arguments, rows, decompositions(), formulas))
    )
    return emit(module, names, outputs, names[0]), outputs


def check_emission(
    operator: torch._ops.OpOverload | None,
    function: Callable[..., Any],
    *arrays: Tensor,
    fixed: tuple[Tensor, ...] = (),
    tolerance: float = 1e-6,
    formulas: Formulas = FORMULAS,
) -> onnx.ModelProto:
    """Emit ``function(*arrays, *fixed)`` and compare with PyTorch, for several numbers of examples.
    Returns the graph.

    operator: must be among the emitted ones. arrays: have SIZES[0] examples on the first axis; more
        examples repeat them. fixed: arrays of which no axis is free. tolerance: relative to each
        result's largest element.
    formulas: as for ``trace``.
    """
    names = [f"in{place}" for place in range(len(arrays))]
    emission, outputs = emitted(
        lambda *given: function(*given, *fixed), list(arrays), names, formulas
    )
    assert operator is None or operator in {call.node.target for call in emission.calls}, (
        f"{operator} is not in the traced graph, but "
        f"{sorted({str(call.node.target) for call in emission.calls})}"
    )
    model = emission.model
    model.ir_version = IR_VERSION
    model.opset_import[0].version = OPSET
    onnx.checker.check_model(model, full_check=True)
    session = open_session(model.SerializeToString())
    for size in SIZES:
        given = [value[torch.arange(size) % len(value)] for value in arrays]
        expected = function(*(value.clone() for value in given), *fixed)
        expected = expected if isinstance(expected, tuple | list) else (expected,)
        got = session.run(dict(zip(names, (value.numpy() for value in given), strict=True)))
        for name, value in zip(outputs, expected, strict=True):
            wanted = value.detach().numpy()
            assert got[name].dtype == wanted.dtype, f"{got[name].dtype} in place of {wanted.dtype}"
            assert got[name].shape == wanted.shape, f"{got[name].shape} in place of {wanted.shape}"
            scale = (
                np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-30)
                if wanted.dtype.kind == "f"
                else 1
            )
            np.testing.assert_allclose(got[name], wanted, rtol=0, atol=tolerance * scale)
    return model


def gradient_of(function: Callable[..., Tensor], argument: int = 0) -> Callable[..., Tensor]:
    """Return a function that computes the gradient of ``(function(...) * last argument).sum()`` by
    one argument.

    The last argument is the gradient that arrives at the function's result.
    """

    def gradient(*given: Tensor) -> Tensor:
        *arguments, arriving = given
        leaves = [value.detach().clone() for value in arguments]
        leaves[argument].requires_grad_()
        result = function(*leaves)
        (found,) = torch.autograd.grad(result, leaves[argument], arriving)
        return found

    return gradient
