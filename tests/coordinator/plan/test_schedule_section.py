"""[local.schedule]: the factors, beside those of torch.optim.lr_scheduler, and what does not go
together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.schedule_section import ScheduleSection
from fleetlearn_protocol.manifest import Hyper
from fleetlearn_protocol.messages import StepSchedule
from line_bundle import write_line_bundle
from plans import PAIRWISE

ROUNDS = 60
LR = 0.2


def parse(schedule: str, recipe: str = "fedavg", more: str = "", goal: int = 4) -> Plan:
    text = (
        f'name = "a"\nbundle = "a.bundle"\nrecipe = "{recipe}"\n[local]\nlr = {LR}\n'
        f"[round]\ngoal = {goal}\n[local.schedule]\n{schedule}\n{more}"
    )
    return Plan.parse(text, Path("/base"), file="my.toml")


def schedule_of(text: str, more: str = "") -> ScheduleSection:
    found = parse(text, more=more).local.schedule
    assert found is not None
    return found


def of_torch(kind: str, warm_up: int, **settings: Any) -> list[float]:
    """The learning rates of as many steps of PyTorch's own scheduler."""
    import torch
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    after: Any = getattr(lr_scheduler, kind)(optimizer, **settings)
    if warm_up:
        first = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=warm_up)
        with warnings.catch_warnings():  # of how SequentialLR itself calls the others
            warnings.simplefilter("ignore")
            after = lr_scheduler.SequentialLR(optimizer, [first, after], [warm_up])
    rates = []
    for _ in range(ROUNDS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            after.step()
    return rates


@pytest.mark.parametrize("warm_up", [0, 7])
@pytest.mark.parametrize(
    ("text", "kind", "settings"),
    [
        ("", "ConstantLR", {"factor": 1.0}),
        ('kind = "step"\nevery = 9\nfactor = 0.5', "StepLR", {"step_size": 9, "gamma": 0.5}),
        ('kind = "exponential"\nfactor = 0.9', "ExponentialLR", {"gamma": 0.9}),
        ('kind = "cosine"\nleast = 0.05', "CosineAnnealingLR", {"eta_min": 0.05 * LR}),
        (
            'kind = "linear"\nrounds = 30\nleast = 0.2',
            "LinearLR",
            {"start_factor": 1.0, "end_factor": 0.2, "total_iters": 30},
        ),
    ],
    ids=["constant", "step", "exponential", "cosine", "linear"],
)
def test_the_rates_are_those_of_pytorch(
    text: str, kind: str, settings: dict[str, Any], warm_up: int
) -> None:
    if kind == "CosineAnnealingLR":
        settings = {**settings, "T_max": ROUNDS - warm_up}
    text += f"\nwarm_up = {warm_up}\nstart = 0.25" if warm_up else ""
    schedule = schedule_of(text, f"[stop]\nrounds = {ROUNDS}")
    found = [LR * schedule.factor_of(version) for version in range(ROUNDS)]
    assert found == pytest.approx(of_torch(kind, warm_up, **settings), rel=1e-9)


def test_no_rate_is_nothing() -> None:
    """Where a run goes on for longer than its cosine, or an exponential has become too small."""
    cosine = schedule_of('kind = "cosine"\nrounds = 10\nleast = 0.1')
    assert [cosine.factor_of(version) for version in (0, 5, 10, 11, 10**6)] == [
        1.0, pytest.approx(0.55), 0.1, 0.1, 0.1,
    ]  # fmt: skip
    assert schedule_of('kind = "exponential"\nfactor = 0.5').factor_of(10**6) == 1e-4


def test_defaults() -> None:
    cosine = schedule_of('kind = "cosine"\nwarm_up = 10', "[stop]\nrounds = 50")
    assert (cosine.rounds, cosine.start) == (40, 1 / 3)
    assert schedule_of('kind = "cosine"').rounds == 100
    assert schedule_of('kind = "step"\nevery = 5').factor == 0.1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('kind = "step"', ["local.schedule.every is missing", 'kind = "step"', "every = 30"]),
        ('kind = "exponential"', ["local.schedule.factor is missing", "factor = 0.98"]),
        ('kind = "cosine"\nfactor = 0.5', ["factor = 0.5", "'step' and 'exponential'", "'cosine'"]),
        ("every = 3", ["every = 3", "'step'", "'constant'"]),
        ('kind = "cosine"\nwarm_up = 100', ["warm_up = 100", "stop.rounds = 100", "shorter"]),
        ('kind = "cosin"', ["local.schedule.kind", "cosin"]),
        ("least = 0.0", ["local.schedule.least"]),
        ("warmup = 3", ["local.schedule.warmup", "warm_up"]),
        ("start = 0.5", ["local.schedule.start = 0.5", "warm_up", "leave start out"]),
        ('kind = "linear"\nwarm_up = 100', ["warm_up = 100", "no round is left for", "'linear'"]),
    ],
)
def test_a_mistake_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        parse(text)
    for word in ("my.toml", *words):
        assert word in error.value.text


def by_step(schedule: str, more: str = "", recipe: str = "fedavg") -> Plan:
    text = (
        f'name = "a"\nbundle = "a.bundle"\nrecipe = "{recipe}"\n[local]\nlr = {LR}\n'
        f"[round]\ngoal = 100\n[local.step_schedule]\n{schedule}\n{more}"
    )
    return Plan.parse(text, Path("/base"), file="my.toml")


def test_a_schedule_by_step_of_each_task() -> None:
    plan = by_step('kind = "cosine"\nwarm_up = 5\nstart = 0.1')
    expected = StepSchedule("cosine", 5, 0.1)
    assert [plan.steps_of(version) for version in (0, 9)] == [expected, expected]
    assert by_step('kind = "step"\nevery = 7').steps_of(3) == StepSchedule(
        "step", start=1 / 3, every=7, factor=0.1
    )
    assert parse("warm_up = 3").steps_of(0) is None


def test_a_schedule_by_step_of_the_whole_run() -> None:
    """100 rounds of 30 steps: the cosine has what the warm-up leaves of them."""
    plan = by_step('kind = "cosine"\nwarm_up = 500\nsteps_per_round = 30')
    assert plan.steps_of(7) == StepSchedule("cosine", 500, 1 / 3, steps=2500, first=210)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = 3", ["local.step_schedule.rounds"]),
        ("steps = 3", ["local.step_schedule.steps = 3", "'one-cycle'", "'constant'"]),
        ('kind = "exponential"', ["local.step_schedule.factor is missing"]),
        (
            'kind = "linear"\nwarm_up = 200\nsteps_per_round = 2',
            ["local.step_schedule.warm_up = 200", "stop.rounds = 100", "no step is left"],
        ),
    ],
)
def test_a_mistake_by_step_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        by_step(text)
    for word in ("my.toml", *words):
        assert word in error.value.text


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("q-fedavg", r"aggregation.q = 1: q-FedAvg takes"), ("fednova", r"normalise = true: it is")],
)
def test_weighing_by_one_rate_refuses_others_by_step(recipe: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        by_step("warm_up = 3", recipe=recipe)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (parse("warm_up = 100"), "local.schedule.warm_up = 100 and stop.rounds = 100: the run is"),
        (parse('kind = "step"\nevery = 100'), "local.schedule.every = 100 and stop.rounds = 100"),
        (
            by_step("warm_up = 600\nsteps_per_round = 6"),
            "warm_up = 600 and stop.rounds = 100 of steps_per_round = 6",
        ),
    ],
)
def test_what_never_happens_is_said(tmp_path: Path, plan: Plan, words: str) -> None:
    manifest = write_line_bundle(tmp_path / "line.bundle", references=["anchor"]).manifest
    assert [words in remark for remark in plan.remarks(manifest)].count(True) == 1
    sound = parse("warm_up = 99"), parse('kind = "step"\nevery = 99'), by_step("warm_up = 10000")
    assert not any("the run is over" in each for own in sound for each in own.remarks(manifest))


def test_a_rule_that_takes_one_rate_is_refused() -> None:
    with pytest.raises(PlanError, match=r"with aggregation.q = 1: .*fixed local"):
        parse("warm_up = 3", "q-fedavg")


def test_pairwise_masks_take_one() -> None:
    plan = parse("warm_up = 3", goal=100, more=PAIRWISE)
    assert plan.local.schedule == ScheduleSection(warm_up=3)


def test_what_the_step_must_have(tmp_path: Path) -> None:
    manifest = write_line_bundle(
        tmp_path / "line.bundle", references=["anchor"], optimizer="sgd"
    ).manifest
    plan = parse("warm_up = 3")
    assert plan.hyper_of(0, plan.hyper(manifest))["lr"] == pytest.approx(LR / 3)
    assert plan.hyper_of(3, plan.hyper(manifest))["lr"] == LR
    local = msgspec.structs.replace(plan.local, lr=None)
    no_rate = msgspec.structs.replace(manifest, hyper=(Hyper("rate", 0.1), Hyper("mu", 0.0)))
    with pytest.raises(PlanError, match=r"\[local.schedule\]: it changes the step's lr"):
        msgspec.structs.replace(plan, local=local).hyper(no_rate)


def test_normalised_updates_need_lr_times_mu_to_stay(tmp_path: Path) -> None:
    manifest = write_line_bundle(
        tmp_path / "line.bundle", references=["anchor"], optimizer="sgd"
    ).manifest
    plan = parse("warm_up = 3", more="[aggregation]\nnormalise = true")
    assert plan.weighing(manifest).rule is not None
    plan = parse("warm_up = 3", "fedprox", "[aggregation]\nnormalise = true")
    pulled = msgspec.structs.replace(plan, local=msgspec.structs.replace(plan.local, mu=0.1))
    with pytest.raises(PlanError, match=r"\[local.schedule\]: .*needs lr \* mu to stay"):
        pulled.weighing(manifest)
