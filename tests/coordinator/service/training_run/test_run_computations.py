"""A run without a model, without a network: restarts at any point, lost devices, sums that can be
none, and a roll back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from answering import NOW
from computing_fleet import ComputingFleet, result_of
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.training_run.evaluation_request import ask_to_evaluate
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_coordinator.storage import store
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from statistics_bundle import statistics_bundle

QUESTIONS = Statistics(
    numbers=(NumberColumn("age", quantiles=(0.5,), error=0.0, bins=3),), rounds=4
)
AGES = {"a": [1.0, 5.0, 2.5], "b": [7.0], "c": [3.0, np.nan], "d": [2.0, 2.0, 9.5, 4.0]}
ALL = np.concatenate([*AGES.values()])
THERE = ALL[~np.isnan(ALL)]
TABLES = {device: {"age": np.array(ages)} for device, ages in AGES.items()}


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    bundle = statistics_bundle(tmp_path, QUESTIONS)

    def make(name: str = "run", goal: int = 4, minimum: int = 4) -> Plan:
        text = (
            f'recipe = "statistics"\nname = "{name}"\nbundle = "{bundle.path}"\n[round]\n'
            f"goal = {goal}\nminimum = {minimum}\nover_selection = 1.0\n"
        )
        return Plan.parse(text, tmp_path)

    return make


def whole_run(plan: Plan, *, restarts: bool, order: str = "abcd") -> ComputingFleet:
    """All devices answer in each round, in this order, until the run is over."""
    running = ComputingFleet(plan, TABLES)
    running.check_in(*AGES)
    while running.run.finished is None:
        for device in order:
            if restarts:
                running.store.close()
                running = ComputingFleet(plan, TABLES)
                running.run.resume(NOW)
                running.check_in(*AGES)
            running.answer(running.lease_of(device), running.sums_of(device))
    return running


def test_restarts_and_another_order_make_the_same_states(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process between any two reports, sums in files after each second one."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 2)
    made = []
    for restarts, order in ((False, "abcd"), (True, "dbca")):
        plan = make_plan(f"run-{restarts}")
        running = whole_run(plan, restarts=restarts, order=order)
        assert running.run.finished == "the computation is done: measured on 10 rows of 4 devices"
        made.append(read_model(plan.data_dir)[1].tobytes())
        found = result_of(plan, running)
        running.store.close()
        again = ComputingFleet(plan, TABLES)  # a start afterwards finds that it is over
        assert again.run.finished == running.run.finished
        again.store.close()
    assert made[0] == made[1]
    age = found["columns"]["age"]
    assert (found["rows"], age["missing"]) == (10, 1)
    assert age["mean"] == pytest.approx(THERE.mean(), abs=age["mean_error"])
    (median,) = age["quantiles"]
    assert median["least"] <= np.quantile(THERE, 0.5, method="lower") <= median["most"]
    summaries = [row.summary for row in read_status(plan.data_dir).rounds]
    assert [row["metrics"] for row in summaries] == [{}] * 4
    assert summaries[0]["computation"] == "1 round so far, of at most 4"


def test_a_process_that_dies_between_the_commit_and_its_end_finds_that_it_is_over(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    module = "fleetlearn_coordinator.service.training_run.round_work.computation_done"
    monkeypatch.setattr(module, lambda computation, newest: None)  # as if it died before the row
    running = ComputingFleet(plan, TABLES)
    running.check_in(*AGES)
    for _ in range(4):
        for device in AGES:
            running.answer(running.lease_of(device), running.sums_of(device))
    assert running.run.finished is None
    running.store.close()
    again = ComputingFleet(plan, TABLES)
    assert again.run.finished is not None
    assert again.run.finished.startswith("the computation is done")


def test_a_total_is_of_the_devices_that_reported(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(minimum=2)
    running = ComputingFleet(plan, TABLES)
    running.check_in(*AGES)
    for device in "ad":
        running.answer(running.lease_of(device), running.sums_of(device))
    running.carry_out(running.run.engine.tick(10_000.0))
    assert running.run.engine.version == 1
    found = result_of(plan, running)
    assert (found["devices"], found["rows"]) == (2, 7)


def test_sums_that_are_too_large_are_refused(make_plan: Callable[..., Plan]) -> None:
    running = ComputingFleet(make_plan(), TABLES)
    running.check_in(*AGES)
    sums = running.sums_of("a")
    sums[0] = 2**61
    with pytest.raises(ProtocolError, match="can be at most") as refused:
        running.answer(running.lease_of("a"), sums)
    assert refused.value.code == Code.OUT_OF_RANGE


def test_a_report_of_no_rows_is_refused_and_spoils_no_round(make_plan: Callable[..., Plan]) -> None:
    """A device that said -1000 rows spoiled the round of all."""
    plan = make_plan()
    running = ComputingFleet(plan, TABLES)
    running.check_in(*AGES)
    for device in "abcd":
        sums = running.sums_of(device)
        if device == "b":
            wrong = sums.copy()
            wrong[0] = -1000
            with pytest.raises(ProtocolError, match="the sums are of no rows: sums of -1000 rows"):
                running.answer(running.lease_of(device), wrong)
        running.answer(running.lease_of(device), sums)
    (row,) = [row for row in read_status(plan.data_dir).rounds if row.outcome]
    assert (row.outcome, running.run.engine.version) == ("committed", 1)


def test_a_run_that_is_rolled_back_measures_again(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    running = whole_run(plan, restarts=False)
    running.store.close()
    ask_to_roll_back(plan.data_dir, 2, "somebody")
    again = ComputingFleet(plan, TABLES)
    heard = again.run.resume(NOW)
    assert not [each for each in heard if isinstance(each, Finish)]
    assert (again.run.engine.version, again.run.finished) == (5, None)
    assert result_of(plan, again)["rounds"] == 2
    again.check_in(*AGES)
    while again.run.finished is None:
        for device in AGES:
            again.answer(again.lease_of(device), again.sums_of(device))
    assert result_of(plan, again)["done"]
    assert again.run.engine.version == 7


def test_a_run_without_a_model_is_not_evaluated(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    running = ComputingFleet(plan, TABLES)
    with pytest.raises(FleetError, match="there is nothing that devices could measure"):
        ask_to_evaluate(plan.data_dir)
    find_storage(plan.data_dir).requests.ask_for_evaluation()  # as if the plan was another then
    assert not running.run.exchanges[EVALUATION].look_for_request()
    assert find_storage(plan.data_dir).requests.evaluation() is None
