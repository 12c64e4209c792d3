"""``sparse=``: tables that devices need some rows of, and models that need all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fleetlearn_export import ExportError, LocalStep, export_bundle
from fleetlearn_protocol.manifest import SparseRows
from sparse_fleet import Ratings, squared_error
from torch import Tensor, nn
from torch.nn import functional

FILM, RATING = torch.arange(4), torch.ones(4)


def export(path: Path, model: nn.Module, **options: object) -> SparseRows:
    settings = {"sparse": ["films"], "names": ["film", "rating"]} | options
    done = export_bundle(model, squared_error, (FILM, RATING), path / "b.bundle", **settings)
    sparse = done.bundle.manifest.sparse
    assert isinstance(sparse, SparseRows)
    return sparse


@pytest.mark.parametrize(
    "step",
    [
        LocalStep("momentum"),
        LocalStep("adam", proximal=True),
        LocalStep("sgd", clip=True, proximal=True),
    ],
    ids=["momentum", "adam", "clip"],
)
def test_what_the_manifest_says(tmp_path: Path, step: LocalStep) -> None:
    found = export(tmp_path, Ratings(50, 4), sparse=["films", "film_bias"], step=step)
    assert found == SparseRows(("films.weight", "film_bias.weight"), ("film",), 50)


class Next(nn.Module):
    """Scores the last item against the next one, or all items."""

    def __init__(self, *, all_items: bool) -> None:
        super().__init__()
        self.films, self.all_items = nn.Embedding(50, 4), all_items

    def forward(self, film: Tensor) -> Tensor:
        own = self.films(film)
        if self.all_items:
            return functional.log_softmax(own @ self.films.weight.T, 1)[:, 0]
        return (own * self.films((film + 1) % 50)).sum(1)


@pytest.mark.parametrize("all_items", [True, False], ids=["a softmax over all", "other rows"])
def test_a_table_of_which_the_model_needs_other_rows(tmp_path: Path, all_items: bool) -> None:
    with pytest.raises(ExportError, match=r"needs (all|other) rows of"):
        export(tmp_path, Next(all_items=all_items))


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.films, self.norm = nn.Embedding(50, 4), nn.BatchNorm1d(4)

    def forward(self, film: Tensor) -> Tensor:
        return self.norm(self.films(film)).sum(1)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Ratings(50, 4), {"sparse": ["user"]}, "two axes or more"),
        (Ratings(50, 4), {"sparse": ["nothing"]}, "nothing"),
        (Ratings(50, 4), {"step": LocalStep("adamw", weight_decay=True)}, "weight decay"),
        (Ratings(50, 4), {"step": LocalStep("sgd", correction=True)}, "without correction"),
        (WithNorm(), {}, "LayerNorm"),
    ],
    ids=["a vector", "no such name", "weight decay", "a correction", "BatchNorm"],
)
def test_what_is_no_sparse_table(
    tmp_path: Path, model: nn.Module, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        export(tmp_path, model, **options)


def test_tables_of_different_sizes(tmp_path: Path) -> None:
    model = Ratings(50, 4)
    model.film_bias = nn.Embedding(60, 1)
    with pytest.raises(ExportError, match="different numbers of rows"):
        export(tmp_path, model, sparse=["films", "film_bias"])
