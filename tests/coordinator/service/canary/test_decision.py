"""The canary's state machine: when it goes on, when it goes back, and what can never happen."""

from __future__ import annotations

import random
from statistics import median

import msgspec
import pytest
from fleetlearn_coordinator.plan.canary_settings import CanarySettings
from fleetlearn_coordinator.service.canary.arms import Arm, class_of
from fleetlearn_coordinator.service.canary.decision import (
    CanaryState,
    bounds,
    decide,
    finished,
    gone_back,
    is_last,
    widened,
)
from fleetlearn_coordinator.service.canary.exact_tests import most_are_above
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

RULES = CanarySettings(tasks=20, hold=10.0, probation=100.0, patience=60.0)
CAUSES = ("lost", "late", "stalled", "failed: diverged", "rejected: not-finite")


def arm(done: int, *, seconds: float = 1.0, interrupted: int = 0, **causes: int) -> Arm:
    """An arm whose tasks all ended. ``causes``: cause -> tasks."""
    found = {cause.replace("__", ": "): count for cause, count in causes.items()}
    given = done + sum(causes.values())
    return Arm(given, done, found, interrupted, given, {class_of(seconds): done})


def minutes(state: CanaryState, count: float) -> CanaryState:
    return replace(state, seconds=60 * count)


# It goes on


def test_a_good_canary_reaches_all_devices_and_takes_over() -> None:
    state, actions = CanaryState(), []
    for waited in (10.0, 10.0, 100.0):
        state = replace(minutes(state, waited), canary=arm(20), control=arm(100))
        actions.append(decide(state, RULES).action)
        state = widened(state, RULES)
    assert actions == ["widen", "widen", "finish"]


@pytest.mark.parametrize(
    ("canary", "waited", "why"),
    [
        (arm(19), 10.0, "waits for 1 more tasks"),
        (arm(20), 9.0, "waits for 1 more minutes"),
        (arm(0), 0.0, "waits for 20 more tasks and 10 more minutes"),
    ],
)
def test_a_step_needs_its_tasks_and_its_time(canary: Arm, waited: float, why: str) -> None:
    state = minutes(CanaryState(canary=canary, control=arm(100)), waited)
    assert decide(state, RULES) == ("hold", why)


def test_the_last_step_takes_the_probation() -> None:
    state = CanaryState(step=2, canary=arm(500), before=arm(100))
    assert decide(minutes(state, 99.0), RULES).action == "hold"
    assert decide(minutes(state, 100.0), RULES).action == "finish"


# It goes back


@pytest.mark.parametrize(
    ("canary", "word"),
    [
        (arm(0, lost=3), "lost: 3 of 3"),
        (arm(30, failed__diverged=12), "failed: 12 of 42"),
        (arm(30, rejected__not_finite=12), "refused: 12 of 42"),
        (arm(30, interrupted=14), "interrupted: 14 of 30"),
        (arm(20, seconds=3.0), "20 of 20 tasks of the canary took longer than 2 times"),
        (arm(20, lost=4, late=4, stalled=4), "failures: 12 of 32"),
    ],
)
def test_each_bound_sends_it_back(canary: Arm, word: str) -> None:
    state = CanaryState(canary=canary, control=arm(200, lost=2))
    found = decide(state, RULES)
    assert found.action == "back"
    assert word in found.why


def test_what_the_old_run_has_too_is_no_fault_of_the_canary() -> None:
    state = CanaryState(canary=arm(20, lost=60), control=arm(200, lost=600))
    assert decide(minutes(state, 10.0), RULES).action == "widen"


def test_few_bad_tasks_are_an_accident() -> None:
    rare = CanaryState(canary=arm(0, lost=2), control=arm(10_000))
    assert decide(rare, RULES).action == "hold"
    margin = CanaryState(canary=arm(9_600, lost=400), control=arm(10_000))
    assert decide(margin, RULES).action == "hold", "4 % is certain, and within the margin"


def test_without_an_old_run_to_compare_with_the_largest_share_counts() -> None:
    assert decide(CanaryState(canary=arm(0, lost=12)), RULES).action == "back"
    assert decide(CanaryState(canary=arm(20, lost=12)), RULES).action == "hold"


def test_the_last_step_is_compared_with_the_old_run_of_the_step_before() -> None:
    state = CanaryState(step=1, canary=arm(20), control=arm(100, lost=1))
    last = replace(widened(state, RULES), canary=arm(50, lost=20))
    assert last.before == state.control
    found = decide(last, RULES)
    assert found.action == "back"
    assert "1 of 101 of the old run" in found.why


def test_no_progress_sends_it_back() -> None:
    state = minutes(CanaryState(canary=arm(19), control=arm(1000)), 60.0)
    found = decide(state, RULES)
    assert (found.action, found.why) == ("back", "no progress: 19 of 20 tasks ended in 60 minutes")


def test_trouble_sends_it_back() -> None:
    assert decide(CanaryState(), RULES, "the disk is full") == ("back", "the disk is full")
    over = finished(CanaryState(), "x")
    assert decide(over, RULES, "the disk is full").action == "hold"


# What can never happen

counts = st.integers(0, 200)
arms = st.builds(
    lambda done, causes, cut, seconds: Arm(
        done + sum(causes.values()),
        done,
        causes,
        min(cut, done),
        1,
        {class_of(seconds): done} if done else {},
    ),
    counts,
    st.dictionaries(st.sampled_from(CAUSES), counts),
    counts,
    st.floats(0.01, 1e4),
)


@given(arms, st.integers(0, 2))
def test_equal_arms_never_send_it_back(both: Arm, step: int) -> None:
    assert not [each for each in bounds(CanaryState(step=step, canary=both, control=both), RULES)
                if each.is_beyond]  # fmt: skip


@given(arms, arms, st.integers(0, 60))
def test_more_lost_tasks_never_help(canary: Arm, control: Arm, more: int) -> None:
    def is_lost(arm: Arm) -> bool:
        found = bounds(CanaryState(canary=arm, control=control), RULES)
        return next(each.is_beyond for each in found if each.name == "lost")

    lost = canary.causes.get("lost", 0) + more
    worse = replace(canary, given=canary.given + more, causes={**canary.causes, "lost": lost})
    assert is_lost(worse) or not is_lost(canary)


@given(arms, arms, arms, st.floats(0, 1e5))
def test_what_is_written_is_read_as_it_was(one: Arm, two: Arm, three: Arm, seconds: float) -> None:
    state = CanaryState("running", 1, seconds, one, two, three)
    assert msgspec.json.decode(msgspec.json.encode(state), type=CanaryState) == state


class Lives(RuleBasedStateMachine):
    """A canary to which anything happens, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.steps = CanaryState(), [0]

    @rule(canary=arms, control=arms, waited=st.floats(0, 7200))
    def goes_on(self, canary: Arm, control: Arm, waited: float) -> None:
        self.state = replace(
            self.state, canary=canary, control=control, seconds=self.state.seconds + waited
        )
        found = decide(self.state, RULES)
        if found.action == "widen":
            assert canary.ended >= RULES.tasks
            assert not any(each.is_beyond for each in bounds(self.state, RULES))
            self.widens()
        elif found.action == "back":
            assert found.why
            self.goes_back()
        elif found.action == "finish":
            assert is_last(self.state, RULES)

    @rule()
    def widens(self) -> None:
        self.state = widened(self.state, RULES)
        self.steps.append(self.state.step)

    @rule()
    def goes_back(self) -> None:
        self.state = gone_back(self.state, "asked")
        assert gone_back(self.state, "again") == self.state
        assert finished(self.state, "too late") == self.state

    @invariant()
    def steps_follow_each_other(self) -> None:
        pairs = list(zip(self.steps, self.steps[1:], strict=False))
        assert all(after - before in (0, 1) for before, after in pairs)
        assert self.state.step < len(RULES.steps)

    @invariant()
    def an_end_is_an_end(self) -> None:
        if self.state.phase != "running":
            assert decide(self.state, RULES, "trouble").action == "hold"
            assert widened(self.state, RULES) == self.state


TestLives = Lives.TestCase
TestLives.settings = settings(TestLives.settings, max_examples=15, stateful_step_count=20)


# How often it errs


def went_back(rng: random.Random, bad: float, bad_before: float, tasks: int) -> int | None:
    """Return after how many tasks a canary is back that is looked at after each. None: it is
    not. There are nine tasks of the old run for each of its own."""
    lost = lost_before = 0
    for number in range(1, tasks + 1):
        lost += rng.random() < bad
        lost_before += sum(rng.random() < bad_before for _ in range(9))
        canary = Arm(number, number - lost, {"lost": lost})
        control = Arm(9 * number, 9 * number - lost_before, {"lost": lost_before})
        state = CanaryState(canary=canary, control=control)
        if any(each.is_beyond for each in bounds(state, CanarySettings())):
            return number
    return None


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_equal_devices_seldom_send_a_canary_back(share: float) -> None:
    """The figures of docs/operate/canary.md, in which this seed is one of many."""
    rng = random.Random(1)
    assert sum(went_back(rng, share, share, 200) is not None for _ in range(200)) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(("share", "most"), [(1.0, 4), (0.5, 15), (0.3, 40), (0.15, 150)])
def test_worse_ones_are_soon_back(share: float, most: int) -> None:
    rng = random.Random(1)
    found = [went_back(rng, share, 0.05, 400) or 401 for _ in range(40)]
    assert median(found) <= most


# Settings


def test_steps_that_do_not_rise_to_all_are_refused() -> None:
    CanarySettings().check()
    for steps in ((0.1, 0.01, 1.0), (0.1, 0.1, 1.0), (0.1, 0.5)):
        with pytest.raises(ValueError, match=r"end with 1 are expected, such as \[0.01, 0.1, 1\]"):
            CanarySettings(steps=steps).check()
    CanarySettings(tasks=10).check()
    assert most_are_above(10, 10) < 0.001 < most_are_above(9, 9)
    with pytest.raises(ValueError, match=r"canary\.tasks = 9 is less than 10"):
        CanarySettings(tasks=9).check()
    with pytest.raises(ValueError, match=r"patience = 5 is less than canary.hold = 10"):
        CanarySettings(hold=10.0, patience=5.0).check()
