"""Values of a plan whose time never comes: each is said, and its nearest sound neighbour is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.without_effect import WITHOUT_EFFECT, without_effect

CASES = {
    "patience": ('[stop]\nrounds = 5\nmetric = "loss"\npatience = {}', 6, 5, "at most 6 models"),
    "patience of evaluations": (
        '[stop]\nrounds = 9\nmetric = "loss"\nmeasured_by = "evaluation"\npatience = {}\n'
        "[evaluation]\nevery = 4",
        4,
        3,
        "at most 4 models",
    ),
    "kept versions": ("[models]\nevery = {}", 101, 100, "no version is kept for that"),
    "held-out data": ("[evaluation]\ndata_every = {}", 2, 1, "there is no evaluation.data"),
    "models that nobody measures": (
        '[models]\nbest = 2\nmetric = "loss"\nmeasured_by = "{}"',
        "evaluation",
        "round",
        "only when somebody asks for it",
    ),
    "a warm-up": ("[local.schedule]\nwarm_up = {}", 100, 99, "the run is over before"),
    "devices that do not measure": (
        '[models]\nbest = 2\nmetric = "loss"\n[local]\nevaluate = {}',
        "false",
        "true",
        "measure no model",
    ),
}


def parse(text: str) -> Plan:
    return Plan.parse(
        f'name = "a"\nbundle = "a.bundle"\n[round]\ngoal = 4\n{text}', Path("/base"), file="my.toml"
    )


@pytest.mark.parametrize("case", CASES)
def test_what_changes_nothing_is_said(case: str) -> None:
    text, idle, sound, words = CASES[case]
    (remark,) = without_effect(parse(text.format(idle)))
    assert words in remark
    assert not [*without_effect(parse(text.format(sound)))]


def test_each_rule_is_broken_by_a_plan_here() -> None:
    plans = [parse(text.format(idle)) for text, idle, _, _ in CASES.values()]
    for rule in WITHOUT_EFFECT:
        assert any(rule.breaks(plan) for plan in plans)
