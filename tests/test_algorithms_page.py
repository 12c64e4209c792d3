"""docs/algorithms/recipes.md: a row for each recipe, and no row for what is none; what the page
names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.recipes import RECIPES

DOCS = Path(__file__).parents[1] / "docs" / "algorithms"
TEXT = (DOCS / "recipes.md").read_text("utf-8")
ROWS = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]


def test_each_recipe_has_one_row() -> None:
    named = [name for row in ROWS for name in re.findall(r"`([a-z-]+)`", row[0]) if name in RECIPES]
    assert sorted(set(named)) == sorted(RECIPES)
    assert {name for name in named if named.count(name) > 1} == {"scaffold"}, "its two options"


def test_no_row_is_of_something_else() -> None:
    for row in ROWS:
        first = re.match(r"\| `([a-z-]+)`", row[0])
        assert first is not None
        assert first[1] in RECIPES, row[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_of_devices_is_named(name: str) -> None:
    assert f"`{name}`" in TEXT or f'"{name}"' in TEXT


def test_papers_are_those_of_the_recipes() -> None:
    for row in ROWS:
        cited = set(re.findall(r"\[(\d{4}\.\d{5})\]", row[0]))
        for name in re.findall(r"`([a-z-]+)`", row[0]):
            if cited and name in RECIPES:
                assert cited & set(re.findall(r"\d{4}\.\d{5}", RECIPES[name].source)), name


def test_linked_pages_are_there() -> None:
    for page in re.findall(r"\]\(([a-z-]+\.md)\)", TEXT):
        assert (DOCS / page).exists(), page
