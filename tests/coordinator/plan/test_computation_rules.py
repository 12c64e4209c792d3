"""What a run without a model refuses, each with its reason, and which bundle it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.aggregation.modular_sum import SumWords
from fleetlearn_coordinator.plan.computation_rules import COMPUTATION_RULES
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.manifest import Manifest
from plans import PRIVATE, SECURE, SMALL, manifest
from statistics_bundle import PLAN, QUESTIONS, statistics_bundle

COMPONENTS = PLAN.replace("statistics", "boosted-components")
TREES = PLAN.replace("statistics", "boosted-trees")
AGES = (0.0, 100.0)
TRAINS = manifest(proximal=False, hyper=(), metrics=("accuracy",))
BROKEN = {
    "asynchronous": ('participation = "asynchronous"\n', "begin from the same state"),
    "late ones": ('late = "carry"\n', "begin from the same state"),
    "median": ('[aggregation]\naggregator = "median"\n', "leaves devices out"),
    "max_norm": ("[aggregation]\nmax_norm = 1.0\n", "count whole"),
    "weights": ('weighting = "examples"\n', "each row counts once"),
    "adam": ('[server]\noptimizer = "adam"\n', "follows from the total alone"),
    "devices": ("[server]\ndevices = 9\n", "Leave server.devices out"),
    "lr": ("[local]\nlr = 0.1\n", "makes no step"),
    "epochs": ("[local]\nepochs = 2\n", "passes over the rows once"),
    "time_budget": ("[local]\ntime_budget = 5.0\n", "a part of the rows would be wrong"),
    "int8": ('[encoding]\nup = "int8"\n', "travel as they are"),
    "float16": ('[encoding]\ndown = "float16"\n', "travel as they are"),
    "evaluate": ("[local]\nevaluate = true\n", "no model that could be measured"),
    "evaluation": ("[evaluation]\nevery = 2\n", "no model that could be measured"),
    "a metric": ('[models]\nmetric = "accuracy"\nbest = 1\n', "Leave stop.metric and"),
    "epsilon": ("[stop]\nepsilon = 0.1\n", "ends when it is done"),
    "oort": ('[selection]\nstrategy = "oort"\n', "some rows would count more often"),
    "give": ("[models]\ngive = true\n", "predict with the newest model"),
    "a clip of masked sums": (f"minimum = 2\n{SECURE}", "sums are masked whole"),
    "bits of masked sums": (
        f"minimum = 2\n{SECURE.replace('clip = 0.5', 'bits = 20')}", "Leave secure.clip and"
    ),
    "dp-ftrl": (f'{PRIVATE}mechanism = "dp-ftrl"\n', "each round asks something else"),
    "local noise": (f'{PRIVATE}mechanism = "local"\n', "the coordinator adds noise to its total"),
    "a clip norm that moves": (
        f"{PRIVATE}clip_quantile = 0.5\n",
        "Leave privacy.clip_quantile out",
    ),
}  # fmt: skip
MASKED = f"minimum = 2\n{SECURE.replace('clip = 0.5', '')}"
FAMILY = (
    'recipe = "statistics"\nname = "a"\n[family.one]\nbundle = "b"\n[family.two]\nbundle = "c"\n'
    "[round]\ngoal = 4\n"
)


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/plans"))


@pytest.mark.parametrize("name", BROKEN)
def test_what_would_make_sums_inexact_is_refused_with_the_reason(name: str) -> None:
    text, said = BROKEN[name]
    with pytest.raises(PlanError) as refused:
        parse(PLAN + text)
    assert said in refused.value.text
    assert 'local.algorithm = "statistics" computes sums: ' in refused.value.text


def test_sums_without_a_bound_are_not_private() -> None:
    with pytest.raises(PlanError, match="a bound on what one row adds to the sums"):
        parse(COMPONENTS + PRIVATE)


def test_trees_need_ranges_and_as_many_releases_as_they_have_levels(tmp_path: Path) -> None:
    for column, said in (
        (BoostColumn("a"), "columns of numbers have no range"),
        (BoostColumn("a", range=AGES), r"Set stop\.rounds = 7"),
    ):
        told = BoostedTrees((column,), loss="logistic", rounds=3, depth=2)
        file = write_computation_bundle(tmp_path / "trees.bundle", "trees", told)
        found = open_bundle(file).manifest
        budget = PRIVATE.replace("noise = 1.0", "epsilon = 2.0")
        with pytest.raises(PlanError, match=said):
            parse(TREES + budget).check_against(found)
    plan = parse(f"{TREES}[stop]\nrounds = 7\n{budget}")
    plan.check_against(found)
    assert plan.round_rules(found).clips_sums


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"numbers": (NumberColumn("age"),)}, "column age has no range"),
        ({"numbers": (NumberColumn("age", AGES, (0.0, 0.5), bins=9),)}, "the quantile 0 or 1"),
        ({"numbers": (NumberColumn("age", AGES, (0.5,)),)}, "read off the histogram"),
        ({"numbers": (NumberColumn("age", AGES),), "rounds": 16}, "Set rounds = 1"),
        ({"categories": (CategoryColumn("city"),)}, "Set rounds = 3"),
    ],
)
def test_questions_that_noise_would_answer_are_refused(
    asked: Any, said: str, tmp_path: Path
) -> None:
    found = statistics_bundle(tmp_path, Statistics(**{"rounds": 1} | asked)).manifest
    parse(PLAN).check_against(found)
    with pytest.raises(PlanError, match=said):
        parse(PLAN + PRIVATE).check_against(found)


def test_noise_is_computed_for_the_releases_that_there_are(tmp_path: Path) -> None:
    asked = Statistics(numbers=(NumberColumn("age", AGES),), rounds=1)
    found = statistics_bundle(tmp_path, asked).manifest
    budget = PRIVATE.replace("noise = 1.0", "epsilon = 2.0")
    with pytest.raises(PlanError, match=r"Set stop\.rounds = 1"):
        parse(PLAN + budget).check_against(found)
    plan = parse(f"{PLAN}[stop]\nrounds = 1\n{budget}")
    plan.check_against(found)
    privacy = plan.round_rules(found).privacy
    assert privacy is not None
    assert gaussian_epsilon(1 / privacy.noise, 1e-6) == pytest.approx(2.0, abs=1e-6)


def test_a_family_is_refused() -> None:
    with pytest.raises(PlanError, match="a computation has one state"):
        parse(FAMILY)


def test_each_rule_is_broken_by_a_plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no plan breaks could be wrong for ever."""
    monkeypatch.setattr("fleetlearn_coordinator.plan.plan.contradictions", lambda plan: ())
    plans = [parse(PLAN + text) for text, _ in BROKEN.values()]
    plans.append(parse(COMPONENTS + PRIVATE))
    for rule in COMPUTATION_RULES:
        assert any(rule.breaks(plan) for plan in plans)
        assert not any(rule.breaks(parse(PLAN + text)) for text in ("", MASKED))
        assert not any(rule.breaks(parse(SMALL + text)) for text in ("", "[local]\nlr = 0.1\n"))


@pytest.fixture(scope="module")
def computes(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return statistics_bundle(tmp_path_factory.mktemp("bundle")).manifest


def test_the_rules_of_a_round(computes: Manifest) -> None:
    plan = parse(PLAN)
    plan.check_against(computes)
    rules = plan.round_rules(computes)
    assert rules.computation is not None
    assert rules.computation == ("statistics", QUESTIONS)
    assert list(rules.aggregators) == ["sums"]
    assert plan.parts(computes) == plan.exact_parts(computes) == {"sums": "int64"}
    assert computes.elements_of("sums") == computes.sums
    rules.aggregators["sums"].check(2.0**62 / plan.round.cohort, 1)
    with pytest.raises(Exception, match="can be at most"):
        rules.aggregators["sums"].check(2.0**62 / plan.round.cohort * 1.001, 1)


def test_the_rules_of_a_round_of_masked_sums(computes: Manifest) -> None:
    plan = parse(PLAN + MASKED)
    plan.check_against(computes)
    rules = plan.round_rules(computes)
    assert rules.secure == SumWords(computes.sums or 0, plan.round.cohort)
    assert rules.aggregators["sums"].name == "modular sum"
    assert plan.parts(computes) == plan.exact_parts(computes) == {"sums": "masked64"}
    assert plan.masked_words(computes) == 3 * computes.elements_of("sums")
    assert plan.updates_kept == 4, "one may have to be taken off again"
    (remark,) = plan.remarks(computes)
    assert "the difference of the two tells of that device" in remark


def test_a_plan_says_how_many_bytes_a_device_sends(computes: Manifest) -> None:
    sums = computes.elements_of("sums")
    assert parse(PLAN).update_bytes(computes) == 8 * sums
    assert parse(PLAN + MASKED).update_bytes(computes) == 12 * sums
    assert parse(SMALL).update_bytes(TRAINS) == 4 * TRAINS.size
    assert parse(f"{SMALL}minimum = 2\n{SECURE}").update_bytes(TRAINS) == 4 * (TRAINS.size + 1)


def test_masked_sums_are_of_rounds_that_words_of_16_bits_can_hold(computes: Manifest) -> None:
    """The cohort may be larger: no more than the goal are added up."""
    plan = parse(PLAN.replace("goal = 4", "goal = 65537") + MASKED)
    assert plan.round.cohort > 65537
    assert plan.round_rules(computes).secure == SumWords(computes.sums or 0, 65537)
    with pytest.raises(PlanError, match="at most 65537 such updates"):
        parse(PLAN.replace("goal = 4", "goal = 65538") + MASKED)


def test_a_bundle_of_the_other_sort_is_refused(computes: Manifest) -> None:
    with pytest.raises(PlanError, match="make-bundle"):
        parse(PLAN).check_against(TRAINS)
    with pytest.raises(PlanError, match='Set recipe = "statistics"'):
        parse(SMALL).check_against(computes)
    with pytest.raises(PlanError, match="nothing is computed"):
        parse(SMALL).computation(TRAINS)


def test_a_computation_ends_when_it_is_done_and_not_after_the_rounds_of_a_training() -> None:
    """A hundred boosting rounds of depth 5 take more than 500 rounds."""
    assert parse(PLAN).stop.rounds == 1_000_000
    assert parse(PLAN + "[stop]\nrounds = 20\n").stop.rounds == 20
    assert parse(SMALL).stop.rounds == 100


def test_plans_that_train_have_no_computation() -> None:
    plan = parse(SMALL)
    plan.check_against(TRAINS)
    assert plan.round_rules(TRAINS).computation is None
    assert TRAINS.elements_of("sums") == 0
    assert "computation" not in msgspec.to_builtins(TRAINS)
