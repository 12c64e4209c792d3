"""``round.goal_share`` of a plan: what it fills in, and what it does not go with."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan, PlanError
from fleetlearn_coordinator.plan.scaled_plan import scale_plan
from fleetlearn_coordinator.rounds.settings import CohortShare
from plans import PRIVATE, SECURE

HEAD = 'name = "a"\nbundle = "b"\n'
SHARE = "[round]\ngoal = 100\ngoal_share = 0.1\n"


def plan(text: str = "", head: str = HEAD, rounds: str = SHARE) -> Plan:
    return Plan.parse(f"{head}{rounds}{text}", Path("/plans"))


def refused(text: str = "", head: str = HEAD, rounds: str = SHARE) -> str:
    with pytest.raises(PlanError) as caught:
        plan(text, head, rounds)
    return str(caught.value)


def test_what_is_left_out() -> None:
    found = plan()
    assert found.round.share == CohortShare(0.1, 100, 1, 1.3, 0.5)
    engine = found.engine_settings(10.0)
    assert engine.share == found.round.share
    assert (engine.goal, engine.cohort, engine.minimum) == (100, 130, 50), "the largest round's"
    assert found.round.cohort == 130, "what memory, files and connections go by"
    assert (found.evaluation.devices, found.evaluation.minimum) == (100, 1)


def test_what_is_given() -> None:
    found = plan("minimum = 12\nminimum_share = 0.8\nover_selection = 1.1\n")
    assert found.round.share == CohortShare(0.1, 100, 12, 1.1, 0.8)
    assert found.evaluation.minimum == 12


def test_without_a_share_nothing_is_filled_in() -> None:
    found = plan(rounds="[round]\ngoal = 100\n").round
    assert (found.goal_share, found.minimum_share, found.share) == (None, None, None)
    assert found.minimum == 50


def test_the_least_goal_is_what_the_aggregator_needs() -> None:
    """Trimmed-mean cuts a fifth off at each end: of fewer updates it would leave none."""
    krum = '[aggregation]\naggregator = "krum"\n'
    least = plan(krum).round.minimum
    assert least > 1
    assert "aggregation" in refused(krum, rounds=f"{SHARE}minimum = {least - 1}\n")


def test_for_a_part_of_the_devices_the_share_stays() -> None:
    found = scale_plan(plan("minimum = 10\n"), 0.1).round
    assert found.share == CohortShare(0.1, 10, 1, 1.3, 0.5)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("goal_share = 0\n", "goal_share"),
        ("goal_share = 1.1\n", "goal_share"),
        ('goal_share = "10%"\n', "goal_share"),
        ("goal_share = 0.1\nminimum = 101\n", "round.minimum = 101 is more than round.goal = 100"),
        ("minimum_share = 0.5\n", "round.minimum_share = 0.5 is a share of each round's own goal"),
    ],
)
def test_values_that_cannot_be(text: str, found: str) -> None:
    assert found in refused(rounds=f"[round]\ngoal = 100\n{text}")


def test_the_most_must_be_given() -> None:
    said = refused(rounds="[round]\ngoal_share = 0.1\n")
    assert "round.goal_share = 0.1 needs round.goal, the most reports" in said


@pytest.mark.parametrize(
    ("text", "head", "found"),
    [
        ("", f'{HEAD}recipe = "fedbuff"\n', "updates are buffered"),
        (
            PRIVATE,
            HEAD,
            "the stated epsilon would be wrong",
        ),
        (
            SECURE,
            HEAD,
            "is fixed for one size of a round",
        ),
        ("[clusters]\ncount = 2\n", HEAD, "a fixed number of devices"),
    ],
)
def test_what_it_does_not_go_with(text: str, head: str, found: str) -> None:
    said = refused(text, head)
    assert "round.goal_share = 0.1" in said
    assert found in said


def test_regions_have_goals_of_their_own() -> None:
    regions = "[regions.named.north]\ngoal = 3\n"
    said = refused(regions, rounds="[round]\ngoal_share = 0.1\n")
    assert "each region has a goal of its own" in said
