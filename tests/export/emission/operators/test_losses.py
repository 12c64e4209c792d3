"""Losses and their backward passes as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.tracing.cross_entropy import BACKWARD
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
SCORES = torch.tensor([[0.5, -2.0, 3.0, 0.0], [1.0, 4.0, -0.25, 1.0], [2.0, 0.125, -7.0, 100.0]])
CLASSES = torch.tensor([2, -100, 0])
IMAGE = torch.linspace(-3, 4, 3 * 4 * 2 * 2).sin().reshape(3, 4, 2, 2) * 3
PIXELS = torch.tensor([[[2, 0], [-100, 1]], [[3, 3], [0, -100]], [[1, 1], [2, 2]]])
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 0.25])
REDUCTIONS = ["mean", "sum", "none"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize(("scores", "classes"), [(SCORES, CLASSES), (IMAGE, PIXELS)])
def test_losses_of_classes(
    scores: Tensor, classes: Tensor, weight: Tensor | None, reduction: str
) -> None:
    def loss(scores: Tensor, classes: Tensor) -> Tensor:
        return functional.nll_loss(
            functional.log_softmax(scores, 1), classes, weight, reduction=reduction
        )

    deep = scores.dim() > 2
    check_emission(
        aten.nll_loss2d_forward.default if deep else aten.nll_loss_forward.default,
        loss,
        scores,
        classes,
    )

    def gradient(scores: Tensor, classes: Tensor) -> Tensor:
        leaf = scores.detach().clone().requires_grad_()
        found = loss(leaf, classes)
        if reduction == "none":
            found = found * torch.arange(1.0, 1.0 + found.shape[-1])
        return torch.autograd.grad(found.sum() * 3, leaf)[0]

    if reduction != "none" or deep:
        operator = aten.nll_loss2d_backward.default if deep else aten.nll_loss_backward.default
        check_emission(operator, gradient, scores, classes)


def fused(weight: Tensor | None, reduction: int, ignored: int) -> Callable[..., Tensor]:
    """The gradient of cross-entropy, in one operator."""

    def gradient(scores: Tensor, classes: Tensor, grad: Tensor) -> Tensor:
        logp = functional.log_softmax(scores, 1)
        valid = classes != ignored
        counted = valid.to(scores.dtype)
        if weight is not None:
            counted = counted * weight[torch.where(valid, classes, 0)]
        arriving: Tensor = grad if reduction == 0 else grad.sum()
        result: Tensor = BACKWARD(
            arriving, logp, classes, weight, reduction, ignored, counted.sum()
        )
        return result

    return gradient


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_fused_backward_pass(weight: Tensor | None, reduction: int) -> None:
    grad = torch.tensor([2.0, 3.0, -1.0])
    check_emission(BACKWARD, fused(weight, reduction, -100), SCORES, CLASSES, grad)
    check_emission(BACKWARD, fused(weight, reduction, 0), SCORES, CLASSES.clamp(min=0), grad)
    image = grad[:, None, None].expand(3, 2, 2).contiguous()
    check_emission(BACKWARD, fused(weight, reduction, -100), IMAGE, PIXELS, image)


def test_nothing_but_ignored_examples() -> None:
    none = torch.full((3,), -100)
    check_emission(None, lambda a, b: functional.cross_entropy(a, b), SCORES, none)
    check_emission(BACKWARD, fused(None, 1, -100), SCORES, none, torch.ones(3))


def test_an_infinite_logarithm_that_does_not_count() -> None:
    logp = SCORES.clone()
    logp[1] = -torch.inf
    check_emission(
        aten.nll_loss_forward.default, lambda a, b: functional.nll_loss(a, b), logp, CLASSES
    )


Y = torch.tensor([[0.5, -1.0, 3.0, 1.0], [0.0, 0.0, 0.25, 2.5], [2.0, 0.5, 1.0, 99.0]])
LABELS = torch.tensor([[0.0, 1.0, 1.0, 0.5], [1.0, 0.0, 0.25, 1.0], [0.0, 0.5, 1.0, 0.0]])

LOSSES: list[tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = [
    (functional.mse_loss, lambda x: x),
    (functional.l1_loss, lambda x: x),
    (functional.smooth_l1_loss, lambda x: x),
    (functional.huber_loss, lambda x: x),
    (functional.soft_margin_loss, lambda x: x),
    (functional.poisson_nll_loss, lambda x: x / 50),
    (functional.binary_cross_entropy, torch.sigmoid),
    (functional.binary_cross_entropy_with_logits, lambda x: x),
    (functional.kl_div, lambda x: functional.log_softmax(x, 1)),
    (functional.cross_entropy, lambda x: x),
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("loss", "prepared"), LOSSES)
def test_decomposed_losses(
    loss: Callable[..., Any], prepared: Callable[[Tensor], Tensor], reduction: str
) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = loss(prepared(x), y, reduction=reduction)
        return result

    check_emission(None, function, SCORES, LABELS)
    check_emission(
        None,
        lambda x, y: gradient_of(lambda x, y: function(x, y).sum())(x, y, x.new_ones(())),
        SCORES,
        LABELS,
    )


def test_other_losses() -> None:
    sign = torch.tensor([1.0, -1.0, 1.0])
    check_emission(None, lambda a, b, c: functional.cosine_embedding_loss(a, b, c), SCORES, Y, sign)
    check_emission(None, lambda a, b: functional.triplet_margin_loss(a, b, a * b), SCORES, Y)
    check_emission(
        None, lambda a, b, c: functional.margin_ranking_loss(a[:, 0], b[:, 0], c), SCORES, Y, sign
    )
    check_emission(None, lambda a, b: functional.hinge_embedding_loss(a, b.sign()), SCORES, Y)
    check_emission(
        None,
        lambda a, b: functional.cross_entropy(a, b, label_smoothing=0.1, weight=WEIGHT),
        SCORES,
        CLASSES,
    )
    check_emission(None, lambda a: functional.cosine_similarity(a, a * a), SCORES)
