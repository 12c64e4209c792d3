"""What [aggregation] takes: rules of weighing and the bound on norms, and each contradiction by
name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator.aggregation.robust.rules import RULES
from fleetlearn_coordinator.aggregation.weighing.norm_bound import NormBound
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_protocol.manifest import Hyper, LocalStep, Manifest
from line_bundle import write_line_bundle

SMALL = (
    'name = "a"\nbundle = "a.bundle"\n[local]\nlr = 0.5\n{local}\n[round]\ngoal = '
    "4\n{more}\n[aggregation]\n"
)


def parse(aggregation: str, recipe: str = "fedavg", more: str = "", local: str = "") -> Plan:
    text = f'recipe = "{recipe}"\n{SMALL.format(more=more, local=local)}{aggregation}'
    return Plan.parse(text, Path("/base"), file="my.toml")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    path = tmp_path_factory.mktemp("line") / "line.bundle"
    return write_line_bundle(path, references=["anchor"], optimizer="sgd").manifest


def with_step(manifest: Manifest, *hyper: Hyper, **step: object) -> Manifest:
    made = msgspec.structs.replace(manifest.step, **step)  # type: ignore[arg-type]
    return msgspec.structs.replace(manifest, step=made, hyper=(*manifest.hyper, *hyper))


def test_the_recipes_choose_their_rules(manifest: Manifest) -> None:
    for name, rule in (("fednova", "normalised"), ("q-fedavg", "fair")):
        found = parse("", name).weighing(manifest).rule
        assert found is not None
        assert found.name == rule
    assert parse("", "q-fedavg").round.weighting == "uniform"
    assert parse("").weighing(manifest).is_plain
    assert parse("normalise = false", "fednova").weighing(manifest).is_plain


def test_a_rule_s_numbers_are_the_plan_s(manifest: Manifest) -> None:
    """alpha = lr * mu = 0.5 * 0.4: two steps are 1 + 0.8."""
    rule = parse("", "fednova", local="mu = 0.4").weighing(manifest).rule
    assert rule is not None
    assert rule.factor(Reported(1, 2, 0.0), 1.0) == pytest.approx(1 / 1.8)
    momentum = with_step(manifest, Hyper("momentum", 0.9), optimizer="momentum")
    rule = parse("", "fednova").weighing(momentum).rule
    assert rule is not None
    assert rule.factor(Reported(1, 2, 0.0), 1.0) == pytest.approx(1 / 2.9)


def test_the_bound() -> None:
    assert parse("max_norm = 3.0").aggregation.norm_bound == NormBound(3.0, "clip", None, 0.2)
    full = 'max_norm = 3.0\nnorm_action = "refuse"\nnorm_quantile = 0.9\nnorm_rate = 0.1'
    assert parse(full).aggregation.norm_bound == NormBound(3.0, "refuse", 0.9, 0.1)
    assert parse("").aggregation.norm_bound is None
    for name in RULES:
        plan = parse("max_norm = 3.0", name, "minimum = 4")
        assert plan.aggregation.norm_bound is not None


@pytest.mark.parametrize(
    ("aggregation", "recipe", "local", "words"),
    [
        ('norm_action = "clip"', "fedavg", "", "norm_action = 'clip' needs aggregation.max_norm"),
        ("norm_quantile = 0.5", "fedavg", "", "norm_quantile = 0.5 needs aggregation.max_norm"),
        (
            "max_norm = 1.0\nnorm_rate = 0.5",
            "fedavg",
            "",
            "norm_rate = 0.5 needs aggregation.norm_quantile",
        ),
        ("max_norm = 0.0", "fedavg", "", "max_norm"),
        ("q = 1.0", "fednova", "", "it takes one of them"),
        ("q = 11.0", "fedavg", "", "q"),
        (
            "normalise = true",
            "median",
            "",
            "it needs aggregation.aggregator = \"mean\", not 'median'",
        ),
        ("q = 1.0", "krum", "", "aggregation.q weighs the updates of a mean"),
        ("", "q-fedavg", "evaluate = false", "needs local.evaluate = true"),
    ],
)
def test_contradictions_are_named(aggregation: str, recipe: str, local: str, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(aggregation, recipe, local=local)
    assert words in refused.value.text


def test_a_server_that_mixes_models_has_nothing_to_weigh() -> None:
    text = 'recipe = "fedasync"\nname = "a"\nbundle = "b"\n[aggregation]\nq = 1.0'
    with pytest.raises(
        PlanError, match=r"aggregation.q weighs .* server.mix = true has one at a time"
    ):
        Plan.parse(text, Path("/"))


@pytest.mark.parametrize(
    ("step", "local", "words"),
    [
        (
            {"optimizer": "adam"},
            "",
            "as with sgd, momentum, nesterov. Bundle line: its step is adam",
        ),
        ({"optimizer": "adamw"}, "", "its step is adamw"),
        ({"optimizer": "custom"}, "", "its step is custom"),
        ({}, "mu = 2.0", "needs lr * mu below 1, here with momentum 0; lr is 0.5 and mu 2"),
        (
            {"optimizer": "momentum"},
            "mu = 0.1",
            "needs lr * mu of at most 0.00263, here with momentum 0.9",
        ),
        ({"optimizer": "nesterov"}, "mu = 0.1", "needs lr * mu of at most 0.00277"),
        ({"clip": True}, "mu = 0.1", "needs a step that does not clip the gradient"),
        (
            {"optimizer": "momentum"},
            "[local.hyper]\nmomentum = 1.0",
            "needs a momentum of 0 to below 1; it is 1",
        ),
    ],
)
def test_a_step_that_fednova_cannot_normalise_is_refused(
    manifest: Manifest, step: dict[str, object], local: str, words: str
) -> None:
    hyper = [Hyper("momentum", 0.9)] if step.get("optimizer") in ("momentum", "nesterov") else []
    with pytest.raises(PlanError) as refused:
        parse("", "fednova", local=local).check_against(with_step(manifest, *hyper, **step))
    assert words in refused.value.text


def test_q_fedavg_needs_a_learning_rate(manifest: Manifest) -> None:
    plan = Plan.parse(
        'recipe = "q-fedavg"\nname = "a"\nbundle = "b"\n[round]\ngoal = 4',
        Path("/"),
        file="my.toml",
    )
    without = msgspec.structs.replace(manifest, hyper=(), step=LocalStep("custom"))
    with pytest.raises(PlanError, match="q = 1 needs a step with a learning rate lr"):
        plan.check_against(without)


SCAFFOLD = (
    'recipe = "scaffold"\nname = "a"\nbundle = "b"\n[round]\ngoal = 4\n[server]\ndevices = '
    "9\n[aggregation]\n"
)


@pytest.mark.parametrize(
    ("aggregation", "words"),
    [
        (
            "max_norm = 1.0",
            'so these must count whole. It takes aggregation.norm_action = "refuse"',
        ),
        (
            "normalise = true",
            "works with the mean of whole updates, without normalise, q or weighing",
        ),
        ("q = 1.0", "works with the mean of whole updates"),
    ],
)
def test_what_devices_keep_is_of_updates_that_count_whole(aggregation: str, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse(SCAFFOLD + aggregation, Path("/"))
    assert words in refused.value.text
    Plan.parse(SCAFFOLD + 'max_norm = 1.0\nnorm_action = "refuse"', Path("/"))


def test_an_adaptive_mu_needs_a_proximal_step_and_a_mu_of_its_own(manifest: Manifest) -> None:
    parse("", "fedprox-adaptive").check_against(manifest)
    plan = parse("", local="adaptive_mu = true")
    plan.check_against(manifest)
    assert plan.hyper(manifest)["mu"] == 0.0
    without = msgspec.structs.replace(manifest, step=LocalStep("sgd"), references=())
    with pytest.raises(PlanError, match=r"adaptive_mu = true needs a step with a proximal term"):
        plan.check_against(without)
    with pytest.raises(PlanError, match=r"normalise = true needs it to stay"):
        parse("normalise = true", "fedprox-adaptive")
    with pytest.raises(PlanError, match='mu of "ditto" is another number'):
        parse("", "ditto", local="adaptive_mu = true")
