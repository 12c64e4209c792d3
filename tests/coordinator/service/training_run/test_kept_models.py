"""Which versions are kept: the rule by itself, and at the commits of a run."""

from __future__ import annotations

from typing import Any

import pytest
from answering import Fleet, leases
from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.plan.sections import Models
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.service.training_run.kept_models import (
    best_versions,
    versions_to_drop,
    why_kept,
)
from fleetlearn_coordinator.storage.file_blobs import model_versions
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol.messages import Evaluation
from peers import PlanMaker, update_of


def rule(**keys: Any) -> Models:
    return Models(**{"measured_by": "round", **keys})


def test_the_rule_keeps_the_newest_each_mth_and_the_best() -> None:
    """By hand, with newest = 10."""
    found = {version: why_kept(rule(last=2, every=4), version, 10, {3}) for version in range(11)}
    kept = {version: why for version, why in found.items() if why is not None}
    assert kept == {0: "initial", 3: "best", 4: "every", 8: "every", 9: "last", 10: "newest"}
    assert versions_to_drop(rule(last=2, every=4), range(10), 10, 7, [3]) == [1, 2, 5, 6]
    assert versions_to_drop(rule(), range(10), 10, 9, []) == [1, 2, 3, 4, 5, 6, 7]


def test_the_best_are_those_of_the_metric() -> None:
    values = {1: 0.5, 2: 0.9, 3: float("nan"), 4: 0.5, 5: 0.1}
    assert best_versions(rule(best=2), values) == {2, 4}, "of two equals the newer one"
    assert best_versions(rule(best=2, direction="below"), values) == {5, 4}
    assert best_versions(rule(best=9), values) == {1, 2, 4, 5}
    assert best_versions(rule(), values) == set()


def commit_rounds(
    fleet: Fleet, accuracies: list[float], commands: list[Command] | None = None
) -> list[Command]:
    """One round for each: its device measures the round's model so, and reports."""
    commands = commands or fleet.check_in("a")
    for accuracy in accuracies:
        (lease,) = leases(commands)
        measured = Evaluation(10, 5.0, {"accuracy": 10 * accuracy})
        commands = fleet.report(lease, update_of(1.0), evaluation=measured)
    return commands


def test_a_run_keeps_the_models_that_its_devices_measured_best(make_plan: PlanMaker) -> None:
    """The devices of round n measure version n - 1, from which it begins."""
    plan = make_plan(
        round__goal=1, models__last=1, models__best=2, models__metric="accuracy", models__every=5
    )
    fleet = Fleet(plan)
    commit_rounds(fleet, [0.1, 0.3, 0.9, 0.2, 0.4, 0.5, 0.6, 0.1])
    assert model_versions(plan.data_dir) == [0, 2, 5, 6, 7, 8], "7 was the newest until 8 counted"
    fleet.store.close()


def test_a_run_keeps_the_models_that_were_best_on_held_out_data(
    make_plan: PlanMaker, tmp_path: Any
) -> None:
    (tmp_path / "held.npz").touch()
    settings: dict[str, Any] = {"models__last": 1, "models__best": 1, "models__metric": "loss"}
    plan = make_plan(
        round__goal=1, evaluation__data="held.npz", models__measured_by="held-out", **settings
    )
    fleet = Fleet(plan)
    for version, loss in ((1, 0.7), (2, 0.3), (3, 0.5)):
        find_storage(plan.data_dir).held_out.write(
            version, {"examples": 1, "metrics": {"loss": loss}}
        )
    commit_rounds(fleet, [0.5] * 6)
    assert model_versions(plan.data_dir) == [0, 2, 5, 6]
    fleet.store.close()


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_needed_stays(make_plan: PlanMaker, asked: bool) -> None:
    """The bases of differences, and a version that somebody asks to roll back to at this moment."""
    plan = make_plan(round__goal=1, models__last=1, encoding__down="delta")
    fleet = Fleet(plan)
    commands = commit_rounds(fleet, [0.5] * 2)
    if asked:
        find_storage(plan.data_dir).requests.ask_for_roll_back(1, "command")
    commit_rounds(fleet, [0.5] * 3, commands)
    assert model_versions(plan.data_dir) == ([0, 1, 2, 3, 4, 5] if asked else [0, 3, 4, 5])
    fleet.store.close()


def test_a_plan_says_by_which_metric_models_are_best(make_plan: PlanMaker) -> None:
    with pytest.raises(PlanError, match=r"models.best = 2 needs models.metric"):
        make_plan(models__best=2)
    with pytest.raises(PlanError, match=r'models.measured_by = "held-out" needs evaluation.data'):
        make_plan(models__best=2, models__metric="loss", models__measured_by="held-out")
    plan = make_plan(models__best=2, stop__metric="loss", stop__target=0.1)
    assert (plan.models.metric, plan.models.direction, plan.models.measured_by) == (
        "loss",
        "below",
        "round",
    )
    assert make_plan(models__best=2, models__metric="loss").models.direction == "below"
