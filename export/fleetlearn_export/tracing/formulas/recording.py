"""Records formulas in place of operators while a step is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fleetlearn_export.tracing.formulas import (
    chunks,
    concatenations,
    ctc,
    distances,
    experts,
    grids,
    margins,
    recurrent,
    resizing,
    spectrograms,
)

AUTOGRAD, COMPOSITE = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
"""Where PyTorch looks for its own formulas."""
Formulas = Mapping[torch._ops.OpOverload, Callable[..., Any]]
FORMULAS: Formulas = {
    **resizing.FORMULAS,
    **grids.FORMULAS,
    **distances.FORMULAS,
    **chunks.FORMULAS,
    **concatenations.FORMULAS,
    **ctc.FORMULAS,
    **experts.FORMULAS,
    **margins.FORMULAS,
    **spectrograms.FORMULAS,
    **recurrent.FORMULAS,
}
IN_EVALUATION: Formulas = {**FORMULAS, **recurrent.IN_EVALUATION}


@contextmanager
def formulas_recorded(formulas: Formulas = FORMULAS) -> Iterator[None]:
    """While active, tracing records the formulas. PyTorch would use its own before it asks a table
    of decompositions, or would record an operator for the gradient."""
    originals = {operator: dict(operator.py_kernels) for operator in formulas}
    for operator, formula in formulas.items():
        operator.py_kernels[AUTOGRAD] = formula
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator._name, COMPOSITE):
            operator.py_kernels[COMPOSITE] = formula
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in originals.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
