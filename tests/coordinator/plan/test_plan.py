"""The plan: what it reads, what it fills in, and what it says about each mistake."""

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bottom_manifest import bottom_manifest
from fleetlearn_coordinator.aggregation.optimizers import make
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_coordinator.plan.sections import OPTIONAL, SECTIONS
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.rounds.settings import PaceSettings
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.manifest import (
    Hyper,
    LocalStep,
    Manifest,
)
from plans import PRIVATE, SMALL, manifest

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan.toml"


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/base"), file="my.toml")


def refusal(text: str) -> str:
    with pytest.raises(PlanError) as refused:
        parse(text)
    assert refused.value.code is Code.BAD_MESSAGE
    assert refused.value.text.startswith("my.toml: ")
    return refused.value.text


def test_the_example_has_every_key_and_fits_a_proximal_bundle() -> None:
    plan = Plan.load(EXAMPLE)
    folder = EXAMPLE.parent
    assert (plan.name, plan.recipe, plan.seed, plan.file) == ("digits", "fedprox", 7, str(EXAMPLE))
    assert (plan.bundle, plan.data_dir) == (folder / "digits.bundle", folder / "digits.run")
    assert (plan.local.epochs, plan.local.batch_size, plan.local.time_budget) == (2, 20, 60.0)
    assert (plan.round.goal, plan.round.cohort, plan.round.minimum, plan.round.deadline) == (
        8,
        11,
        4,
        120.0,
    )
    assert plan.server.hyper == {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 0.001}
    assert plan.optimizer(manifest()).name == "adam"
    assert (plan.stop.rounds, plan.stop.metric, plan.stop.target, plan.stop.epsilon) == (
        30,
        "accuracy",
        0.99,
        1e-6,
    )
    assert plan.hyper(manifest()) == {"lr": 0.1, "mu": 0.01}
    plan.check_against(manifest())

    text = EXAMPLE.read_text("utf-8")
    for section in SECTIONS.values():
        for key in section.__struct_fields__:
            assert re.search(
                rf"^(# )?\[?(local\.|selection\.|regions\.)?{key}\b", text, re.MULTILINE
            ), f"{key} is not in the example"


def test_the_defaults_that_the_example_states_are_the_defaults() -> None:
    stated = {
        match["key"]: match["default"]
        for match in re.finditer(
            r"^(?P<key>\w+) = .*#.*\bdefault (?P<default>[\d.]+|true|power|process)\b",
            EXAMPLE.read_text("utf-8"),
            re.MULTILINE,
        )
    }
    plan = parse(SMALL)
    values: dict[str, Any] = msgspec.structs.asdict(plan)
    for section in SECTIONS.keys() - OPTIONAL:
        values |= msgspec.structs.asdict(values[section])
    assert len(stated) >= 9
    for key, default in stated.items():
        assert str(values[key]).lower().removesuffix(".0") == default, key


def test_the_smallest_plan_is_fedavg() -> None:
    plan = parse(SMALL)
    assert (plan.recipe, plan.seed, plan.bundle, plan.data_dir) == (
        "fedavg",
        0,
        Path("/base/a.bundle"),
        Path("/base/a.run"),
    )
    assert (plan.local.epochs, plan.local.batch_size, plan.local.lr, plan.local.mu) == (
        1,
        20,
        None,
        None,
    )
    assert (plan.round.cohort, plan.round.minimum) == (6, 2)
    assert plan.server.hyper == {"lr": 1.0}
    assert (plan.stop.rounds, plan.stop.metric, plan.stop.epsilon) == (100, None, None)


def test_paths_may_be_absolute_or_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    plan = parse('name = "a"\nbundle = "/models/a.bundle"\ndata_dir = "~/runs"\n[round]\ngoal = 1')
    assert (plan.bundle, plan.data_dir) == (Path("/models/a.bundle"), Path("/home/me/runs"))


def test_a_path_in_a_home_folder_that_is_not_known_is_refused_with_the_cause() -> None:
    said = refusal('name = "a"\nbundle = "~no-such-user/a.bundle"\n[round]\ngoal = 1')
    assert (
        "bundle = '~no-such-user/a.bundle' is refused: the path ~no-such-user/a.bundle begins with "
        "~no-such-user"
    ) in said
    assert "write the whole path" in said


def test_a_relative_plan_file_gives_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    assert Plan.load("p.toml").bundle == tmp_path / "a.bundle"


@pytest.mark.parametrize(
    ("goal", "over_selection", "cohort"),
    [(100, "1.1", 110), (10, "1.3", 13), (3, "1.0", 3), (7, "1.3", 10), (1, "1.0001", 2)],
)
def test_the_cohort_is_rounded_up_from_the_number_as_written(
    goal: int, over_selection: str, cohort: int
) -> None:
    plan = parse(
        f'name = "a"\nbundle = "b"\n[round]\ngoal = {goal}\nover_selection = {over_selection}'
    )
    assert plan.round.cohort == cohort


@pytest.mark.parametrize(("goal", "minimum"), [(1, 1), (2, 1), (3, 2), (9, 5), (10, 5)])
def test_half_of_the_goal_is_the_least(goal: int, minimum: int) -> None:
    assert parse(f'name = "a"\nbundle = "b"\n[round]\ngoal = {goal}').round.minimum == minimum


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_fills_in_the_plan(name: str) -> None:
    recipe = RECIPES[name]
    text = f'recipe = "{name}"\nname = "a"\nbundle = "a.bundle"' + "\n[round]\ngoal = 4" * (
        "goal" not in recipe.round
    )
    if recipe.mechanism is not None:
        text += f"\n{PRIVATE}"
    if recipe.distils:
        text += '\n[distil]\ndata = "d.npz"\nbundle = "d.bundle"'
    if recipe.clusters:
        text += "\n[clusters]\ncount = 2"
    plan = parse(
        text + "\n[server]\ndevices = 9" * ALGORITHMS[recipe.local["algorithm"]].counts_devices
    )
    assert {key: getattr(plan.round, key) for key in recipe.round} == recipe.round
    assert {key: getattr(plan.server, key) for key in recipe.server} == recipe.server
    assert {key: getattr(plan.local, key) for key in recipe.local} == recipe.local
    assert plan.optimizer(manifest()).name == recipe.server["optimizer"]
    assert {key: getattr(plan.aggregation, key) for key in recipe.aggregation} == recipe.aggregation
    assert plan.aggregator().name == recipe.aggregation["aggregator"]


def test_the_server_section_overrides_the_recipe() -> None:
    plan = parse(f'recipe = "fedadam"\n{SMALL}[server]\nlr = 0.5')
    assert (plan.server.optimizer, plan.server.hyper) == (
        "adam",
        {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    )
    plan = parse(f'recipe = "fedadam"\n{SMALL}[server]\noptimizer = "momentum"\nmomentum = 0.5')
    assert (plan.server.optimizer, plan.server.hyper) == ("momentum", {"lr": 1.0, "momentum": 0.5})


def test_the_optimizer_has_the_plans_values() -> None:
    params, delta = np.zeros(3, np.float32), np.array([1.0, -2.0, 3.0])
    plan = parse(f'{SMALL}[server]\noptimizer = "yogi"\nlr = 0.25\ntau = 0.5\nbeta1 = 0.5')
    ours, reference = (
        plan.optimizer(manifest()),
        make("yogi", lr=0.25, tau=0.5, beta1=0.5, beta2=0.99),
    )
    moved, expected = (
        ours.apply(ours.init(params), delta, params),
        reference.apply(reference.init(params), delta, params),
    )
    assert np.array_equal(moved[1], expected[1])


@pytest.mark.parametrize(
    ("stop", "bounds"),
    [
        ('metric = "accuracy"\ntarget = 0.9', {"accuracy": (-math.inf, 1.0)}),
        ('metric = "loss"\ntarget = 0.1', {"loss": (0.0, math.inf)}),
        ('metric = "psnr"\ntarget = 30\nbounds = [0, 100]', {"psnr": (0.0, 100.0)}),
        ('metric = "loss"\ntarget = -3.0\nbounds = [-50, 50.0]', {"loss": (-50.0, 50.0)}),
        ("rounds = 3", {}),
    ],
)
def test_what_the_metric_that_stops_can_be(
    stop: str, bounds: dict[str, tuple[float, float]]
) -> None:
    """By default no single device's metric can stop the run."""
    assert parse(f"{SMALL}[stop]\n{stop}").bounds == bounds


@pytest.mark.parametrize(("metric", "direction"), [("loss", "below"), ("accuracy", "above")])
def test_a_target_has_a_direction(metric: str, direction: str) -> None:
    assert parse(f'{SMALL}[stop]\nmetric = "{metric}"\ntarget = 0.5').stop.direction == direction
    given = parse(f'{SMALL}[stop]\nmetric = "{metric}"\ntarget = 0.5\ndirection = "above"')
    assert given.stop.direction == "above"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name = ", ["this is not TOML", "Invalid value"]),
        ("name = " + "[" * 5000, ["this is not TOML"]),
        ("port = 1\n[tls]\nkey = 'a'", ["this is a service file, and a plan is expected here"]),
        (
            'name = "a"\nbundle = "b"\nrecipe = "krum"\nround.goal = 2147483647',
            ["round.goal", "at most"],
        ),
        ('bundle = "b"\n[round]\ngoal = 1', ["name is missing"]),
        ('name = "a"\n[round]\ngoal = 1', ["bundle is missing"]),
        ('name = "a"\nbundle = "b"', ["round.goal is missing"]),
        ('name = "a/b"\nbundle = "b"\n[round]\ngoal = 1', ["name = 'a/b'", "matching"]),
        ('name = "a"\nbundle = 3\n[round]\ngoal = 1', ["bundle = 3", "it takes a path"]),
        ('name = "a"\nbundle = ""\n[round]\ngoal = 1', ["bundle = ''", "it takes a path"]),
        (
            f"sed = 3\n{SMALL}",
            ["sed is not a key", "did you mean seed?", "Allowed here: name, bundle, recipe"],
        ),
        (
            f"{SMALL}gaol = 3",
            [
                "round.gaol is not a key",
                "did you mean round.goal?",
                "Allowed here: goal, goal_share",
            ],
        ),
        (f"{SMALL}zzz = 3", ["round.zzz is not a key of a plan. Allowed here: goal"]),
        (
            f"lr = 0.1\n{SMALL}",
            ["lr is not a key", "did you mean local.lr or server.lr or distil.lr?"],
        ),
        (f"{SMALL}epochs = 2", ["round.epochs is not a key", "did you mean local.epochs?"]),
        (f'file = "x"\n{SMALL}', ["file is not a key"]),
        (f"{SMALL}[rounds]\ngoal = 1", ["rounds is not a key", "stop.rounds"]),
        (
            f'recipe = "fedprix"\n{SMALL}',
            ["recipe = 'fedprix'", "did you mean fedprox or fedper?", *RECIPES],
        ),
        (f"recipe = 5\n{SMALL}", ["recipe = 5", *RECIPES]),
        (f"recipe = []\n{SMALL}", ["recipe = []"]),
        (f"{SMALL}[server]\noptimizer = []", ["server.optimizer = []"]),
        (f"seed = -1\n{SMALL}", ["seed = -1", "it takes an integer, at least 0 and at most"]),
        (
            'round = 5\nname = "a"\nbundle = "b"',
            ["round = 5", "it takes a table of goal, goal_share"],
        ),
        (f"local = 5\n{SMALL}", ["local = 5"]),
        (f"server = 5\n{SMALL}", ["server = 5"]),
        (f"stop = 5\n{SMALL}", ["stop = 5"]),
        (
            f"service = 5\n{SMALL}",
            ["no table [service] any more", "--service SERVICE.toml", "durable"],
        ),
        (
            f"{SMALL}[service]\nport = 1",
            ["no table [service] any more", "--service SERVICE.toml", "durable"],
        ),
        (f'durable = "disk"\n{SMALL}', ["durable = 'disk'", '"process"', '"power"']),
        (
            'name = "a"\nbundle = "b"\n[round]\ngoal = 0',
            ["round.goal = 0", "at least 1 and at most 131072"],
        ),
        (
            'name = "a"\nbundle = "b"\n[round]\ngoal = "4"',
            ["round.goal = '4'", "an integer, at least 1 and at most 131072"],
        ),
        (
            'name = "a"\nbundle = "b"\n[round]\ngoal = 200000',
            ["round.goal = 200000", "at most 131072"],
        ),
        (
            'name = "a"\nbundle = "b"\n[round]\ngoal = true',
            ["round.goal = True", "it takes an integer"],
        ),
        (f"{SMALL}minimum = 5", ["round.minimum = 5", "round.goal = 4"]),
        (f"{SMALL}minimum = 0", ["round.minimum = 0", "at least 1"]),
        (
            f"{SMALL}over_selection = 0.9",
            ["round.over_selection = 0.9", "a number, at least 1 and at most 100"],
        ),
        (f"{SMALL}over_selection = nan", ["round.over_selection = nan"]),
        (f"{SMALL}deadline = inf", ["round.deadline = inf"]),
        (f"{SMALL}deadline = 0", ["round.deadline = 0"]),
        (f"{SMALL}max_weight = 1073741824", ["round.max_weight = 1073741824", "at most 536870911"]),
        (
            'name = "a"\nbundle = "b"\n[round]\ngoal = 131072',
            ["a cohort of 170394", "the limit is 131072"],
        ),
        (f"{SMALL}[local]\nepochs = 0", ["local.epochs = 0", "at least 1"]),
        (f"{SMALL}[local]\nbatch_size = -1", ["local.batch_size = -1", "at least 0"]),
        (f"{SMALL}[local]\nlr = 0", ["local.lr = 0", "a number, above 0"]),
        (f"{SMALL}[local]\nmu = -0.1", ["local.mu = -0.1", "at least 0"]),
        (
            f"{SMALL}[local]\ntime_budget = 700",
            ["local.time_budget = 700.0 s", "round.deadline = 600.0 s"],
        ),
        (f"{SMALL}[local.hyper]\nlr = 0.1", ["local.hyper.lr has its own key: local.lr"]),
        (
            f'{SMALL}[local.hyper]\nalpha = "x"',
            ["local.hyper.alpha = 'x' is refused: it takes a number"],
        ),
        (f'{SMALL}[local.hyper]\n"a b" = 1', ["local.hyper", "'a b': 1", "matching"]),
        (
            f'recipe = "fedsgd"\n{SMALL}[local]\nepochs = 2',
            ["local.epochs = 2", "recipe fedsgd", 'recipe = "fedavg"'],
        ),
        (
            f'recipe = "fedsgd"\n{SMALL}[local]\nbatch_size = 8',
            ["local.batch_size = 8", "recipe fedsgd"],
        ),
        (
            f'{SMALL}[server]\noptimizer = "adamw"',
            ["server.optimizer = 'adamw'", "did you mean adam?", "yogi"],
        ),
        (f"{SMALL}[server]\noptimizer = 5", ["server.optimizer = 5"]),
        (
            f'{SMALL}[server]\noptimizer = "adam"\nmomentum = 0.9',
            ["server.momentum = 0.9", "adam takes lr, beta1, beta2, tau"],
        ),
        (f"{SMALL}[server]\ntau = 0.1", ["server.tau = 0.1", "sgd takes lr"]),
        (f"{SMALL}[server]\nlr = -1", ["server.lr = -1", "above 0"]),
        (f'{SMALL}[server]\noptimizer = "adam"\nbeta1 = 1.0', ["server.beta1 = 1.0", "below 1"]),
        (f'{SMALL}[server]\noptimizer = "adam"\ntau = 0', ["server.tau = 0", "at least 1e-12"]),
        (f"{SMALL}[stop]\nrounds = 0", ["stop.rounds = 0", "at least 1"]),
        (f"{SMALL}[stop]\ntarget = 0.9", ["stop.target = 0.9 needs stop.metric"]),
        (f'{SMALL}[stop]\nmetric = "loss"', ['stop.metric = "loss" needs stop.target']),
        (
            f'{SMALL}[stop]\nmetric = "psnr"\ntarget = 30',
            ["stop.target = 30.0 needs stop.bounds = [least, greatest]"],
        ),
        (f'{SMALL}[stop]\nmetric = "loss"\ntarget = -1', ["stop.target = -1.0 needs stop.bounds"]),
        (
            f'{SMALL}[stop]\nmetric = "psnr"\ntarget = 30\nbounds = [0, 10]',
            [
                (
                    "stop.bounds = [0.0, 10.0] takes the least and the greatest value, with the "
                    "target between"
                )
            ],
        ),
        (
            f'{SMALL}[stop]\nmetric = "psnr"\ntarget = 30\nbounds = [90, 10]',
            ["stop.bounds = [90.0, 10.0]"],
        ),
        (f'{SMALL}[stop]\nmetric = "psnr"\ntarget = 30\nbounds = [0]', ["stop.bounds = [0]"]),
        (f"{SMALL}[stop]\nbounds = [0, 1]", ["stop.bounds = [0.0, 1.0] needs stop.metric"]),
        (f"{SMALL}[stop]\nepsilon = 0", ["stop.epsilon = 0", "above 0"]),
        (f"{SMALL}[stop]\npatience = 3", ["stop.patience = 3 needs stop.metric"]),
        (f'{SMALL}[stop]\nmetric = "loss"\npatience = 0', ["stop.patience = 0", "at least 1"]),
        (
            f'{SMALL}[stop]\nmetric = "loss"\ntarget = 1\nleast = 0.1',
            ["stop.least = 0.1 needs stop.patience"],
        ),
        (
            f'{SMALL}[stop]\nmetric = "loss"\npatience = 3\nleast = -1',
            ["stop.least = -1", "at least 0"],
        ),
        (
            f'{SMALL}[stop]\nmetric = "psnr"\npatience = 3',
            ["stop.patience = 3 needs stop.bounds = [least, greatest], what psnr can be"],
        ),
        (
            f'{SMALL}[stop]\nmetric = "psnr"\npatience = 3\nbounds = [90, 10]',
            ["stop.bounds = [90.0, 10.0]"],
        ),
        (
            f'{SMALL}[stop]\nmetric = "loss"\ntarget = 1\n[local]\nevaluate = false',
            ["stop.metric", "local.evaluate = true"],
        ),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(text: str, expected: list[str]) -> None:
    said = refusal(text)
    for part in expected:
        assert part in said


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(PlanError, match=re.escape(f"{path}: the plan cannot be read")):
            Plan.load(path)
    (tmp_path / "latin.toml").write_bytes('name = "\xe9"'.encode("latin-1"))
    with pytest.raises(
        PlanError,
        match=r"~no-such-user/a\.toml: the plan cannot be read: .* no home folder is known for it",
    ):
        Plan.load("~no-such-user/a.toml")
    with pytest.raises(PlanError, match=r"latin\.toml: the plan cannot be read"):
        Plan.load(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "bundle", "expected"),
    [
        (
            f'recipe = "fedprox"\n{SMALL}[local]\nlr = 0.1\nmu = 0.2',
            manifest(),
            {"lr": 0.1, "mu": 0.2},
        ),
        (f"{SMALL}[local]\nlr = 0.1", manifest(), {"lr": 0.1, "mu": 0.0}),
        (
            f"{SMALL}[local]\nlr = 0.1",
            manifest(hyper=(Hyper("lr"), Hyper("mu", 0.3))),
            {"lr": 0.1, "mu": 0.0},
        ),
        (
            f'recipe = "fedadam"\n{SMALL}[local]\nlr = 0.1\nmu = 0.2',
            manifest(),
            {"lr": 0.1, "mu": 0.2},
        ),
        (
            f'recipe = "fedprox"\n{SMALL}',
            manifest(hyper=(Hyper("lr", 0.5), Hyper("mu", 0.3))),
            {"lr": 0.5, "mu": 0.3},
        ),
        (
            f"{SMALL}[local.hyper]\nalpha = 2",
            manifest(proximal=False, hyper=(Hyper("lr", 0.5), Hyper("alpha", 1.0))),
            {"lr": 0.5, "alpha": 2.0},
        ),
    ],
)
def test_the_steps_values_come_from_the_plan_then_the_bundle(
    text: str, bundle: Manifest, expected: dict[str, float]
) -> None:
    plan = parse(text)
    assert plan.hyper(bundle) == expected
    plan.check_against(bundle)


MOON = manifest(
    step=LocalStep("momentum", contrastive=True),
    hyper=(Hyper("lr"), Hyper("momentum", 0.9), Hyper("mu"), Hyper("temperature", 0.5)),
)
SCAFFOLD = manifest(step=LocalStep("sgd", correction=True), hyper=(Hyper("lr"),))
DEVICES = "\n[server]\ndevices = 9"
ZERO_MU = (Hyper("lr"), Hyper("mu", 0.0))
OWN = manifest(step=LocalStep("custom"), hyper=(Hyper("rate", 0.25), Hyper("mu", 2.0)))


@pytest.mark.parametrize(
    ("text", "bundle", "expected"),
    [
        (
            f'recipe = "moon"\n{SMALL}[local]\nlr = 0.1\nmu = 5\n[local.hyper]\ntemperature = 1',
            MOON,
            {"lr": 0.1, "momentum": 0.9, "mu": 5.0, "temperature": 1.0},
        ),
        (
            f"{SMALL}[local]\nlr = 0.1",
            MOON,
            {"lr": 0.1, "momentum": 0.9, "mu": 0.0, "temperature": 0.5},
        ),
        (f"{SMALL}[local]\nlr = 0.1", SCAFFOLD, {"lr": 0.1}),
        (SMALL, OWN, {"rate": 0.25, "mu": 2.0}),  # a step of one's own means by mu what it likes
        (f"{SMALL}[local]\nmu = 1\n[local.hyper]\nrate = 0.5", OWN, {"rate": 0.5, "mu": 1.0}),
    ],
)
def test_any_step_s_values_can_be_given(
    text: str, bundle: Manifest, expected: dict[str, float]
) -> None:
    plan = parse(text)
    plan.check_against(bundle)
    assert plan.hyper(bundle) == expected


def test_a_mu_of_0_that_is_meant_is_said() -> None:
    """FedProx with mu 0 is FedAvg bit for bit. The adaptive mu may begin at 0."""
    bundle = manifest(hyper=ZERO_MU)
    plan = parse(f'recipe = "fedprox"\n{SMALL}[local]\nlr = 0.1\nmu = 0')
    assert plan.hyper(bundle)["mu"] == 0.0
    assert plan.remarks(bundle) == [
        "local.mu = 0: recipe fedprox without its proximal term is another algorithm"
    ]
    adaptive = parse(f'recipe = "fedprox-adaptive"\n{SMALL}[local]\nlr = 0.1')
    assert (adaptive.hyper(bundle)["mu"], adaptive.remarks(bundle)) == (0.0, [])
    assert parse(f"{SMALL}[local]\nlr = 0.1").remarks(bundle) == []


@pytest.mark.parametrize(
    ("text", "weighting"),
    [
        ("", "examples"),
        ('[aggregation]\naggregator = "median"', "uniform"),
        ('[aggregation]\naggregator = "geometric-median"', "uniform"),
        ('weighting = "examples"\n[aggregation]\naggregator = "geometric-median"', "examples"),
        ("[aggregation]\nmax_norm = 1.0", "examples"),
    ],
)
def test_robust_rules_weigh_all_devices_the_same_unless_the_plan_says_otherwise(
    text: str, weighting: str
) -> None:
    assert parse(f"{SMALL}{text}").round.weighting == weighting


def test_what_a_bundle_has_in_vain_is_said() -> None:
    plan = parse(f"{SMALL}[local]\nlr = 0.1")
    (said,) = plan.remarks(SCAFFOLD)
    assert "adds a correction to the gradient, and this plan has none" in said
    (said,) = plan.remarks(MOON)
    assert 'Set recipe = "moon" and local.mu' in said
    assert parse(f'recipe = "moon"\n{SMALL}[local]\nlr = 0.1\nmu = 5').remarks(MOON) == []
    assert plan.remarks(manifest()) == plan.remarks(OWN) == []


PLAIN = manifest(proximal=False, hyper=(Hyper("lr"),))


@pytest.mark.parametrize(
    ("text", "bundle", "expected"),
    [
        (
            f'recipe = "fedprox"\n{SMALL}[local]\nlr = 0.1',
            PLAIN,
            ["recipe fedprox needs a step with a proximal term"],
        ),
        (
            f"{SMALL}[local]\nlr = 0.1\nmu = 0.1",
            PLAIN,
            ["local.mu = 0.1 needs a step with a proximal or contrastive term"],
        ),
        (f'recipe = "fedprox"\n{SMALL}[local]\nlr = 0.1', manifest(), ["local.mu is missing"]),
        (
            f'recipe = "moon"\n{SMALL}[local]\nlr = 0.1',
            manifest(),
            [
                "recipe moon needs a step with a contrastive term",
                "its step is sgd with a proximal term and takes lr, mu",
            ],
        ),
        (
            f'recipe = "fedprox"\n{SMALL}[local]\nlr = 0.1\nmu = 1',
            MOON,
            [
                "recipe fedprox needs a step with a proximal term",
                "its step is momentum with a contrastive term and",
            ],
        ),
        (f'recipe = "moon"\n{SMALL}[local]\nlr = 0.1', MOON, ["local.mu is missing"]),
        *(
            (
                f'recipe = "{name}"\n{SMALL}[local]\nlr = 0.1{devices}',
                bundle,
                [name, "default is 0", "Set local.mu"],
            )
            for name, bundle, devices in [
                ("fedprox", manifest(hyper=ZERO_MU), ""),
                ("moon", manifest(step=LocalStep("sgd", contrastive=True), hyper=ZERO_MU), ""),
                (
                    "feddyn",
                    manifest(step=LocalStep("sgd", proximal=True, correction=True), hyper=ZERO_MU),
                    DEVICES,
                ),
                ("ditto", manifest(hyper=ZERO_MU), ""),
            ]
        ),
        (SMALL, PLAIN, ["local.lr is missing", "its step is sgd and takes lr;"]),
        (
            f"{SMALL}[local]\nlr = 1",
            manifest(proximal=False, hyper=()),
            ["local.lr = 1.0 is not", "takes nothing"],
        ),
        (
            f"{SMALL}[local]\nlr = 1\n[local.hyper]\nalpah = 1",
            manifest(proximal=False, hyper=(Hyper("lr"), Hyper("alpha", 1.0))),
            ["local.hyper.alpah = 1.0 is not", "did you mean alpha?"],
        ),
        (
            f"{SMALL}[local]\nlr = 1",
            manifest(proximal=False, hyper=(Hyper("lr"), Hyper("alpha"))),
            ["local.hyper.alpha is missing"],
        ),
        (
            f'{SMALL}[local]\nlr = 1\n[stop]\nmetric = "acuracy"\ntarget = 1',
            PLAIN,
            [
                'stop.metric = "acuracy" is not measured',
                "did you mean accuracy?",
                "its metrics are loss, accuracy",
            ],
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_bundle_says_so(
    text: str, bundle: Manifest, expected: list[str]
) -> None:
    plan = parse(text)
    with pytest.raises(PlanError) as refused:
        plan.check_against(bundle)
    assert refused.value.text.startswith("my.toml: ")
    for part in ["Bundle digits", *expected]:
        assert part in refused.value.text


def test_the_loss_is_always_measured() -> None:
    plan = parse(f'{SMALL}[local]\nlr = 1\n[stop]\nmetric = "loss"\ntarget = 0.1')
    plan.check_against(manifest(proximal=False, hyper=(Hyper("lr"),), metrics=()))


@pytest.mark.parametrize(
    ("deadline", "heartbeat", "given", "stall"),
    [
        (600.0, 15.0, None, 120.0),
        (120.0, 15.0, None, 60.0),
        (120.0, 1.0, None, 30.0),
        (86400.0, 15.0, None, 300.0),
        (86400.0, 600.0, None, 2400.0),
        (600.0, 15.0, 45.0, 45.0),
    ],
)
def test_the_time_without_progress_leaves_slow_devices_enough(
    deadline: float, heartbeat: float, given: float | None, stall: float
) -> None:
    """By default a fifth of the deadline and at most 300 s, but at least 30 s and four
    heartbeats."""
    own = "" if given is None else f"stall = {given}\n"
    plan = parse(f"{SMALL}deadline = {deadline}\n{own}")
    assert plan.engine_settings(heartbeat).stall == stall


@pytest.mark.parametrize(
    ("own", "service", "words"),
    [
        (
            "",
            ServiceSettings(max_connections=5),
            ["max_connections = 5 of the service", "cohort of 6"],
        ),
        (
            "[pace]\nconnected = 9",
            ServiceSettings(max_connections=9),
            ["is not more than pace.connected = 9"],
        ),
        (
            "stall = 29.9",
            ServiceSettings(),
            ["round.stall = 29.9 s", "two heartbeats", "heartbeat = 15.0 s"],
        ),
    ],
)
def test_a_process_that_could_not_serve_the_plan_is_refused(
    own: str, service: ServiceSettings, words: list[str]
) -> None:
    with pytest.raises(PlanError) as refused:
        parse(SMALL + own).check_service(service)
    assert refused.value.text.startswith("my.toml: ")
    for word in words:
        assert word in refused.value.text


def test_a_process_that_can_serve_the_plan_passes() -> None:
    parse(f"{SMALL}stall = 30.0").check_service(ServiceSettings(max_connections=6))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("", "the devices' training examples"),
        (
            '[stop]\nmeasured_by = "evaluation"\n[evaluation]\nevery = 2',
            "the devices' training examples",
        ),
        ('[stop]\nmeasured_by = "held-out"\n[evaluation]\ndata = "a.npz"', "held-out data"),
    ],
)
def test_the_engine_knows_in_words_whose_examples_stop_the_run(own: str, words: str) -> None:
    assert parse(SMALL + own).engine_settings(15.0).measured_on == words


BUFFERED = 'name = "a"\nbundle = "a.bundle"\nrecipe = "fedbuff"\n[round]\n'


def test_what_an_asynchronous_plan_gives_the_engine() -> None:
    settings = parse(f"{BUFFERED}goal = 20").engine_settings(15.0)
    assert (settings.asynchronous, settings.goal, settings.cohort, settings.minimum) == (
        True,
        20,
        200,
        20,
    )
    assert (settings.max_staleness, settings.max_updates, settings.carry) == (100, None, False)
    settings = parse(f"{BUFFERED}goal = 100\nconcurrency = 250\nmax_share = 0.29").engine_settings(
        15.0
    )
    assert (settings.cohort, settings.max_staleness, settings.max_updates) == (250, 30, 29)
    settings = parse(f'{SMALL}late = "carry"').engine_settings(15.0)
    assert (settings.asynchronous, settings.carry, settings.max_staleness) == (False, True, 1)
    settings = parse(SMALL).engine_settings(15.0)
    assert not settings.outlive


def test_where_devices_add_their_noise_each_has_one_task_in_a_round() -> None:
    private = f"{SMALL}{PRIVATE}mechanism = "
    assert parse(f'{private}"local"').engine_settings(15.0).one_task
    assert not parse(f'{private}"gaussian"').engine_settings(15.0).one_task
    assert not parse(SMALL).engine_settings(15.0).one_task


def test_what_pace_steering_gives_the_engine() -> None:
    assert parse(SMALL).engine_settings(15.0).pace is None
    settings = parse(f"{SMALL}[pace]\nconnected = 6\nlongest = 60.0").engine_settings(15.0)
    assert settings.pace == PaceSettings(connected=6, longest=60.0, check_ins=100.0)
    parse(f"{SMALL}[pace]\nconnected = 6").check_service(ServiceSettings(max_connections=7))


def test_what_an_update_weighs() -> None:
    assert parse(SMALL).largest_weight == 1_000_000
    plan = parse(f"{BUFFERED}goal = 2")
    assert plan.largest_weight == 1
    assert [plan.staleness_factor(tau) for tau in (0, 3)] == [1.0, 0.5]
    plan = parse(f'{BUFFERED}goal = 2\n[staleness]\nfunction = "hinge"\nb = 2')
    assert [plan.staleness_factor(tau) for tau in (0, 2, 3)] == [1.0, 1.0, 1 / 11]
    assert parse(SMALL).staleness_factor(0) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{SMALL}concurrency = 9",
            ["round.concurrency = 9 is for asynchronous rounds", 'is "synchronous"'],
        ),
        (f"{SMALL}max_share = 0.5", ["round.max_share = 0.5 is for asynchronous rounds"]),
        (
            f"{BUFFERED}over_selection = 1.3",
            ["round.over_selection = 1.3 is for synchronous rounds", '"asynchronous"'],
        ),
        (f'{BUFFERED}late = "carry"', ["round.late = 'carry' is for synchronous rounds"]),
        (
            f"{SMALL}[staleness]\nmax = 3",
            ["staleness.max = 3: no update is stale", 'round.late = "carry"'],
        ),
        (
            f'{BUFFERED}[staleness]\nfunction = "linear"',
            ["staleness.function = 'linear'", "constant, polynomial, hinge"],
        ),
        (
            f'{BUFFERED}[staleness]\nfunction = "constant"\na = 1',
            ["staleness.a = 1: constant takes neither"],
        ),
        (f"{BUFFERED}[staleness]\nb = 1", ["staleness.b = 1: polynomial takes a"]),
        (
            f"{BUFFERED}max_share = 0.01",
            ["round.max_share = 0.01 of round.goal = 10 is less than one update", "0.1 to 1"],
        ),
        (
            f"{BUFFERED}goal = 2\n[server]\nmix = true",
            ["server.mix = true", "round.goal = 1 (it is 2)"],
        ),
        (
            f'{SMALL}[encoding]\nup = "int16"',
            ['encoding.up = "int16": there is no encoding int16; expected float32'],
        ),
        (f'{SMALL}[encoding]\nup = "topk-1.5"', ["topk-1.5", "topk-0.01-int8", "above 0, below 1"]),
        (
            BUFFERED.replace("fedbuff", "fedasync") + '[encoding]\ndown = "float16"',
            ['encoding.down = "float16"', "server.mix = true"],
        ),
        (
            f'recipe = "median"\n{SMALL}[encoding]\nup = "topk-0.1"',
            ['encoding.up = "topk-0.1" leaves a part', "the aggregator median"],
        ),
        (f'{SMALL}[encoding]\ndown = "int8"', ["encoding.down = 'int8'"]),
        (f"{SMALL}[encoding]\nup = 8", ["encoding.up = 8"]),
        (f"{SMALL}[pace]\nlongest = 60.0", ["pace.longest and pace.check_ins need pace.connected"]),
        (
            f"{SMALL}[pace]\nconnected = 5",
            ["pace.connected = 5 is less than the cohort", "6: rounds"],
        ),
        (
            f"{BUFFERED}concurrency = 9\n[pace]\nconnected = 8",
            ["pace.connected = 8 is less than round.concurrency, 9"],
        ),
        (
            f'{SMALL}weighting = "inverse-participation"',
            ['round.weighting = "inverse-participation"', "asynchronous"],
        ),
        (
            f'{BUFFERED}goal = 1\nweighting = "inverse-participation"',
            ["a round.goal above 1 (it is 1)"],
        ),
        (f"{BUFFERED}concurrency = 0", ["round.concurrency = 0"]),
        (f'{SMALL}participation = "sometimes"', ["round.participation = 'sometimes'"]),
    ],
)
def test_a_mistake_of_participation_is_named(text: str, expected: list[str]) -> None:
    said = refusal(text)
    for part in expected:
        assert part in said


def test_a_service_must_hold_the_devices_of_an_asynchronous_plan() -> None:
    plan = parse(f"{BUFFERED}concurrency = 50")
    plan.check_service(ServiceSettings(max_connections=50))
    with pytest.raises(
        PlanError, match=r"max_connections = 49 of the service is less than round\.concurrency = 50"
    ):
        plan.check_service(ServiceSettings(max_connections=49))


def test_a_part_of_a_split_model_is_no_model_of_rounds() -> None:
    plan = Plan.load(EXAMPLE)
    with pytest.raises(PlanError, match="bundle bank is the bottom of a split model, which"):
        plan.hyper(bottom_manifest())
