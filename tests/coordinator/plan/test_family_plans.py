"""[family.NAME]: what it says, its mistakes, and what does not go together with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.family_rules import FAMILY_RULES
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.plan_place import read_place
from fleetlearn_protocol.manifest import Hyper
from plans import PRIVATE, SECURE, manifest

BASE = Path("/base")
HEAD = 'name = "a"\n'
LR = "[local]\nlr = 0.1\n"
TAIL = "[round]\ngoal = 4\n"
FAMILY = """[family.large]
bundle = "l.bundle"
memory = 2_000_000_000
tags = ["indoor"]
[family.small]
bundle = "s.bundle"
"""


def parse(text: str) -> Plan:
    return Plan.parse(text, BASE)


def refusal(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        parse(text)
    return caught.value.text


def test_a_family_s_members_stand_in_the_file_s_order() -> None:
    plan = parse(HEAD + TAIL + FAMILY)
    assert plan.members == {"large": BASE / "l.bundle", "small": BASE / "s.bundle"}
    large, small = plan.family.values()
    assert (large.memory, large.tags, small.memory, small.tags) == (
        2_000_000_000,
        ("indoor",),
        None,
        (),
    )
    assert plan.bundle == BASE / "l.bundle"
    assert plan.is_family


def test_a_plan_with_one_bundle_has_one_member_without_a_name() -> None:
    plan = parse(f'{HEAD}bundle = "a.bundle"\n{TAIL}')
    assert (plan.members, plan.is_family) == ({"": BASE / "a.bundle"}, False)


def test_a_family_of_one_is_a_family() -> None:
    assert parse(f'{HEAD}{TAIL}[family.only]\nbundle = "o.bundle"\n').is_family


def test_the_example_is_a_family_with_a_member_for_every_device() -> None:
    plan = Plan.load(Path(__file__).parents[3] / "examples" / "family.toml")
    assert [*plan.members] == ["cnn", "mlp", "linear"]
    last = plan.family["linear"]
    assert (last.memory, last.tags) == (None, ())


def test_where_a_family_s_run_is_can_be_read_without_the_rest(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(HEAD + FAMILY + "[round]\ngoal = 0\n")
    assert read_place(tmp_path / "plan.toml").data_dir == tmp_path / "a.run"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEAD}family = {{}}\n{TAIL}", "[family] has no member"),
        (f'{HEAD}bundle = "b.bundle"\n{TAIL}{FAMILY}', "bundle = 'b.bundle' and [family]"),
        (f"{HEAD}{TAIL}[family.a]\nmemory = 1\n", "bundle is missing"),
        (f"{HEAD}{TAIL}{FAMILY}[family.b]\nmemory = 1\n", "family.b.bundle is missing"),
        (f"{HEAD}{TAIL}{FAMILY}ram = 1\n", "family.small.ram is not a key of a plan"),
        (f"{HEAD}{TAIL}{FAMILY}memory = -1\n", "family.small.memory = -1 is refused"),
        (f'{HEAD}{TAIL}[family."a b"]\nbundle = "b"\n', "is refused"),
        (f"{HEAD}{TAIL}[family]\na = 1\n", "family.a = 1 is refused: it takes a table of bundle"),
    ],
)
def test_a_mistake_is_named(text: str, said: str) -> None:
    assert said in refusal(text)


MEMBERS = "".join(f'[family.m{number}]\nbundle = "{number}.bundle"\n' for number in range(17))
REFUSED = {
    "17 members: it takes 1 to 16": HEAD + TAIL + MEMBERS,
    "[secure]: a sum of masked updates": HEAD + TAIL + FAMILY + SECURE,
    "[privacy]: its noise and its epsilon": HEAD + TAIL + FAMILY + PRIVATE,
    'local.algorithm = "statistics": a computation': f'{HEAD}recipe = "statistics"\n{TAIL}{FAMILY}',
    'local.algorithm = "scaffold"': (
        f'{HEAD}recipe = "scaffold"\n{TAIL}{FAMILY}[server]\ndevices = 9\n'
    ),
    'encoding.up = "topk-0.1"': f'{HEAD}{TAIL}{FAMILY}[encoding]\nup = "topk-0.1"\n',
    'aggregation.aggregator = "median"': f'{HEAD}recipe = "median"\n{TAIL}{FAMILY}',
    'aggregation.norm_action = "refuse" with aggregation.norm_quantile': (
        f'{HEAD}{TAIL}{FAMILY}[aggregation]\nmax_norm = 1.0\nnorm_action = "refuse"\n'
        "norm_quantile = 0.5\n"
    ),
    "initial = '": f'{HEAD}initial = "w.safetensors"\n{TAIL}{FAMILY}',
    "local.adaptive_mu = true": (
        f'{HEAD}recipe = "fedprox"\n{TAIL}{FAMILY}[local]\nadaptive_mu = true\n'
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_needs_one_model_is_refused_with_its_reason(said: str) -> None:
    assert f"[family] and {said}" in refusal(REFUSED[said])


def test_each_rule_is_tried() -> None:
    assert len(REFUSED) == len(FAMILY_RULES)


def test_a_plan_with_one_model_keeps_none_of_these_rules() -> None:
    for text in REFUSED.values():
        one = text.replace(FAMILY, "").replace(MEMBERS, "")
        parse(one.replace(HEAD, f'{HEAD}bundle = "a.bundle"\n', 1))


# The bundles


def test_each_member_s_bundle_must_fit_the_plan() -> None:
    plan = parse(HEAD + TAIL + FAMILY + "[local]\nlr = 0.1\nmu = 0.1\n")
    fits, fits_not = manifest(), manifest(proximal=False, hyper=(Hyper("lr"),))
    plan.check_members({"large": fits, "small": fits})
    with pytest.raises(PlanError, match=r"local\.mu = 0\.1 needs a step"):
        plan.check_members({"large": fits, "small": fits_not})


def test_members_measure_the_same_metrics() -> None:
    plan = parse(HEAD + TAIL + FAMILY + LR)
    other = manifest(metrics=("accuracy", "recall"))
    with pytest.raises(PlanError, match=r"small loss and accuracy and recall.*the same metrics"):
        plan.check_members({"large": manifest(), "small": other})
    parse(f'{HEAD}bundle = "a.bundle"\n{TAIL}{LR}').check_members({"": other})


def test_the_rules_of_a_round_have_each_member_s_size() -> None:
    family = parse(HEAD + TAIL + FAMILY + LR).family_rules(
        {"large": manifest(), "small": manifest()}
    )
    assert [(member.name, member.size) for member in family.members] == [("large", 6), ("small", 6)]
    assert family.places == [slice(0, 6), slice(6, 12)]
