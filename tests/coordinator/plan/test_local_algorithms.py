"""Algorithms of devices in a plan: what they need of the bundle and of each other."""

from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator import Plan, PlanError
from fleetlearn_protocol.manifest import Hyper, LocalStep, Parameter
from plans import SMALL, manifest

DEVICES = "[server]\ndevices = 9\n"
PLAIN = manifest()
WITH_BUFFERS = msgspec.structs.replace(
    PLAIN, parameters=(*PLAIN.parameters, Parameter("norm.running_mean", (3,), 6, buffer=True))
)


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/"))


def test_scaffold_s_recipe_asks_for_two_parts_and_sends_two_vectors() -> None:
    plan = parse(f'recipe = "scaffold"\n{SMALL}{DEVICES}')
    assert plan.parts(PLAIN) == {"update": "float32", "control": "float32"}
    assert plan.parts(WITH_BUFFERS) == {
        "update": "float32",
        "control": "float32",
        "buffers": "float32",
    }
    assert [aggregator.name for aggregator in plan.aggregators().values()] == ["mean", "mean"]
    assert plan.vectors == plan.algorithm.tied == ("control",)
    assert plan.round.weighting == "uniform"
    gradient = parse(
        f'recipe = "scaffold"\n{SMALL}[local]\nalgorithm = "scaffold-gradient"\n{DEVICES}'
    )
    assert gradient.parts(PLAIN) == plan.parts(PLAIN)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'recipe = "scaffold"\n{SMALL}', ["needs server.devices", "an estimate will do"]),
        (f"{SMALL}{DEVICES}", ["server.devices = 9 is for local.algorithm"]),
        (
            f'{SMALL}[local]\nalgorithm = "scafold"',
            ["'scafold' is not known", "did you mean scaffold?"],
        ),
        (
            f'{SMALL}[local]\nalgorithm = "feddyn"\n{DEVICES}',
            ['server.optimizer = "sgd"', 'recipe = "feddyn"'],
        ),
        (
            f'recipe = "feddyn"\n{SMALL}[server]\ndevices = 9\noptimizer = "adam"',
            ['server.optimizer = "adam"'],
        ),
        (
            f'recipe = "feddyn"\n{SMALL}[server]\ndevices = 9\nlr = 2.0',
            ["feddyn takes no hyper-parameter"],
        ),
        (
            f'recipe = "feddyn"\n{SMALL}weighting = "examples"\n{DEVICES}',
            ["count the same", 'round.weighting = "uniform"'],
        ),
        (
            f'recipe = "feddyn"\n{SMALL}late = "carry"\n{DEVICES}',
            ['round.late = "carry"', "needs synchronous rounds"],
        ),
        (
            f'recipe = "feddyn"\n{SMALL}participation = "asynchronous"\n{DEVICES}',
            ['round.participation = "asynchronous"', "needs synchronous rounds that discard late"],
        ),
        (
            f'recipe = "scaffold"\n{SMALL}{DEVICES}[aggregation]\naggregator = "median"',
            ["the aggregator median leaves some of them out", 'aggregation.aggregator = "mean"'],
        ),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    for word in words:
        assert word in caught.value.text


@pytest.mark.parametrize(
    ("recipe", "step", "words"),
    [
        (
            "scaffold",
            LocalStep("sgd"),
            ["recipe scaffold needs a step with a correction", "correction=True"],
        ),
        (
            "scaffold",
            LocalStep("adam", correction=True),
            ["recipe scaffold takes", "plain SGD", "its step is adam"],
        ),
        (
            "feddyn",
            LocalStep("sgd", correction=True),
            ["recipe feddyn needs a step with a proximal", "proximal=True"],
        ),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused(
    recipe: str, step: LocalStep, words: list[str]
) -> None:
    plan = parse(f'recipe = "{recipe}"\n{SMALL}[local]\nlr = 0.1\n{DEVICES}')
    with pytest.raises(PlanError) as caught:
        plan.check_against(manifest(step=step, hyper=(Hyper("lr"), Hyper("mu", 0.0))))
    for word in words:
        assert word in caught.value.text


def test_feddyn_s_mu_is_the_plan_s() -> None:
    step = LocalStep("sgd", proximal=True, correction=True)
    plan = parse(f'recipe = "feddyn"\n{SMALL}[local]\nlr = 0.1\nmu = 0.5\n{DEVICES}')
    made = manifest(step=step, hyper=(Hyper("lr"), Hyper("mu", 0.0)))
    assert plan.hyper(made) == {"lr": 0.1, "mu": 0.5}
    assert plan.remarks(msgspec.structs.replace(made)) == []
