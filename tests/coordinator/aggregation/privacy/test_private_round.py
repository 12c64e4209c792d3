"""The noise of a private round never depends on who came, in which order, or how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.exact_mean import add_up
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.privacy import round_release
from fleetlearn_coordinator.aggregation.privacy.release import begin, release
from fleetlearn_coordinator.aggregation.privacy.round_release import RoundRelease
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector
from hypothesis import given
from hypothesis import strategies as st
from round_reports import private_rules_of, reports_of_rows, state_of

SIZE, GOAL, MOST, CLIP, NOISE = 200, 10, 8, 0.5, 1.5
SPREAD = NOISE * CLIP / GOAL
"""Standard deviation of the noise in each element of a released mean, by definition."""


def private(secret: int) -> tuple[RoundRules, ModelState]:
    rules = private_rules_of(SIZE, MOST, CLIP, goal=GOAL, noise=NOISE)
    assert rules.privacy is not None
    privacy = begin(rules.privacy, secret.to_bytes(32, "little"), SIZE)
    return rules, state_of(rules, [0.0] * SIZE, privacy=privacy)


def model_of(secret: int, updates: list[list[float]], weights: list[int]) -> Vector:
    rules, state = private(secret)
    round = OpenRound(rules, state)
    received = round.receive(reports_of_rows(updates, weights))
    assert received.refusal is None
    round.accept(received.accepted)
    round.add(received.accepted)
    return round.commit(1, round.summary({})).state.model


def updates_of(seed: int, count: int) -> tuple[list[list[float]], list[int]]:
    random = np.random.default_rng(seed)
    updates = random.normal(size=(count, SIZE)) * 10.0 ** random.uniform(-4, 2, (count, 1))
    return updates.astype(np.float32).tolist(), random.integers(1, MOST + 1, count).tolist()


@given(st.integers(0, 2**32), st.integers(1, 20), st.data())
def test_neither_the_order_nor_the_way_of_arrival_changes_a_bit(
    seed: int, count: int, data: st.DataObject
) -> None:
    updates, weights = updates_of(seed, count)
    together = model_of(seed, updates, weights)
    rules, state = private(seed)
    round = OpenRound(rules, state)
    for row in data.draw(st.permutations(range(count))):
        alone = data.draw(st.booleans())
        reports = reports_of_rows([updates[row]], [weights[row]], one_by_one=alone)
        received = round.receive(reports)
        round.accept(received.accepted)
        round.add(received.accepted)
    assert round.commit(1, round.summary({})).state.model.tobytes() == together.tobytes()


def spread_of(count: int, secrets: int = 60) -> float:
    """The standard deviation of the released means of ``count`` reports over many secrets, in each
    element, from all of them together: SIZE * (secrets - 1) degrees of freedom."""
    updates, weights = updates_of(count, count)
    models = np.array([model_of(secret, updates, weights) for secret in range(secrets)], float)
    return float(sqrt(models.var(axis=0, ddof=1).mean()))


def check_spread(count: int, secrets: int = 60) -> None:
    """A standard deviation from n degrees of freedom is off by 1 / sqrt(2 n) of itself."""
    off = abs(spread_of(count, secrets) / SPREAD - 1)
    assert off < 5 / sqrt(2 * SIZE * (secrets - 1))


@pytest.mark.parametrize("count", [1, 3, GOAL, 2 * GOAL])
def test_the_noise_in_the_mean_is_the_same_however_many_came(count: int) -> None:
    check_spread(count)


def by_who_came(round: OpenRound) -> RoundRelease:
    """Planted mistake: the mean is divided by the weights that came."""
    rules, state = round.rules.privacy, round.state.privacy
    assert rules is not None
    assert state is not None
    made = release(replace(rules, goal=len(round)), state, add_up(round.sums.states[UPDATE]))
    return RoundRelease(*made, {})


def for_who_came(round: OpenRound) -> RoundRelease:
    """Planted mistake: the noise is in proportion to sqrt(reports)."""
    rules, state = round.rules.privacy, round.state.privacy
    assert rules is not None
    assert state is not None
    noise = rules.noise * sqrt(len(round) / rules.goal)
    made = release(replace(rules, noise=noise), state, add_up(round.sums.states[UPDATE]))
    return RoundRelease(*made, {})


@pytest.mark.parametrize("mistake", [by_who_came, for_who_came])
@pytest.mark.parametrize("count", [1, 3, 2 * GOAL])
def test_noise_that_depends_on_who_came_is_found(
    mistake: Callable[[OpenRound], RoundRelease], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenRound, "_release", lambda round, unmasked: mistake(round))
    with pytest.raises(AssertionError):
        check_spread(count)


def test_one_noise_that_is_drawn_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted mistake: the noise does not follow from the secret."""
    fixed = begin(private_rules_of(SIZE, MOST, CLIP, goal=GOAL).privacy, bytes(32), SIZE)  # type: ignore[arg-type]
    monkeypatch.setattr(
        round_release, "release", lambda rules, state, total: release(rules, fixed, total)
    )
    with pytest.raises(AssertionError):
        check_spread(3)


def test_a_round_without_reports_has_no_release() -> None:
    rules, state = private(1)
    round = OpenRound(rules, state)
    with pytest.raises(ValueError, match="the release of no updates was asked for"):
        round.commit(1, round.summary({}))
