"""The coordinator is killed at 200 random instants of asynchronous runs, and of runs whose plan has
rules on selection: what was acknowledged counts, once, and the memory of devices goes on."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.storage.ledger import ROUNDS_KEPT
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol.messages import Evaluation
from peers import BUFFERED, plan_text, write_test_bundle
from processes import Processes, free_port, service_file
from random_kills import KILLS, Devices, by_hand, kill_at_random, luck_of

RUNS = 20
"""Asynchronous runs, with 200 kills together."""
DEVICES = 4
GOAL = 100
"""Updates that make a model: so many that a run of ROUNDS_KEPT models, whose reports the ledger
keeps, outlasts its kills."""


def write_plan(folder: Path, recipe: str, **settings: Any) -> tuple[Path, str]:
    """Write a plan that ends after ROUNDS_KEPT models. Returns its file, and the coordinator's
    address."""
    port, file, bundle = (
        free_port(),
        folder / "plan.toml",
        write_test_bundle(folder / "test.bundle"),
    )
    usual = {
        "round__grace": 30.0,
        "stop__rounds": ROUNDS_KEPT,
        "server__optimizer": "adam",
        "server__lr": 0.05,
    }
    file.write_text(plan_text(bundle, folder / "run", recipe, **(usual | settings)))
    service_file(file, port)
    return file, f"ws://127.0.0.1:{port}"


def check_updates(
    folder: Path,
    file: Path,
    acknowledged: list[str],
    killed: int,
    goal: int,
    weight: int,
    reported: Callable[[str], dict[str, Any]] = lambda task: {},
) -> None:
    """Check that what was acknowledged counts, once, and that the model is made of it."""
    version, model = read_model(folder / "run")
    rounds = [row.summary for row in read_status(folder / "run").rounds if row.summary]
    with sqlite3.connect(folder / "run" / DATABASE) as ledger:
        found = ledger.execute(
            "SELECT task, round, staleness FROM tasks WHERE state='accepted'"
        ).fetchall()
    print(f"{killed} kills, {version} models, {len(acknowledged)} updates acknowledged")
    assert killed == KILLS or version == ROUNDS_KEPT
    assert version >= 1
    assert {*acknowledged} <= {task for task, _, _ in found}, "an acknowledged update was lost"
    assert len(acknowledged) == len({*acknowledged}), "an update was acknowledged twice"
    assert [row["reports"] for row in rounds] == [goal] * version
    counted = Counter(number for _, number, _ in found)
    assert [counted[number] for number in range(1, version + 1)] == [goal] * version, (
        "or counted twice"
    )
    assert by_hand(Plan.load(file), found, version, weight, reported).tobytes() == model.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_asynchronous_rounds(run: Processes, tmp_path: Path, seed: int) -> None:
    settings = BUFFERED | {"round__goal": GOAL, "round__concurrency": DEVICES}
    file, url = write_plan(tmp_path, settings.pop("recipe"), **settings)
    devices = Devices(url, [f"device-{number}" for number in range(DEVICES)])
    killed = asyncio.run(kill_at_random(run, file, devices, random.Random(seed), least=2 * GOAL))
    check_updates(tmp_path, file, devices.acknowledged, killed, GOAL, weight=1)


WEIGHED = {
    "fednova": {"aggregation__normalise": True},
    "q-fedavg": {"aggregation__q": 2.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHED)
def test_weighed_updates(run: Processes, tmp_path: Path, name: str) -> None:
    """With a bound on norms that follows the updates."""

    def reported(task: str) -> dict[str, Any]:
        return {
            "steps": 1 + int(40 * luck_of(task)),
            "evaluation": Evaluation(10, 10 * luck_of(task + "loss")),
        }

    settings = (
        BUFFERED
        | WEIGHED[name]
        | {"round__goal": GOAL, "round__concurrency": DEVICES, "local__lr": 0.1}
    )
    settings |= {"aggregation__max_norm": 50.0, "aggregation__norm_quantile": 0.5}
    file, url = write_plan(tmp_path, settings.pop("recipe"), **settings)
    devices = Devices(url, [f"device-{number}" for number in range(DEVICES)], reported=reported)
    killed = asyncio.run(kill_at_random(run, file, devices, random.Random(5), least=2 * GOAL))
    check_updates(tmp_path, file, devices.acknowledged, killed, GOAL, 1, reported)


SELECTED = {
    "round__goal": 20,
    "round__minimum": 20,
    "round__over_selection": 1.2,
    "round__gather": 5.0,
    "selection__strategy": "oort",
    "selection__once_in": 2,
    "selection.tag_quotas__eu": 0.5,
    "selection.oort__window": 2,
    "selection.oort__preferred_seconds": 0.5,
    "selection.oort__preferred_step": 0.25,
    "selection.oort__exploration": 0.5,
    "selection.oort__most_tasks": 1000,
}
"""Oort, with a quota for one tag, and at most every second round for each device."""
COHORT = 24


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_rules_on_selection(run: Processes, tmp_path: Path, seed: int) -> None:
    file, url = write_plan(tmp_path, "fedavg", **SELECTED)
    devices = Devices(
        url,
        [f"device-{number}" for number in range(60)],
        stated=lambda name: {"tags": ("eu",) if int(name.rpartition("-")[2]) % 2 else ()},
        reported=lambda task: {"loss": luck_of(task)},
    )
    luck = random.Random(seed)
    killed = asyncio.run(kill_at_random(run, file, devices, luck, least=2 * 20))
    check_updates(tmp_path, file, devices.acknowledged, killed, 20, weight=10)
    with sqlite3.connect(tmp_path / "run" / DATABASE) as ledger:
        rows = ledger.execute("SELECT task, round, device, state FROM tasks").fetchall()
        memory = {row[0]: row[1:] for row in ledger.execute("SELECT * FROM devices").fetchall()}
    given = [(int(task.split("-")[1]), device) for task, _, device, _ in rows]
    check_rules(given)

    # What is remembered of devices is what the rounds say of them.
    accepted = {
        (number, device): luck_of(task)
        for task, number, device, state in rows
        if state == "accepted"
    }
    assert memory.keys() == {device for _, device in given}
    for device, (last, tasks, _, reported, loss, examples, seconds) in memory.items():
        own = [number for number, name in given if name == device]
        assert (last, tasks) == (max(own), len(own))
        last_report = max((number for number, name in accepted if name == device), default=None)
        assert reported == last_report
        if reported is not None:
            assert (loss, examples) == (accepted[reported, device], 10)
            assert seconds is None or seconds > 0

    # The pacer's T goes on from round to round, whoever died in between.
    settings = Plan.load(file).engine_settings(15.0)
    by_rounds = RuledSelection(settings)
    for number, row in enumerate(
        (row.summary for row in read_status(tmp_path / "run").rounds if row.summary), 1
    ):
        for (at, device), loss in accepted.items():
            if at == number:
                by_rounds.memory.records[device] = DeviceRecord(at, 1, (), at, loss, 10, None)
        found = by_rounds.utility_of(device for at, device in accepted if at == number)
        assert row["selection"] == pytest.approx(found)
        by_rounds.committed(number, row["selection"])


def check_rules(given: list[tuple[int, str]]) -> None:
    """Check the quota of each round, and that no device has tasks in two rounds one after the
    other."""
    rounds: dict[int, set[str]] = {}
    for number, device in given:
        rounds.setdefault(number, set()).add(device)
    for number, names in rounds.items():
        of_tag = sum(int(name.rpartition("-")[2]) % 2 for name in names)
        assert of_tag <= floor(0.5 * max(COHORT, len(names)))
        assert not names & rounds.get(number + 1, set())
