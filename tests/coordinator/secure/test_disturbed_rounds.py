"""Rounds with a helper in which anything may die at any moment: the sum is exact, or the round is
abandoned by name, and no two answers of the helper tell more than a sum. Planted mistakes are
found."""

from __future__ import annotations

from collections import Counter

import pytest
from disturbed_helper import CHANCES, MISTAKES, Rehearsal, first_found

FAST, SLOW = range(45), range(1000, 4000)
MOST_SEEDS = 60


def outcomes(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Return how the rounds of these runs ended, and what went wrong in them."""
    ended, disturbances = Counter[str](), Counter[str]()
    for seed in seeds:
        run = Rehearsal(seed)
        for row in run.go():
            ended[row.status] += 1
            assert (row.status == "abandoned") == bool(row.why)
        disturbances += run.disturbances.counts
    return ended, disturbances


def test_sums_are_exact_or_rounds_are_abandoned_by_name() -> None:
    ended, disturbances = outcomes(FAST)
    assert min(ended["committed"], ended["abandoned"]) > 10
    assert min(disturbances[name] for name in CHANCES) > 1, "each disturbance happens"


@pytest.mark.slow
def test_thousands_of_runs_are_exact_or_abandoned_by_name() -> None:
    ended, disturbances = outcomes(SLOW)
    assert ended.total() > 4000
    assert min(disturbances[name] for name in CHANCES) > 100


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_each_planted_mistake_is_found(mistake: str) -> None:
    found = first_found(mistake, range(MOST_SEEDS))
    assert found is not None, f"{MOST_SEEDS} runs did not find that {mistake}"
