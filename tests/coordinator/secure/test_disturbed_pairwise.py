"""Sessions of pairwise masks in which anything may die at any moment: the sum is exact, or the
round is abandoned by name, and the coordinator never has both secrets of a device. Planted mistakes
are found."""

from __future__ import annotations

from collections import Counter

import pytest
from disturbed_pairwise import CHANCES, MISTAKES, PairwiseRehearsal, first_found
from fleetlearn_protocol.secure.pairwise_messages import SHARES

FAST, SLOW = range(60), range(1000, 4000)
MOST_SEEDS = 80


def outcomes(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Return how the rounds ended, and what went wrong in them. ``lossy``: rounds that were
    committed although devices were lost after they had sent their shares."""
    ended, disturbances = Counter[str](), Counter[str]()
    for seed in seeds:
        run = PairwiseRehearsal(seed)
        found = run.go()
        ended[found.status] += 1
        if found.status == "committed":
            ended["lossy"] += len(found.survivors or ()) < len(found.answers[SHARES])
        disturbances += run.disturbances.counts
    return ended, disturbances


def test_sums_are_exact_or_rounds_are_abandoned_by_name() -> None:
    ended, disturbances = outcomes(FAST)
    assert min(ended["committed"], ended["abandoned"]) > 15
    assert ended["lossy"] > 2
    assert min(disturbances[name] for name in CHANCES) > 1, "each disturbance happens"


@pytest.mark.slow
def test_thousands_of_rounds_are_exact_or_abandoned_by_name() -> None:
    ended, disturbances = outcomes(SLOW)
    assert min(ended["committed"], ended["abandoned"]) > 900
    assert ended["lossy"] > 150
    assert min(disturbances[name] for name in CHANCES) > 100


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_each_planted_mistake_is_found(mistake: str) -> None:
    found = first_found(mistake, range(MOST_SEEDS))
    assert found is not None, f"{MOST_SEEDS} rounds did not find that {mistake}"
