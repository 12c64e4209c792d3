from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backbone import classifier
from fleetlearn_export import ExportError
from fleetlearn_export.model.fine_tuning import Trained, fine_tuning
from fleetlearn_export.model.user_model import training_mode
from torch import nn

HEAD = {"head.1.weight", "head.1.bias"}


def trained(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("head.*", HEAD),
        ("head", HEAD),
        ("head.1.bias", {"head.1.bias"}),
        (["head.1.bias", "backbone.9"], {"head.1.bias", "backbone.9.weight", "backbone.9.bias"}),
        (lambda name, value: value.dim() == 1 and name.startswith("head"), {"head.1.bias"}),
    ],
)
def test_what_is_trained(train: Trained, expected: set[str]) -> None:
    model = classifier()
    model.head.requires_grad_(False)
    before = {name: value.requires_grad for name, value in model.named_parameters()}
    with fine_tuning(model, train):
        assert trained(model) == expected
    assert {name: value.requires_grad for name, value in model.named_parameters()} == before


def test_frozen_modules_stay_in_evaluation_mode_with_all_that_is_inside_them() -> None:
    model = classifier()
    model.extra = nn.Dropout(0.1)
    with fine_tuning(model, "head"), training_mode(model):
        assert [name for name, module in model.named_modules() if module.training] == [
            "",
            "head",
            "head.0",
            "head.1",
            "extra",
        ]
        assert not model.backbone[3].training, "a dropout inside of a frozen module"
    with fine_tuning(model, "backbone.9"), training_mode(model):
        modes = {name: module.training for name, module in model.named_modules()}
    assert not modes["backbone.1"], (
        "a BatchNorm that is not trained, in a module that is trained in part"
    )
    assert modes["backbone.3"], "a dropout in a module that is trained in part"
    assert not modes["head"]
    model.train()
    assert all(module.training for module in model.modules()), "the model's modes can be set again"


def test_without_train_nothing_changes() -> None:
    model = classifier()
    model.backbone.requires_grad_(False)
    with fine_tuning(model, None), training_mode(model):
        assert trained(model) == HEAD
        assert all(module.training for module in model.modules())


def test_a_tied_parameter_is_trained_if_one_of_its_names_is_chosen() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(7, 4), "scores": nn.Linear(4, 7, bias=False)})
    model["scores"].weight = model["table"].weight
    with fine_tuning(model, "scores"):
        assert trained(model) == {"table.weight"}


class OwnTrain(nn.Linear):
    """A module whose class, or whose user, decides what ``train`` does."""

    def train(self, mode: bool = True) -> OwnTrain:
        super().train(mode)
        self.calls = [*getattr(self, "calls", []), mode]
        return self


def test_the_model_is_restored_on_an_error() -> None:
    model = nn.Sequential(OwnTrain(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    own: Callable[..., Any] = lambda mode=True: model[1]  # noqa: E731
    model[1].train = own  # type: ignore[method-assign]
    model[1].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())

    def fail() -> None:
        with fine_tuning(model, "2"):
            model.train()
            assert model[0].calls == [False]
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert trained(model) == {"0.weight", "0.bias", "1.bias", "2.weight", "2.bias"}
    assert model[1].train is own
    assert "train" not in vars(model[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "haed.*",
            r"^train: 'haed\.\*' is the name of no parameter; there are backbone\.0\.weight, ",
        ),
        (["head", "tail"], "^train: 'tail' is the name of no parameter"),
        (
            lambda name, value: False,
            "^train chooses none of the model's parameters: there is nothing to train$",
        ),
        ([], "^train chooses none"),
    ],
)
def test_refused(train: Trained, message: str) -> None:
    model = classifier()
    with pytest.raises(ExportError, match=message), fine_tuning(model, train):
        pass
    assert trained(model) == {name for name, _ in model.named_parameters()}


def test_of_many_names_the_nearest_are_listed() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    model.add_module("classifier", nn.Linear(2, 2))
    with (
        pytest.raises(ExportError, match="of 20 the nearest are classifier") as raised,
        fine_tuning(model, "classifer.*"),
    ):
        pass
    assert len(re.findall(r"weight|bias", str(raised.value))) == 12


def test_integers_cannot_be_trained() -> None:
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    with (
        pytest.raises(ExportError, match=r"train chooses parameter codes, which is torch\.int8"),
        fine_tuning(model, "*"),
    ):
        pass
