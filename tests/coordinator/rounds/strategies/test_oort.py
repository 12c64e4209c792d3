"""Oort's formulas, worked out by hand."""

from __future__ import annotations

from collections import Counter
from math import inf, log, sqrt

import pytest
from fleetlearn_coordinator.rounds.random_draws import picks
from fleetlearn_coordinator.rounds.selection_rules import Oort
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord
from fleetlearn_coordinator.rounds.strategies.oort import (
    Pacer,
    admitted,
    exploration,
    limit,
    sampling_order,
    statistical_utility,
    utilities,
)

RULES = Oort(preferred=10.0, step=5.0, window=2, clip=1.0)


def record(loss: float, examples: int, reported: int, seconds: float | None = 1.0) -> DeviceRecord:
    return DeviceRecord(reported, 1, (), reported, loss, examples, seconds)


def test_the_statistical_utility_is_examples_times_loss() -> None:
    assert statistical_utility(record(0.5, 40, 1), 10**6) == 20.0
    assert statistical_utility(record(0.5, 10**9, 1), 1000) == 500.0, (
        "a claim above the limit does not count"
    )
    assert statistical_utility(record(-3.0, 40, 1), 10**6) == 0.0
    assert statistical_utility(DeviceRecord(1, 1), 10**6) == 0.0


def test_the_utility_of_three_devices() -> None:
    """Round 8, T = 10. U = 20, 10, 40; the limit is 40. The third took 20 s: (10 / 20)^2 = 1/4."""
    records = {
        "a": record(0.5, 40, 2),
        "b": record(1.0, 10, 8, None),
        "c": record(2.0, 20, 4, 20.0),
    }
    found = utilities(records, 8, 10.0, RULES, 10**6)
    assert found == pytest.approx(
        {
            "a": 20 / 40 + sqrt(0.1 * log(8) / 2),
            "b": 10 / 40 + sqrt(0.1 * log(8) / 8),
            "c": (1 + sqrt(0.1 * log(8) / 4)) / 4,
        }
    )


def test_one_device_s_huge_loss_counts_as_much_as_the_next_largest() -> None:
    records = {name: record(1.0, 10, 1) for name in "abc"} | {"liar": record(1e30, 2**31, 1)}
    found = utilities(records, 1, inf, RULES._replace(clip=0.95), 10**6)
    assert found == dict.fromkeys(records, 1.0)


def test_the_limit_is_a_quantile() -> None:
    assert limit(range(101), 0.95) == 95
    assert limit([5.0], 0.95) == 5.0
    assert limit([], 0.95) == 0.0


def test_devices_near_the_cutoff_are_admitted() -> None:
    """The best two have 10 and 8; the next, 4, sets the cutoff, 0.95 * 4 = 3.8."""
    found = {"e": 3.7, "a": 10.0, "d": 3.8, "b": 8.0, "c": 4.0}
    assert admitted(found, 2, 0.95) == {"a": 10.0, "b": 8.0, "c": 4.0, "d": 3.8}
    assert [*admitted(found, 9, 0.95)] == [*"abcde"], "fewer than are wanted: all"
    assert admitted({}, 2, 0.95) == {}


def test_sampling_is_in_proportion_to_utility() -> None:
    found = {"a": 1.0, "b": 2.0, "c": 5.0}
    draws = picks(9, 1, 1, 60_000)
    counts = Counter(
        sampling_order(found, draws[row : row + 3])[0] for row in range(0, len(draws), 3)
    )
    expected = {name: 20_000 * value / 8 for name, value in found.items()}
    # 2 df, p = 0.001
    assert sum((counts[name] - mean) ** 2 / mean for name, mean in expected.items()) < 13.8


def test_a_utility_of_0_is_drawn_last() -> None:
    assert sampling_order({"a": 0.0, "b": 1.0}, [2**63, 0]) == ["b", "a"]


def test_exploration_decays_to_its_least() -> None:
    assert exploration(1, RULES) == 0.9
    assert exploration(3, RULES) == pytest.approx(0.9 * 0.98**2)
    assert exploration(1000, RULES) == 0.2
    assert exploration(1, RULES._replace(exploration=0.0)) == 0.0


def test_the_pacer_lets_longer_tasks_in_where_utility_fell() -> None:
    pacer = Pacer(RULES)
    preferred = []
    for version, utility in enumerate([5.0, 5.0, 4.0, 5.0, 9.0, 9.0, 1.0, 1.0], 1):
        pacer.end_round(version, utility)
        preferred.append(pacer.preferred)
    # After round 4: 10 > 9. After 6: 9 < 18. After 8: 18 > 2. In between it does not look.
    assert preferred == [10, 10, 10, 15, 15, 15, 15, 20]
