"""Canaries among the devices of a scenario: they take part as the engine chooses, while the others
train on their data. The attack is that of ``canary_run``; what the other devices send hides the
canaries in addition to the noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fleetlearn_simulator.audit.canary_devices import (
    CanaryDevices,
    Guesses,
    guess,
    log_ratios,
    make_canaries,
)
from fleetlearn_simulator.audit.canary_run import SIZE_PER_CANARY, CanaryAttack
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.events import AcceptedLine
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.choice import choose_backend, make_backend
from fleetlearn_simulator.training.run_bundles import run_bundles
from fleetlearn_simulator.training.trained_devices import TrainedDevices


class ReleaseWatch:
    """Remembers what each round of a fleet released, and of whom it was: an observer of its event
    log."""

    def __init__(self, canaries: int) -> None:
        self.canaries = canaries
        self.fleet: Fleet | None = None
        self.released: list[NDArray[np.float64]] = []
        self.lengths: list[NDArray[np.float64]] = []
        self._reported: set[int] = set()

    def write(self, lines: Sequence[Any]) -> None:
        """Read lines of the event log."""
        for line in lines:
            if isinstance(line, AcceptedLine):
                self._reported.add(line.device)
            elif isinstance(line, dict) and line["event"] in ("committed", "abandoned"):
                if line["event"] == "committed":
                    self._end_round()
                self._reported = set()

    def _end_round(self) -> None:
        assert self.fleet is not None
        coordinator = self.fleet.coordinator
        rules = coordinator.rules.privacy
        assert rules is not None
        moved = coordinator.model.astype(np.float64) - coordinator.earlier
        self.released.append(moved * (rules.goal * rules.largest_weight))
        clip = coordinator.history[-1]["privacy"]["clip"]
        row = np.zeros(self.canaries)
        row[[device for device in self._reported if device < self.canaries]] = clip
        self.lengths.append(row * rules.largest_weight)


def run_trained_canaries(scenario: Scenario, settings: CanaryAttack) -> Guesses:
    """Simulate the scenario with its first devices as canaries, and guess their coins.
    ``settings.releases`` and ``reports`` are the scenario's own.

    Raises SimulatorError where the model is too small for one canary, or the server's optimizer
    does more than add the mean."""
    plan = scenario.plan
    assert plan.privacy is not None
    if plan.server.optimizer != "sgd" or plan.server.hyper.get("lr", 1.0) != 1.0:
        raise SimulatorError(
            "--train reads the releases off the models: it takes the server's optimizer sgd with "
            "lr = 1. Without --train the audit is of any optimizer"
        )
    (run,) = run_bundles(scenario)
    size, rounds = run.bundle.manifest.size, plan.stop.rounds
    count = min(settings.canaries, scenario.population.size, (size - rounds) // SIZE_PER_CANARY)
    if count < 1:
        raise SimulatorError(
            f"--train: a model of {size:,} elements is too small for {rounds:,} rounds with "
            "canaries in them; take a larger one, or leave --train out"
        )
    canaries = make_canaries(settings.seed, np.zeros((count, rounds), np.bool_), size)
    watch = ReleaseWatch(count)
    kind, _ = choose_backend(run, "auto")
    with threadpool_limits(1), closing(make_backend(scenario, kind)) as backend:
        fleet = watch.fleet = Fleet(
            scenario, [run.bundle], run.source, backend, run.local, watch.write
        )
        fleet.coordinator.training.replace = send_steps(
            canaries, lambda: settings.norm * clip_of(fleet)
        )
        while fleet.advance():
            pass
    if not watch.released:
        raise SimulatorError(f"--train: the scenario made no release: {fleet.finished}")
    lengths, released = np.stack(watch.lengths, axis=1), np.stack(watch.released)
    ratios = log_ratios(canaries, lengths, released)
    return guess(ratios, canaries.included, plan.privacy.delta)


def clip_of(fleet: Fleet) -> float:
    """Return the clip norm of the round that is open."""
    state = fleet.coordinator.state.privacy
    assert state is not None
    return state.clip


def send_steps(
    canaries: CanaryDevices, norm: Callable[[], float]
) -> Callable[[Sequence[int], TrainedDevices], None]:
    """Return what lets canary i, which is device i, send its step, or zeros. ``norm``: returns how
    long a step is."""

    def replace(devices: Sequence[int], found: TrainedDevices) -> None:
        for row, device in enumerate(devices):
            if device < len(canaries.included):
                length = norm() if canaries.included[device] else 0.0
                found.updates[row] = np.float32(length) * canaries.directions[device]
                found.largest[row] = np.abs(found.updates[row]).max()
                found.diverged[row] = False

    return replace
