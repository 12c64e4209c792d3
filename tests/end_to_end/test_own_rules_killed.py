"""A coordinator with own functions is killed at random instants. It goes on choosing by what it had
written down, stops at the version where the rule says, and makes the same models to the bit."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol import extensions
from peers import plan_text, write_test_bundle
from processes import Processes, free_port, service_file
from random_kills import Devices, by_hand, kill_at_random

RULES = """
def fewest_tasks():
    def strategy(choice):
        ranked = []
        for device in choice.devices:
            tasks = 0 if device.record is None else device.record.tasks
            ranked.append((tasks, next(choice.random), device.name))
        return [name for _, _, name in sorted(ranked)[: choice.wanted]]
    return strategy

def enough(reports: int):
    def rule(past):
        found = sum(each.reports for each in past)
        return f"{found} reports are enough" if found >= reports else None
    return rule
"""
GOAL, ROUNDS, DEVICES = 8, 60, 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_own_rules_decide_as_if_nobody_had_been_killed(
    run: Processes, tmp_path: Path, seed: int
) -> None:
    (tmp_path / "killed_rules.py").write_text(RULES)
    bundle = write_test_bundle(tmp_path / "test.bundle")
    file, port = tmp_path / "plan.toml", free_port()
    settings = {
        "round__goal": GOAL,
        "round__minimum": GOAL,
        "round__gather": 5.0,
        "round__grace": 30.0,
        "selection__strategy": "killed_rules:fewest_tasks",
        "stop__rule": "killed_rules:enough",
        "stop__parameters": {"reports": GOAL * ROUNDS},
    }
    file.write_text(plan_text(bundle, tmp_path / "run", "fedavg", **settings))
    service = service_file(file, port)
    service.write_text(service.read_text() + '[plugins]\nmodules = ["killed_rules"]\n')
    devices = Devices(
        f"ws://127.0.0.1:{port}", [f"device-{number:02}" for number in range(DEVICES)]
    )
    # the last process is never stopped: the rule ends the run
    killed = asyncio.run(kill_at_random(run, file, devices, random.Random(seed), least=10**9))

    status, (version, model) = read_status(tmp_path / "run"), read_model(tmp_path / "run")
    assert version == ROUNDS
    assert status.finished == f"{GOAL * ROUNDS} reports are enough"
    assert status.finished_by is not None
    assert status.finished_by["rule"] == "own"
    with sqlite3.connect(tmp_path / "run" / DATABASE) as ledger:
        rows = ledger.execute("SELECT task, round, device, state, staleness FROM tasks").fetchall()
        memory = dict(ledger.execute("SELECT device, tasks FROM devices").fetchall())
    given = Counter(device for _, _, device, _, _ in rows)
    assert memory == given, "what the strategy goes by is what was given"
    print(f"{killed} kills, tasks of the devices {sorted(given.values())}")
    assert max(given.values()) - min(given.values()) <= 2, "the fewest first, over all kills"
    found = [
        (task, number, staleness)
        for task, number, _, state, staleness in rows
        if state == "accepted"
    ]
    assert {*devices.acknowledged} <= {task for task, _, _ in found}
    assert by_hand(Plan.load(file), found, version, 10).tobytes() == model.tobytes()


SERVER = """
import math

import numpy as np
from fleetlearn_coordinator import Optimizer, WeighingRule
from fleetlearn_coordinator.aggregation.aggregators import MEAN

def longest_left_out():
    def combine(updates):
        shares = updates.weights.copy()
        shares[np.argmax(updates.norms())] = 0.0
        return updates.combination(shares / shares.sum())
    return combine

def added_up():
    return MEAN

def heavy_ball(lr: float, momentum: float):
    def step(delta, state, share):
        state["v"] = momentum * state["v"] + delta
        return lr * state["v"]
    return Optimizer("ball", {"v": 0.0}, step)

def root():
    def factor(reported, level):
        return min(1.0, math.sqrt(reported.weight / 1000))
    def scale(reports, level):
        return sum(each.weight for each in reports) / math.fsum(
            each.weight * factor(each, level) for each in reports
        )
    return WeighingRule("root", factor, scale, lambda reports, level: None, False, False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregation",
    [
        {"aggregation__aggregator": "killed_server:longest_left_out"},
        {"aggregation__aggregator": "killed_server:added_up"},
        {"aggregation__weighing": "killed_server:root"},
    ],
)
def test_an_own_server_makes_the_same_models_over_kills(
    run: Processes, tmp_path: Path, aggregation: dict[str, str]
) -> None:
    """An own aggregator that keeps updates, one that adds them up, an own weighing rule; each with
    an own optimizer that has a state."""
    (tmp_path / "killed_server.py").write_text(SERVER)
    bundle = write_test_bundle(tmp_path / "test.bundle")
    file, port = tmp_path / "plan.toml", free_port()
    settings = {
        "round__goal": GOAL,
        "round__minimum": GOAL,
        "round__grace": 30.0,
        "server__optimizer": "killed_server:heavy_ball",
        "server__parameters": {"lr": 0.7, "momentum": 0.5},
        "stop__rounds": 40,
        **aggregation,
    }
    file.write_text(plan_text(bundle, tmp_path / "run", "fedavg", **settings))
    service = service_file(file, port)
    service.write_text(service.read_text() + '[plugins]\nmodules = ["killed_server"]\n')
    devices = Devices(
        f"ws://127.0.0.1:{port}", [f"device-{number:02}" for number in range(DEVICES)]
    )
    killed = asyncio.run(kill_at_random(run, file, devices, random.Random(5), least=10**9))

    version, model = read_model(tmp_path / "run")
    print(f"{killed} kills, {version} versions")
    assert version == 40
    with sqlite3.connect(tmp_path / "run" / DATABASE) as ledger:
        found = ledger.execute(
            "SELECT task, round, staleness FROM tasks WHERE state = 'accepted'"
        ).fetchall()
    assert {*devices.acknowledged} <= {task for task, _, _ in found}
    with extensions.apart():
        extensions.allow(["killed_server"], tmp_path)
        assert by_hand(Plan.load(file), found, version, 10).tobytes() == model.tobytes()
