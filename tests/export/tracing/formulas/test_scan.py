"""Steps along time: in PyTorch, and as a Scan."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.tracing.formulas.scan import SCAN, STEPS
from torch import Tensor

from tests.support.emission_cases import check_emission


@pytest.fixture(autouse=True)
def halving(monkeypatch: pytest.MonkeyPatch) -> None:
    """state -> state / 2 + row; the outputs are the new state and its product with what is
    fixed."""

    def step(
        states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        now = states[0] / 2 + rows[0]
        return [now], [now, now * fixed[0]]

    monkeypatch.setitem(STEPS, "halving", step)


@pytest.mark.parametrize(
    ("backwards", "last", "states"),
    [(False, 21.0, [9.0, 10.5, 21.0]), (True, 11.0, [11.0, 14.0, 16.0])],
)
def test_a_hand_worked_case(backwards: bool, last: float, states: list[float]) -> None:
    """Rows 4, 6, 15.75 behind the state 10, and 4, 6, 11 before it."""
    rows = torch.tensor([[[4.0]], [[6.0]], [[11.0 if backwards else 15.75]]])
    found = SCAN("halving", [torch.tensor([[10.0]])], [rows], [torch.tensor([3.0])], backwards)
    assert found[0].tolist() == [[last]]
    assert found[1].flatten().tolist() == states
    assert found[2].flatten().tolist() == [3 * row for row in states]


@pytest.mark.parametrize("backwards", [False, True])
def test_as_onnx(backwards: bool) -> None:
    """The state and the first output are one value within the body, which the cleaned graph must
    keep apart."""
    x = torch.arange(24.0).reshape(3, 4, 2)

    def function(x: Tensor, factor: Tensor) -> list[Tensor]:
        return list(SCAN("halving", [x[:, 0]], [x.transpose(0, 1)], [factor * 2], backwards))

    check_emission(SCAN, lambda x: function(x, torch.tensor([3.0, 5.0])), x)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shared", ["none", "state", "rows", "fixed"])
def test_under_vmap(shared: str, backwards: bool) -> None:
    """Each element of a vmap has its own steps. What is not shared has the elements on an axis that
    is not the first."""
    torch.manual_seed(0)
    given = {
        "state": torch.randn(2, 3, 4),
        "rows": torch.randn(5, 2, 3, 4),
        "fixed": torch.randn(3, 4),
    }
    axes = {"state": 1, "rows": 2, "fixed": 0}
    if shared in given:
        given[shared] = given[shared].select(axes.pop(shared), 0)

    def function(state: Tensor, rows: Tensor, fixed: Tensor) -> list[Tensor]:
        return list(SCAN("halving", [state], [rows], [fixed], backwards))

    found = torch.func.vmap(function, in_dims=tuple(map(axes.get, given)))(*given.values())
    for element in range(3):
        own = (
            value.select(axes[name], element) if name in axes else value
            for name, value in given.items()
        )
        for row, expected in zip(found, function(*own), strict=True):
            torch.testing.assert_close(row[element], expected, rtol=0, atol=0)
