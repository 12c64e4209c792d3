"""Asynchronous gossip: pairs, means, and peers that vanish."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.peers.mixing import average
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.peers.gossip import gossip_steps
from fleetlearn_simulator.peers.peer_measures import consensus_error
from peers_support import make_peers, scenario_of

STILL: dict[str, Any] = {
    "mode": "gossip",
    "plan__local": {"epochs": 1, "batch_size": 10, "lr": 1e-30},
}
"""A plan's learning rate is above 0; this one changes no bit of a parameter."""
OWN = slice(0, 3)
"""The parameters of the line that gradients change: after them comes a count of examples."""


def test_meetings_are_means_of_neighbours_and_keep_the_sum(line: Path, tmp_path: Path) -> None:
    noted: list[dict[str, Any]] = []
    scenario = scenario_of(tmp_path, line, 9, topology="torus", **STILL)
    fleet = make_peers(scenario, tmp_path, noted.extend)
    fleet.models[:] = np.random.default_rng(0).normal(size=fleet.models.shape)
    models, error = fleet.models.copy(), consensus_error(fleet.models[:, OWN])
    steps = list(islice(gossip_steps(fleet), 8))
    for row in noted:
        peer, other = row["peer"], row["with"]
        assert other in fleet.matrices[0].row(peer)
        models[peer] = models[other] = average(models[peer], models[other])
    np.testing.assert_array_equal(fleet.models[:, OWN], models[:, OWN])
    assert [step.mixed for step in steps] == [9] * 8
    assert [step.sent for step in steps] == [18] * 8
    assert consensus_error(fleet.models[:, OWN]) < error / 10
    begin = np.random.default_rng(0).normal(size=fleet.models.shape)[:, OWN]
    np.testing.assert_allclose(models[:, OWN].mean(axis=0), begin.mean(axis=0), atol=1e-6)


def test_nobody_waits_for_a_slow_peer(line: Path, tmp_path: Path) -> None:
    """Peer k trains for 10 (k + 1) seconds: in 120 s peer 0 ends twelve trainings, and peer 3
    three."""
    noted: list[dict[str, Any]] = []
    fleet = make_peers(scenario_of(tmp_path, line, 4, **STILL), tmp_path, noted.extend)
    list(islice(gossip_steps(fleet), 10))
    ends = [row["peer"] for row in noted if row["time"] < 120.5]
    assert [ends.count(peer) for peer in range(4)] == [12, 6, 4, 3]


def test_a_peer_adds_what_it_learned_to_the_model_that_it_has_by_then(
    line: Path, tmp_path: Path
) -> None:
    """Peer 0 ends at 10 s and meets peer 1, whose training goes on from its first model until
    20 s."""
    scenario = scenario_of(tmp_path, line, 2, topology="complete", mode="gossip")
    fleet = make_peers(scenario, tmp_path)
    fleet.models[1, OWN] += 1.0
    before = fleet.models.copy()
    fleet.keep(fleet.ids)
    changes, _ = fleet.train(fleet.ids, np.zeros(2, np.int64), fleet.steps)
    met = average(before[0] + changes[0], before[1])
    (step,) = islice(gossip_steps(fleet), 1)
    assert step.time == pytest.approx(20.0, abs=1e-6)
    expected = average(met + changes[1], met)
    np.testing.assert_array_equal(fleet.models, [expected, expected])
    assert np.abs(changes[:, OWN]).max() > 0.01


def test_what_a_vanished_peer_learned_is_lost_and_it_comes_back(line: Path, tmp_path: Path) -> None:
    noted: list[dict[str, Any]] = []
    scenario = scenario_of(
        tmp_path, line, 6, deadline=100.0, failures={"crash": 0.5}, topology="complete", **STILL
    )
    fleet = make_peers(scenario, tmp_path, noted.extend)
    steps = list(islice(gossip_steps(fleet), 12))
    gone = [row for row in noted if row["event"] == "gone"]
    assert sum(sum(step.causes.values()) for step in steps) == len(gone) > 6
    assert all(step.mixed + sum(step.causes.values()) == 6 for step in steps)
    for row in gone:
        away = [
            other
            for other in noted
            if row["time"] < other["time"] < row["time"] + 100.0
            and row["peer"] in (other["peer"], other.get("with"))
        ]
        assert not away
    assert {row["peer"] for row in noted if row["event"] == "met"} == {*range(6)}


def test_offline_peers_are_not_met(line: Path, tmp_path: Path) -> None:
    noted: list[dict[str, Any]] = []
    (tmp_path / "trace.csv").write_text("device,on,off\n0,0,5000\n1,0,95\n1,300,5000\n2,0,5000\n")
    trace = {"kind": "trace", "file": "trace.csv"}
    scenario = scenario_of(tmp_path, line, 3, availability=trace, **STILL)
    list(islice(gossip_steps(make_peers(scenario, tmp_path, noted.extend)), 30))
    of_one = [row["time"] for row in noted if 1 in (row["peer"], row["with"])]
    assert not [time for time in of_one if 100.5 < time < 300]
    assert [time for time in of_one if time > 320]
    assert max(row["time"] for row in noted) > 400


def test_nobody_is_online_any_more(line: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("device,on,off\n0,5,28\n")
    trace = {"kind": "trace", "file": "trace.csv"}
    fleet = make_peers(scenario_of(tmp_path, line, 1, availability=trace, **STILL), tmp_path)
    steps = gossip_steps(fleet)
    assert [next(steps).mixed for _ in range(3)] == [1, 1, 1]
    with pytest.raises(SimulatorError, match="after 3 trainings no peer is online"):
        next(steps)


def test_a_peer_alone_trains_on(line: Path, tmp_path: Path) -> None:
    noted: list[dict[str, Any]] = []
    fleet = make_peers(scenario_of(tmp_path, line, 1, mode="gossip"), tmp_path, noted.extend)
    before = fleet.models.copy()
    (step,) = islice(gossip_steps(fleet), 1)
    assert (step.mixed, step.sent, noted[0]["with"]) == (1, 0, None)
    assert step.time == pytest.approx(10.0, abs=1e-6)
    assert np.abs(fleet.models - before)[:, OWN].max() > 0
