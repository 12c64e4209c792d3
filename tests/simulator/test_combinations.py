"""Every combination of recipe, weighting, encoding, participation and model ends where it must, or
its plan is refused.

The fast tests read plans without compression, and train a few. The slow ones train every seventh,
in which each pair of values of two axes is: all 6,000 take hours. Set EVERY to 1 to train them all.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from combinations import (
    APART,
    CORRECTED,
    LR,
    MODELS,
    PARTICIPATIONS,
    REFUSED,
    Cell,
    cells,
    expected_refusals,
    run,
    target_of,
)
from fleetlearn_coordinator.aggregation.robust.rules import RULES
from fleetlearn_protocol.encodings import FLOAT32

ALL = list(cells())
EVERY = 7
RECIPES = sorted({cell.recipe for cell in ALL})


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("combinations")


def check(folder: Path, bundles: Path, cell: Cell, rounds: int) -> None:
    """``rounds`` = 0: only the plan is read."""
    ended, expected = run(folder / "run", bundles, cell, rounds), expected_refusals(cell)
    if ended.refused is not None:
        assert any(words in ended.refused for words in expected), (cell.name, ended.refused)
        return
    assert not expected, cell.name
    if not rounds:
        return
    assert ended.last is not None
    np.testing.assert_allclose(ended.last, target_of(cell), atol=tolerance(cell), err_msg=cell.name)
    minima = np.array([device.minimum for device in APART])
    for name, values in ended.buffers.items():
        assert np.isfinite(values).all(), (cell.name, name)
        low, high = (
            (0.0, 1.0) if name.endswith("var") else (min(0.0, minima.min()), minima.max() + 1)
        )
        assert (values >= low).all(), (cell.name, name)
        assert (values <= high).all(), (cell.name, name)


def slowly(cell: Cell) -> bool:
    """Return whether a cell ends where it must, but late: up to 0.032 away after 150 rounds, less
    than 2e-4 after 1,200. Adam's and Yogi's second moments remember the first rounds' large
    updates, and keep steps small. With stale updates SCAFFOLD's c lags behind the model."""
    stale = cell.recipe in CORRECTED and cell.participation not in ("all", "some")
    return cell.encoding == FLOAT32.name and (cell.recipe in ("fedadam", "fedyogi") or stale)


def tolerance(cell: Cell) -> float:
    """Return how far the end may be from where it must be. Rounding of updates is noise in each
    round. A mu that follows the loss may be anywhere from 0 to 1 / lr, and devices that want
    different models balance each other elsewhere with each mu."""
    found = 1e-3 if cell.encoding == FLOAT32.name else 0.06
    if cell.recipe != "fedprox-adaptive":
        return found
    places = [target_of(cell, mu) for mu in np.linspace(0, 1 / LR, 101)]
    return found + max(float(abs(place - places[0]).max()) for place in places)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_that_cannot_end_where_it_must_is_refused_by_name(
    tmp_path: Path, bundles: Path, recipe: str
) -> None:
    for cell in ALL:
        plain = cell.weighting == "uniform" and cell.model in ("plain", "personal")
        if cell.recipe == recipe and cell.encoding == FLOAT32.name and plain:
            check(tmp_path, bundles, cell, 0)


def test_the_page_has_a_row_for_each_refusal() -> None:
    page = Path(__file__).parents[2] / "docs" / "algorithms" / "recipes.md"
    text = page.read_text("utf-8").partition("These are refused:")[2]
    rows = [line.strip("| ").split(" | ") for line in text.partition("\n\n## ")[0].splitlines()]
    expected: dict[str, list[str]] = {}
    for refusal in REFUSED:
        with_what = expected.setdefault(refusal.recipes, [])
        with_what += [refusal.combined_with] * (refusal.combined_with not in with_what)
    found = {recipes: with_what.split("; ") for recipes, with_what in rows[4:]}
    assert found == expected


@pytest.mark.parametrize(
    "cell",
    [
        Cell("feddyn", "uniform", "int4", "some", "buffers"),
        Cell("scaffold", "examples", "int8", "some", "buffers"),
        Cell("fednova", "examples", "float32", "all", "personal"),
        Cell("fedbuff", "examples", "float32", "buffered", "buffers"),
        Cell("median", "uniform", "float16", "carried", "buffers"),
    ],
    ids=lambda cell: cell.name,
)
def test_some_combinations(tmp_path: Path, bundles: Path, cell: Cell) -> None:
    check(tmp_path, bundles, cell, 80)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_combinations_of_a_recipe(tmp_path: Path, bundles: Path, recipe: str) -> None:
    for cell in [cell for cell in ALL if cell.recipe == recipe][::EVERY]:
        check(tmp_path, bundles, cell, 1200 if slowly(cell) else 150)


PRIVACY = {"noise": 1e-3, "delta": 1e-6, "population": 4, "clip": 10.0}
"""So little noise that the end is known, and a clip norm that no update reaches."""
NO_PROOF = (*RULES, *CORRECTED, "fednova", "q-fedavg", "fedprox-adaptive", "fedasync")
"""Recipes that are not for [privacy]."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_private_combinations_of_a_recipe(tmp_path: Path, bundles: Path, recipe: str) -> None:
    """Each ends where it does without noise, or is refused. Noise on the mean is 0.0025 and
    0.005."""
    for participation, model in product(PARTICIPATIONS, MODELS):
        cell = Cell(recipe, "uniform", "float32", participation, model)
        if slowly(cell) and participation != "all":
            continue  # they take minutes
        rounds = 1200 if slowly(cell) else 150
        ended = run(tmp_path / "run", bundles, cell, rounds, PRIVACY)
        if recipe in NO_PROOF or model == "buffers" or expected_refusals(cell):
            assert ended.refused is not None, cell.name
            continue
        assert ended.refused is None, (cell.name, ended.refused)
        assert ended.last is not None
        away = np.abs(ended.last - target_of(cell)).max()
        assert 0 < away < 0.06, cell.name
