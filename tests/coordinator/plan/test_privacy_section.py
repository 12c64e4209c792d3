"""[privacy] of a plan: what it takes, what is filled in, and the rules of a run's releases."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fleetlearn_coordinator.aggregation.weighing.norm_bound import Enforced, NormBound
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.privacy_budget import account_of
from fleetlearn_coordinator.plan.privacy_section import PrivacySection
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_coordinator.privacy.accounting import PrivacyError, gaussian_epsilon
from fleetlearn_coordinator.privacy.budget import spent_after
from plans import PRIVATE, SMALL, manifest

SGD = manifest(proximal=False, hyper=())


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/base"), file="my.toml")


def privacy_of(text: str) -> PrivacySection:
    privacy = parse(text).privacy
    assert privacy is not None
    return privacy


def test_without_the_table_there_is_none() -> None:
    plan = parse(SMALL)
    assert plan.privacy is None
    assert plan.round_rules(SGD).privacy is None


def test_the_smallest_private_plan() -> None:
    plan = parse(f"{SMALL}{PRIVATE}")
    privacy = plan.privacy
    assert privacy is not None
    assert (privacy.mechanism, privacy.separation, privacy.participations) == ("gaussian", 1, 100)
    assert (plan.round.weighting, plan.local.evaluate) == ("uniform", False)
    rules = plan.round_rules(SGD).privacy
    assert rules is not None
    assert (rules.noise, rules.clip, rules.goal, rules.largest_weight) == (1.0, 0.5, 4, 1)
    assert (rules.clip_quantile, rules.metrics, rules.metric_bounds) == (None, False, {})


def test_a_budget_alone_gives_the_noise_of_all_releases() -> None:
    plan = parse(f"{SMALL}[stop]\nrounds = 25\n{PRIVATE.replace('noise = 1.0', 'epsilon = 2.0')}")
    rules = plan.round_rules(SGD).privacy
    assert rules is not None
    assert gaussian_epsilon(math.sqrt(25) / rules.noise, 1e-6) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("population", "rounds", "separation", "participations"),
    [(1000, 100, 83, 2), (60, 100, 5, 20), (7, 100, 1, 100), (120, 10, 10, 1)],
)
def test_correlated_noise_has_a_separation_by_default(
    population: int, rounds: int, separation: int, participations: int
) -> None:
    """A cohort of 6: half of the population rests."""
    text = PRIVATE.replace("population = 1000", f"population = {population}")
    found = privacy_of(f'recipe = "dp-ftrl"\n{SMALL}[stop]\nrounds = {rounds}\n{text}')
    assert (found.separation, found.participations) == (separation, participations)


def test_participations_follow_a_given_separation() -> None:
    found = privacy_of(f"{SMALL}[stop]\nrounds = 100\n{PRIVATE}separation = 30")
    assert (found.separation, found.participations) == (30, 4)


def test_noised_metrics_take_a_tenth_and_the_bounds_of_the_metric_that_stops() -> None:
    plan = parse(
        f'{SMALL}[stop]\nmetric = "accuracy"\ntarget = 0.9\nbounds = [0, 1]\n{PRIVATE}'
        'metrics = "noised"'
    )
    rules = plan.round_rules(SGD).privacy
    assert rules is not None
    assert rules.metrics_noise == pytest.approx(math.sqrt(10))
    assert rules.metric_bounds == {"accuracy": (0.0, 1.0)}
    assert plan.local.evaluate


@pytest.mark.parametrize("recipe", ["dp-fedavg", "dp-ftrl"])
def test_a_private_recipe_needs_the_table(recipe: str) -> None:
    with pytest.raises(PlanError, match=rf'recipe = "{recipe}" needs \[privacy\] with population'):
        parse(f'recipe = "{recipe}"\n{SMALL}')


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("delta = 1e-6", "privacy.delta is missing"),
        ("population = 1000", "privacy.population is missing"),
        ("clip = 0.5", "privacy.clip is missing"),
    ],
)
def test_what_must_be_given(line: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse(f"{SMALL}{PRIVATE.replace(line, '')}")


@pytest.mark.parametrize(
    "line",
    [
        "epsilon = 0", "delta = 1", "delta = 0", "noise = -1", 'mechanism = "laplace"', "clip = 0",
        "clip_quantile = 1", "clip_rate = 0", "separation = 0", "participations = 0",
        'sampling = "uniform"', 'metrics = "all"', "metrics_noise = 0",
        "metrics_bounds = {loss = [1]}",
    ],
)  # fmt: skip
def test_values_that_are_none(line: str) -> None:
    key = line.split(" = ")[0]
    text = "\n".join(row for row in PRIVATE.splitlines() if not row.startswith(f"{key} ="))
    with pytest.raises(PlanError, match=rf"privacy\.{key}"):
        parse(f"{SMALL}{text}\n{line}")


def test_weights_by_examples_need_a_public_limit() -> None:
    with pytest.raises(PlanError, match=r"needs round\.max_weight"):
        parse(f'{SMALL}weighting = "examples"\n{PRIVATE}')
    plan = parse(f'{SMALL}weighting = "examples"\nmax_weight = 50\n{PRIVATE}')
    rules = plan.round_rules(SGD).privacy
    assert rules is not None
    assert rules.largest_weight == 50


def test_the_clip_norm_is_the_bound_that_the_coordinator_enforces() -> None:
    plan = parse(f"{SMALL}{PRIVATE}")
    assert plan.weighing(SGD).bound == NormBound(0.5, "clip", enforced=Enforced(1, SGD.size))
    examples = 'weighting = "examples"\nmax_weight = 30\n'
    plan = parse(f"{SMALL}{examples}{PRIVATE}clip_quantile = 0.7\nclip_rate = 0.1\n")
    assert plan.weighing(SGD).bound == NormBound(0.5, "clip", 0.7, 0.1, Enforced(30, SGD.size))
    local = parse(f'{SMALL}{PRIVATE}mechanism = "local"\n')
    assert local.weighing(SGD).bound is None, "updates come with noise"


def test_what_a_round_releases_beside_the_mean_must_leave_it_noise() -> None:
    """With a goal of 4 the count has noise of 0.2 devices: 1 / 0.4^2 is 6.25."""
    plan = parse(f"{SMALL}{PRIVATE}clip_quantile = 0.5\n")
    with pytest.raises(PrivacyError, match=r"privacy\.noise = 1 leaves .* takes 6\.25"):
        plan.round_rules(SGD)


@pytest.mark.parametrize("mechanism", ["gaussian", "dp-ftrl", "local"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
@pytest.mark.parametrize(("rounds", "separation"), [(1, 1), (7, 1), (90, 30)])
def test_the_computed_noise_is_enough_for_all_rounds_and_not_for_more(
    mechanism: str, epsilon: float, rounds: int, separation: int
) -> None:
    """By the account that the run keeps: not one release less by a rounding."""
    given = PRIVATE.replace("noise = 1.0", f"epsilon = {epsilon}")
    more = f'mechanism = "{mechanism}"\nseparation = {separation}\nparticipations = 50\n'
    plan = parse(f"{SMALL}[stop]\nrounds = {rounds}\n{given}{more}")
    rules = plan.round_rules(SGD).privacy
    assert plan.privacy is not None
    assert rules is not None
    account = account_of(plan.privacy, rules)
    assert account.left is not None
    assert account.left >= rounds
    spent = spent_after(account.segments, rounds, 1e-6)
    assert spent == pytest.approx(epsilon, rel=1e-6)
    assert spent <= epsilon


def test_the_page_has_each_key_and_recipe() -> None:
    page = Path(__file__).parents[3] / "docs/algorithms/privacy-plan.md"
    text = page.read_text("utf-8").partition("## The keys")[2]
    for key in PrivacySection.__struct_fields__:
        assert f"`{key}`" in text, key
    for name, recipe in RECIPES.items():
        if recipe.mechanism is not None:
            assert f"`{name}`" in text, name
