"""Synchronous steps of peers, against FedAvg, closed forms and dense matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.peers.mixing import mix_all
from fleetlearn_device.peers.topologies import ring
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import simulate
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.peers.peer_fleet import PeerFleet
from fleetlearn_simulator.peers.synchronous import synchronous_steps
from fleetlearn_simulator.run import Options
from fleetlearn_simulator.training.vectorized import Vectorized
from peers_support import make_peers, scenario_of

STILL: dict[str, Any] = {"plan__local": {"epochs": 1, "batch_size": 10, "lr": 1e-30}}
"""A plan's learning rate is above 0; this one changes no bit of a parameter."""


def test_a_complete_graph_is_the_simulators_fedavg(softmax: Path, tmp_path: Path) -> None:
    """Each peer does some local steps, and W = 11^T/n: that is FedAvg with all devices, of which
    all have as many examples. One local step on all of a peer's data is mini-batch SGD."""
    for epochs in (1, 3):
        local = {"epochs": epochs, "batch_size": 0, "lr": 0.1, "evaluate": False}
        settings = {"plan__local": local, "plan__stop__rounds": 4}
        folder = tmp_path / str(epochs)
        folder.mkdir()
        scenario = scenario_of(folder, softmax, 6, topology="complete", **settings)
        fedavg = simulate(
            scenario, folder / "fedavg", Options(backend="bundle", workers=1, events=False)
        )
        assert fedavg is not None
        fleet = make_peers(scenario, folder)
        begin = open_bundle(softmax).parameters()
        assert np.linalg.norm(fedavg.model - begin) > 0.05
        for model in run(fleet, 4):
            np.testing.assert_allclose(model, fedavg.model, rtol=0, atol=2e-6)


def test_a_ring_that_learns_nothing_forgets_its_slowest_disagreement_by_lambda_2(
    line: Path, tmp_path: Path
) -> None:
    fleet = make_peers(scenario_of(tmp_path, line, 16, **STILL), tmp_path)
    wave = np.cos(2 * np.pi * np.arange(16) / 16).astype(np.float32)
    fleet.models[:] = wave[:, None]
    rate = (1 + 2 * np.cos(2 * np.pi / 16)) / 3
    steps = synchronous_steps(fleet)
    for number in range(1, 11):
        # `seen` of the bundle counts examples: it is a buffer, and no part of what is compared.
        own = slice(0, 3)
        next(steps)
        distance = float(np.linalg.norm(fleet.models[:, own] - fleet.models[:, own].mean(axis=0)))
        expected = rate**number * np.linalg.norm(wave) * np.sqrt(3)
        assert distance == pytest.approx(expected, rel=1e-5)
    assert rate == pytest.approx(0.9493, abs=5e-5)


def test_steps_are_training_from_own_models_and_then_the_product(
    line: Path, tmp_path: Path
) -> None:
    fleet = make_peers(scenario_of(tmp_path, line, 5, topology="ring"), tmp_path)
    fleet.models[:] += np.arange(5, dtype=np.float32)[:, None] / 10
    before = fleet.models.copy()
    fleet.keep(fleet.ids)
    changes, results = fleet.train(fleet.ids, np.zeros(5, np.int64), fleet.steps)
    assert (np.abs(changes).max(axis=1) > 0).all()
    fleet.models[:] = before
    step = next(synchronous_steps(fleet))
    np.testing.assert_array_equal(fleet.models, mix_all(before + changes, ring(5)))
    assert (step.mixed, step.sent, step.causes, step.there) == (5, 10, {}, 5)
    assert step.train["loss"] == pytest.approx((results.loss * results.seen).sum() / 150)
    # A step takes 10 s, peer 4 has five of them, and transfers take none.
    assert step.time == pytest.approx(50.0, abs=1e-6)


def test_local_steps_are_bounded(line: Path, tmp_path: Path) -> None:
    fleet = make_peers(scenario_of(tmp_path, line, 4, local_steps=2), tmp_path)
    np.testing.assert_array_equal(fleet.steps, [1, 2, 2, 2])
    assert next(synchronous_steps(fleet)).time == pytest.approx(20.0, abs=1e-6)


def test_a_straggler_does_a_part_of_its_local_steps(line: Path, tmp_path: Path) -> None:
    local = {"epochs": 3, "batch_size": 10, "lr": 0.001}
    scenario = scenario_of(
        tmp_path, line, 4, local_steps=2, failures={"stragglers": 1.0}, plan__local=local
    )
    fleet = make_peers(scenario, tmp_path)
    np.testing.assert_array_equal(fleet.steps, 2)
    step = next(synchronous_steps(fleet))
    assert (step.partial, step.mixed, step.time) == (4, 4, pytest.approx(10.0, abs=1e-6))


def test_those_that_vanish_keep_their_model_and_the_others_keep_their_mean(
    line: Path, tmp_path: Path
) -> None:
    noted: list[dict[str, Any]] = []
    scenario = scenario_of(tmp_path, line, 12, topology="torus", failures={"crash": 0.4}, **STILL)
    fleet = make_peers(scenario, tmp_path, noted.extend)
    random = np.random.default_rng(0)
    fleet.models[:] = random.normal(size=fleet.models.shape)
    gone_ever = set()
    steps, own = synchronous_steps(fleet), slice(0, 3)  # all but the buffer
    for number in range(6):
        before = fleet.models.copy()
        step = next(steps)
        gone = {row["peer"] for row in noted if row["event"] == "gone" and row["step"] == number}
        there = sorted({*range(12)} - gone)
        np.testing.assert_array_equal(fleet.models[sorted(gone)], before[sorted(gone)])
        np.testing.assert_allclose(
            fleet.models[there, own].mean(axis=0), before[there, own].mean(axis=0), atol=1e-6
        )
        assert (step.mixed, step.causes) == (len(there), {"crash": len(gone)} if gone else {})
        gone_ever |= gone
    assert len(gone_ever) > 6  # and each of them came back: the others' rows were whole again


def test_a_late_peer_keeps_what_it_trained_and_mixes_with_nobody(
    line: Path, tmp_path: Path
) -> None:
    """A peer that has no time left to train does nothing."""
    scenario = scenario_of(tmp_path, line, 3, deadline=25.0, tiers={"slow": {"latency": 24.5}})
    fleet = make_peers(scenario, tmp_path)
    step = next(synchronous_steps(fleet))
    assert (step.mixed, step.sent, step.causes) == (0, 0, {"out-of-time": 3})
    scenario = scenario_of(tmp_path, line, 3, deadline=25.0, tiers={"slow": {"latency": 9.0}})
    fleet = make_peers(scenario, tmp_path)
    before = fleet.models.copy()
    step = next(synchronous_steps(fleet))
    assert (step.time, step.mixed, step.causes) == (25.0, 0, {"late": 3})
    assert (np.abs(fleet.models - before).max(axis=1) > 0).all()


def test_peers_that_are_offline_are_left_out_and_come_back(line: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("device,on,off\n0,0,1000\n1,0,15\n1,60,1000\n2,0,1000\n")
    scenario = scenario_of(
        tmp_path,
        line,
        3,
        availability={"kind": "trace", "file": "trace.csv"},
        topology="complete",
        deadline=35.0,
    )
    steps = synchronous_steps(make_peers(scenario, tmp_path))
    first, second, third = (next(steps) for _ in range(3))
    # Peer 1 goes offline at 15 s, before its two steps are done.
    assert (first.there, first.mixed, first.causes) == (3, 2, {"offline": 1})
    # The others wait for it until the deadline; in the next step nobody expects it.
    assert first.time == 35.0
    assert (second.there, second.mixed, second.time) == (2, 2, pytest.approx(65.0, abs=1e-6))
    assert (third.there, third.mixed) == (3, 3)


def test_nobody_is_online_any_more(line: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("device,on,off\n0,5,500\n")
    scenario = scenario_of(tmp_path, line, 2, availability={"kind": "trace", "file": "trace.csv"})
    steps = synchronous_steps(make_peers(scenario, tmp_path))
    assert next(steps).time == pytest.approx(25.0, abs=1e-6)
    with pytest.raises(SimulatorError, match="no peer is online, and none will be again"):
        list(steps)


def test_a_peer_that_diverges_is_left_out(line: Path, tmp_path: Path) -> None:
    fleet = make_peers(scenario_of(tmp_path, line, 4, topology="complete"), tmp_path)
    fleet.models[2, :3] = 1e38
    before = fleet.models.copy()
    step = next(synchronous_steps(fleet))
    assert (step.mixed, step.causes) == (3, {"diverged": 1})
    np.testing.assert_array_equal(fleet.models[2], before[2])
    assert np.isfinite(fleet.models[[0, 1, 3]]).all()


def test_time_varying_matrices_take_turns(line: Path, tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, line, 8, topology="one-peer-exponential", **STILL)
    fleet = make_peers(scenario, tmp_path)
    fleet.models[:] = np.random.default_rng(1).normal(size=fleet.models.shape)
    own = slice(0, 3)
    mean = fleet.models[:, own].mean(axis=0)
    sent = [step.sent for step, _ in zip(synchronous_steps(fleet), range(3), strict=False)]
    assert sent == [8, 8, 8]
    np.testing.assert_allclose(fleet.models[:, own], np.broadcast_to(mean, (8, 3)), atol=1e-6)


def test_the_back_ends_train_each_peer_from_its_own_model(softmax: Path, tmp_path: Path) -> None:
    scenario = scenario_of(
        tmp_path, softmax, 11, plan__local={"epochs": 2, "batch_size": 10, "lr": 0.05}
    )
    one = make_peers(scenario, tmp_path / "one")
    many = make_peers(scenario, tmp_path / "many", backend=Vectorized)
    for fleet in (one, many):
        random = np.random.default_rng(2)
        fleet.models[:] += random.normal(size=fleet.models.shape).astype(np.float32)
    np.testing.assert_allclose(run(one, 3), run(many, 3), rtol=0, atol=1e-5)
    assert np.std(one.models, axis=0).max() > 0.1


def run(fleet: PeerFleet, steps: int) -> Any:
    for _, step in zip(range(steps), synchronous_steps(fleet), strict=False):
        assert step.mixed == len(fleet.ids)
    return fleet.models
