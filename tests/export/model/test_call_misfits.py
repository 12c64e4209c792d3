"""Wrong calls of ``export_bundle``, as people make them at first: the error says what is wrong in
their words, and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fleetlearn_export import ExportError, export_bundle
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
TAKES_LABELS_FIRST = "called with the model's outputs first"
NO_LOSS = "loss= was not given, and the model"


class Named(nn.Module):
    """Returns what transformers' models return without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x)}


class Pair(Named):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.layer(x), x


class Reconstructs(nn.Module):
    """Returns its loss, and has no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        again = self.layer(x)
        return {"loss": functional.mse_loss(again, x), "again": again}


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def swapped(y: Tensor, outputs: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, y)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"loss": None},
            rf"{NO_LOSS}'s forward takes \(input\), .* from y itself. Give loss=, .*cros",
        ),
        ({"loss": None, "model": Pair()}, rf"{NO_LOSS}'s forward takes \(x\)"),
        (
            {"loss": None, "model": Named(), "example": {"x": X, "labels": Y}},
            rf"{NO_LOSS}'s forward takes \(x\), .* from labels itself",
        ),
        ({"loss": None, "example": (X,)}, rf"{NO_LOSS} returns a tensor of shape .* or give loss="),
        ({"example": (X,)}, r"Give the labels too, as in example=\(x, y\), or targets=0"),
        ({"targets": 0}, r"called with x0 and x1, and the model's forward takes \(input\)"),
        (
            {"loss": lambda outputs: outputs.mean()},
            r"called with \(outputs, y\), and takes \(outputs\)",
        ),
        (
            {"metrics": {"size": lambda outputs: outputs}},
            r"metric size is called with \(outputs, y\)",
        ),
        ({"loss": swapped}, TAKES_LABELS_FIRST),
        ({"metrics": accuracy}, r"metrics= is a function; .* metrics=\{\"accuracy\": accuracy\}"),
        ({"metrics": ["accuracy"]}, "metrics= is a list"),
        ({"model": Pair()}, r"returns several outputs together.*cross_entropy\(outputs\[0\], y\)"),
        ({"model": Named()}, r"returns several outputs together.*outputs\[\"logits\"\]"),
        ({"example": (X, Y.float())}, r"numbers of classes.*astype\(numpy.int64\)"),
        ({"example": (X, Y + 2)}, "integers from 0 to the number of the model's outputs minus 1"),
        ({"example": (X.long(), Y)}, "holds integers, and a layer of the model takes float32"),
        ({"example": (torch.randn(4, 5), Y)}, "not as many values as a layer takes"),
        (
            {
                "loss": functional.binary_cross_entropy_with_logits,
                "example": (X, torch.eye(4, 2).long()),
            },
            "this loss takes labels as float32",
        ),
        ({"example": TensorDataset(X, Y)}, r"one batch, as next\(iter\(loader\)\) gives it"),
        ({"example": DataLoader(TensorDataset(X, Y))}, r"one batch, as next\(iter\(loader\)\)"),
        ({"hyper": {"lr": "0.1"}}, "hyper-parameter lr='0.1'"),
    ],
)
def test_a_first_mistake_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    given = {
        "model": nn.Sequential(nn.Linear(3, 2)),
        "loss": functional.cross_entropy,
        "example": (X, Y),
        "path": tmp_path / "bundle",
    }
    with pytest.raises(ExportError, match=text):
        export_bundle(**(given | options))  # type: ignore[arg-type]
    assert not (tmp_path / "bundle").exists()


def test_what_is_needed_is_named() -> None:
    with pytest.raises(TypeError, match=r"needs example, one batch .*, and path, the folder"):
        export_bundle(nn.Linear(3, 2))


def test_a_loss_without_labels(tmp_path: Path) -> None:
    """A model that compares with its own input: an example of one array."""
    made = export_bundle(Reconstructs(), example=(X,), path=tmp_path / "bundle")
    assert [row.name for row in made.bundle.manifest.batch] == ["x"]


def test_a_type_error_of_the_user_s_own_stays(tmp_path: Path) -> None:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        raise TypeError("of my own")

    with pytest.raises(ExportError, match="fails in PyTorch itself: TypeError: of my own"):
        export_bundle(nn.Linear(3, 2), loss, (X, Y), tmp_path / "bundle")
