"""FedProx's rule for mu, step by step."""

from __future__ import annotations

from math import inf

import pytest
from fleetlearn_coordinator.aggregation.adaptive_mu import (
    MuState,
    largest,
    next_state,
    state_after,
    summary_of,
)


def mus(first: float, losses: list[float | None], most: float = inf) -> list[float]:
    """The mu of each round, and of the one after the last, through the rounds' summaries."""
    state, found = state_after(None, first), [first]
    for loss in losses:
        state = state_after(summary_of(state, loss, most), first)
        found.append(state.mu)
    return found


def test_mu_rises_with_the_loss_at_once() -> None:
    assert mus(0.0, [1.0, 2.0, 3.0, 4.0]) == [0.0, 0.0, 0.1, 0.2, 0.3]


def test_mu_falls_after_five_rounds_in_which_the_loss_falls() -> None:
    falling = [20.0 - number for number in range(12)]
    assert mus(0.15, falling) == [0.15] * 6 + [0.05] * 5 + [0.0] * 2


def test_four_falls_and_a_rise_are_a_rise() -> None:
    assert mus(1.0, [9, 8, 7, 6, 5, 6, 5, 4, 3, 2, 1]) == [1.0] * 6 + [1.1] * 5 + [1.0]


def test_a_loss_that_stays_ends_the_row_of_falls() -> None:
    assert mus(1.0, [9, 8, 7, 6, 5, 5, 4, 3, 2, 1, 0]) == [1.0] * 11 + [0.9]


def test_a_round_whose_loss_nobody_measured_changes_nothing() -> None:
    assert mus(1.0, [9.0, None, 10.0, None]) == [1.0, 1.0, 1.0, 1.1, 1.1]
    assert next_state(MuState(1.0), None) == MuState(1.0)


def test_a_run_that_had_no_adaptive_mu_begins_with_its_last_loss() -> None:
    assert state_after({"metrics": {"loss": 3.0}}, 0.5) == MuState(0.5, 3.0)
    assert next_state(state_after({"metrics": {"loss": 3.0}}, 0.5), 4.0).mu == 0.6


@pytest.mark.parametrize("lr", [0.1, 0.3, 4.0])
def test_mu_stops_where_a_step_takes_back_all_that_came_before(lr: float) -> None:
    """Steps on (y - 1)^2 / 2 from y = x = 0: with a larger mu they swing, and at last grow."""
    mu = mus(0.0, [float(number) for number in range(200)], largest({"lr": lr, "mu": 0.0}))[-1]
    assert 1 / lr - 0.1 < mu <= 1 / lr
    y = 0.0
    for _ in range(100):
        y -= lr * (0.2 * (y - 1.0) + mu * y)
        assert 0.0 <= y <= 1.0


def test_a_mu_that_began_above_the_limit_stays_and_may_fall() -> None:
    assert mus(30.0, [1, 2, 1, 0, -1, -2, -3], 10.0) == [30.0] * 7 + [29.9]
    assert largest({"rate": 0.1, "mu": 1.0}) == inf
