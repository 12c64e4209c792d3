"""The passes of the cross-entropy give PyTorch's loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleetlearn_export.tracing import cross_entropy
from fleetlearn_export.tracing.cross_entropy import (
    BACKWARD,
    backward_by_index,
    backward_one_hot,
    forward_one_hot,
    fuse_cross_entropy,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

aten = torch.ops.aten
REDUCTIONS = ["none", "mean", "sum"]
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.5, 3.0])
SHAPES = {"a batch": (6, 5), "one example": (1, 5), "images": (3, 5, 2, 4), "no batch": (5,)}


def pytorch(outputs: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, a gradient of it, and the outputs' gradient."""
    leaf = outputs.clone().requires_grad_()
    loss = functional.cross_entropy(leaf, target, **options)
    grad = torch.rand(loss.shape) + 0.5
    loss.backward(grad)
    assert leaf.grad is not None
    return loss.detach(), grad, leaf.grad


def compare(
    outputs: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str
) -> Tensor:
    """Returns the loss."""
    options: Any = {"weight": weight, "ignore_index": ignored, "reduction": reduction}
    loss, grad, expected = pytorch(outputs, target, **options)
    logp, number = outputs.log_softmax(min(outputs.dim() - 1, 1)), REDUCTIONS.index(reduction)
    operator = aten.nll_loss2d_forward if outputs.dim() == 4 else aten.nll_loss_forward
    _, total = operator(logp, target, weight, number, ignored)
    found, found_total = forward_one_hot(logp, target, weight, number, ignored)
    torch.testing.assert_close(found, loss, equal_nan=True)
    if reduction != "none":
        torch.testing.assert_close(found_total, total)
    for backward in (backward_by_index, backward_one_hot):
        gradient = backward(grad, logp, target, weight, number, ignored, total)
        torch.testing.assert_close(gradient, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
    return loss


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", [-100, -1, 3, 70])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["alike", "weighted"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_as_pytorch(
    shape: tuple[int, ...], weight: Tensor | None, ignored: int, reduction: str
) -> None:
    torch.manual_seed(0)
    outputs = 3 * torch.randn(shape)
    target = torch.randint(5, (shape[0], *shape[2:]) if len(shape) > 1 else ())
    if target.numel() > 1:
        target.view(-1)[::3] = ignored
    compare(outputs, target, weight, ignored, reduction)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_many_classes_are_compared(monkeypatch: pytest.MonkeyPatch, ignored: int) -> None:
    monkeypatch.setattr(cross_entropy, "TABLE_CLASSES", 4)
    outputs, target = torch.randn(6, 5), torch.tensor([ignored, 0, 4, ignored, 2, 1])
    for weight in (None, WEIGHT):
        compare(outputs, target, weight, ignored, "mean")


def test_by_hand() -> None:
    """Two classes with p = (1/4, 3/4), then an ignored target: loss log 4, gradient (p - y) / 1,
    and nothing."""
    logp, target = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log(), torch.tensor([0, -100])
    loss, total = forward_one_hot(logp, target, None, 1, -100)
    assert (float(loss), float(total)) == (pytest.approx(1.3862944), 1.0)
    for backward in (backward_by_index, backward_one_hot):
        gradient = backward(torch.tensor(1.0), logp, target, None, 1, -100, total)
        torch.testing.assert_close(gradient, torch.tensor([[-0.75, 0.75], [0.0, 0.0]]))


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["alike", "weighted"])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_where_all_are_ignored_the_mean_is_of_nothing(weight: Tensor | None, ignored: int) -> None:
    outputs, target = torch.randn(3, 5), torch.full((3,), ignored)
    assert compare(outputs, target, weight, ignored, "mean").isnan()
    assert compare(outputs, target, weight, ignored, "sum") == 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_classes_that_the_model_rules_out(reduction: str) -> None:
    """Outputs of -inf, as masks set them: of other classes, and of the target's, which costs
    infinitely much."""
    outputs = torch.randn(3, 5)
    outputs[:, 2] = -torch.inf
    assert compare(outputs, torch.tensor([0, 1, 4]), None, -100, reduction).isfinite().all()
    assert compare(outputs, torch.tensor([0, 1, 2]), None, -100, reduction).isinf().any()


def test_a_target_that_is_no_class_counts_as_ignored() -> None:
    logp = torch.randn(3, 5).log_softmax(1)
    odd, ignored = torch.tensor([1, 5, -1]), torch.tensor([1, -100, -100])
    assert forward_one_hot(logp, odd, None, 1, -100) == forward_one_hot(
        logp, ignored, None, 1, -100
    )
    found = [
        backward_one_hot(torch.ones(()), logp, y, None, 1, -100, torch.ones(()))
        for y in (odd, ignored)
    ]
    assert torch.equal(*found)
    assert found[0][0].any()
    assert not found[0][1:].any()


def traced(outputs: Tensor, target: Tensor, **options: Any) -> torch.fx.GraphModule:
    def gradient(outputs: Tensor) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        return torch.autograd.grad(functional.cross_entropy(leaf, target, **options), leaf)[0]

    return make_fx(gradient, tracing_mode="fake", _allow_non_fake_inputs=True)(outputs)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_backward_passes_of_loss_and_softmax_are_one(shape: tuple[int, ...]) -> None:
    outputs, target = (
        torch.randn(shape),
        torch.randint(2, (shape[0], *shape[2:]) if len(shape) > 1 else ()),
    )
    graph = traced(outputs, target, weight=WEIGHT)
    expected = graph(outputs)
    fuse_cross_entropy(graph.graph)
    graph.recompile()
    operators = {node.target for node in graph.graph.nodes}
    assert BACKWARD in operators
    assert aten._log_softmax_backward_data.default not in operators
    torch.testing.assert_close(graph(outputs), expected)


def test_a_gradient_of_more_than_the_chosen_classes_stays() -> None:
    outputs, target = torch.randn(6, 5), torch.randint(5, (6,))
    graph = traced(outputs, target, label_smoothing=0.1)
    before = graph.code
    fuse_cross_entropy(graph.graph)
    graph.recompile()
    assert graph.code == before
