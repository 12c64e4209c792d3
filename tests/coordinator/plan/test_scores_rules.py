"""Which plans whose devices tell class scores (FedMD) are refused, each with its reason; and the
mean of the scores, worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.scores_rules import SCORES_RULES
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.public_examples import write_public_bundle
from plans import PRIVATE, SECURE, SMALL, manifest

FEDMD = f'recipe = "fedmd"\n{SMALL}'
LR = "[local]\nlr = 0.1\n"
FAMILY = 'recipe = "fedmd"\nname = "a"\n[round]\ngoal = 4\n[family.one]\nbundle = "1.bundle"\n'
BROKEN = {
    "asynchronous": (f'{FEDMD}participation = "asynchronous"\n', "digested an older consensus"),
    "carry": (f'{FEDMD}late = "carry"\n', "digested an older consensus"),
    "server": (f'{FEDMD}[server]\noptimizer = "adam"\n', "the mean of the devices' scores"),
    "half a mean": (f"{FEDMD}[server]\nlr = 0.5\n", "the mean of the devices' scores"),
    "seldom": (f'{FEDMD}weighting = "inverse-participation"\n', "devices that come seldom"),
    "held out": (f'{FEDMD}[evaluation]\ndata = "h.npz"\n', "the coordinator has no model"),
    "evaluated": (f"{FEDMD}[evaluation]\nevery = 2\n", "the coordinator has no model"),
    "given": (f"{FEDMD}[models]\ngive = true\n", "Leave models.give out"),
    "family": (FAMILY, "Leave [family] and [clusters] out"),
    "distil": (f'{FEDMD}[distil]\ndata = "u"\nbundle = "d"\n', "the devices distil by themselves"),
    "quality": (f"{FEDMD}[quality]\nevery = 2\n", "that devices could be compared by"),
    "normalise": (f"{FEDMD}[aggregation]\nnormalise = true\n", "an update is no sum of gradients"),
}


def load(text: str) -> Plan:
    return Plan.parse(text, Path("/plans"))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    x = np.zeros((2, 4), np.float32)
    return open_bundle(write_public_bundle(tmp_path / "p.bundle", "two", {"x": x}, 3))


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_go_with_scores_is_refused(name: str) -> None:
    text, reason = BROKEN[name]
    with pytest.raises(PlanError) as caught:
        load(text)
    assert reason in caught.value.text


def test_each_rule_has_a_plan_that_breaks_it() -> None:
    texts = {reason for _, reason in BROKEN.values()}
    for rule in SCORES_RULES:
        told = rule.text(load(FEDMD))
        assert any(reason in told for reason in texts), told


def test_what_a_mean_of_updates_can_do_is_there(bundle: Bundle) -> None:
    for more in (
        "",
        '[encoding]\nup = "int8"\n',
        '[aggregation]\naggregator = "median"\n',
        "[aggregation]\nmax_norm = 9.0\n",
        PRIVATE,
        SECURE,
    ):
        plan = load(f"{FEDMD}{LR}{more}")
        plan.check_against(bundle.manifest)


def test_numbers_of_the_plan(bundle: Bundle) -> None:
    plan = load(f"{FEDMD}[local]\nlr = 0.1\nhyper = {{temperature = 3.0}}\n")
    assert plan.hyper(bundle.manifest) == {
        "lr": 0.1, "digest_lr": 0.001, "digest_epochs": 5.0, "temperature": 3.0,
    }  # fmt: skip
    with pytest.raises(PlanError, match="lr is missing: recipe fedmd needs it"):
        load(FEDMD).check_against(bundle.manifest)
    wrong = load(f"{FEDMD}[local]\nlr = 0.1\nhyper = {{digest_epochs = 2.5}}\n")
    with pytest.raises(PlanError, match=r"digest_epochs = 2\.5; expected a whole number"):
        wrong.check_against(bundle.manifest)


def test_bundle_and_recipe_go_together(bundle: Bundle) -> None:
    with pytest.raises(PlanError, match=r"has public examples in place of graphs.*fedmd"):
        load(SMALL).check_against(bundle.manifest)
    with pytest.raises(PlanError, match=r"needs a bundle of public examples.*public-bundle"):
        load(f"{FEDMD}{LR}").check_against(manifest())


def test_the_mean_of_the_scores_by_hand(bundle: Bundle) -> None:
    """Two devices of different weight count the same, and so does what they began from: the
    consensus is the mean of what they say."""
    rules = load(f"{FEDMD}{LR}").family_rules({"": bundle.manifest})
    before = np.array([1, 2, 3, 4, 5, 6], np.float32)
    said = np.array([[1, 0, 0, 0, 8, 0], [3, 0, -2, 0, 0, 1]], np.float32)
    state = rules.make_state(
        None, version=1, model=before, optimizer_state=rules.init(before), vectors={}
    )
    round = rules.open_round(state)
    for scores, examples in zip(said, (10, 90), strict=True):
        columns = ReportColumns(
            weights=np.array([1]),
            examples=np.array([examples]),
            steps=np.array([1]),
            complete=np.array([True]),
            loss=np.array([0.5]),
            metrics={"digest_loss": np.array([0.25])},
            largest={UPDATE: np.array([10.0])},
            parts={UPDATE: (scores - before)[None]},
        )
        assert round.receive(columns).refusal is None
        round.accept(columns)
        round.add(columns)
    made = round.commit(2, round.summary({}))
    assert made.state.model.tolist() == [2, 0, -1, 0, 4, 0.5]
