"""Matrix products as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(3)
A = torch.randn(3, 4, generator=RANDOM)
BATCH = torch.randn(3, 4, 5, generator=RANDOM)
M = torch.randn(5, 4, generator=RANDOM)
BIAS = torch.randn(5, generator=RANDOM)

CASES: list[tuple[Any, Callable[..., Any]]] = [
    (aten.mm.default, lambda a, batch, m, bias: a @ m.t()),
    (aten.mm.default, lambda a, batch, m, bias: a.to(torch.int64) @ m.t().to(torch.int64)),
    (aten.mm.default, lambda a, batch, m, bias: a.t() @ a),
    (aten.bmm.default, lambda a, batch, m, bias: batch @ batch.transpose(1, 2)),
    (aten.bmm.default, lambda a, batch, m, bias: torch.einsum("nij,nj->ni", batch, batch[:, 0])),
    (aten.mv.default, lambda a, batch, m, bias: a @ m[0]),
    (aten.mv.default, lambda a, batch, m, bias: batch[0].t() @ a[0]),
    (aten.dot.default, lambda a, batch, m, bias: a[0] @ m[0]),
    (aten.vdot.default, lambda a, batch, m, bias: torch.vdot(a[0], m[0])),
    (aten.addmm.default, lambda a, batch, m, bias: torch.nn.functional.linear(a, m, bias)),
    (aten.addmm.default, lambda a, batch, m, bias: torch.addmm(bias, a, m.t(), beta=0.5, alpha=-2)),
    (aten.addmm.default, lambda a, batch, m, bias: torch.addmm(bias * torch.inf, a, m.t(), beta=0)),
    (aten.addmm.default, lambda a, batch, m, bias: torch.addmm(a, batch[:, 0], m)),
    (
        aten.addmm.default,
        lambda a, batch, m, bias: torch.addmm(bias, a, m.t(), alpha=1 / a.shape[0]),
    ),
    (aten.addmv.default, lambda a, batch, m, bias: torch.addmv(a[:, 0], a, m[0], beta=2, alpha=3)),
    (
        aten.baddbmm.default,
        lambda a, batch, m, bias: torch.baddbmm(a[:, :, None], batch, batch.mT, alpha=0.5),
    ),
    (
        aten.baddbmm.default,
        lambda a, batch, m, bias: torch.baddbmm(a[:, :, None], batch, batch.mT, beta=0),
    ),
    (aten.addbmm.default, lambda a, batch, m, bias: torch.addbmm(m[0], batch, batch.mT)),
    (aten.addr.default, lambda a, batch, m, bias: torch.addr(a, a[:, 0], m[0], alpha=2)),
    (None, lambda a, batch, m, bias: torch.outer(a[:, 0], bias)),
    (None, lambda a, batch, m, bias: torch.einsum("nij,kj->nik", batch, m.t())),
]


@pytest.mark.parametrize(("operator", "function"), CASES)
def test_products(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(
        operator,
        lambda a, batch, m, bias: (function(a, batch, m, bias), batch),
        A,
        BATCH,
        fixed=(M, BIAS),
    )


def test_gradients_of_a_linear_layer() -> None:
    for argument in (0, 1):
        check_emission(
            aten.mm.default,
            lambda x, grad, weight, bias, argument=argument: gradient_of(
                torch.nn.functional.linear, argument
            )(x, weight, bias, grad),
            A,
            torch.randn(3, 5, generator=RANDOM),
            fixed=(M, BIAS),
        )
