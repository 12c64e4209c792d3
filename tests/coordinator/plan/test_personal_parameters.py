"""Which bundles the recipes with personal parameters and models take, and what is said of the
others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator import Plan, PlanError
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.personal_parameters import personal_misfit
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_protocol.manifest import Hyper, LocalStep, Manifest, Parameter, State
from plans import SMALL
from plans import manifest as fitting

ROWS = ("body.weight", "norm.weight", "norm.running_mean", "head.weight")
NORMS = ROWS[1:3]


def bundle(*personal: str, norms: tuple[str, ...] = NORMS, **others: Any) -> Manifest:
    fields = {"step": LocalStep(), **others}
    return Manifest(
        format="fleetlearn.bundle",
        version=1,
        name="digits",
        parameters=tuple(
            Parameter(name, (), row, personal=name in personal) for row, name in enumerate(ROWS)
        ),
        batch=(),
        outputs=(),
        hyper=(),
        metrics=(),
        files={},
        normalisation=norms or msgspec.UNSET,
        **fields,
    )


def said_of(recipe: str, manifest: Manifest) -> str | None:
    found = RECIPES[recipe]
    personal = found.personal or ALGORITHMS[found.local["algorithm"]].personal
    return personal_misfit(f"recipe {recipe}", personal, manifest)


@pytest.mark.parametrize(
    ("recipe", "manifest"),
    [
        ("fedavg", bundle()),
        ("fedavg", bundle("head.weight")),
        ("fedper", bundle("head.weight")),
        ("fedper", bundle(*NORMS)),
        ("fedbn", bundle(*NORMS)),
        ("fedrep", bundle("head.weight", step=LocalStep("momentum"))),
        (
            "ditto",
            bundle(
                step=LocalStep(proximal=True), references=("anchor",), state=(State("t", (), 0),)
            ),
        ),
    ],
)
def test_bundles_that_fit(recipe: str, manifest: Manifest) -> None:
    assert said_of(recipe, manifest) is None


NONE = (
    "needs personal parameters, which stay on the devices, and bundle digits has none. Export it "
    'with export_bundle(..., personal=["head"]), where "head" is the name of the model\'s last '
    "layer"
)
NORMALISATION = 'Export it with export_bundle(..., personal="normalisation") for recipe fedbn'
IN_TURNS = (
    "recipe fedrep freezes the personal parameters and the others in turns, and the step of bundle "
    "digits"
)
WHOLE = "recipe ditto has a whole model for each device, and of bundle digits devices keep"
WITHOUT = (
    "besides. Export it without personal= and kept=, and with a step that does not read the "
    "previous model"
)


@pytest.mark.parametrize(
    ("recipe", "manifest", "said"),
    [
        ("fedper", bundle(), f"recipe fedper {NONE}"),
        ("fedrep", bundle(), f"recipe fedrep {NONE}"),
        (
            "fedbn",
            bundle("head.weight", norms=()),
            "recipe fedbn keeps normalisation layers on the devices, and the manifest of bundle "
            "digits names none: the model has none of PyTorch's, or an earlier version exported "
            f"it. {NORMALISATION}",
        ),
        (
            "fedbn",
            bundle(*NORMS, "head.weight"),
            "recipe fedbn keeps normalisation layers alone on the devices, and in bundle digits "
            f"the parameter head.weight, of another layer, is personal too. {NORMALISATION}, or "
            'set recipe = "fedper", which takes any personal parameters',
        ),
        (
            "fedbn",
            bundle("norm.weight"),
            "recipe fedbn keeps all normalisation layers on the devices, and in bundle digits the "
            f"parameter norm.running_mean of such a layer travels. {NORMALISATION}",
        ),
        (
            "fedrep",
            bundle("head.weight", step=LocalStep(clip=True)),
            f"{IN_TURNS} clips the gradient of all parameters together, so that frozen ones would "
            "change how the others move. Export it without clip=True",
        ),
        (
            "fedrep",
            bundle("head.weight", step=LocalStep(contrastive=True)),
            f"{IN_TURNS} compares with the previous model, which has one phase and not two. Export "
            "it without contrastive=True",
        ),
        ("ditto", bundle("head.weight"), f"{WHOLE} the personal parameter head.weight {WITHOUT}"),
        ("ditto", bundle(state=(State("t", (), 0, kept=True),)), f"{WHOLE} the state t {WITHOUT}"),
        ("ditto", bundle(references=("previous",)), f"{WHOLE} the previous model {WITHOUT}"),
    ],
)
def test_bundles_that_do_not_fit_are_refused_with_what_to_export(
    recipe: str, manifest: Manifest, said: str
) -> None:
    assert said_of(recipe, manifest) == said


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/base"), file="my.toml")


LR = "[local]\nlr = 0.1\n"


def test_a_plan_names_the_recipe_or_the_algorithm_that_does_not_fit() -> None:
    for text, name in (
        (f'recipe = "fedper"\n{SMALL}{LR}mu = 0', "recipe fedper"),
        (f'recipe = "fedrep"\n{SMALL}{LR}mu = 0', "recipe fedrep"),
        (f'{SMALL}{LR}mu = 0\nalgorithm = "fedrep"', 'local.algorithm = "fedrep"'),
    ):
        with pytest.raises(PlanError) as refused:
            parse(text).check_against(fitting())
        assert refused.value.text.startswith(f"my.toml: {name} needs personal parameters")


def test_ditto_s_lambda_is_local_mu() -> None:
    plan = parse(f'recipe = "ditto"\n{SMALL}{LR}mu = 0.5')
    plan.check_against(fitting())
    assert (plan.local.algorithm, plan.local.personal_epochs, plan.parts(bundle())) == (
        "ditto",
        None,
        {"update": "float32"},
    )
    assert plan.hyper(fitting()) == {"lr": 0.1, "mu": 0.5}
    with pytest.raises(PlanError, match=r"local\.mu is missing"):
        parse(f'recipe = "ditto"\n{SMALL}{LR}').check_against(fitting())
    with pytest.raises(
        PlanError, match=r"recipe ditto needs a step with a proximal term \(export it with proximal"
    ):
        parse(f'recipe = "ditto"\n{SMALL}{LR}').check_against(fitting(proximal=False))


def test_ditto_s_lambda_does_not_count_where_updates_are_normalised() -> None:
    """FedNova divides by what the steps' gradients count in the update, which is trained without
    lambda."""
    nova = f'recipe = "fednova"\n{SMALL}{LR}mu = 10.0\n'
    with pytest.raises(PlanError, match=r"needs lr \* mu below 1"):
        parse(nova).weighing(fitting())
    assert parse(f'{nova}algorithm = "ditto"').weighing(fitting()).rule is not None


def test_passes_of_its_own() -> None:
    assert parse(f'recipe = "fedrep"\n{SMALL}').local.personal_epochs == 10
    assert (
        parse(f'recipe = "fedrep"\n{SMALL}[local]\npersonal_epochs = 3').local.personal_epochs == 3
    )
    other = parse(f'recipe = "fedrep"\n{SMALL}[local]\nalgorithm = "ditto"')
    assert other.local.personal_epochs is None, "the recipe's default is its own algorithm's"
    with pytest.raises(PlanError) as refused:
        parse(f"{SMALL}[local]\npersonal_epochs = 3")
    assert refused.value.text == (
        'my.toml: local.personal_epochs = 3 is for local.algorithm = "fedrep" and "ditto"; here it '
        'is "plain"'
    )


def test_a_run_may_stop_by_the_personal_models_metric() -> None:
    """As the devices of each round measure it, and where they have such models."""
    stop = '[stop]\nmetric = "personal.{}"\ntarget = 0.5\n'
    plan = parse(f'recipe = "ditto"\n{SMALL}{LR}mu = 1\n{stop.format("loss")}')
    plan.check_against(fitting())
    assert (plan.stop.direction, plan.bounds) == ("below", {"personal.loss": (0.0, float("inf"))})
    parse(f'recipe = "ditto"\n{SMALL}{LR}mu = 1\n{stop.format("accuracy")}').check_against(
        fitting()
    )
    for text in (
        f"{SMALL}{LR}mu = 1\n{stop.format('loss')}",
        f'recipe = "ditto"\n{SMALL}{LR}mu = 1\n{stop.format("loss")}measured_by = "evaluation"\n'
        "[evaluation]\nevery = 1",
    ):
        with pytest.raises(PlanError, match=r'stop\.metric = "personal\.loss" is not measured'):
            parse(text).check_against(fitting())


MOVES = f'recipe = "pfedme"\n{SMALL}{LR}mu = 2.0\n[local.hyper]\nouter_lr = {{}}\n{{}}'


def test_pfedme_s_and_apfl_s_numbers_are_keys_of_local_hyper() -> None:
    plan = parse(MOVES.format(0.5, ""))
    plan.check_against(fitting())
    assert plan.hyper(fitting()) == {"lr": 0.1, "mu": 2.0, "inner_steps": 5.0, "outer_lr": 0.5}
    assert plan.round.weighting == "uniform"
    sgd = fitting(hyper=(Hyper("lr"),), proximal=False)
    apfl = parse(f'recipe = "apfl"\n{SMALL}{LR}')
    apfl.check_against(sgd)
    assert apfl.hyper(sgd) == {"lr": 0.1, "alpha": 0.5, "adapt_alpha": 0.0}
    # in a bundle with a term that APFL does not use, its weight is 0
    assert apfl.hyper(fitting())["mu"] == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f'recipe = "pfedme"\n{SMALL}{LR}mu = 2.0',
            "local.hyper.outer_lr is missing: recipe pfedme needs it, a number from 1e-6 to 1e6.",
        ),
        (
            MOVES.format(0.75, ""),
            "local.hyper.outer_lr = 0.75 and local.mu = 2: the local model would go beyond the "
            "personal one. Their product must be at most 1, so outer_lr at most 0.5.",
        ),
        (
            MOVES.format(0.5, "inner_steps = 2.5"),
            "local.hyper.inner_steps = 2.5; expected a whole number from 1 to 10000.",
        ),
        (MOVES.format(0.5, "alpha = 1"), "local.hyper.alpha = 1.0 is not a value that the step"),
        (
            f'recipe = "apfl"\n{SMALL}{LR}[local.hyper]\nalpha = 1.5',
            "local.hyper.alpha = 1.5; expected a number from 0 to 1.",
        ),
        (
            MOVES.format(0.5, "[aggregation]\nnormalise = true"),
            'local.algorithm = "pfedme": an update is no sum of gradients, as '
            "aggregation.normalise, aggregation.q and aggregation.weighing take it. It needs none",
        ),
    ],
)
def test_numbers_of_pfedme_and_apfl_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(text).check_against(fitting())
    assert said in refused.value.text


def test_a_step_with_a_number_of_an_algorithm_s_name_is_refused() -> None:
    own = fitting(hyper=(Hyper("lr"), Hyper("alpha", 0.1)), proximal=False)
    with pytest.raises(PlanError, match="recipe apfl has a value alpha of its own, and so has"):
        parse(f'recipe = "apfl"\n{SMALL}{LR}').check_against(own)


def test_apfl_needs_plain_gradient_descent() -> None:
    plain = fitting(hyper=(Hyper("lr"),), proximal=False)
    momentum = msgspec.structs.replace(plain, step=LocalStep("momentum"))
    with pytest.raises(PlanError, match="recipe apfl takes a model's change for a sum of gradi"):
        parse(f'recipe = "apfl"\n{SMALL}{LR}').check_against(momentum)
