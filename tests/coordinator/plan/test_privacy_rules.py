"""Which plans with [privacy] are refused, each with its reason, and what devices must keep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.privacy_metric_rules import METRIC_RULES
from fleetlearn_coordinator.plan.privacy_release_rules import RELEASE_RULES
from fleetlearn_coordinator.plan.privacy_rules import UPDATE_RULES, privacy_contradictions
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_protocol.manifest import Parameter
from plans import PRIVATE, SMALL, manifest

SGD = manifest(proximal=False, hyper=())
STOPS = '[stop]\nmetric = "accuracy"\ntarget = 0.9\n'
NOISED = 'metrics = "noised"\nmetrics_bounds = {accuracy = [0, 1]}\n'
ROBUST = ("median", "trimmed-mean", "multi-krum", "geometric-median", "centred-clipping")
GOAL = f"{SMALL}minimum = 4\n"
BROKEN = {
    "no epsilon and no noise": (
        f"{SMALL}{PRIVATE.replace('noise = 1.0', '')}", "[privacy] needs epsilon"
    ),
    **{
        name: (f'{SMALL}[aggregation]\naggregator = "{name}"\n{PRIVATE}', "looks at each update")
        for name in ROBUST
    },
    "fednova": (f'recipe = "fednova"\n{SMALL}{PRIVATE}', "aggregation.normalise = true with"),
    "own algorithm": (
        f'{SMALL}[local]\nalgorithm = "mine:train"\n{PRIVATE}',
        'local.algorithm = "mine:train" with [privacy]: nobody has shown',
    ),
    "own encoding": (
        f'{SMALL}{PRIVATE}[encoding]\nup = "mine:format"\n',
        'encoding.up = "mine:format" with [privacy]: nobody has shown',
    ),
    "own weighing": (
        f'recipe = "fedavg"\n{SMALL}{PRIVATE}[aggregation]\nweighing = "mine:rule"\n',
        'aggregation.weighing = "mine:rule" with [privacy]',
    ),
    "q-fedavg": (f'recipe = "q-fedavg"\n{SMALL}{PRIVATE}', "aggregation.q = 1.0 with [privacy]"),
    **{
        name: (
            f'{SMALL}[local]\nalgorithm = "{name}"\n[server]\ndevices = 9\n{PRIVATE}',
            f'local.algorithm = "{name}" with [privacy]',
        )
        for name in ("scaffold", "scaffold-gradient", "feddyn")
    },
    "fedprox-adaptive": (
        f'recipe = "fedprox-adaptive"\n{SMALL}{PRIVATE}', "mu follows the devices' losses"
    ),
    **{
        name: (
            f'{SMALL}[selection]\nstrategy = "{name}"\n{PRIVATE}',
            f'selection.strategy = "{name}" with [privacy]: it chooses devices by their losses',
        )
        for name in ("oort", "power-of-choice")
    },
    "inverse-participation": (
        f'recipe = "fedbuff"\n{SMALL}weighting = "inverse-participation"\n{PRIVATE}',
        "an update's weight depends on the others",
    ),
    "fedasync": (f'recipe = "fedasync"\nname = "a"\nbundle = "b"\n{PRIVATE}', "server.mix = true"),
    "max_norm": (
        f"{SMALL}[aggregation]\nmax_norm = 2.0\n{PRIVATE}", "aggregation.max_norm = 2 with"
    ),
    "dp-ftrl, adaptive": (
        f'recipe = "dp-ftrl"\n{SMALL}{PRIVATE}clip_quantile = 0.5', "Correlated noise of one"
    ),
    "local, adaptive": (
        f'{SMALL}{PRIVATE}mechanism = "local"\nclip_quantile = 0.5', "Nobody but the device sees"
    ),
    "a rate alone": (f"{SMALL}{PRIVATE}clip_rate = 0.1", "privacy.clip_rate = 0.1 needs"),
    "local, asynchronous": (
        f'recipe = "fedbuff"\n{SMALL}{PRIVATE}mechanism = "local"',
        'round.participation = "asynchronous" with privacy.mechanism = "local"',
    ),
    "local, carried": (
        f'{SMALL}late = "carry"\n{PRIVATE}mechanism = "local"', 'round.late = "carry" with'
    ),
    "local, by examples": (
        f'{SMALL}weighting = "examples"\nmax_weight = 9\n{PRIVATE}mechanism = "local"',
        "devices do not tell how many examples",
    ),
    "an evaluation": (f"{SMALL}[evaluation]\nevery = 5\n{PRIVATE}", "evaluation.every = 5 with"),
    "a stop by evaluation": (
        f'{SMALL}{STOPS}measured_by = "evaluation"\n{PRIVATE}', "held-out data"
    ),
    "the best by evaluation": (
        f'{SMALL}[models]\nbest = 1\nmetric = "loss"\nmeasured_by = "evaluation"\n{PRIVATE}',
        "held-out data",
    ),
    "local, noised": (
        f'{SMALL}{PRIVATE}mechanism = "local"\n{NOISED}', "devices send nothing that they measure"
    ),
    "measured for nothing": (
        f"{SMALL}[local]\nevaluate = true\n{PRIVATE}", "would measure for nothing"
    ),
    "nothing measured": (
        f"{SMALL}[local]\nevaluate = false\n{PRIVATE}{NOISED}", "devices measure nothing"
    ),
    "noise of no metrics": (f"{SMALL}{PRIVATE}metrics_noise = 3.0", 'it is "none"'),
    "bounds of no metrics": (
        f"{SMALL}{PRIVATE}metrics_bounds = {{loss = [0, 1]}}", 'it is "none"'
    ),
    "a stop by the round": (
        f"{SMALL}{STOPS}{PRIVATE}", 'stop.metric = "accuracy" is measured by the devices'
    ),
    "a stop by what is not released": (
        f'{SMALL}{STOPS}{PRIVATE}metrics = "noised"\nmetrics_bounds = {{loss = [0, 5]}}',
        'stop.metric = "accuracy" is measured by the devices',
    ),
    "the best by the round": (
        f'{SMALL}[models]\nbest = 1\nmetric = "loss"\n{PRIVATE}',
        'models.metric = "loss" is measured by the devices',
    ),
    "noised without bounds": (f'{SMALL}{PRIVATE}metrics = "noised"', "needs privacy.metrics_bo"),
    "bounds the other way round": (
        f'{SMALL}{PRIVATE}metrics = "noised"\nmetrics_bounds = {{loss = [1, 0]}}',
        "privacy.metrics_bounds.loss = [1.0, 0.0]",
    ),
    "poisson, dp-ftrl": (
        f'recipe = "dp-ftrl"\n{SMALL}{PRIVATE}sampling = "poisson"', 'mechanism = "dp-ftrl": the'
    ),
    "poisson, asynchronous": (
        f'recipe = "fedbuff"\n{SMALL}{PRIVATE}sampling = "poisson"', '"asynchronous": the smaller'
    ),
    "poisson, carried": (
        f'{SMALL}late = "carry"\n{PRIVATE}sampling = "poisson"', 'round.late = "carry": the smaller'
    ),
    "poisson, apart": (
        f'{SMALL}{PRIVATE}sampling = "poisson"\nseparation = 2', "privacy.separation = 2: the small"
    ),
    "dp-ftrl for ever": (
        f'recipe = "dp-ftrl"\n{SMALL}[stop]\nrounds = 100001\n{PRIVATE}', "up to 100000"
    ),
    "fewer than a goal": (
        f"{SMALL}{PRIVATE.replace('1000', '3')}", "is less than round.goal = 4"
    ),
    "too long a separation": (
        f"{GOAL}{PRIVATE.replace('1000', '39')}separation = 10", "at most 9"
    ),
    "too few participations": (
        f"{GOAL}[stop]\nrounds = 20\n{PRIVATE.replace('1000', '39')}participations = 2",
        "need 80 participations, and privacy.population = 39 devices have 78",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_without_a_proof_is_refused_with_the_reason(name: str) -> None:
    text, said = BROKEN[name]
    with pytest.raises(PlanError) as refused:
        Plan.parse(text, Path("/base"), file="my.toml")
    assert said in refused.value.text


def test_each_rule_is_broken_by_a_plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no plan breaks could be wrong for ever."""
    monkeypatch.setattr("fleetlearn_coordinator.plan.plan.contradictions", lambda plan: ())
    plans = [Plan.parse(text, Path("/base")) for text, _ in BROKEN.values()]
    whole = Plan.parse(f"{SMALL}{PRIVATE}", Path("/base"))
    for rule in (*UPDATE_RULES, *METRIC_RULES, *RELEASE_RULES):
        assert not rule.breaks(whole)
        assert any(rule.breaks(plan) for plan in plans)


def test_without_privacy_no_rule_is_broken() -> None:
    assert not [*privacy_contradictions(Plan.parse(SMALL, Path("/base")))]


ALLOWED = {
    "fedavg": "",
    "fedprox": 'recipe = "fedprox"\n',
    "fedadam": 'recipe = "fedadam"\n',
    "fedavgm": 'recipe = "fedavgm"\n',
    "fedbuff": 'recipe = "fedbuff"\n',
    "ditto": 'recipe = "ditto"\n',
    "fedrep": 'recipe = "fedrep"\n',
    "moon": 'recipe = "moon"\n',
    "dp-fedavg": 'recipe = "dp-fedavg"\n',
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_has_a_proof_is_allowed(name: str) -> None:
    Plan.parse(f"{ALLOWED[name]}{SMALL}{PRIVATE}", Path("/base"))


@pytest.mark.parametrize(
    "rest",
    [
        f'late = "carry"\n{PRIVATE}',
        f"over_selection = 2.0\n{PRIVATE}",
        f"{PRIVATE}{NOISED}",
        f"{STOPS}{PRIVATE}{NOISED}",
        f'{STOPS}measured_by = "held-out"\n[evaluation]\ndata = "x.npz"\n{PRIVATE}',
        f'{PRIVATE}sampling = "poisson"',
        f"{PRIVATE.replace('1.0', '0.3')}clip_quantile = 0.5\nclip_rate = 0.1",
        f'{PRIVATE}mechanism = "local"',
        f'[encoding]\nup = "topk-0.01-int8"\n{PRIVATE}',
        f'weighting = "examples"\nmax_weight = 100\n{PRIVATE}',
        f'[selection]\nonce_in = 3\ntags = ["roof"]\n{PRIVATE}',
    ],
)
def test_what_else_is_allowed(rest: str) -> None:
    Plan.parse(f"{SMALL}{rest}", Path("/base")).check_against(SGD)


def test_values_that_travel_beside_the_update_are_refused() -> None:
    statistics = Parameter("norm.running_mean", (3,), 6, buffer=True)
    bundle = msgspec.structs.replace(SGD, parameters=(*SGD.parameters, statistics))
    Plan.parse(SMALL, Path("/base")).check_against(bundle)
    plan = Plan.parse(f"{SMALL}{PRIVATE}", Path("/base"))
    with pytest.raises(PlanError, match="GroupNorm or LayerNorm"):
        plan.check_against(bundle)
    kept = msgspec.structs.replace(statistics, personal=True)
    plan.check_against(msgspec.structs.replace(SGD, parameters=(*SGD.parameters, kept)))


def test_a_released_metric_is_one_that_the_bundle_measures() -> None:
    plan = Plan.parse(f"{SMALL}{PRIVATE}{NOISED.replace('accuracy', 'recall')}", Path("/base"))
    with pytest.raises(PlanError, match=r"metrics_bounds\.recall is not measured"):
        plan.check_against(SGD)


def test_a_delta_that_would_allow_showing_one_device_is_remarked() -> None:
    plan = Plan.parse(f"{SMALL}{PRIVATE.replace('1e-6', '1e-3')}", Path("/base"))
    (remark,) = plan.remarks(SGD)
    assert "privacy.delta = 0.001 is not below 1 / privacy.population = 0.001" in remark


def test_a_private_run_survives_a_power_cut_unless_the_plan_says_otherwise() -> None:
    assert Plan.parse(SMALL, Path("/base")).durable == "process"
    plan = Plan.parse(SMALL + PRIVATE, Path("/base"))
    assert (plan.durable, plan.remarks(SGD)) == ("power", [])
    plan = Plan.parse(f'durable = "process"\n{SMALL}{PRIVATE}', Path("/base"))
    (remark,) = plan.remarks(SGD)
    assert remark.startswith('durable = "process" with [privacy]: where the power fails, releases')


def test_rounds_that_cannot_be_full_are_remarked() -> None:
    text = f"{SMALL}minimum = 2\n[stop]\nrounds = 9\n{PRIVATE.replace('1000', '10')}separation = 3"
    (remark,) = Plan.parse(text, Path("/base")).remarks(SGD)
    assert "need 12 devices, and privacy.population is 10" in remark


def test_poisson_sampling_is_for_the_simulator_alone() -> None:
    plan = Plan.parse(f'{SMALL}{PRIVATE}sampling = "poisson"', Path("/base"))
    plan.check_service(ServiceSettings())
    with pytest.raises(PlanError, match="no coin of the coordinator decides who takes part"):
        plan.check_served(ServiceSettings())


@pytest.mark.parametrize("check", [Plan.check_privacy, lambda plan: plan.check_against(SGD)])
def test_a_budget_that_does_not_allow_one_release_is_refused(check: Callable[[Plan], None]) -> None:
    """Noise 1 and one participation cost 4.8866."""
    fits = Plan.parse(f"{SMALL}{PRIVATE}epsilon = 4.89", Path("/base"))
    check(fits)
    too_small = Plan.parse(f"{SMALL}{PRIVATE}epsilon = 4.88", Path("/base"), file="my.toml")
    with pytest.raises(PlanError, match=r"my\.toml: privacy\.epsilon = 4\.88 does not allow"):
        check(too_small)


def test_a_private_plan_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it does not: status and the like work without."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    plan = Plan.parse(f"{SMALL}{PRIVATE}", Path("/base"))
    with pytest.raises(PlanError, match="pip install"):
        plan.check_against(SGD)
    Plan.parse(SMALL, Path("/base")).check_against(SGD)


@pytest.mark.parametrize(("rounds", "separation", "told"), [(9, 1, True), (9, 2, False)])
def test_correlated_noise_that_gains_nothing_is_remarked(
    rounds: int, separation: int, told: bool
) -> None:
    text = f"{SMALL}[stop]\nrounds = {rounds}\n{PRIVATE}mechanism = 'dp-ftrl'\n"
    remarks = Plan.parse(f"{text}separation = {separation}", Path("/base")).remarks(SGD)
    assert any('the noise is the same as with "gaussian"' in each for each in remarks) == told
