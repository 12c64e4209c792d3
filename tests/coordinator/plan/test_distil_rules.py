"""Which plans with [distil] are refused, each with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan import plan as plan_module
from fleetlearn_coordinator.plan.distil_files import distillation_bundles
from fleetlearn_coordinator.plan.distil_rules import DISTIL_RULES
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from plans import PRIVATE, SECURE, SMALL

DISTIL = '\n[distil]\ndata = "u.npz"\nbundle = "d.bundle"\n'
FAMILY = 'name = "a"\n[round]\ngoal = 4\n[family.one]\nbundle = "1.bundle"\n'
BROKEN = {
    "no bundle": (f'{SMALL}\n[distil]\ndata = "u.npz"\n', "distil.bundle is missing"),
    "a family's one bundle": (f"{FAMILY}{DISTIL}", "as family.one.distil, and distil.bundle is"),
    "a member without": (
        f'{FAMILY}distil = "1.d"\n[family.two]\nbundle = "2.bundle"\n[distil]\ndata = "u.npz"',
        "as family.two.distil",
    ),
    "members that name bundles for nothing": (f'{FAMILY}distil = "1.d"', "add [distil] with data"),
    "one model of its own": (f'{SMALL}{DISTIL}teachers = "members"', "is for a family of several"),
    "asynchronous": (
        f'recipe = "fedbuff"\n{SMALL}{DISTIL}',
        'round.participation = "asynchronous": teachers are models of one round',
    ),
    "carry": (f'{SMALL}late = "carry"\n{DISTIL}', 'round.late = "carry": teachers are models of'),
    **{
        name: (
            f'{SMALL}[local]\nalgorithm = "{name}"\n[server]\ndevices = 9\n{DISTIL}',
            f'[distil] with local.algorithm = "{name}"',
        )
        for name in ("scaffold", "feddyn")
    },
    "secure": (f"{SMALL}{SECURE}{DISTIL}", "the coordinator knows the sum of the updates alone"),
    "private": (f"{SMALL}{PRIVATE}{DISTIL}", "would reach the model without noise"),
    "median": (
        f'{SMALL}[aggregation]\naggregator = "median"\n{DISTIL}', "one hostile device could teach"
    ),
    "clipped": (
        f"{SMALL}[aggregation]\nmax_norm = 2.0\n{DISTIL}", "its device's model would teach as it is"
    ),
    "too many": (
        f'name = "a"\nbundle = "b"\n[round]\ngoal = 100000\n{DISTIL}', "keeps a round's updates"
    ),
}  # fmt: skip


def load(text: str) -> Plan:
    return Plan.parse(text, Path("/plans"))


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_go_with_distillation_is_refused(name: str) -> None:
    text, reason = BROKEN[name]
    with pytest.raises(PlanError) as caught:
        load(text)
    assert reason in caught.value.text


def test_each_rule_is_broken_by_a_plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "contradictions", lambda plan: ())
    plans = [load(text) for text, _ in BROKEN.values()]
    assert all(any(rule.breaks(plan) for plan in plans) for rule in DISTIL_RULES)


def test_a_longer_update_may_be_refused() -> None:
    """Then no device's model that is there is longer."""
    refusing = f'[aggregation]\nmax_norm = 2.0\nnorm_action = "refuse"\n{DISTIL}'
    assert load(f"{SMALL}{refusing}").keeps_device_models


def test_updates_stay_until_the_round_ends() -> None:
    plan = load(f"{SMALL}{DISTIL}")
    assert plan.updates_kept == plan.round.goal
    assert load(SMALL).updates_kept == 0


def test_files_are_beside_the_plan() -> None:
    distil = load(f"{SMALL}{DISTIL}").distil
    assert distil is not None
    assert (distil.data, distil.bundle) == (Path("/plans/u.npz"), Path("/plans/d.bundle"))


def test_the_recipe_needs_the_section() -> None:
    with pytest.raises(PlanError, match=r"recipe = \"feddf\" needs \[distil\] with data"):
        load(f'recipe = "feddf"\n{SMALL}')


def test_each_member_has_its_bundle() -> None:
    other = '[family.two]\nbundle = "2.bundle"\ndistil = "2.d"'
    text = f'{FAMILY}distil = "1.d"\n{other}\n[distil]\ndata = "u.npz"\nteachers = "members"'
    plan = load(text)
    assert distillation_bundles(plan) == [Path("/plans/1.d"), Path("/plans/2.d")]
    assert not plan.keeps_device_models
    assert distillation_bundles(load(f"{SMALL}{DISTIL}")) == [Path("/plans/d.bundle")]
