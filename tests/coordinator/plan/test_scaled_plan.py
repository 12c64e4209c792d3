"""A plan for a share of its devices: worked by hand, and never one that contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.contradictions import contradictions
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.scaled_plan import scale_plan

HEAD = 'name = "a"\nbundle = "b"\n'


def plan(text: str, recipe: str = "fedavg") -> Plan:
    return Plan.parse(f'{HEAD}recipe = "{recipe}"\n{text}\n[stop]\nrounds = 9\n', Path())


def test_each_number_of_devices_is_rounded_up() -> None:
    found = scale_plan(
        plan(
            "[round]\ngoal = 200\nminimum = 101\nover_selection = 1.3\n[pace]\nconnected = 1000\n"
            "[evaluation]\ndevices = 30\nminimum = 15\n"
        ),
        0.01,
    )
    assert (found.round.goal, found.round.minimum, found.round.cohort) == (2, 2, 3)
    assert found.pace.connected == 10
    assert (found.evaluation.devices, found.evaluation.minimum) == (1, 1)


def test_asynchronous_rounds_keep_their_concurrency_for_each_report() -> None:
    found = scale_plan(plan("[round]\ngoal = 10\nconcurrency = 300", "fedbuff"), 0.1)
    assert (found.round.goal, found.round.cohort) == (1, 30)
    tiny = scale_plan(plan("[round]\ngoal = 10", "fedbuff"), 0.001)
    assert (tiny.round.goal, tiny.round.cohort) == (1, 10), "the default, ten times the goal"


def test_the_number_of_all_devices_is_scaled_as_the_cohort() -> None:
    found = scale_plan(
        plan("[round]\ngoal = 100\nover_selection = 1\n[server]\ndevices = 5000", "scaffold"), 0.01
    )
    assert (found.round.goal, found.server.devices) == (1, 50)


def test_all_devices_have_the_plan_as_it_is() -> None:
    given = plan("[round]\ngoal = 7")
    assert scale_plan(given, 1.0) is given


@pytest.mark.parametrize("aggregator", ["krum", "multi-krum", "bulyan", "trimmed-mean", "median"])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.9])
def test_a_smaller_plan_contradicts_nothing(aggregator: str, share: float) -> None:
    given = plan(f'[round]\ngoal = 100\nminimum = 90\n[aggregation]\naggregator = "{aggregator}"')
    found = scale_plan(given, share)
    assert not [*contradictions(found)]
    assert found.round.minimum <= found.round.goal <= given.round.goal
    if share == 0.001 and aggregator in ("krum", "bulyan"):
        assert found.round.goal > 1, "one update cannot be compared with others"


REGIONS = """
[round]
deadline = 60.0
[regions]
minimum = 1
[regions.each]
over_selection = 1.2
[regions.named.north]
tags = ["n"]
goal = 40
minimum = 20
[regions.named.south]
tags = ["s"]
goal = 5
over_selection = 3.0
"""


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_each_region_is_scaled(share: float) -> None:
    """A region that kept its goal would never have its minimum of a share of its devices."""
    found = scale_plan(plan(REGIONS), share)
    assert found.regions is not None
    north, south = found.regions.settings.regions
    expected = {
        0.001: ((1, 2, 1), (1, 3, 1)),
        0.05: ((2, 3, 1), (1, 3, 1)),
        0.5: ((20, 24, 10), (3, 9, 2)),
    }
    got = tuple((each.goal, each.cohort, each.minimum) for each in (north, south))
    assert got == expected[share]
    assert found.round.goal == north.goal + south.goal
    assert found.round.cohort == north.cohort + south.cohort
    assert found.round.minimum == min(north.minimum, south.minimum)
    assert not [*contradictions(found)]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.9])
def test_each_smaller_region_has_enough_updates_for_its_aggregator(share: float) -> None:
    text = REGIONS.replace("minimum = 1", 'weighting = "uniform"\nminimum = 1', 1)
    found = scale_plan(plan(f'{text}[aggregation]\naggregator = "median"'), share)
    assert not [*contradictions(found)]
