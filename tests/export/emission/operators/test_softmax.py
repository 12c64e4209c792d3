"""Softmax and its backward passes as ONNX, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
X = torch.tensor(
    [[[0.5, -2.0], [3.0, 100.0]], [[1.0, 4.0], [-0.25, 0.0]], [[2.0, 0.125], [-7.0, -200.0]]]
)
GRAD = torch.linspace(-2, 3, 12).reshape(3, 2, 2)
ATTENTION_MASK = torch.tensor(
    [[[True, False], [False, False]], [[True, True], [False, True]], [[False, False]] * 2]
)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(dim: int) -> None:
    check_emission(aten._softmax.default, lambda x: x.softmax(dim), X)
    check_emission(aten._log_softmax.default, lambda x: x.log_softmax(dim), X)
    softmax, logarithm = (
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    )
    check_emission(softmax, gradient_of(lambda x: x.softmax(dim)), X, GRAD)
    check_emission(logarithm, gradient_of(lambda x: x.log_softmax(dim)), X, GRAD)


def test_other_types_and_no_axis() -> None:
    check_emission(
        aten._softmax.default, lambda x: x.to(torch.int64).softmax(1, dtype=torch.float32), X
    )
    check_emission(aten._softmax.default, lambda x: x.sum().softmax(0), X)
    check_emission(aten._log_softmax.default, lambda x: x.sum().log_softmax(0), X)


def test_rows_that_a_mask_leaves_empty() -> None:
    def function(x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = aten._safe_softmax(x.masked_fill(~mask, -torch.inf), -1)
        return result

    check_emission(aten._safe_softmax.default, function, X, ATTENTION_MASK)
    check_emission(aten._safe_softmax.default, lambda x: aten._safe_softmax(x, 1), X)


def test_products_of_matrices_need_no_care() -> None:
    model = check_emission(
        aten._safe_softmax.default,
        lambda x: aten._safe_softmax((x @ x) * 0.125, -1),
        X / 10,
        tolerance=2e-6,
    )
    assert {node.op_type for node in model.graph.node} == {"MatMul", "Mul", "Softmax", "Identity"}


def test_attention() -> None:
    query = X[:, None].repeat(1, 2, 1, 1)

    def attention(query: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, query, query / 3, attn_mask=mask[:, None]
        )

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check_emission(None, attention, query, ATTENTION_MASK, tolerance=1e-5)
        check_emission(
            None,
            lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            query / 9,
        )
