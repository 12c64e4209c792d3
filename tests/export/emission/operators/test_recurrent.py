"""LSTM, GRU and RNN layers as ONNX's operators in evaluation, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleetlearn_export.tracing.formulas.recording import IN_EVALUATION
from fleetlearn_export.tracing.formulas.recurrent import LAYER
from torch import Tensor, nn

from tests.support.emission_cases import check_emission

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
"""Three examples of five steps."""
KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *given, **options: nn.RNN(*given, nonlinearity="relu", **options),
}


def made(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return KINDS[kind](4, 6, **options).eval()


def flat(result: Any) -> list[Tensor]:
    """Outputs and last states without a gradient, as in an evaluation."""
    outputs, states = result
    states = [states] if isinstance(states, Tensor) else states
    return [outputs.detach(), *(row.detach() for row in states)]


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_two_layers(kind: str, both_ways: bool) -> None:
    layers = made(kind, num_layers=2, bidirectional=both_ways, batch_first=True)

    @torch.no_grad()
    def function(x: Tensor) -> list[Tensor]:
        return flat(layers(x))

    model = check_emission(LAYER, function, X, formulas=IN_EVALUATION)
    found = [node.op_type for node in model.graph.node]
    assert found.count("RNN" if kind in ("tanh", "relu") else kind) == 2
    assert not {"MatMul", "Gemm"} & set(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_state_no_biases_and_time_first(kind: str) -> None:
    layer = made(kind, bias=False)

    @torch.no_grad()
    def function(x: Tensor) -> list[Tensor]:
        begin = x[:, 0].repeat(1, 2)[:, :6].unsqueeze(0)
        return flat(layer(x.transpose(0, 1), (begin, 2 * begin) if kind == "LSTM" else begin))

    check_emission(LAYER, function, X, formulas=IN_EVALUATION)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projected_state_is_computed_step_by_step() -> None:
    layer = made("LSTM", proj_size=3, batch_first=True)

    @torch.no_grad()
    def function(x: Tensor) -> list[Tensor]:
        return flat(layer(x))

    model = check_emission(None, function, X, formulas=IN_EVALUATION)
    assert "LSTM" not in {node.op_type for node in model.graph.node}


def test_float64_is_computed_in_float64() -> None:
    torch.testing.assert_close(
        LAYER("GRU", *_gru_inputs(torch.float64), True, False)[0],
        LAYER("GRU", *_gru_inputs(torch.float32), True, False)[0].double(),
    )


def _gru_inputs(dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    layer = made("GRU").to(dtype)
    return (
        X.transpose(0, 1).to(dtype),
        [torch.zeros(1, 3, 6, dtype=dtype)],
        [row.detach() for row in layer.parameters()],
    )
