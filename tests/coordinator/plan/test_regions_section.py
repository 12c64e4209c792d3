"""[regions] of a plan: what it fills in, which devices are where, and what it does not go with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan, PlanError
from fleetlearn_coordinator.aggregation.regional_round import RegionalWeights
from fleetlearn_coordinator.rounds.settings import RegionSettings

HEAD = 'name = "test"\nbundle = "test.bundle"\n'
TWO = {"north": {"tags": ["north"]}, "south": {"devices": ["s-*", "south?"]}}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml(each)}' for key, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def plan_with(regions: dict[str, Any], more: str = "", head: str = HEAD) -> Plan:
    text = "\n".join([head, more, "[regions]", *(f"{k} = {toml(v)}" for k, v in regions.items())])
    return Plan.parse(text, Path("/plans"))


def refused(regions: dict[str, Any], more: str = "", head: str = HEAD) -> str:
    with pytest.raises(PlanError) as caught:
        plan_with(regions, more, head)
    return str(caught.value)


def test_the_round_s_numbers_follow_from_the_regions() -> None:
    named = {"north": {"goal": 30, "over_selection": 1.5}, "south": {"minimum": 3}, "west": {}}
    plan = plan_with({"minimum": 2, "each": {"goal": 10}, "named": named})
    assert plan.regions is not None
    settings = plan.regions.settings
    assert settings.regions == (
        RegionSettings("north", 30, 45, 15, 600.0),
        RegionSettings("south", 10, 13, 3, 600.0),
        RegionSettings("west", 10, 13, 5, 600.0),
    )
    assert (settings.goal, settings.minimum) == (3, 2)
    assert (plan.round.goal, plan.round.cohort, plan.round.minimum) == (50, 71, 8)
    engine = plan.engine_settings(10.0)
    assert (engine.goal, engine.cohort, engine.regions) == (50, 71, settings)
    assert plan.evaluation.devices == 50
    assert plan.regions.weights == RegionalWeights(("north", "south", "west"))


@pytest.mark.parametrize("goal", [1, 3, 7, 13, 100, 999])
@pytest.mark.parametrize("over", [1, 1.1, 1.3, 1.37, 2.5])
def test_the_cohort_is_the_sum_of_the_regions_cohorts(goal: int, over: float) -> None:
    named = {"a": {"goal": goal, "over_selection": over}, "b": {"goal": 3}, "c": {"goal": 1}}
    plan = plan_with({"named": named})
    assert plan.regions is not None
    assert plan.round.cohort == sum(each.cohort for each in plan.regions.settings.regions)


def test_which_region_a_device_is_in() -> None:
    plan = plan_with({"each": {"goal": 1}, "named": {**TWO, "west": {}}})
    regions = plan.regions
    assert regions is not None
    assert regions.region_of("d", ("north", "x"), None) == "north"
    assert regions.region_of("s-1", ("north",), None) == "north", "the first that fits"
    assert regions.region_of("s-1", (), None) == "south"
    assert regions.region_of("southX", (), None) == "south"
    assert regions.region_of("d", (), None) == ""
    assert regions.region_of("s-1", ("north",), "west") == "west", "its gateway comes first"
    assert regions.region_of("s-1", (), "mars") == "south", "the plan has no region mars"


def test_tags_and_names_must_both_fit() -> None:
    both = {"north": {"tags": ["a", "b"], "devices": ["n*"]}}
    regions = plan_with({"each": {"goal": 1}, "named": both}).regions
    assert regions is not None
    assert regions.region_of("n1", ("b", "a"), None) == "north"
    assert regions.region_of("n1", ("a",), None) == ""
    assert regions.region_of("m1", ("a", "b"), None) == ""


def test_weights() -> None:
    named = {"north": {"weight": 2.5}, "south": {"weight": 1}}
    plan = plan_with({"weighting": "given", "each": {"goal": 1}, "named": named})
    assert plan.regions is not None
    assert plan.regions.weights.weights == {"north": 2.5, "south": 1.0}
    plan = plan_with({"weighting": "uniform", "each": {"goal": 1}, "named": TWO})
    assert plan.regions is not None
    assert plan.regions.weights.weights == {"north": 1.0, "south": 1.0}


def test_a_robust_aggregator_gives_each_region_the_minimum_that_it_needs() -> None:
    plan = plan_with(
        {"weighting": "uniform", "each": {"goal": 10}, "named": TWO},
        '[aggregation]\naggregator = "krum"\nhostile = 0.2',
    )
    assert plan.regions is not None
    flat = Plan.parse(
        HEAD + '[round]\ngoal = 10\n[aggregation]\naggregator = "krum"\nhostile = 0.2', Path("/p")
    )
    assert {each.minimum for each in plan.regions.settings.regions} == {flat.round.minimum}


EACH = {"each": {"goal": 4}, "named": TWO}


@pytest.mark.parametrize(
    ("regions", "more", "words"),
    [
        (EACH, "[round]\ngoal = 5", "round.goal = 5 with [regions]: it follows from the regions'"),
        (EACH, "[round]\nminimum = 5", "regions.each.minimum is for each region"),
        ({"named": TWO}, "", "[regions.named.north] has no goal, and [regions.each] has none"),
        ({"each": {"goal": 1}}, "", "[regions] names no region"),
        ({"each": {"goal": 1}, "named": {"1st": {}}}, "", "regions.named"),
        ({"each": {"goal": 0}, "named": TWO}, "", "goal"),
        ({"each": {"goal": "x"}, "named": TWO}, "", "goal"),
        ({"named": {"north": 3}}, "", "regions.named.north"),
        ({**EACH, "goal": "x"}, "", "regions.goal"),
        ({**EACH, "goal": 3}, "", "regions.goal = 3 of 2 regions: it takes 1 to 2"),
        ({**EACH, "goal": 1, "minimum": 2}, "", "is more than regions.goal = 1"),
        ({"named": {"n": {"goal": 2, "minimum": 3}}}, "", "minimum = 3 is more than goal = 2"),
        (
            {"each": {"goal": 1, "deadline": 700.0}, "named": TWO},
            "",
            "deadline = 700 s is more than round.deadline = 600 s",
        ),
        ({**EACH, "color": 1}, "", "regions.color is not a key of a plan"),
        ({"each": {"goal": 1}, "named": {"n": {"tag": ["x"]}}}, "", "regions.named.n.tag is not"),
        ({**EACH, "weighting": "given"}, "", "needs the weight of each region; these have none"),
        (
            {"each": {"goal": 1}, "named": {"n": {"weight": 2.0}}},
            "",
            'weighting = "updates" has no use for the weight of n',
        ),
        (EACH, '[round]\nlate = "carry"', 'It takes "discard"'),
        (EACH, '[aggregation]\naggregator = "median"', "within each region"),
        (
            {**EACH, "weighting": "uniform"},
            "[aggregation]\nq = 1.0",
            "against each other",
        ),
        (EACH, '[secure]\nmode = "pairwise"', "[regions] and [secure]"),
        (
            EACH,
            '[family.small]\nbundle = "a.bundle"\n[family.large]\nbundle = "b.bundle"',
            "several models",
        ),
    ],
)
def test_what_is_refused(regions: dict[str, Any], more: str, words: str) -> None:
    head = 'name = "test"\n' if "family" in more else HEAD
    assert words in refused(regions, more, head)


@pytest.mark.parametrize(
    ("recipe", "regions", "more", "words"),
    [
        ("fedbuff", EACH, "", "asynchronous"),
        ("statistics", EACH, "", "without a word"),
        ("scaffold", {**EACH, "weighting": "uniform"}, "[server]\ndevices = 9", "server.devices"),
        (
            "fedavg",
            {**EACH, "weighting": "uniform"},
            "[privacy]\npopulation = 10000\ndelta = 1e-6\nclip = 1.0\nnoise = 1.0",
            "one would weigh more",
        ),
        (
            "fedavg",
            EACH,
            "[privacy]\npopulation = 10000\ndelta = 1e-6\nclip = 1.0\nnoise = 1.0\n"
            'sampling = "poisson"',
            "all regions together",
        ),
        (
            "fedavg",
            EACH,
            '[evaluation]\ndata = "x.npz"\n[quality]\ncontributions = 5',
            "[quality] contributions",
        ),
    ],
)
def test_what_is_refused_of_recipes(
    recipe: str, regions: dict[str, Any], more: str, words: str
) -> None:
    assert words in refused(regions, more, HEAD + f'recipe = "{recipe}"\n')
