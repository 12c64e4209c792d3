"""How many hostile devices each rule bears: below that the model is trained, above it is not."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.aggregators import make
from fleetlearn_coordinator.aggregation.robust.rules import RULES, Bounds, least_updates

SIZE, ROUNDS = 30, 40
GOAL = np.linspace(-1, 1, SIZE)
"""What every honest device wants the model to be."""


def trained(rule: str, devices: int, attackers: int, hostile: float) -> float:
    """Return how far from GOAL the model ends. Honest devices go half of the way, with noise of
    their own; attackers all send the same step the other way, thrice as long as an honest one is at
    first."""
    random = np.random.default_rng(3)
    aggregator, model = make(rule, Bounds(hostile)), np.zeros(SIZE)
    for _ in range(ROUNDS):
        state = aggregator.init(SIZE)
        honest = (GOAL - model) / 2 + 0.05 * random.standard_normal((devices - attackers, SIZE))
        updates = np.concatenate([honest, np.tile(-1.5 * GOAL, (attackers, 1))]).astype(np.float32)
        aggregator.add_many(
            state, [updates], np.full(devices, 10), np.abs(updates).max(axis=1).astype(float), None
        )
        model = model + aggregator.result(state).delta
    return float(np.linalg.norm(model - GOAL) / np.linalg.norm(GOAL))


BREAKDOWN = {
    "median": (11, 5, 0.2),
    "trimmed-mean": (11, 4, 0.4),
    "krum": (13, 5, 0.4),
    "multi-krum": (13, 5, 0.4),
    "bulyan": (15, 3, 0.2),
    "geometric-median": (11, 5, 0.2),
    "centred-clipping": (11, 5, 0.2),
}
"""Rule -> devices, the most attackers among them that it bears, and the share that the plan
says."""


@pytest.mark.parametrize("rule", BREAKDOWN)
def test_as_many_attackers_as_it_bears_do_not_keep_it_from_training(rule: str) -> None:
    devices, most, hostile = BREAKDOWN[rule]
    assert trained(rule, devices, 0, hostile) < 0.1
    assert trained(rule, devices, most, hostile) < 0.5
    assert trained("mean", devices, most, hostile) > 0.5


@pytest.mark.parametrize("rule", BREAKDOWN)
def test_a_majority_of_attackers_decides(rule: str) -> None:
    devices, _, hostile = BREAKDOWN[rule]
    assert trained(rule, devices, devices - 3, hostile) > 1


@pytest.mark.parametrize("rule", RULES)
def test_one_report_of_any_length_hardly_matters(rule: str) -> None:
    random = np.random.default_rng(0)
    updates = random.normal(1.0, 0.1, (9, SIZE)).astype(np.float32)
    updates[4] = 1e6
    aggregator = make(rule)
    state = aggregator.init(SIZE)
    aggregator.add_many(
        state, [updates], np.full(9, 100), np.abs(updates).max(axis=1).astype(float), None
    )
    np.testing.assert_allclose(aggregator.result(state).delta, 1.0, atol=0.35)


def test_from_how_many_updates_on_a_rule_works() -> None:
    """Bulyan needs 4 f + 3; with a fifth of hostile devices 11 updates are enough for f = 2, and 10
    are not."""
    assert Bounds(0.2).count(20) == 4
    assert Bounds(0.3).count(10) == 3, "0.3 * 10 is 3, although floats say less"
    assert least_updates("bulyan", Bounds(0.2), 20) == 11
    assert least_updates("bulyan", Bounds(0.2), 10) == 11, "not even for its goal"
    assert least_updates("krum", Bounds(0.0), 10) == 3
    assert least_updates("median", Bounds(0.4), 10) == 1


@pytest.mark.parametrize("rule", RULES)
def test_updates_of_the_largest_size_allowed_take_no_digits_from_the_others(rule: str) -> None:
    """Four attackers of twenty send 3e10 in every element. The result is what it is where they send
    3e4."""
    random = np.random.default_rng(5)
    honest = (0.005 + 0.01 * random.standard_normal((16, 2000))).astype(np.float32)
    signs = np.sign(random.standard_normal((4, 2000))).astype(np.float32)
    found = []
    for size in (3e4, 3e10):
        aggregator = make(rule, Bounds(0.2))
        state = aggregator.init(2000)
        updates = np.concatenate([honest, np.float32(size) * signs])
        largest = np.abs(updates).max(axis=1).astype(float)
        aggregator.add_many(state, [updates], np.ones(20, np.int64), largest, None)
        found.append(aggregator.result(state).delta)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6)
