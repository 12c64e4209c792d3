"""Which plans with [quality] are refused, each with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.quality_rules import QUALITY_RULES
from plans import PRIVATE, SECURE, SMALL

LOOKS = "\n[quality]\nevery = 5\n"
MEASURES = '\n[quality]\ncontributions = 1\n[evaluation]\ndata = "held-out.npz"\n'
BROKEN = {
    "private": (f"{SMALL}{PRIVATE}{LOOKS}", "[quality] with [privacy]"),
    "secure": (f"{SMALL}{SECURE}{LOOKS}", "[quality] with [secure]"),
    "a family": (
        f'name = "a"\n[round]\ngoal = 4\n[family.one]\nbundle = "1"\n[family.two]\nbundle = "2"'
        f"\n{LOOKS}",
        "[quality] with several models",
    ),
    "a computation": (f'recipe = "statistics"\n{SMALL}{LOOKS}', "has no model that devices could"),
    "no held-out data": (f"{SMALL}\n[quality]\ncontributions = 1\n", "needs held-out data"),
    "asynchronous": (f'recipe = "fedbuff"\n{SMALL}{MEASURES}', "compares updates of one model"),
    "carry": (f'{SMALL}late = "carry"\n{MEASURES}', "compares updates of one model"),
    "too many": (
        f'name = "a"\nbundle = "b"\n[round]\ngoal = 1025\n{MEASURES}',
        "that is more than 1024",
    ),
    "distilled": (
        f'{SMALL}{MEASURES}[distil]\ndata = "u.npz"\nbundle = "d.bundle"\n',
        "would be what is left of it",
    ),
    "median": (f'{SMALL}[aggregation]\naggregator = "median"\n{MEASURES}', "this plan's model is"),
    "fednova": (f'recipe = "fednova"\n{SMALL}{MEASURES}', "this plan's model is"),
    "clipped": (
        f"{SMALL}[aggregation]\nmax_norm = 2.0\n{MEASURES}",
        "measures updates as they came, and this plan shortens",
    ),
    "too few": (f"{SMALL}{LOOKS}minimum = 9\ndevices = 8\n", "is more than quality.devices = 8"),
}


def load(text: str) -> Plan:
    return Plan.parse(text, Path("/plans"))


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_go_with_quality_is_refused(name: str) -> None:
    text, reason = BROKEN[name]
    with pytest.raises(PlanError) as caught:
        load(text)
    assert reason in caught.value.text


def test_each_rule_is_broken_by_a_plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlearn_coordinator.plan.plan.contradictions", lambda plan: ())
    plans = [load(text) for text, _ in BROKEN.values()]
    for rule in QUALITY_RULES:
        assert any(rule.breaks(plan) for plan in plans)
        for told in ("", LOOKS, MEASURES):
            assert not rule.breaks(load(SMALL + told))


def test_an_update_that_is_too_long_may_be_refused() -> None:
    refuses = '[aggregation]\nmax_norm = 2.0\nnorm_action = "refuse"\n'
    assert load(f"{SMALL}{refuses}{MEASURES}").quality is not None
