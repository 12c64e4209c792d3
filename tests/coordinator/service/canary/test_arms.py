"""What counts for a canary, and how the time that tasks take is remembered."""

from __future__ import annotations

from statistics import median

import pytest
from fleetlearn_coordinator.service.canary.arms import (
    Arm,
    class_of,
    outcome_of,
    seconds_of,
    together,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("cause", "outcome"),
    [
        ("lost", "lost"),
        ("late", "lost"),
        ("stalled", "lost"),
        ("surplus", None),
        ("stale", None),
        ("failed: stopping", None),
        ("failed: out-of-memory", "failed"),
        ("rejected: not-finite", "refused"),
    ],
)
def test_what_counts(cause: str, outcome: str | None) -> None:
    assert outcome_of(cause) == outcome


def test_the_outcomes_are_sums_of_causes() -> None:
    arm = Arm(done=5, causes={"lost": 1, "late": 2, "failed: diverged": 3, "rejected: x": 4})
    assert (arm.of("lost"), arm.of("failed"), arm.of("refused"), arm.ended) == (3, 3, 4, 15)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60).filter(lambda x: len(x) % 2))
def test_the_median_is_known_to_nine_per_cent(times: list[float]) -> None:
    counts: dict[int, int] = {}
    for each in times:
        counts = together(counts, {class_of(each): 1})
    found = Arm(done=len(times), seconds=counts).median
    assert found == pytest.approx(median(times), rel=0.0906)


@given(st.floats(1e-3, 1e7))
def test_a_time_is_in_its_class(seconds: float) -> None:
    assert class_of(seconds_of(class_of(seconds))) == class_of(seconds)


def test_no_task_has_no_median() -> None:
    assert Arm().median is None
    assert class_of(0.0) == class_of(1e-3), "a device may say that it took no time"


def test_slower_tasks_are_counted() -> None:
    arm = Arm(seconds={class_of(1.0): 3, class_of(2.5): 2, class_of(8.0): 1})
    assert (arm.slower_than(2.0), arm.slower_than(4.0), arm.slower_than(9.0)) == (3, 1, 0)
