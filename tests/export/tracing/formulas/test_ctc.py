"""ctc_loss and its gradient in ONNX, against PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fleetlearn_export import export_bundle
from fleetlearn_export.checks.comparison import open_session
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.conversion import clean, serialised
from fleetlearn_export.tracing.formulas.scan import SCAN
from fleetlearn_protocol.manifest import INFER
from torch import Tensor, nn
from torch.nn import functional

from tests.support.emission_cases import check_emission

SCORES = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 1, 2], [2, -1, 3], [4, 4, 4]])
"""Repeated labels, one that nobody reads, and a text that is too long for its time."""
TIMES, LENGTHS = torch.tensor([7, 5, 4]), torch.tensor([3, 1, 3])


def loss(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor, **options: object) -> Tensor:
    logp = x.log_softmax(2).transpose(0, 1)
    return functional.ctc_loss(logp, y, times, lengths, zero_infinity=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_and_its_gradient(reduction: str) -> None:
    def both(x: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().clone().requires_grad_()
        found = loss(leaf, *given, reduction=reduction)
        return found.detach(), torch.autograd.grad(found.sum() * 3, leaf)[0]

    check_emission(SCAN, both, SCORES, LABELS, TIMES, LENGTHS, tolerance=1e-5)


def test_an_empty_text_and_another_blank() -> None:
    given = LABELS % 4, TIMES, torch.tensor([0, 2, 1])
    check_emission(SCAN, lambda x, *rest: loss(x, *rest, blank=4), SCORES, *given, tolerance=1e-5)


def test_what_cannot_be_is_infinite() -> None:
    def infinite(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        return functional.ctc_loss(
            x.log_softmax(2).transpose(0, 1), y, times, lengths, reduction="none"
        )

    assert torch.isinf(infinite(SCORES, LABELS, TIMES, LENGTHS)).tolist() == [False, False, True]
    check_emission(SCAN, infinite, SCORES, LABELS, TIMES, LENGTHS, tolerance=1e-5)


def test_labels_that_are_far_less_likely_than_the_blank_do_not_vanish() -> None:
    x = torch.zeros(3, 40, 5)
    x[:, :, 0] = 60.0
    y = torch.tensor([[1, 2, 3, 4, 1], [2, 3, 4, 1, 2], [3, 4, 1, 2, 3]])
    times, lengths = torch.full((3,), 40), torch.full((3,), 5)
    expected = loss(x, y, times, lengths, reduction="none")
    assert bool((expected > 250).all())
    check_emission(
        SCAN, lambda *given: loss(*given, reduction="none"), x, y, times, lengths, tolerance=1e-5
    )


def test_the_cleaned_graph_computes_the_same() -> None:
    """The body of the Scan is cleaned too."""
    given = SCORES, LABELS, TIMES, LENGTHS
    model = check_emission(SCAN, loss, *given, tolerance=1e-5)
    session = open_session(serialised(clean(ir.from_proto(model), ["out0"])))
    found = session.run({f"in{place}": value.numpy() for place, value in enumerate(given)})["out0"]
    np.testing.assert_allclose(found, loss(*given).numpy(), rtol=1e-5)


def test_targets_in_one_row_are_refused_with_what_to_do() -> None:
    def flat(x: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        targets = torch.tensor([1, 2, 3])
        return functional.ctc_loss(x.log_softmax(2).transpose(0, 1), targets, times, lengths)

    with pytest.raises(ExportError, match=r"targets of shape \(3,\).*give each text its own row"):
        check_emission(None, flat, SCORES, TIMES, torch.ones(3, dtype=torch.int64))


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scores = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.layer(x)[0])
        return scores


def test_a_bundle_whose_inference_has_nothing_of_the_loss(tmp_path: Path) -> None:
    """Both loss and layer are Scans, whose bodies read from outside."""

    def whole_time(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        return loss(x, y, torch.zeros_like(lengths) + x.shape[1], lengths)

    torch.manual_seed(0)
    example = SCORES, LABELS % 5, LENGTHS
    bundle = export_bundle(Recogniser(), whole_time, example, tmp_path / "b", targets=2).bundle
    graph = onnx.load(bundle.path / INFER).graph
    assert [row.name for row in graph.input] == ["x"]
    assert {row.op_type for row in graph.node} >= {"GRU"}
    assert not {row.op_type for row in graph.node} & {"Scan", "Where"}
