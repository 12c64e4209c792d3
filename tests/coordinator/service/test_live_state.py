"""When a run's state is recorded: after something happened, and seldom else."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
from fleetlearn_coordinator.rounds.commands import Opened
from fleetlearn_coordinator.service import live_state
from fleetlearn_coordinator.service.live_state import QUIET, LiveState
from fleetlearn_coordinator.storage.ledger import Metadata
from peers import PlanMaker, fleet, update_of


def test_it_is_recorded_after_an_event_and_seldom_else() -> None:
    now, reads = 100.0, 0

    def read() -> dict[str, int]:
        nonlocal reads
        reads += 1
        return {"round": reads}

    live = LiveState(read, lambda: now)
    (row,) = live.take_rows()
    assert isinstance(row, Metadata)
    assert row.key == "live"
    found = {"round": 1, "pid": os.getpid(), "began": 100.0}
    assert msgspec.json.decode(str(row.value)) == found
    now += 1
    assert live.take_rows() == []
    live([Opened(2)])
    assert len(live.take_rows()) == 1
    now += QUIET - 0.1
    assert live.take_rows() == []
    assert reads == 2, "what is not recorded is not read"
    now += 0.1
    assert len(live.take_rows()) == 1, "status says when the coordinator was last alive"
    now -= 3600
    assert len(live.take_rows()) == 1, "a clock that was set back silences nothing"


def test_the_end_is_always_recorded() -> None:
    live = LiveState(dict)
    live.take_rows()
    (row,) = live.take_rows(ended=True)
    assert isinstance(row, Metadata)
    assert msgspec.json.decode(str(row.value))["pid"] is None


def test_a_run_without_events_writes_nothing(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's looks of each second write when a device does something, and not otherwise."""
    monkeypatch.setattr(live_state, "QUIET", 3600.0)

    async def test() -> None:
        async with fleet(make_plan(round__goal=1)) as (coordinator, join):
            written: list[object] = []
            taking = coordinator.live_state.take_rows

            def take_rows(**more: bool) -> list[object]:
                """The looks of each second come here too."""
                rows = taking(**more)
                written.extend(rows)
                return list(rows)

            taking()
            coordinator.live_state.take_rows = take_rows  # type: ignore[method-assign, assignment]
            for _ in range(3):
                take_rows()
            assert not written
            peer = await join("a")
            await peer.do_round(update_of(1.0))
            take_rows()
            assert written

    asyncio.run(test())
