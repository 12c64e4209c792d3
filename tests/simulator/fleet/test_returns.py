"""Pace steering in virtual time: who is connected when, and what becomes of devices that are
away."""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.fleet.returns import FIRST_CHECK_INS
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS
from virtual import Row, make_fleet, make_scenario, simulate_in_parts

PACED: Row = {
    "plan__round": {
        "goal": 6,
        "minimum": 6,
        "over_selection": 1.2,
        "deadline": 4000.0,
        "grace": 10.0,
    },
    "plan__pace": {"connected": 16, "longest": 2000.0, "check_ins": 1.0},
    "plan__stop__rounds": 30,
    "plan__local": {"epochs": 1, "batch_size": 0, "lr": 0.01, "evaluate": False},
    "compute": {"step_seconds": 20.0},
    "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 0.5}},
}
"""One hundred devices of different speeds; a round has eight of them for some 30 seconds."""
AWAY: Row = {
    "availability": {"kind": "bernoulli", "share": 0.4, "slot": 1200.0},
    "failures": {"crash": 0.1},
}


class Watched:
    """A fleet, with what is to be seen of its connections at each step."""

    def __init__(self, folder: Path, line: Path, size: int = 100, **settings: Any) -> None:
        self.fleet: Fleet = make_fleet(make_scenario(folder, line, size, **(PACED | settings)))
        self.check_ins: list[float] = []
        self.devices: Counter[int] = Counter()
        self.most = 0
        if self.fleet.returns is not None:
            self.fleet.returns.checked_in = self.note
        steps = 0
        while self.fleet.advance():
            steps += 1
            self.most = max(self.most, len(self.fleet.connections.connected))
            if steps % 20 == 0:
                self.check()

    def note(self, device: int) -> None:
        self.check_ins.append(self.fleet.now)
        self.devices[device] += 1

    def check(self) -> None:
        connected, engine, returns = (
            self.fleet.connections.connected,
            self.fleet.engine,
            self.fleet.returns,
        )
        assert returns is not None
        assert {*np.flatnonzero(returns.due == inf).tolist()} == connected.keys(), (
            "each device is here or comes back"
        )
        if (
            engine.pace is not None
            and not self.fleet.connections.away
            and not self.fleet.coordinator.down
        ):
            assert {int(name[1:]) for name in engine.pace.present} <= connected.keys()

    @property
    def reports(self) -> list[int]:
        return [row["reports"] for row in self.fleet.history]


@pytest.mark.parametrize("more", [{}, AWAY], ids=["always online", "devices come and go"])
def test_rounds_are_full_with_few_connected_and_all_take_part(
    tmp_path: Path, line: Path, more: Row
) -> None:
    run = Watched(tmp_path, line, **more, plan__stop__rounds=300)
    assert run.reports == [6] * 300
    assert run.most <= 16
    assert len(run.fleet.tasks.has_bundle) > 90
    later = [when for when in run.check_ins if when > FIRST_CHECK_INS]
    assert len(later) > 100
    per_minute = Counter(int(when // 60) for when in later)
    assert max(per_minute.values()) < 60 * 1.1 + 6 * 8.1  # check_ins = 1 a second


def test_the_same_seed_gives_the_same_run(tmp_path: Path, line: Path) -> None:
    first, second = (Watched(tmp_path, line, **AWAY) for _ in range(2))
    assert first.check_ins == second.check_ins
    assert first.fleet.history == second.fleet.history


@pytest.mark.parametrize("at", [700.0, 5000.0])
def test_a_coordinator_that_dies_goes_on_with_its_bookings(
    tmp_path: Path, line: Path, at: float
) -> None:
    run = Watched(
        tmp_path,
        line,
        **AWAY,
        coordinator={"crashes": [at], "restart": 40.0},
        plan__stop__rounds=120,
    )
    assert run.reports == [6] * 120
    assert run.most <= 16
    assert not [when for when in run.check_ins if at < when < at + 40.0]


def test_fewer_devices_than_may_be_connected_come_once(tmp_path: Path, line: Path) -> None:
    run = Watched(tmp_path, line, size=16)
    assert run.reports == [6] * 30
    assert set(run.devices.values()) == {1}


def test_asynchronous_rounds(tmp_path: Path, line: Path) -> None:
    buffered: Row = {"goal": 4, "concurrency": 8, "deadline": 1000.0}
    run = Watched(
        tmp_path, line, **AWAY, plan__recipe="fedbuff", plan__round=buffered, plan__stop__rounds=200
    )
    assert run.reports == [4] * 200
    assert run.most <= 16
    assert len(run.fleet.tasks.has_bundle) > 40


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"coordinator": {"crashes": [700.0], "restart": 40.0}},
        {
            "plan__recipe": "fedbuff",
            "plan__round": {"goal": 4, "concurrency": 8, "deadline": 1000.0},
        },
    ],
    ids=["synchronous", "the coordinator dies", "asynchronous"],
)
def test_a_run_stopped_after_each_round_ends_as_if_it_was_not(
    tmp_path: Path, line: Path, more: Row
) -> None:
    """Devices come back when they were told to, to the last bit."""
    scenario = make_scenario(
        tmp_path, line, 60, **(PACED | AWAY | {"plan__stop__rounds": 25} | more)
    )
    whole = simulate(scenario, tmp_path / "whole.sim", Options(backend="bundle", workers=1))
    assert whole is not None
    again = simulate_in_parts(scenario, tmp_path / "parts.sim")
    for name in (ROUNDS, EVENTS, MODEL):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()
