"""[clusters]: what follows from it, and what does not go together with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan, PlanError
from plans import SMALL, manifest


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/base"), file="my.toml")


IFCA = f'recipe = "ifca"\n{SMALL}[clusters]\ncount = 3\n'


def test_a_plan_with_clusters_is_a_family_of_one_bundle() -> None:
    plan = parse(IFCA)
    assert plan.is_family
    assert list(plan.members) == ["c1", "c2", "c3"]
    assert {*plan.members.values()} == {plan.bundle}
    assert (plan.round.weighting, plan.clusters and plan.clusters.spread) == ("uniform", 1.0)
    fit = plan.engine_settings(15.0).fit
    assert fit == (plan.round.cohort, plan.round.minimum, plan.round.deadline)
    plan = parse(f"{IFCA}deadline = 7")
    assert plan.engine_settings(15.0).fit == (plan.round.cohort, plan.round.minimum, 7.0)
    plan = parse(f"{IFCA}[local]\nlr = 0.1\nmu = 0")
    rules = plan.family_rules({name: manifest() for name in plan.members})
    assert rules.size == 3 * manifest().size
    assert parse(f"{SMALL}[local]\nlr = 0.1\n").engine_settings(15.0).fit is None


def test_other_recipes_may_have_clusters() -> None:
    assert parse(f'recipe = "fedprox"\n{SMALL}[clusters]\ncount = 2\n').is_family


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'recipe = "ifca"\n{SMALL}', 'recipe = "ifca" needs [clusters] with count'),
        (f"{SMALL}[clusters]\ncount = 9\n", "clusters.count"),
        (f"{SMALL}[clusters]\ncount = 1\n", "clusters.count"),
        (f"{IFCA}[family.small]\nbundle = 'x.bundle'\n", "[family]"),
        (f"{IFCA}[evaluation]\nevery = 2\n", "evaluation.every = 2"),
        (f'{IFCA}[distil]\ndata = "d.npz"\nbundle = "d.bundle"\n', "[clusters] and [distil]"),
        (f'{IFCA}[local]\nalgorithm = "statistics"\n', "a computation"),
        (f'{IFCA}[evaluation]\ndata = "held.npz"\n', "[clusters] and evaluation.data"),
        (f"{IFCA}[models]\ngive = true\n", "models.give = true"),
        (f"{IFCA}[pace]\nconnected = 10\n", "pace.connected = 10"),
        (f'{IFCA}[aggregation]\naggregator = "median"\n', 'aggregation.aggregator = "median"'),
        (f'{IFCA}[encoding]\nup = "topk-0.1"\n', 'encoding.up = "topk-0.1"'),
        (f'{IFCA}[local]\nalgorithm = "scaffold"\n', 'local.algorithm = "scaffold"'),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(text)
    assert said in refused.value.text


@pytest.mark.parametrize(
    "round_", ['participation = "asynchronous"\nconcurrency = 4', 'late = "carry"']
)
def test_rounds_whose_devices_cannot_choose_are_refused(round_: str) -> None:
    text = IFCA.replace("[round]\n", f"[round]\n{round_}\n").replace("over_selection = 1\n", "")
    assert text != IFCA
    with pytest.raises(PlanError, match=r"\[clusters\] and round\."):
        parse(text)
