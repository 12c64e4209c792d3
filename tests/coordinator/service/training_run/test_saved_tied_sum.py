"""SCAFFOLD's c and FedDyn's h: right again after a device lost its disk, or N was corrected."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.rounds.commands import Assign
from fleetlearn_coordinator.service.training_run.saved_tied_sum import load_tied_sum
from fleetlearn_protocol import open_bundle, write_bundle
from fleetlearn_protocol.manifest import LocalStep
from fleetlearn_protocol.vector import Vector
from peers import SIZE, plan_text, write_test_bundle

Parts = dict[str, Vector]
NAMES = "abcdef"
CURVATURES = np.array([1.0, 2.5, 2.0, 0.5, 1.5, 3.0])
MINIMA = np.array([3.5, 2.0, 2.5, 4.0, -1.0, 1.0])
"""Of six devices with the losses curvature / 2 * (w - minimum)^2 in each element."""
LEAST = float(CURVATURES @ MINIMA / CURVATURES.sum())
LR, STEPS, MU = 0.1, 5, 1.0


def vector(value: float) -> Vector:
    return np.full(SIZE, value, np.float32)


def plan_of(folder: Path, recipe: str, devices: int = 6) -> Plan:
    path = folder / "corrected.bundle"
    if not path.exists():
        plain = open_bundle(write_test_bundle(folder / "plain.bundle"))
        files = {file: plain.read(file) for file in plain.manifest.files}
        step = LocalStep("sgd", proximal=True, correction=True)
        references = ("anchor", "correction")
        manifest = msgspec.structs.replace(plain.manifest, step=step, references=references)
        write_bundle(path, manifest, files)
    settings: dict[str, object] = {"recipe": recipe, "server__devices": devices, "local__lr": LR}
    settings |= {"round__goal": 2, "round__minimum": 2, "stop__rounds": 1000}
    if recipe == "feddyn":
        settings["local__mu"] = MU
    return Plan.parse(plan_text(path, folder / "run", **settings), folder)  # type: ignore[arg-type]


class Quadratics:
    """Six devices that train by a recipe, and what they keep on their disks."""

    def __init__(self, recipe: str) -> None:
        self.work = {"scaffold": self._scaffold, "feddyn": self._feddyn}[recipe]
        self.disks: dict[str, dict[str, Vector]] = {name: {} for name in NAMES}

    def train(self, fleet: Fleet, rounds: int) -> None:
        """Let them connect, and train for this many rounds."""
        tasks = leases(fleet.check_in(*NAMES))
        for _ in range(rounds):
            commands: list[object] = []
            for lease in tasks:
                commands += self._report(fleet, lease)
            tasks = leases(commands)  # type: ignore[arg-type]

    def _report(self, fleet: Fleet, lease: Assign) -> list[object]:
        disk, kept = self.disks[lease.device], fleet.run.tied_to(lease.device)
        own = vector(0.0) if kept is None else disk.get(kept, vector(0.0))
        parts, keeps = self.work(fleet, NAMES.index(lease.device), own)
        fleet.save_parts(lease, parts, lost_tied=kept is not None and kept not in disk)
        disk[lease.task] = keeps
        return list(fleet.carry_out(fleet.run.engine.count_report(lease.device, lease.task, 0.0)))

    def _scaffold(self, fleet: Fleet, place: int, own: Vector) -> tuple[Parts, Vector]:
        newest = fleet.run.models.newest
        model, control = newest.model, newest.vectors["control"]
        y = model.astype(np.float64)
        for _ in range(STEPS):
            y = y - LR * (CURVATURES[place] * (y - MINIMA[place]) + control - own)
        change = (-control + (model - y) / (STEPS * LR)).astype(np.float32)
        return {"update": (y - model).astype(np.float32), "control": change}, own + change

    def _feddyn(self, fleet: Fleet, place: int, own: Vector) -> tuple[Parts, Vector]:
        """The device finds where its loss - <own, w> + mu / 2 |w - x|^2 is least."""
        model = fleet.run.models.newest.model.astype(np.float64)
        curvature = CURVATURES[place]
        y = (curvature * MINIMA[place] + own + MU * model) / (curvature + MU)
        update = (y - model).astype(np.float32)
        return {"update": update}, own - np.float32(MU) * update

    def mean_kept(self, fleet: Fleet) -> Vector:
        """Return the mean of what the devices will go on from."""
        tied = {name: fleet.run.tied_to(name) for name in NAMES}
        rows = [self.disks[name][task] for name, task in tied.items() if task is not None]
        return np.sum(rows, axis=0, dtype=np.float32) / np.float32(len(NAMES))


def sum_of(fleet: Fleet, recipe: str) -> Vector:
    """Return what the server has of the mean of what the devices keep. FedDyn's lambda is -mu h."""
    newest = fleet.run.models.newest
    return newest.vectors["control"] if recipe == "scaffold" else -MU * newest.optimizer_state["h"]


@pytest.mark.parametrize(("first", "then"), [(60, 6), (6, 60), (6, 6)])
def test_c_is_right_again_after_n_was_corrected(tmp_path: Path, first: int, then: int) -> None:
    """The sum of all c_k stays. (With 60 corrected to 6, the model stayed at a wrong point.)"""
    recipe = "scaffold"
    devices = Quadratics(recipe)
    fleet = Fleet(plan_of(tmp_path, recipe, first))
    devices.train(fleet, 15)
    assert np.abs(sum_of(fleet, recipe) * first).max() > 0.1
    fleet.store.close()
    fleet = Fleet(plan_of(tmp_path, recipe, then))
    fleet.run.resume(NOW)
    devices.train(fleet, 120 if then == 6 else 1)
    found = sum_of(fleet, recipe) * then
    np.testing.assert_allclose(found, 6 * devices.mean_kept(fleet), atol=1e-4)
    if then == 6:
        np.testing.assert_allclose(fleet.run.models.newest.model, vector(LEAST), atol=1e-3)
    fleet.store.close()


@pytest.mark.parametrize("recipe", ["scaffold", "feddyn"])
def test_a_device_that_lost_its_disk_does_not_count_twice(tmp_path: Path, recipe: str) -> None:
    """The sum begins from zeros again, and all devices with it, once; the model goes on. (SCAFFOLD
    stayed 4.5e-2 away.)"""
    devices = Quadratics(recipe)
    fleet = Fleet(plan_of(tmp_path, recipe))
    devices.train(fleet, 15)
    devices.disks["a"].clear()
    devices.train(fleet, 150)
    state = fleet.run.models.newest.tied_sum
    assert state is not None
    assert state.lost == 0
    assert 15 < state.since < 15 + 12, "in the first round of the device, and never again"
    assert load_tied_sum(fleet.store.ledger) == state, "as a restart finds it"
    np.testing.assert_allclose(sum_of(fleet, recipe), devices.mean_kept(fleet), atol=1e-5)
    np.testing.assert_allclose(fleet.run.models.newest.model, vector(LEAST), atol=1e-3)
    fleet.store.close()
