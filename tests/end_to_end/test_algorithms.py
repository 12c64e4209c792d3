"""Algorithms that keep something on each device, with real processes and sockets.

Undisturbed they give the bits of the loop in this file. With devices and the coordinator killed
they give the same bits, and what the devices keep is what the coordinator counted.
"""

from __future__ import annotations

import random
import runpy
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.aggregation.round_sums import next_control
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, ArrayUpdate
from fleetlearn_coordinator.storage.file_blobs import model_path, model_versions
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_coordinator.storage.store import OPTIMIZER_STATE
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.algorithms import run_algorithm
from fleetlearn_device.training.sent_parts import encode_parts
from fleetlearn_device.training.work import Inputs, TaskSettings
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.messages import CONTROL, UPDATE
from fleetlearn_protocol.vector import Vector
from peers import plan_text
from processes import Processes, free_port, processes, service_file, wait_for
from quadratics import TWO, Quadratic, optimum, quadratics_bundle
from safetensors.numpy import load_file

CRASH_COORDINATOR = Path(__file__).with_name("crash_coordinator.py")
CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH_DEVICE.parent))
    POINTS = list(runpy.run_path(str(CRASH_DEVICE))["POINTS"])
DEVICES = (*TWO, Quadratic((2.0, 0.5), (4.0, 9.0)))
STEPS = 10
SETTINGS = {
    "round__goal": len(DEVICES),
    "round__minimum": len(DEVICES),
    "round__gather": 60.0,
    "round__grace": 60.0,
    "round__deadline": 600.0,
    "local__lr": 0.05,
    "local__epochs": STEPS,
    "local__batch_size": 0,
}
"""Every round has all devices. Each has one example, so that the order of its examples, which
another turn in the round would change, is no matter."""
COUNTED = {"server__devices": len(DEVICES)}
RUNS = {
    "scaffold": {"recipe": "scaffold", **COUNTED},
    "scaffold-gradient": {"recipe": "scaffold", "local__algorithm": "scaffold-gradient", **COUNTED},
    "feddyn": {"recipe": "feddyn", "local__mu": 0.5, **COUNTED},
    "top-k": {"recipe": "fedavg", "encoding__up": "topk-0.5"},
    "scaffold, top-k": {"recipe": "scaffold", "encoding__up": "topk-0.5-float16", **COUNTED},
    "ditto": {"recipe": "ditto", "local__mu": 0.5, "local__personal_epochs": 3},
    "pfedme": {"recipe": "pfedme", "local__mu": 0.5, "local__hyper": {"outer_lr": 0.5}},
    "apfl": {"recipe": "apfl", "local__hyper": {"adapt_alpha": 0.001}},
}
"""What is tried -> its settings beside SETTINGS."""
CONVERGING = ("scaffold", "scaffold-gradient", "feddyn")
OFTEN = ("scaffold, top-k", "feddyn", "ditto")
"""What is tried by the fast tests: each thing that devices keep."""


class Fleet(NamedTuple):
    """A plan, its data directory, and the devices' data."""

    run: Processes
    plan: Path
    data_dir: Path
    url: str
    settings: Mapping[str, Any]

    def stop_after(self, rounds: int) -> None:
        """Write the plan. Processes that start from now on read it."""
        self.plan.write_text(
            plan_text(data_dir=self.data_dir, **self.settings, stop__rounds=rounds)
        )

    def device(self, number: int, *wrapper: str | Path) -> None:
        self.run.device(f"device-{number}", self.url, self.run.folder / f"{number}.npz", *wrapper)


@pytest.fixture(scope="session")
def quadratics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle").path


def fleet_of(run: Processes, bundle: Path, name: str, rounds: int) -> Fleet:
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    service_file(plan, port)
    for number, device in enumerate(DEVICES):
        np.savez(run.folder / f"{number}.npz", **device.data)
    fleet = Fleet(
        run, plan, data_dir, f"ws://127.0.0.1:{port}", {"bundle": bundle, **SETTINGS, **RUNS[name]}
    )
    fleet.stop_after(rounds)
    return fleet


class Kept(NamedTuple):
    """What a device keeps."""

    tied: Mapping[str, Vector]
    personal: Vector | None


class Ended(NamedTuple):
    """What a run leaves."""

    model: Vector
    control: Vector | None
    kept: Sequence[Kept]
    """Of each device."""

    def bits(self) -> list[bytes]:
        own = [vector for kept in self.kept for vector in (*kept.tied.values(), kept.personal)]
        return [
            b"" if vector is None else vector.tobytes()
            for vector in (self.model, self.control, *own)
        ]


def by_formula(plan: Plan, rounds: int) -> Ended:
    """The same without coordinator, devices or files: their functions in a loop."""
    bundle, local = open_bundle(plan.bundle), plan.local
    runtime, aggregators, optimizer = (
        open_runtime(bundle),
        plan.aggregators(),
        plan.optimizer(bundle.manifest),
    )
    model = bundle.parameters()
    state, control = optimizer.init(model), np.zeros_like(model)
    kept = [Kept({}, None) for _ in DEVICES]
    settings = TaskSettings(
        plan.hyper(bundle.manifest), STEPS, 0, 0, personal_epochs=local.personal_epochs
    )
    for _ in range(rounds):
        sums = {part: aggregator.init(len(model)) for part, aggregator in aggregators.items()}
        for number, device in enumerate(DEVICES):
            vectors = dict.fromkeys(plan.vectors, control)
            inputs = Inputs(model, None, vectors, kept[number].tied, kept[number].personal)
            outcome = run_algorithm(local.algorithm, runtime, bundle, device.data, inputs, settings)
            asked = plan.parts(bundle.manifest)
            sent = encode_parts(asked, outcome.parts, 0, kept[number].tied)
            arrived = {
                name: find_encoding(asked[name]).decode(content, len(model))
                for name, content in sent.contents.items()
            }
            for name, vector in arrived.items():
                largest = float(np.abs(vector).max())
                aggregators[name].add(sums[name], ArrayUpdate(vector), 1, largest, 1.0, NO_VALUES)
            kept[number] = Kept({**outcome.tied, **sent.tied}, outcome.personal)
        model, state, _ = next_model(aggregators[UPDATE], sums[UPDATE], optimizer, state, model)
        if CONTROL in sums:
            control = next_control(control, sums[CONTROL], len(DEVICES))
    return Ended(model, control if plan.vectors else None, kept)


def ended(fleet: Fleet) -> Ended:
    """What the coordinator and the devices have now, after all processes ended: of each device, the
    tied vectors of the task that the coordinator names."""
    version, model = read_model(fleet.data_dir)
    with sqlite3.connect(fleet.data_dir / DATABASE) as ledger:
        counted = dict(ledger.execute("SELECT device, task FROM tied").fetchall())
    bundle, kept = open_bundle(Plan.load(fleet.plan).bundle).sha256, []
    for number in range(len(DEVICES)):
        state = StateDirectory(fleet.run.folder / f"device-{number}.state")
        tied = state.tied_vectors.begin(bundle, counted.get(state.device), 2)
        kept.append(Kept(tied, state.kept_states.load_personal(bundle, 2)))
        state.close()
    return Ended(
        model, load_file(model_path(fleet.data_dir, version)).get(OPTIMIZER_STATE + CONTROL), kept
    )


def play(
    fleet: Fleet,
    crash: tuple[str, int] | None = None,
    coordinator_dies: tuple[str, int] | None = None,
) -> Ended:
    """Run to the end. ``crash``: where device 0 dies before it is started again.
    ``coordinator_dies``: where the coordinator does."""
    killing = (
        ()
        if coordinator_dies is None
        else (CRASH_COORDINATOR, *map(str, coordinator_dies), fleet.plan)
    )
    coordinator = fleet.run.coordinator(fleet.plan, *killing)
    wait_for((fleet.data_dir / DATABASE).exists, "the coordinator")  # the devices would back off
    for number in range(len(DEVICES)):
        fleet.device(
            number, *([] if crash is None or number else [CRASH_DEVICE, crash[0], str(crash[1])])
        )
    if crash is not None:
        assert fleet.run.running["device-0"].wait(60) == -9, fleet.run.log("device-0")
        fleet.device(0)
    if coordinator_dies is not None:
        assert coordinator.wait(60) == -9, fleet.run.log("coordinator")
        coordinator = fleet.run.coordinator(fleet.plan)
    assert coordinator.wait(120) == 0, fleet.run.log("coordinator")
    for number in range(len(DEVICES)):
        assert fleet.run.wait(f"device-{number}") == 0, fleet.run.log(f"device-{number}")
    return ended(fleet)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in RUNS]
)
def test_processes_give_the_formula_s_bits(run: Processes, quadratics: Path, name: str) -> None:
    """25 rounds. Where drift is corrected they end near the optimum that all devices have together.
    A device's control variate is the sum of what it reported, so the server's is their mean."""
    fleet = fleet_of(run, quadratics, name, 25)
    found = play(fleet)
    assert found.bits() == by_formula(Plan.load(fleet.plan), 25).bits()
    if name in CONVERGING:
        np.testing.assert_allclose(found.model, optimum(DEVICES), atol=0.1)
    if found.control is not None:
        np.testing.assert_allclose(
            found.control, np.mean([row.tied[CONTROL] for row in found.kept], 0), atol=1e-5
        )


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, quadratics: Path
) -> list[bytes]:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        return play(fleet_of(run, quadratics, "scaffold", 3)).bits()


@pytest.mark.parametrize(
    "point", [POINTS[0], *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS[1:])]
)
def test_a_device_killed_keeps_what_was_counted(
    run: Processes, quadratics: Path, undisturbed: list[bytes], point: str
) -> None:
    """SIGKILL in the second round: the same model, server control variate and tied vectors at the
    end, bit for bit."""
    # the directory is settled when it is opened, and in drop
    turn = 4 if "not in its place" in point else 2
    assert play(fleet_of(run, quadratics, "scaffold", 3), (point, turn)).bits() == undisturbed


@pytest.mark.parametrize(
    ("point", "turn"),
    [
        ("the new model is half recorded", 3),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in [
                ("an update is recorded but not acknowledged", 5),
                ("the new model is in its place but not recorded", 3),
                ("a round is recorded and the engine not told", 2),
            ]
        ),
    ],
)
def test_the_coordinator_killed_counts_what_devices_keep(
    run: Processes, quadratics: Path, undisturbed: list[bytes], point: str, turn: int
) -> None:
    """SIGKILL in the second round, of a coordinator that adds and commits in another thread."""
    fleet = fleet_of(run, quadratics, "scaffold", 3)
    assert play(fleet, coordinator_dies=(point, turn)).bits() == undisturbed


KILLS, LONGEST = 100, 1.5
"""Kills of a run, and the most seconds between two of them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "top-k", "ditto"])
def test_killed_at_random_instants(run: Processes, quadratics: Path, name: str) -> None:
    """100 SIGKILLs of devices and of the coordinator. However many rounds there were, they are the
    formula's."""
    luck, fleet = random.Random(7), fleet_of(run, quadratics, name, 10**6)
    names = ["coordinator", *(f"device-{number}" for number in range(len(DEVICES)))]

    def start(process: str) -> None:
        if process == "coordinator":
            run.coordinator(fleet.plan)
        else:
            fleet.device(int(process.removeprefix("device-")))

    for process in names:
        start(process)
    wait_for(lambda: max(model_versions(fleet.data_dir), default=0) > 0, "the first model")
    for _ in range(KILLS):
        time.sleep(luck.uniform(0, LONGEST))
        process = luck.choice(names)
        assert run.running[process].poll() is None, run.log(process)
        run.kill(process)
        start(process)
    run.kill("coordinator")
    version = read_model(fleet.data_dir)[0] + 2
    fleet.stop_after(version)
    start("coordinator")
    for process in names:
        assert run.wait(process) == 0, run.log(process)
    print(f"{name}: {version} rounds")
    assert ended(fleet).bits() == by_formula(Plan.load(fleet.plan), version).bits()
