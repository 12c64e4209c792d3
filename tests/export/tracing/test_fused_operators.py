"""The cheaper forms give PyTorch's numbers."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.tracing.fused_operators import CHEAPER_DECOMPOSITIONS, mask_before_pooling
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

aten = torch.ops.aten


@pytest.mark.parametrize("threshold", [0, 0.5])
def test_gradient_behind_a_threshold(threshold: float) -> None:
    grad, x = torch.randn(2, 50), torch.randn(2, 50).relu()
    cheaper = CHEAPER_DECOMPOSITIONS[aten.threshold_backward.default]
    assert torch.equal(
        cheaper(grad, x, threshold), aten.threshold_backward.default(grad, x, threshold)
    )


def traced(window: int, extra: float, x: torch.Tensor) -> torch.fx.GraphModule:
    """The gradient of a pooled ReLU's squares; with ``extra``, of the ReLU's own too."""

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        passed = functional.relu(x)
        total = (functional.max_pool2d(passed, window, 2) ** 2).sum()
        if extra:
            total = total + extra * passed.sum()
        return torch.autograd.grad(total, x)[0]

    return make_fx(gradient)(x)


@pytest.mark.parametrize("window", [2, 3])
def test_the_mask_of_a_relu_is_taken_where_its_pooling_is_small(window: int) -> None:
    # Rounded: many zeros, and many places that are equal.
    x = (2 * torch.randn(3, 2, 8, 9)).round()
    graph = traced(window, 0, x)
    expected = graph(x)
    mask_before_pooling(graph.graph)
    graph.recompile()
    assert torch.equal(graph(x), expected)
    (mask,) = (node for node in graph.graph.nodes if node.target is aten.threshold_backward.default)
    assert mask.meta["val"].shape[-1] == 4


def test_a_mask_of_more_than_the_pooling_stays() -> None:
    x = torch.randn(3, 2, 8, 8)
    graph = traced(2, 1.0, x)
    expected, before = graph(x), graph.code
    mask_before_pooling(graph.graph)
    graph.recompile()
    assert graph.code == before
    assert torch.equal(graph(x), expected)


def test_maxima_that_the_model_writes_into_are_no_mask() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        pooled = functional.max_pool2d(functional.relu(x), 3, 2).flatten(2).transpose(1, 2)
        pooled += 1
        return torch.autograd.grad((pooled**2).sum(), x)[0]

    x = torch.randn(3, 2, 8, 8) - 1  # windows without a positive element have no gradient
    graph = make_fx(gradient)(x)
    mask_before_pooling(graph.graph)
    graph.recompile()
    assert torch.equal(graph(x), gradient(x))
