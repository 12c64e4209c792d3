from __future__ import annotations

import pytest
import torch
from fleetlearn_export.checks.training_in_place import SHARES, SMALLEST, trained_in_place
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import TrainStep, make_train_step
from fleetlearn_export.model.user_model import UserModel, training_mode
from fleetlearn_protocol.manifest import LocalStep
from torch import Tensor, nn
from torch.nn import functional


def prepared(
    model: nn.Module, loss: object = functional.cross_entropy
) -> tuple[UserModel, TrainStep]:
    torch.manual_seed(1)
    example = (torch.randn(4, 6), torch.randint(3, (4,)))
    user = make_user_model(model, loss, example, {}, None, 1)  # type: ignore[arg-type]
    with training_mode(model):
        return user, make_train_step(user, LocalStep())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def test_everything_moves_by_percents_and_comes_back() -> None:
    """Parameters, those of zeros too, and statistics; the user's own gradients are left alone."""
    model = network()
    nn.init.zeros_(model[3].bias)
    user, step = prepared(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model[0].weight.grad = torch.ones(8, 6)
    memory = {name: value.data_ptr() for name, value in model.named_parameters()}
    with training_mode(model), trained_in_place(user, step, None) as moved:
        for name, value in model.named_parameters():
            scale = max(SMALLEST, float(before[name].pow(2).mean().sqrt()))
            farthest = float((value.detach() - before[name]).abs().max())
            assert 0.5 * SHARES[0] * scale < farthest < 4 * SHARES[0] * scale, name
            assert moved.values[name].data_ptr() == memory[name], (
                "another copy of the model is in memory"
            )
        assert not torch.equal(moved.values["1.running_mean"], before["1.running_mean"])
        assert torch.equal(moved.values["1.running_mean"], model[1].running_mean)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == memory
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(8, 6))
    assert model[3].bias.grad is None


def test_the_module_comes_back_after_an_error() -> None:
    model = network()
    user, step = prepared(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError), training_mode(model), trained_in_place(user, step, None):
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Narrow(nn.Module):
    """A model whose loss is a number only while its weight has hardly moved."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.inner, self.weight, self.width = nn.Linear(6, 3), nn.Parameter(torch.ones(1)), width

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * self.weight + 0 * torch.sqrt(
            self.width - (self.weight - 1).abs()
        )
        return found


@pytest.mark.parametrize(("width", "share"), [(1.0, SHARES[0]), (0.01, SHARES[1]), (1e-5, 0.0)])
def test_where_it_leads_to_no_numbers_it_goes_less_far(width: float, share: float) -> None:
    model = Narrow(width)
    user, step = prepared(model)
    with training_mode(model), trained_in_place(user, step, None):
        moved = abs(model.weight.item() - 1)
    assert moved <= 3.1 * share
    assert moved >= 0.3 * share
    assert model.weight.item() == 1
