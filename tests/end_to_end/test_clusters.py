"""IFCA with real processes and sockets: three groups of devices, one model for each. The rounds are
those of the paper's algorithm, and no kill changes a bit of them."""

from __future__ import annotations

import json
import runpy
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.service.training_run.members import starts_of
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol import open_bundle
from numpy.typing import NDArray
from peers import plan_text
from processes import Processes, free_port, processes, service_file, wait_for
from quadratics import Quadratic, quadratics_bundle
from web_sdk import script

CRASH = Path(__file__).with_name("crash_clusters.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    POINTS = runpy.run_path(str(CRASH))
MINIMA = ((9.0, 9.0), (-9.0, 4.0), (4.0, -9.0))
DEVICES = tuple(Quadratic((1.0 + number / 4, 2.0), MINIMA[number % 3], 1) for number in range(6))
ROUNDS, STEPS, LR = 3, 4, 0.1
SETTINGS: dict[str, Any] = {
    "recipe": "ifca",
    "clusters__count": 3,
    "clusters__spread": 2.0,
    "round__goal": len(DEVICES),
    "round__minimum": len(DEVICES),
    "round__gather": 60.0,
    "round__grace": 60.0,
    "round__deadline": 600.0,
    "local__lr": LR,
    "local__epochs": STEPS,
    "local__batch_size": 0,
    "stop__rounds": ROUNDS,
}


@pytest.fixture(scope="session")
def quadratics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle").path


class Found(NamedTuple):
    """What a run leaves."""

    model: bytes
    members: list[list[str]]
    """The members of each round's tasks that counted, by device."""
    chosen: list[dict[str, int]]
    """How many devices chose each model, in each round's fit."""


def play(
    run: Processes, bundle: Path, crash: str | None = None, in_browser: Sequence[int] = ()
) -> Found:
    """``crash``: where device 0 or the coordinator dies, and is started again. ``in_browser``:
    devices that have the SDK for browsers, in Node."""
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    service_file(plan, port)
    plan.write_text(plan_text(bundle, data_dir, **SETTINGS))
    for number, device in enumerate(DEVICES):
        np.savez(run.folder / f"{number}.npz", **device.data)
    url = f"ws://127.0.0.1:{port}"

    def start(number: int, *wrapper: str | Path) -> None:
        name, data = f"device-{number}", run.folder / f"{number}.npz"
        if number in in_browser:
            state = run.folder / f"{name}.state"
            told = ("--until-finished", "--name", name)
            run.start(name, *script("node_device"), url, data, state, *told)
            return
        run.device(name, url, data, *wrapper)

    at_coordinator = crash in POINTS["COORDINATOR"]
    wrapper: tuple[str | Path, ...] = () if crash is None else (CRASH, crash)
    coordinator = run.coordinator(plan, *((*wrapper, "serve", plan) if at_coordinator else ()))
    wait_for((data_dir / DATABASE).exists, "the coordinator")
    for number in range(len(DEVICES)):
        start(number, *(wrapper if number == 0 and not at_coordinator else ()))
    if crash is not None:
        dying = coordinator if at_coordinator else run.running["device-0"]
        assert dying.wait(60) == -9, run.log("coordinator" if at_coordinator else "device-0")
        if at_coordinator:
            coordinator = run.coordinator(plan)
        else:
            start(0)
    assert coordinator.wait(120) == 0, run.log("coordinator")
    for number in range(len(DEVICES)):
        assert run.wait(f"device-{number}") == 0, run.log(f"device-{number}")
    with sqlite3.connect(data_dir / DATABASE) as ledger:
        rows = ledger.execute(
            "SELECT round, member FROM tasks WHERE state = 'accepted' ORDER BY round, device"
        ).fetchall()
        summaries = ledger.execute(
            "SELECT summary FROM exchanges WHERE kind = 'fit' ORDER BY number"
        ).fetchall()
    members = [[name for number, name in rows if number == at + 1] for at in range(ROUNDS)]
    return Found(
        read_model(data_dir)[1].tobytes(),
        members,
        [json.loads(summary)["chosen"] for (summary,) in summaries],
    )


def by_the_paper(plan: Plan) -> tuple[NDArray[np.float64], list[list[int]]]:
    """Algorithm 1 of IFCA with averages of models, in float64."""
    models = [row.astype(np.float64) for row in starts_of(plan, open_bundle(plan.bundle))]
    chosen = []
    for _ in range(ROUNDS):
        ends: list[list[NDArray[np.float64]]] = [[] for _ in models]
        chosen.append([])
        for device in DEVICES:
            losses = [
                float(np.array(device.curvature) @ (model - device.minimum) ** 2 / 2)
                for model in models
            ]
            best = int(np.argmin(losses))
            chosen[-1].append(best)
            own = models[best].copy()
            for _ in range(STEPS):
                own -= LR * device.gradient(own)
            ends[best].append(own)
        models = [
            np.mean(rows, axis=0) if rows else model
            for rows, model in zip(ends, models, strict=True)
        ]
    return np.concatenate(models), chosen


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: Path, quadratics: Path) -> Found:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        return play(run, quadratics)


@pytest.mark.slow
def test_rounds_are_the_paper_s(tmp_path: Path, quadratics: Path, undisturbed: Found) -> None:
    plan = Plan.parse(plan_text(quadratics, tmp_path / "run", **SETTINGS), tmp_path)
    model, chosen = by_the_paper(plan)
    found = np.frombuffer(undisturbed.model, np.float32)
    np.testing.assert_allclose(found, model, rtol=1e-4, atol=1e-4)
    names = list(plan.members)
    assert undisturbed.members == [[names[each] for each in row] for row in chosen]
    assert undisturbed.chosen == [
        {name: row.count(number) for number, name in enumerate(names)} for row in chosen
    ]
    groups = [{chosen[-1][number] for number in range(6) if number % 3 == at} for at in range(3)]
    assert sorted(map(len, groups)) == [1, 1, 1], "a group is in one cluster"
    assert len(set.union(*groups)) == 3, "and alone there"


@pytest.mark.slow
def test_devices_of_the_sdk_for_browsers_choose_as_others_do(
    run: Processes, quadratics: Path, undisturbed: Found
) -> None:
    found = play(run, quadratics, in_browser=(1, 5))
    assert (found.members, found.chosen) == (undisturbed.members, undisturbed.chosen)
    models = (np.frombuffer(each.model, np.float32) for each in (found, undisturbed))
    np.testing.assert_allclose(*models, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("point", [*POINTS["COORDINATOR"], *POINTS["DEVICE"]])
def test_a_kill_changes_nothing(
    run: Processes, quadratics: Path, undisturbed: Found, point: str
) -> None:
    assert play(run, quadratics, point) == undisturbed
