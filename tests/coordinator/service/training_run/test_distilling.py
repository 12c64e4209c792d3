"""The distillation of a round's model in a run: what is asked, and what follows from answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from fleetlearn_coordinator.service.training_run.distilling import Distilling, DistilQuestion
from fleetlearn_coordinator.service.worker_process import WorkerAnswer
from fleetlearn_coordinator.storage.blobs import StoredBytes
from fleetlearn_protocol.vector import Vector
from peers import SIZE, PlanMaker, update_of

DISTIL: dict[str, Any] = {
    "distil__data": "u.npz",
    "distil__bundle": "d.bundle",
    "distil__steps": 9,
    "round__goal": 2,
    "round__minimum": 2,
}
LOSSES = {"loss_before": 0.5, "loss_after": 0.25}


@pytest.fixture
def make(make_plan: PlanMaker) -> PlanMaker:
    """The files are a worker's: here nobody opens them."""

    def made(**settings: Any) -> Plan:
        return make_plan(**(DISTIL | settings))

    return made


@contextmanager
def fleet_of(plan: Plan) -> Iterator[tuple[Fleet, Distilling]]:
    fleet = Fleet(plan)
    assert fleet.run.distilling is not None
    try:
        yield fleet, fleet.run.distilling
    finally:
        fleet.store.close()


def report_twice(fleet: Fleet, *values: float) -> None:
    for lease, value in zip(leases(fleet.check_in("a", "b")), values, strict=True):
        fleet.report(lease, update_of(value))


def asked(distilling: Distilling) -> DistilQuestion:
    assert distilling.question is not None
    return distilling.question


def bytes_of(part: bytes | StoredBytes) -> Vector:
    content = part if isinstance(part, bytes) else part.read(0, part.size)
    return np.frombuffer(content, "<f4")


def answer(model: Vector) -> WorkerAnswer:
    return WorkerAnswer({"students": [LOSSES]}, model.tobytes())


def last_summary(fleet: Fleet) -> dict[str, Any]:
    ((_, summary),) = fleet.store.ledger.committed_rounds(1)
    return summary


def test_the_mean_learns_from_each_device_s_model(make: PlanMaker) -> None:
    with fleet_of(make()) as (fleet, distilling):
        before = fleet.run.models.newest.model
        report_twice(fleet, 0.25, 0.75)
        question = asked(distilling)
        job = question.job
        assert (job.seed, job.steps, job.students, job.teachers) == (1, 9, (0,), (0, 0))
        student, *teachers = map(bytes_of, question.content)
        assert np.allclose(student, before + 0.5)
        assert sorted(float((each - before).mean().round(4)) for each in teachers) == [0.25, 0.75]
        assert fleet.run.engine.version == 0, "the model does not count yet"
        text = "round 1 is being distilled, from 2 models in 9 steps"
        assert waits_for(fleet.run.engine, 0.0) == text

        taught = np.linspace(0, 1, SIZE, dtype=np.float32)
        distilling.answered(question, answer(taught))
        fleet.run.work.do_work(NOW)
        assert fleet.run.engine.version == 1
        assert np.array_equal(fleet.run.models.newest.model, taught)
        summary = last_summary(fleet)
        assert summary["distilled"] == {"teachers": 2, "steps": 9, **LOSSES}
        assert summary["change"] == pytest.approx(float(np.linalg.norm(taught - before)), rel=1e-6)


def test_only_each_so_many_th_round_is_distilled(make: PlanMaker) -> None:
    with fleet_of(make(distil__every=2)) as (fleet, distilling):
        report_twice(fleet, 0.25, 0.75)
        assert fleet.run.engine.version == 1
        report_twice(fleet, 0.25, 0.75)
        assert fleet.run.engine.version == 1
        assert asked(distilling).job.seed == 2


def test_a_process_that_cannot_is_asked_again(
    make: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    with fleet_of(make()) as (fleet, distilling):
        report_twice(fleet, 0.25, 0.75)
        question = asked(distilling)
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                distilling.answered(question, WorkerAnswer({"error": "3 processes died"}))
        assert asked(distilling) is question
        assert [record.getMessage() for record in caplog.records] == [
            "round 1 waits for its distillation: 3 processes died"
        ]
        words = waits_for(fleet.run.engine, 0.0)
        assert words.endswith("and will be asked again: 3 processes died")
        assert "asked 3 times" in words
        distilling.answered(question, answer(update_of(2.0)))
        fleet.run.work.do_work(NOW)
        assert fleet.run.engine.version == 1


def test_where_it_diverges_the_mean_is_the_model(
    make: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """It would diverge again."""
    with fleet_of(make()) as (fleet, distilling):
        before = fleet.run.models.newest.model
        report_twice(fleet, 0.25, 0.75)
        why = "distillation diverged: its loss was 1 and is nan after 9 steps"
        with caplog.at_level(logging.ERROR):
            distilling.answered(asked(distilling), WorkerAnswer({"diverged": why}))
        fleet.run.work.do_work(NOW)
        assert np.allclose(fleet.run.models.newest.model, before + 0.5)
        assert last_summary(fleet)["distilled"] == {"error": why}
        assert f"round 1 is not distilled, and has the mean of its updates: {why}" in caplog.text


def test_a_restart_asks_the_same(make: PlanMaker) -> None:
    plan = make()
    with fleet_of(plan) as (fleet, distilling):
        report_twice(fleet, 0.25, 0.75)
        first = asked(distilling)
        contents = [bytes_of(part).copy() for part in first.content]
    with fleet_of(plan) as (fleet, distilling):
        fleet.run.resume(NOW)
        again = asked(distilling)
        assert again.job == first.job
        assert np.array_equal(bytes_of(again.content[0]), contents[0])
        both = [sorted(float(part[0]) for part in parts) for parts in (
            [bytes_of(part) for part in again.content[1:]], contents[1:]
        )]  # fmt: skip
        assert both[0] == both[1]


def test_a_roll_back_ends_it(make: PlanMaker) -> None:
    with fleet_of(make()) as (fleet, distilling):
        report_twice(fleet, 0.25, 0.75)
        distilling.answered(asked(distilling), answer(update_of(2.0)))
        fleet.run.work.do_work(NOW)
        report_twice(fleet, 0.25, 0.75)
        question, changes = asked(distilling), list[None]()
        distilling.changed = lambda: changes.append(None)
        fleet.store.storage.requests.ask_for_roll_back(0, "somebody")
        fleet.run.roll_backs.look(NOW.wall)
        fleet.run.work.do_work(NOW)
        assert distilling.question is None
        assert changes == [None]
        assert not fleet.run.engine.waits_on
        model = fleet.run.models.newest.model
        distilling.answered(question, answer(update_of(3.0)))
        fleet.run.work.do_work(NOW)
        assert fleet.run.models.newest.model is model, "a late answer changes nothing"
        report_twice(fleet, 0.25, 0.75)
        later = asked(distilling)
        distilling.answered(question, answer(update_of(3.0)))
        assert asked(distilling) is later, "a late answer is none to the next round's question"


def test_devices_that_reported_before_the_plan_had_it_are_not_missed(
    make: PlanMaker, make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one's update is in the saved sums alone."""
    plain = make_plan(round__goal=2, round__minimum=2)
    fleet = Fleet(plain)
    first, second = leases(fleet.check_in("a", "b"))
    fleet.report(first, update_of(0.25))
    store = fleet.store
    store.end_save(store.begin_save(fleet.run.reports.round.sums.to_tensors())())
    store.close()
    with fleet_of(make()) as (fleet, distilling), caplog.at_level(logging.ERROR):
        before = fleet.run.models.newest.model
        fleet.run.resume(NOW)
        fleet.run.record(fleet.run.engine.check_in("b", second.task, 0.0), NOW)
        fleet.report(second, update_of(0.75))
        assert distilling.question is None
        fleet.run.work.do_work(NOW)
        assert np.allclose(fleet.run.models.newest.model, before + 0.5)
        assert "devices reported before the plan had [distil]" in caplog.text
