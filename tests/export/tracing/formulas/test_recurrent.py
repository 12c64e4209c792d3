"""Recurrent layers of a training step as scans: results and all gradients, against PyTorch's
autograd."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.tracing.formulas.scan import SCAN
from torch import Tensor, nn

from tests.support.emission_cases import check_emission
from tests.support.recurrent_layers import LAYERS

RANDOM = torch.Generator().manual_seed(0)
X, ARRIVING = (torch.randn(3, 5, size, generator=RANDOM) for size in (4, 12))
"""Three examples of five steps, and the gradients that arrive at the outputs of two directions."""
OPTIONS: dict[str, dict[str, bool | int]] = {
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False},
}


def gradients(layer: nn.RNNBase, x: Tensor, arriving: Tensor) -> list[Tensor]:
    """Return outputs, last states, and the gradients by the inputs, the first states and all
    parameters."""
    rows, leaf = x.shape[0], x.detach().clone().requires_grad_()
    directions, projected = 2 if layer.bidirectional else 1, getattr(layer, "proj_size", 0)
    sizes = [
        projected or layer.hidden_size,
        *([layer.hidden_size] if isinstance(layer, nn.LSTM) else []),
    ]
    states = [
        (x.sum((1, 2)).reshape(1, rows, 1).expand(layer.num_layers * directions, rows, size) / 8)
        .detach()
        .clone()
        for size in sizes
    ]
    states = [row.requires_grad_() for row in states]
    parameters = [row.detach().requires_grad_() for row in layer.parameters()]
    given = dict(zip((name for name, _ in layer.named_parameters()), parameters, strict=True))
    outputs, last = torch.func.functional_call(
        layer, given, (leaf, tuple(states) if len(states) > 1 else states[0])
    )
    last = [last] if isinstance(last, Tensor) else list(last)
    value = (outputs * arriving[:, :, : outputs.shape[2]]).sum() + sum(
        (row * row).sum() for row in last
    )
    found = torch.autograd.grad(value, [leaf, *states, *parameters])
    return [row.detach() for row in (outputs, *last, *found)]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_all_gradients(kind: str, options: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind](4, 6, batch_first=True, **OPTIONS[options])
    model = check_emission(
        SCAN, lambda x, arriving: gradients(layer, x, arriving), X, ARRIVING, tolerance=3e-6
    )
    scans = [node for node in model.graph.node if node.op_type == "Scan"]
    assert len(scans) == 2 * layer.num_layers * (2 if layer.bidirectional else 1)


def test_a_gradient_that_arrives_at_the_last_state_alone() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(4, 6, batch_first=True)

    def gradient(x: Tensor) -> list[Tensor]:
        leaf = x.detach().clone().requires_grad_()
        return list(torch.autograd.grad(layer(leaf)[1].sum(), [leaf, *layer.parameters()]))

    check_emission(SCAN, gradient, X, tolerance=3e-6)


def test_a_long_time_takes_no_larger_graph() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 6, batch_first=True)
    sizes = []
    for length in (2, 40):
        x = torch.randn(3, length, 4)
        model = check_emission(
            SCAN, lambda x: gradients(layer, x, x.repeat(1, 1, 2)), x, tolerance=1e-5
        )
        sizes.append(len(model.graph.node))
    assert sizes[0] == sizes[1]
