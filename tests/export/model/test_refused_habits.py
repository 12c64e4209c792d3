"""Habits of training code that a graph cannot follow: each is refused by name, with what to write
instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fleetlearn_export import ExportError, export_bundle
from fleetlearn_export.model.checked_user_model import make_user_model
from torch import Tensor, nn
from torch.nn import functional

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])


class Centred(nn.Module):
    """Subtracts a running mean, which is a plain attribute or a buffer."""

    mean: Tensor

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        if buffer:
            self.register_buffer("mean", torch.zeros(6))
        else:
            self.mean = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        result: Tensor = self.linear(x - self.mean)
        return result


class Leaving(nn.Module):
    """Leaves its last features in an attribute for people, and makes a table at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.last = torch.zeros(1)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.0, 1.0, 6)
        self.last = x.detach() + self.table
        result: Tensor = self.linear(x + self.table)
        return result


class Following(nn.Module):
    """Has a target network that follows the trained one: of parameters, written in place, or of
    buffers."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        if buffers:
            for name, value in list(self.target.named_parameters()):
                delattr(self.target, name)
                self.target.register_buffer(name, value.detach())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            with torch.no_grad():
                followed = [*self.target.parameters(), *self.target.buffers()]
                for target, online in zip(followed, self.online.parameters(), strict=True):
                    target.mul_(0.9).add_(online, alpha=0.1)
        return self.online(x), self.target(x).detach()


class Autocast(nn.Linear):
    def __init__(self, *, enabled: bool) -> None:
        super().__init__(6, 3)
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            return super().forward(x).float()


def user(
    model: nn.Module, loss: Any = functional.cross_entropy, example: Any = (X, Y), **metrics: Any
) -> Any:
    return make_user_model(model, loss, example, metrics, None, 1)


def apart(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (outputs[0] - outputs[1]).pow(2).mean()


def test_a_plain_attribute_that_follows_the_calls_is_refused_by_name() -> None:
    with pytest.raises(
        ExportError,
        match=r"changes mean, a plain tensor attribute of model\.1, at every call.*buffer",
    ):
        user(nn.Sequential(nn.Identity(), Centred(buffer=False)))


def test_the_same_as_a_buffer_is_exported(tmp_path: Path) -> None:
    exported = export_bundle(
        Centred(buffer=True), functional.cross_entropy, (X, Y), tmp_path / "centred"
    )
    assert "mean" in [row.name for row in exported.bundle.manifest.parameters if row.buffer]


def test_results_and_tables_that_stay_the_same_may_lie_in_attributes() -> None:
    model = Leaving()
    model(X[:2])  # so that the attributes are tensors before the export
    user(model)


def test_a_write_into_a_frozen_parameter_is_refused_by_name() -> None:
    with pytest.raises(
        ExportError, match=r"writes into target\.weight \(and 1 more\), a frozen parameter.*buffers"
    ):
        user(Following(buffers=False), apart)


def test_a_target_network_of_buffers_follows(tmp_path: Path) -> None:
    exported = export_bundle(Following(buffers=True), apart, (X, Y), tmp_path / "following")
    buffers = [row.name for row in exported.bundle.manifest.parameters if row.buffer]
    assert buffers == ["target.weight", "target.bias"]


def test_autocast_is_refused_with_its_line() -> None:
    with pytest.raises(
        ExportError, match=rf"torch\.autocast at {__file__}:\d+ in forward.*float32"
    ):
        user(Autocast(enabled=True))
    user(Autocast(enabled=False))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ExportError, match=r"under torch\.autocast.* export outside of it"),
    ):
        user(nn.Linear(6, 3))


@pytest.mark.parametrize(("row", "column", "value"), [(1, 2, "nan"), (3, 0, "inf")])
def test_an_example_with_missing_values_is_refused_with_their_place(
    row: int, column: int, value: str
) -> None:
    x = X.clone()
    x[row, column] = float(value)
    with pytest.raises(
        ExportError,
        match=rf"array x holds {value} at \[{row}, {column}\] \(1 such .* the loss is nan",
    ):
        user(nn.Linear(6, 3), example=(x, Y))


def test_a_model_that_fills_missing_values_is_exported() -> None:
    class Filling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.nan_to_num(x))

    x = X.clone()
    x[1, 2] = torch.nan
    user(Filling(6, 3), example=(x, Y))


def test_a_metric_that_is_a_sum_is_refused() -> None:
    with pytest.raises(
        ExportError, match=r"metric hits is 2 on 2 examples, and 4 with each .* a value for each"
    ):
        user(
            nn.Linear(6, 3), hits=lambda outputs, y: (outputs.argmax(1) == outputs.argmax(1)).sum()
        )
    user(
        nn.Linear(6, 3),
        mean=lambda outputs, y: outputs.mean(),
        each=lambda outputs, y: outputs.argmax(1) == y,
    )
