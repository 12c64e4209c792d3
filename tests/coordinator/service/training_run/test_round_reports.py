"""The open round's sums, and the thread that adds to them."""

from __future__ import annotations

import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator.service.training_run.round_work import BackgroundWork
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.messages import UPDATE
from peers import SIZE, PlanMaker, report_of, update_of

TOP_K = find_encoding("topk-0.1")
BEYOND = bytes([0xFF]) * TOP_K.size(SIZE)
"""Bytes of which all places are beyond their block."""


def adding(fleet: Fleet) -> tuple[BackgroundWork, int]:
    """Accept a top-k update. Returns the work of adding it, and its spool file."""
    first, _ = leases(fleet.check_in("a", "b"))
    content, blobs = TOP_K.encode(update_of(1.0)), fleet.store.blobs
    spool_file = blobs.take_spool_file()
    blobs.write_spool_file(spool_file, 0, content)
    report = report_of(first, update_of(1.0), parts=(TOP_K.part(UPDATE, content),))  # type: ignore[arg-type]
    fleet.run.save_update(first.device, report, spool_file, {UPDATE: 1.0})
    adding_it = fleet.run.work.next_work()
    assert adding_it is not None
    return adding_it, spool_file


def test_a_spool_file_that_is_another_upload_s_by_now_is_no_error_after_a_round_was_abandoned(
    make_plan: PlanMaker,
) -> None:
    """A thread adds the update of a large model while the round's deadline passes."""
    fleet = Fleet(make_plan(round__goal=2, round__minimum=2, encoding__up=TOP_K.name))
    adding_it, spool_file = adding(fleet)
    fleet.run.record(fleet.run.engine.tick(1000.0), NOW)
    fleet.store.blobs.write_spool_file(spool_file, 0, BEYOND)
    assert adding_it.end(adding_it.work(), NOW) == []
    fleet.store.close()


def test_a_damaged_spool_file_of_the_open_round_is_an_error(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=2, round__minimum=2, encoding__up=TOP_K.name))
    adding_it, spool_file = adding(fleet)
    fleet.store.blobs.write_spool_file(spool_file, 0, BEYOND)
    with pytest.raises(IndexError):
        adding_it.work()
    fleet.store.close()
