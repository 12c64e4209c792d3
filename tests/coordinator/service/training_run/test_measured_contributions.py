"""What the updates of a run's round are worth: which models are measured, and what follows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.device_models import DeviceModel
from fleetlearn_coordinator.quality import round_worth
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from fleetlearn_coordinator.service.training_run.measured_contributions import (
    MeasuringContributions,
)
from peers import PlanMaker, update_of

QUALITY: dict[str, Any] = {
    "quality__contributions": 1,
    "evaluation__data": "held_out.npz",
    "round__goal": 2,
    "round__minimum": 2,
}


@contextmanager
def fleet_of(plan: Plan) -> Iterator[tuple[Fleet, MeasuringContributions]]:
    fleet = Fleet(plan)
    assert fleet.run.contributions is not None
    try:
        yield fleet, fleet.run.contributions
    finally:
        fleet.store.close()


def report_twice(fleet: Fleet, *values: float) -> None:
    for lease, value in zip(leases(fleet.check_in("a", "b")), values, strict=True):
        fleet.report(lease, update_of(value))


def summaries(fleet: Fleet) -> list[dict[str, Any]]:
    return [summary for _, summary in fleet.store.ledger.committed_rounds(1)]


def test_each_set_of_devices_has_its_mean_model(make_plan: PlanMaker) -> None:
    with fleet_of(make_plan(**QUALITY)) as (fleet, measuring):
        before = fleet.run.models.newest.model
        report_twice(fleet, 0.25, 0.75)
        question = measuring.question
        assert question is not None
        assert fleet.run.engine.version == 0, "the model does not count yet"
        assert "is being measured on held-out data" in waits_for(fleet.run.engine, 0.0)
        updates, sets = question.read(), question.rule.sets(2)
        moved = {
            members: float((updates.model_of(members) - before).mean().round(5)) for members in sets
        }
        first, second = (0.25, 0.75) if question.devices == ["a", "b"] else (0.75, 0.25)
        assert moved == {
            frozenset(): 0.0,
            frozenset({0}): first,
            frozenset({1}): second,
            frozenset({0, 1}): 0.5,
        }
        losses = {members: 1.0 - moved[members] for members in sets}
        found = question.rule.worth_of(question.devices, losses)
        measuring.measured(question, found, len(sets))
        fleet.run.work.do_work(NOW)
        assert fleet.run.engine.version == 1
        assert np.allclose(fleet.run.models.newest.model, before + 0.5), "the model is the mean"
        (summary,) = summaries(fleet)
        worth = {name: row["shapley"] for name, row in summary["contributions"].items()}
        # The mean of two ways in which the device comes: alone, and after the other one.
        assert worth == pytest.approx({"a": 0.0, "b": 0.5}, abs=1e-6)
        assert summary["contributions"]["b"]["left_out"] == pytest.approx(0.25, abs=1e-6)


def test_spool_files_are_not_read_where_devices_are_answered(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 256 MiB: the thread of the event loop hands out the question alone."""
    read = list[int]()
    usual = DeviceModel.read
    monkeypatch.setattr(
        DeviceModel, "read", lambda model, *span: (read.append(1), usual(model, *span))[1]
    )
    with fleet_of(make_plan(**QUALITY)) as (fleet, measuring):
        report_twice(fleet, 0.25, 0.75)
        assert measuring.question is not None
        assert not read
        assert measuring.question.read().models.shape == (2, fleet.run.models.newest.model.size)
        assert len(read) == 2


def test_only_each_so_many_th_round_is_measured(make_plan: PlanMaker) -> None:
    with fleet_of(make_plan(**(QUALITY | {"quality__contributions": 2}))) as (fleet, measuring):
        report_twice(fleet, 0.25, 0.75)
        assert fleet.run.engine.version == 1
        report_twice(fleet, 0.25, 0.75)
        assert fleet.run.engine.version == 1
        assert measuring.question is not None


@pytest.mark.parametrize("why", ["the file is gone", "too large"])
def test_a_round_that_cannot_be_measured_is_committed_all_the_same(
    make_plan: PlanMaker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    if why == "too large":
        monkeypatch.setattr(round_worth, "MOST_BYTES", 1)
    with caplog.at_level(logging.ERROR), fleet_of(make_plan(**QUALITY)) as (fleet, measuring):
        report_twice(fleet, 0.25, 0.75)
        if measuring.question is not None:
            measuring.failed(measuring.question, why)
        fleet.run.work.do_work(NOW)
        assert fleet.run.engine.version == 1
        (summary,) = summaries(fleet)
        assert "contributions" not in summary
    assert "what its updates are worth is not measured" in caplog.text


def test_an_answer_to_another_question_changes_nothing(make_plan: PlanMaker) -> None:
    with fleet_of(make_plan(**QUALITY)) as (fleet, measuring):
        report_twice(fleet, 0.25, 0.75)
        old = measuring.question
        assert old is not None
        measuring.forget()
        worth = {"shapley": 0.0, "error": 0.0, "left_out": 0.0}
        measuring.measured(old, dict.fromkeys(old.devices, worth), 4)
        measuring.failed(old, "it died")
        assert fleet.run.engine.version == 0
