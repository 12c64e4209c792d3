"""Masked updates in a run: they are accepted, added up and taken back after a restart, and whoever
watches the run is not told what single devices measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator.rounds.commands import Assign
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.observers import RunEvent, UpdateSaved
from fleetlearn_coordinator.service.server import NOT_SHOWN, RunServer
from fleetlearn_coordinator.service.training_run.evaluation_request import ask_to_evaluate
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol.encodings import MASKED
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.secure.fixed_point import Words, weighted_words
from peers import SIZE, PlanMaker, report_of, update_of

SECURE: dict[str, Any] = {
    "round__goal": 3,
    "round__minimum": 2,
    "round__weighting": "uniform",
    "secure__mode": "helper",
    "secure__helper": "https://helper.example:8770",
    "secure__key": "a" * 64,
    "secure__certificate": "b" * 64,
    "secure__clip": 1.0,
}


def save_masked(fleet: Fleet, lease: Assign, value: float, mask: Words) -> None:
    """Spool a masked update whose elements are all ``value``, and make its report durable."""
    fractions = np.random.default_rng(1).random(SIZE + 1)
    words = weighted_words(update_of(value), 1.0, 1.0, 20, fractions) + mask
    blobs = fleet.store.blobs
    number = blobs.take_spool_file()
    blobs.write_spool_file(number, 0, words.tobytes())
    part = MASKED.part(UPDATE, words.tobytes())
    report = report_of(lease, update_of(value), parts=(part,))  # type: ignore[arg-type]
    fleet.run.save_update(lease.device, report, number, {UPDATE: 0.0})
    fleet.run.record(fleet.run.engine.count_report(lease.device, lease.task, 0.0), NOW)


def masks_of(count: int) -> Words:
    return np.random.default_rng(2).integers(0, 2**32, (count, SIZE + 1), np.uint32)


def test_masked_updates_survive_a_restart_in_sums_and_in_spool_files(
    make_plan: PlanMaker,
) -> None:
    fleet, masks = Fleet(make_plan(**SECURE)), masks_of(2)
    first, second, _ = leases(fleet.check_in("a", "b", "c"))
    save_masked(fleet, first, 0.5, masks[0])
    fleet.run.work.do_work(NOW)
    store = fleet.store
    store.end_save(store.begin_save(fleet.run.reports.round.sums.to_tensors())())
    save_masked(fleet, second, -0.25, masks[1])
    store.close()
    fleet = Fleet(make_plan(**SECURE))
    fleet.run.resume(NOW)
    fleet.run.work.do_work(NOW)
    round = fleet.run.reports.round
    assert len(round) == 2
    before = fleet.run.models.newest.model
    made = round.commit(1, round.summary({}), masks=masks.sum(axis=0, dtype=np.uint32))
    assert np.abs(made.state.model - before - 0.125).max() < 1e-5
    fleet.store.close()


def test_a_round_of_other_numbers_is_given_up(make_plan: PlanMaker) -> None:
    """Words that were written for another clip norm would be read as other numbers."""
    fleet = Fleet(make_plan(**SECURE))
    first, *_ = leases(fleet.check_in("a", "b", "c"))
    save_masked(fleet, first, 0.5, masks_of(1)[0])
    fleet.store.close()
    fleet = Fleet(make_plan(**SECURE | {"secure__clip": 2.0}))
    fleet.run.resume(NOW)
    assert len(fleet.run.reports.round) == 0
    fleet.store.close()


@pytest.mark.parametrize("secure", [True, False])
def test_observers_are_told_what_devices_measured_only_without_secure(
    make_plan: PlanMaker, secure: bool
) -> None:
    kept = SECURE if secure else {"round__goal": 3}
    fleet, seen = Fleet(make_plan(**kept)), list[RunEvent]()
    fleet.run.observers.add(seen.extend)
    first, *_ = leases(fleet.check_in("a", "b", "c"))
    if secure:
        save_masked(fleet, first, 0.5, masks_of(1)[0])
    else:
        fleet.report(first, update_of(0.5))
    (event,) = [event for event in seen if isinstance(event, UpdateSaved)]
    assert (event.report.loss, event.private) == ((0.0, True) if secure else (0.5, False))
    assert (event.report.evaluation is None) == secure
    fleet.store.close()


def test_no_device_is_asked_to_measure_whoever_asks(make_plan: PlanMaker) -> None:
    plain = make_plan(round__weighting="uniform", local__evaluate=False)
    fleet = Fleet(plain)
    ask_to_evaluate(plain.data_dir)
    assert fleet.run.exchanges[EVALUATION].look_for_request()
    fleet.store.close()
    fleet = Fleet(make_plan(**SECURE))
    fleet.run.resume(NOW)
    assert not fleet.run.engine.exchanges[EVALUATION].requested
    assert find_storage(plain.data_dir).requests.evaluation() is None
    with pytest.raises(FleetError, match="what devices measure in an evaluation tells about"):
        ask_to_evaluate(plain.data_dir)
    fleet.store.close()


@pytest.mark.parametrize("secure", [True, False])
def test_what_devices_say_in_words_is_not_shown(make_plan: PlanMaker, secure: bool) -> None:
    """A failed training may quote data."""
    fleet = Fleet(make_plan(**(SECURE if secure else {})))
    server: Any = SimpleNamespace(run=fleet.run)
    assert RunServer.shown(server, None, "element 3 is 5") == (
        NOT_SHOWN if secure else "element 3 is 5"
    )
    fleet.store.close()
