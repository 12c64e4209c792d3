"""Closed rounds of masked updates, and a real helper that is asked by a call: which set is written
down and asked for, and what follows from each answer."""

from __future__ import annotations

import inspect
import logging
import shutil
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import NOW, leases
from fleetlearn_coordinator.aggregation import open_round
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import Abandon, Assign, Command
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from fleetlearn_coordinator.secure.helper_client import (
    HelperRefusedError,
    NoHelperError,
    WrongHelperError,
)
from fleetlearn_coordinator.service.training_run.mask_sum import MaskSums
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_coordinator.service.training_run.saved_mask_set import KEY, saved_set
from fleetlearn_coordinator.storage import find_storage as find_storage_module
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.secure.fixed_point import WeightedSum
from fleetlearn_protocol.secure.helper_messages import (
    MaskSumRefusal,
    RefusalName,
)
from masked_fleet import CalledHelper, MaskedFleet, secure_settings
from memory_storage import SLOW_SCHEME, slow_storage
from peers import BUFFERED, SIZE, PlanMaker, plan_text, update_of

DEVICES = ("a", "b", "c")
STEP = 600.0 / (2**20 - 1)
"""The largest mistake of a rounded element of an update: 2 clip / (2^bits - 1)."""


@pytest.fixture
def helper(tmp_path: Path) -> CalledHelper:
    return CalledHelper(tmp_path, DEVICES)


def closed_round(fleet: MaskedFleet, *values: float) -> list[Assign]:
    """Devices a, b, c ... train, and report these updates: the round is closed."""
    names = ("a", "b", "c", "d", "e")[: len(values)]
    given = leases(fleet.check_in(*names))
    for lease, value in zip(given, values, strict=True):
        fleet.report_masked(lease, update_of(value))
    return given


def running(fleet: MaskedFleet) -> list[Assign]:
    engine = fleet.run.engine
    return [
        Assign(device, task, engine.round_of(task), 0, 0.0, False, engine.version)
        for device, task in engine.leases.items()
    ]


def outcome(plan: Plan, number: int = 1) -> tuple[str, dict[str, Any]]:
    with find_storage(plan.data_dir).read_ledger() as ledger:
        (row,) = [row for row in ledger.closed_rounds(0) if row[0] == number]
    return row[1], row[-1]


def test_the_set_is_written_down_before_anybody_is_asked(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    before = fleet.run.models.newest.model.copy()
    seen = []
    fleet.sums.changed = lambda: seen.append(saved_set(fleet.store.ledger))
    closed_round(fleet, 0.5, 1.0, -0.25)
    question = fleet.sums.question
    (written,) = seen
    assert written is not None
    assert (written.round, written.reports) == (1, 3)
    assert written.digest == question.request.digest().hex()
    assert fleet.run.engine.phase is Phase.COMMITTING
    assert "the masks of its 3 updates" in waits_for(fleet.run.engine, 0.0)
    fleet.answer(helper)
    assert fleet.run.engine.version == 1
    assert waits_for(fleet.run.engine, 0.0).startswith("round 2 has 0 of 3")
    moved = fleet.run.models.newest.model - before
    assert np.abs(moved - (0.5 + 1.0 - 0.25) / 3).max() <= STEP
    assert fleet.store.spool_files == 0
    fleet.store.close()


def test_a_round_of_short_words_is_unmasked_over_a_restart_and_without_a_refused_device(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """Updates of 3 bytes an element; the masks' sum is modulo 2^32. b's update is read again from
    its spool file, and subtracted."""
    plan = make_plan(**secure_settings(helper, secure__bits=12))
    fleet = MaskedFleet(plan)
    before = fleet.run.models.newest.model.copy()
    given = closed_round(fleet, 0.5, 1.0, -0.25)
    assert fleet.task(given[0]).parts == {"update": "masked24"}
    fleet.store.close()
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    helper.revoke("b")
    fleet.answer(helper)
    fleet.answer(helper)
    assert fleet.run.engine.version == 1
    assert outcome(plan)[1]["reports"] == 2
    moved = fleet.run.models.newest.model - before
    assert np.abs(moved - (0.5 - 0.25) / 2).max() <= 600.0 / 4095
    fleet.store.close()


def test_a_restart_asks_for_the_same_set_and_takes_no_other_report(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The round closes at its deadline with two of three. The helper has answered, and the
    coordinator dies before it hears that."""
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    first, second, third = leases(fleet.check_in(*DEVICES))
    fleet.report_masked(first, update_of(0.5))
    fleet.report_masked(second, update_of(1.0))
    assert fleet.sums.question is None
    fleet.carry_out(fleet.run.engine.tick(1e6))
    question = fleet.sums.question
    helper.ask(question)
    fleet.store.close()

    fleet = MaskedFleet(plan)
    assert fleet.run.resume(NOW) == []
    assert fleet.run.engine.phase is Phase.COMMITTING
    assert not fleet.run.engine.takes_report(third.device, third.task)
    again = fleet.sums.question
    assert again.request.digest() == question.request.digest()
    fleet.answer(helper)
    assert fleet.run.engine.version == 1
    assert outcome(plan)[1]["reports"] == 2
    fleet.store.close()


def test_a_refused_device_s_owner_is_told_until_a_set_with_the_device_is_answered(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """Over a restart of the coordinator, too."""
    helper.revoke("b")
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    assert fleet.sums.refusals.words_for("b") == ""
    fleet.answer(helper)
    fleet.answer(helper)
    fleet.store.close()

    fleet = MaskedFleet(plan)
    words = fleet.sums.refusals.words_for
    assert words("b") == (
        "the helper refused this device's last update: unknown-device; give its operator the line "
        "that `fleetlearn-device public-key` prints"
    )
    assert (words("a"), words("c")) == ("", "")
    helper.enrol("b")
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.answer(helper)
    assert fleet.run.engine.version == 2
    assert words("b") == ""
    fleet.store.close()
    fleet = MaskedFleet(plan)
    assert fleet.sums.refusals.words_for("b") == ""
    fleet.store.close()


def test_devices_that_the_helper_names_are_left_out(
    make_plan: PlanMaker, helper: CalledHelper, caplog: pytest.LogCaptureFixture
) -> None:
    helper.revoke("b")
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    before = fleet.run.models.newest.model.copy()
    closed_round(fleet, 0.5, 1.0, -0.25)
    first = fleet.sums.question
    with caplog.at_level(logging.WARNING):
        fleet.answer(helper)
    assert "the updates of b are left out: the helper refuses (unknown-device)" in caplog.text
    assert "`fleetlearn-coordinator helper enrol`" in caplog.text
    second = fleet.sums.question
    assert {report.device for report in second.request.reports} == {"a", "c"}
    assert second.request.digest() != first.request.digest()
    written = saved_set(fleet.store.ledger)
    assert written is not None
    assert written.digest == second.request.digest().hex()
    assert fleet.store.spool_files == 3, "until the round is committed"
    fleet.answer(helper)
    moved = fleet.run.models.newest.model - before
    assert np.abs(moved - (0.5 - 0.25) / 2).max() <= STEP
    how, summary = outcome(plan)
    assert (how, summary["reports"]) == ("committed", 2)
    assert summary["dropped"] == {"rejected: helper-unknown-device": 1}
    assert fleet.store.spool_files == 0
    fleet.store.close()


def test_a_restart_goes_on_without_the_devices_that_were_left_out(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    helper.revoke("b")
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    before = fleet.run.models.newest.model.copy()
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.answer(helper)
    digest = fleet.sums.question.request.digest()
    helper.ask(fleet.sums.question)
    fleet.store.close()
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    assert fleet.sums.question.request.digest() == digest
    fleet.answer(helper)
    moved = fleet.run.models.newest.model - before
    assert np.abs(moved - (0.5 - 0.25) / 2).max() <= STEP
    assert outcome(plan)[1]["dropped"] == {"rejected: helper-unknown-device": 1}
    fleet.store.close()


def test_too_few_that_are_left_are_no_round(
    make_plan: PlanMaker, helper: CalledHelper, caplog: pytest.LogCaptureFixture
) -> None:
    helper.revoke("a")
    helper.revoke("b")
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    before = fleet.run.models.newest.model.copy()
    closed_round(fleet, 0.5, 1.0, -0.25)
    with caplog.at_level(logging.INFO):
        (abandoned,) = [each for each in fleet.answer(helper) if isinstance(each, Abandon)]
    assert abandoned.text.startswith("1 different devices are left, 2 are secure.minimum: the hel")
    assert abandoned.text in caplog.text
    assert fleet.sums.question is None
    how, summary = outcome(plan)
    assert how == "abandoned"
    assert summary["dropped"] == {"rejected: helper-unknown-device": 2}
    assert (fleet.run.models.newest.model == before).all()
    assert fleet.store.spool_files == 0
    fleet.store.close()


def test_a_refusal_that_names_nobody_of_the_set_ends_the_round(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    fleet = MaskedFleet(make_plan(**secure_settings(helper)))
    fleet.check_in(*DEVICES)
    for name in sorted({*RefusalName} - {RefusalName.WRONG_HELPER}):
        for lease in running(fleet):
            fleet.report_masked(lease, update_of(0.5))
        refusal = HelperRefusedError(MaskSumRefusal(name, "for a test", ("stranger",)))
        heard = fleet.hear(fleet.sums.question, refusal)
        (abandoned,) = [each for each in heard if isinstance(each, Abandon)]
        assert f"the helper refuses ({name.value}): for a test" in abandoned.text
    fleet.store.close()


def test_wrong_masks_end_the_round_by_name(make_plan: PlanMaker, tmp_path: Path) -> None:
    """The helper has made a sum of a, b and c's updates of this model: they wait for another model
    and others make it."""
    helper = CalledHelper(tmp_path, "abcdef")
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    wrong = np.random.default_rng(0).integers(0, 2**32, fleet.run.models.newest.model.size + 1)
    heard = fleet.hear(fleet.sums.question, wrong.astype(np.uint32))
    (abandoned,) = [each for each in heard if isinstance(each, Abandon)]
    assert "A mask was not taken off" in abandoned.text
    assert outcome(plan)[0] == "abandoned"
    assert fleet.run.engine.version == 0
    waits = waits_for(fleet.run.engine, 0.0)
    assert waits.startswith("a round needs 2 devices (round.minimum), and none can take part")
    assert "3 had their updates of this very model in a sum before" in waits
    assert "or a new run begins from the model (`export-model --bundle`)" in waits
    assert leases(fleet.check_in("a")) == []
    others = leases(fleet.check_in("d", "e", "f"))
    assert {lease.device for lease in others} == {"d", "e", "f"}
    for lease in others:
        fleet.report_masked(lease, update_of(0.5))
    fleet.answer(helper)
    assert fleet.run.engine.version == 1
    assert {lease.device for lease in running(fleet)} <= {*"abcdef"}
    assert not fleet.run.engine.selection.held
    fleet.store.close()


def test_after_a_roll_back_devices_wait_that_trained_from_the_model_before(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The helper says so, once; the same devices are not given the same task again."""
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.answer(helper)
    ask_to_roll_back(plan.data_dir, 0, "test")
    assert fleet.run.roll_backs.look(0.0)
    fleet.run.work.do_work(NOW)
    for lease in running(fleet):
        fleet.report_masked(lease, update_of(0.25))
    (abandoned,) = [each for each in fleet.answer(helper) if isinstance(each, Abandon)]
    assert "before a roll back or a restored backup" in abandoned.text
    assert "in a sum before" in waits_for(fleet.run.engine, 0.0)
    assert running(fleet) == []
    fleet.store.close()


def test_a_helper_that_does_not_answer_is_waited_for_and_said_once(
    make_plan: PlanMaker, helper: CalledHelper, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = MaskedFleet(make_plan(**secure_settings(helper)))
    closed_round(fleet, 0.5, 1.0, -0.25)
    question = fleet.sums.question
    gone = NoHelperError(Code.BUSY, "https://helper.example does not answer: refused")
    wrong = WrongHelperError(Code.WRONG_HASH, "it shows another certificate")
    other = HelperRefusedError(MaskSumRefusal(RefusalName.WRONG_HELPER, "another key"))
    with caplog.at_level(logging.INFO):
        for error in (gone, gone, wrong, wrong, other):
            assert fleet.hear(question, error) == []
    levels = [(row.levelname, row.getMessage()) for row in caplog.records]
    assert [level for level, _ in levels] == ["WARNING", "ERROR", "ERROR"]
    assert levels[0][1] == f"round 1 waits for the sum of its masks: {gone.text}"
    words = waits_for(fleet.run.engine, 0.0)
    asked = datetime.fromtimestamp(NOW.wall, UTC)
    assert f"The helper was asked 5 times since {asked:%Y-%m-%d %H:%M:%SZ}" in words
    assert "another key" in words
    assert fleet.sums.question is question
    with caplog.at_level(logging.INFO):
        fleet.answer(helper)
    assert "round 1: the helper has answered" in caplog.text
    assert fleet.run.engine.version == 1
    fleet.store.close()


def test_a_roll_back_does_not_wait_for_the_helper(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.answer(helper)
    for lease in running(fleet):
        fleet.report_masked(lease, update_of(0.25))
    question = fleet.sums.question
    assert question is not None
    ask_to_roll_back(plan.data_dir, 0, "test")
    assert fleet.run.roll_backs.look(0.0)
    fleet.run.work.do_work(NOW)
    assert fleet.run.engine.version == 2
    assert fleet.sums.question is None
    assert outcome(plan, 2)[0] == "abandoned"
    assert fleet.hear(question, helper.ask(question)) == [], "an answer to nothing"
    assert fleet.run.engine.version == 2
    fleet.store.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"secure__key": "9" * 64},
        {"secure__minimum": 3, "round__minimum": 3},
        {"local__epochs": 2},
        {"secure__clip": 2.0},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_was_signed_under_another_plan_is_given_up(
    make_plan: PlanMaker, helper: CalledHelper, changed: dict[str, Any]
) -> None:
    fleet = MaskedFleet(make_plan(**secure_settings(helper)))
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.store.close()
    plan = make_plan(**secure_settings(helper, **changed))
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    assert outcome(plan)[0] == "abandoned"
    assert fleet.sums.question is None
    assert fleet.run.engine.phase is Phase.GATHERING
    fleet.store.close()


@pytest.mark.parametrize(
    "changed", [{"secure__certificate": "c" * 64}, {"secure__helper": "https://other.example:1"}]
)
def test_where_the_helper_is_may_change_while_its_answer_is_waited_for(
    make_plan: PlanMaker, helper: CalledHelper, changed: dict[str, Any]
) -> None:
    fleet = MaskedFleet(make_plan(**secure_settings(helper)))
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.store.close()
    plan = make_plan(**secure_settings(helper, **changed))
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    assert fleet.sums.question.helper.certificate == plan.secure.certificate
    assert fleet.sums.question.helper.url == plan.secure.helper
    fleet.answer(helper)
    assert fleet.run.engine.version == 1
    fleet.store.close()


def test_a_set_that_cannot_be_made_again_is_given_up(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    written = fleet.store.ledger.get(KEY)
    changed = written.replace(fleet.sums.question.request.digest().hex(), "0" * 64)
    fleet.store.write([Metadata(KEY, changed)])
    fleet.store.close()
    fleet = MaskedFleet(plan)
    heard = fleet.run.resume(NOW)
    (abandoned,) = [each for each in heard if isinstance(each, Abandon)]
    assert "are not the 3 that the helper was asked for before the restart" in abandoned.text
    fleet.store.close()


def test_a_set_whose_device_was_revoked_after_the_answer_is_answered_again(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The helper has answered, and the coordinator died before it heard that."""
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    helper.ask(fleet.sums.question)
    fleet.store.close()
    helper.revoke("b")
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    fleet.answer(helper)
    how, summary = outcome(plan)
    assert (how, summary["reports"]) == ("committed", 3)
    fleet.store.close()


def test_a_run_that_is_paused_or_about_to_finish_waits_for_its_last_sum(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    plan = make_plan(**secure_settings(helper, stop__rounds=1))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.run.engine.paused = True
    words = waits_for(fleet.run.engine, 0.0)
    assert words.startswith("the run is paused; round 1 waits for the helper's sum")
    fleet.run.engine.paused = False
    assert fleet.run.finished is None
    fleet.answer(helper)
    assert fleet.run.finished is not None
    fleet.store.close()


def test_a_slow_store_has_the_set_before_anybody_is_asked(
    bundle_path: Path, helper: CalledHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(find_storage_module.STORES, SLOW_SCHEME, slow_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    place = f"{SLOW_SCHEME}://run"
    text = plan_text(bundle_path, place, **secure_settings(helper))
    plan = Plan.parse(text, bundle_path.parent)
    fleet, calls = MaskedFleet(plan), deque[Callable[[], None]]()
    fleet.store.write_beside(calls.append, lambda: lambda: None, pytest.fail)
    may_write = slow_storage(place).may_write
    given = leases(fleet.check_in(*DEVICES))
    may_write.clear()
    for lease in given:
        fleet.report_masked(lease, update_of(0.5))
    assert fleet.run.engine.phase is Phase.COMMITTING
    assert fleet.sums.question is None
    may_write.set()
    fleet.store.wait_until_safe()
    while not fleet.store.is_safe:
        while calls:
            calls.popleft()()
    assert fleet.sums.question is not None
    fleet.store.close()


def test_a_restored_copy_asks_for_the_same_set_and_makes_the_same_model(
    make_plan: PlanMaker, helper: CalledHelper, tmp_path: Path
) -> None:
    """The copy was made while the helper was asked. It has answered since, and answers again."""
    plan = make_plan(**secure_settings(helper))
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    fleet.store.close()
    shutil.copytree(plan.data_dir, tmp_path / "copy")
    models = []
    for _ in range(2):
        fleet = MaskedFleet(plan)
        fleet.run.resume(NOW)
        fleet.answer(helper)
        models.append(fleet.run.models.newest.digest)
        fleet.store.close()
        shutil.rmtree(plan.data_dir)
        shutil.copytree(tmp_path / "copy", plan.data_dir)
    assert models[0] == models[1]


def test_a_buffer_that_the_helper_refuses_is_given_up_and_the_run_goes_on(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The third device's task goes on, and its report counts for the next buffer."""
    settings = BUFFERED | secure_settings(helper)
    settings |= {"round__goal": 2, "round__minimum": 2, "round__concurrency": 3}
    plan = make_plan(**settings)
    fleet = MaskedFleet(plan)
    first, second, third = leases(fleet.check_in(*DEVICES))
    helper.revoke(first.device)
    fleet.report_masked(first, update_of(0.5))
    fleet.report_masked(second, update_of(1.0))
    fleet.report_masked(third, update_of(0.25))
    (abandoned,) = [each for each in fleet.answer(helper) if isinstance(each, Abandon)]
    assert "(unknown-device)" in abandoned.text
    assert outcome(plan)[1]["dropped"] == {"rejected: helper-unknown-device": 1}
    assert [*fleet.run.engine.accepted] == [third.task]
    (again,) = [lease for lease in running(fleet) if lease.device == second.device]
    fleet.report_masked(again, update_of(-0.5))
    fleet.answer(helper)
    assert fleet.run.engine.version == 1, "the refused set used no seed"
    fleet.store.close()


def test_a_late_report_that_is_carried_counts_in_the_next_set(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The round has closed at its deadline and waits for its sum, over a restart, when the third
    report comes."""
    plan = make_plan(**secure_settings(helper, round__late="carry"))
    fleet = MaskedFleet(plan)
    first, second, third = leases(fleet.check_in(*DEVICES))
    fleet.report_masked(first, update_of(0.5))
    fleet.report_masked(second, update_of(1.0))
    fleet.carry_out(fleet.run.engine.tick(fleet.run.engine.deadline))
    request = fleet.sums.question.request
    assert not request.one_model
    fleet.store.close()
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    fleet.check_in(*DEVICES)
    fleet.report_masked(third, update_of(0.25))
    assert fleet.sums.question.request.digest() == request.digest()
    fleet.answer(helper)
    for lease in running(fleet):
        fleet.report_masked(lease, update_of(-0.5))
    rounds = {report.device: report.round for report in fleet.sums.question.request.reports}
    assert rounds == {first.device: 2, second.device: 2, third.device: 1}
    fleet.answer(helper)
    assert outcome(plan, 2)[1]["staleness"]["stale"] == 1
    fleet.store.close()


PRIVATE = {
    "round__weighting": "uniform",
    "privacy__mechanism": "gaussian",
    "privacy__clip": 300.0,
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "local__evaluate": False,
}


@pytest.mark.slow
def test_a_private_round_has_the_same_noise_after_a_restart_and_is_spent_once(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The model of a round is a function of its sum, its release and the run's secret."""
    settings = secure_settings(helper) | PRIVATE
    settings.pop("secure__clip")
    plan = make_plan(**settings)
    fleet = MaskedFleet(plan)
    closed_round(fleet, 0.5, 1.0, -0.25)
    masks = helper.ask(fleet.sums.question)
    decided = fleet.run.reports.round
    at_once = decided.commit(1, decided.summary({}), masks=masks).state.model  # type: ignore[arg-type]
    fleet.store.close()
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    assert fleet.run.budget.account.releases == 0
    fleet.answer(helper)
    assert (fleet.run.models.newest.model == at_once).all()
    assert fleet.run.budget.account.releases == 1
    fleet.store.close()
    fleet = MaskedFleet(plan)
    assert fleet.run.budget.account.releases == 1
    fleet.store.close()


def test_a_buffered_run_waits_and_goes_on_with_the_tasks_that_run(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    """FedBuff: the buffer of two is full while a third device trains. Its report comes while the
    helper is asked, and counts for the next round, over a restart too."""
    helper = CalledHelper(tmp_path, DEVICES)
    settings = BUFFERED | secure_settings(helper)
    settings |= {"round__goal": 2, "round__minimum": 2, "round__concurrency": 3}
    plan = make_plan(**settings)
    fleet = MaskedFleet(plan)
    first, second, third = leases(fleet.check_in(*DEVICES))
    fleet.report_masked(first, update_of(0.5))
    fleet.report_masked(second, update_of(1.0))
    digest = fleet.sums.question.request.digest()
    fleet.report_masked(third, update_of(0.25))
    assert len(fleet.sums.question.request.reports) == 2
    fleet.store.close()
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    assert fleet.sums.question.request.digest() == digest
    assert [*fleet.run.engine.book.early] == [third.task]
    fleet.answer(helper)
    assert fleet.run.engine.version == 1
    given = leases(fleet.check_in("a", "b"))
    fleet.report_masked(given[0], update_of(-0.5))
    request = fleet.sums.question.request
    assert len({report.model for report in request.reports}) == 2, "one of them is stale"
    fleet.answer(helper)
    assert fleet.run.engine.version == 2
    assert outcome(plan, 2)[1]["staleness"]["max"] == 1
    fleet.store.close()


def leave_out_without_rows(engine: Engine, tasks: list[str], cause: str) -> list[Command]:
    LEAVE_OUT(engine, tasks, cause)
    return []


LEAVE_OUT = Engine.leave_out
RESTART = test_a_late_report_that_is_carried_counts_in_the_next_set
MISTAKES: dict[str, tuple[Any, str, Any, Callable[..., None]]] = {
    "the set is not written down": (
        MaskSums, "_row", lambda sums, round, question: Metadata("other", None), RESTART,
    ),
    "a start opens the round again": (MaskSums, "is_closed", lambda sums, round: False, RESTART),
    "the helper is asked before the set is safe": (
        MaskSums, "_ask", lambda sums, question: setattr(sums, "question", question),
        test_a_slow_store_has_the_set_before_anybody_is_asked,
    ),
    "a refused update stays in the sum": (
        OpenRound, "subtract", lambda round, reports: None,
        test_devices_that_the_helper_names_are_left_out,
    ),
    "what was left out is not written": (
        Engine, "leave_out", leave_out_without_rows,
        test_a_restart_goes_on_without_the_devices_that_were_left_out,
    ),
    "wrong masks are taken off": (
        open_round, "unmask", lambda state, masks, numbers: WeightedSum(np.zeros(SIZE), 3.0),
        test_wrong_masks_end_the_round_by_name,
    ),
    "nobody is held": (
        Engine, "spend", lambda engine, devices: None,
        test_after_a_roll_back_devices_wait_that_trained_from_the_model_before,
    ),
    "an old answer counts": (
        MaskSums, "forget", lambda sums: None, test_a_roll_back_does_not_wait_for_the_helper,
    ),
}  # fmt: skip
"""Owner, function, what takes its place, and the test that must fail then."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(
    mistake: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, function, replacement, test = MISTAKES[mistake]
    names = [*inspect.signature(test).parameters]
    fixtures = {name: request.getfixturevalue(name) for name in names}
    monkeypatch.setattr(owner, function, replacement)
    with pytest.raises((AssertionError, ValueError, KeyError, AttributeError)):
        test(**fixtures)
