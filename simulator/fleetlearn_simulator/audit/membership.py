"""A membership attack on a private scenario: was this device's data in the training?

After LiRA: Carlini, Chien, Nasr, Song, Terzis and Tramer, "Membership Inference Attacks From First
Principles" (2022), arXiv 2112.03570, section IV. The scenario is simulated many times (*shadow
runs*). In each, a coin decides about each *target* whether it sends what it trained, or zeros. Of
the last model the adversary knows two numbers for each target: the loss on the target's data, and
how far the model has moved in the direction of the target's own first update. Half of the runs say
how these are distributed with and without a target (normal, with one covariance for all targets);
in the other half the attack guesses the coins by the ratio of the two densities.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np
from fleetlearn_coordinator.plan.initial_model import initial_model
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.audit.canary_devices import Guesses, Matrix, guess
from fleetlearn_simulator.audit.epsilon_bounds import rates_bound
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs
from fleetlearn_simulator.training.choice import choose_backend, make_backend
from fleetlearn_simulator.training.run_bundles import run_bundles
from fleetlearn_simulator.training.trained_devices import TrainedDevices

FEWEST_RUNS = 8
FALSE_POSITIVE_RATES = 0.01, 0.1
"""At which the true positive rate is told."""


class MembershipAttack(NamedTuple):
    """How much is tried."""

    shadow_runs: int = 32
    """Half of them to learn, half to attack."""
    targets: int = 20
    """The devices 0, 1, 2, and so on."""
    seconds: float = 120.0
    """No shadow run begins after so long; one that has begun is finished."""
    seed: int = 0


class MembershipResult(NamedTuple):
    """What the attack found."""

    runs: int
    """Shadow runs that were done."""
    true_positives: dict[float, float]
    """False positive rate -> the true positive rate there, over all attacked pairs of a run and a
    target."""
    guesses: Guesses
    """The best guesses of the attacked pairs, and the bound of Steinke et al. on them: the pairs of
    a run depend on each other."""
    rates_epsilon: float
    """The bound by Clopper and Pearson, on one target of each attacked run: these are
    independent."""


class ShadowRuns:
    """The runs of one attack, over the same data."""

    def __init__(self, scenario: Scenario, attack: MembershipAttack) -> None:
        """Raises SimulatorError where the scenario keeps something on devices, or has fewer of
        them than targets."""
        self.scenario, self.attack = scenario, attack
        (run,) = run_bundles(scenario)
        self.bundle, self.local, self.source = run.bundle, run.local, run.source
        if scenario.population.size < attack.targets:
            raise SimulatorError(
                f"{attack.targets} targets were asked for; the scenario has "
                f"{scenario.population.size} devices"
            )
        if self.bundle.manifest.local_size > self.bundle.manifest.size or scenario.plan.tied:
            raise SimulatorError("the membership attack is for plans that keep nothing on devices")
        kind, _ = choose_backend(run, "auto")
        self.backend: Backend = make_backend(scenario, kind)
        self.jobs = [Job(device) for device in range(attack.targets)]
        self.first = initial_model(scenario.plan, self.bundle)
        moves = self.backend.train(RoundInputs(self.first), self.jobs).updates.astype(np.float64)
        lengths = np.linalg.norm(moves, axis=1, keepdims=True)
        self.directions: Matrix = moves / np.maximum(lengths, 1e-30)

    def run(self, number: int, included: NDArray[np.bool_]) -> Matrix:
        """Simulate once. Returns the targets' two numbers, (targets, 2)."""
        scenario = self.scenario
        seed = int.from_bytes(keyed_random.secret_bytes(self.attack.seed, "shadow", number)[:7])
        scenario = msgspec.structs.replace(
            scenario, seed=seed, plan=msgspec.structs.replace(scenario.plan, seed=seed)
        )
        fleet = Fleet(
            scenario, [self.bundle], self.source, self.backend, self.local, lambda lines: None
        )
        fleet.coordinator.training.replace = leave_out(included)
        while fleet.advance():
            pass
        return self._numbers_of(fleet)

    def _numbers_of(self, fleet: Fleet) -> Matrix:
        evaluations = self.backend.evaluate(RoundInputs(fleet.model), self.jobs)
        losses = [
            np.inf if each is None or not each.examples else each.loss_sum / each.examples
            for each in evaluations
        ]
        moved = fleet.model.astype(np.float64) - self.first
        steps, *_ = np.linalg.lstsq(self.directions.T, moved, rcond=None)
        # A loss is skewed; its logarithm is nearly normal.
        return np.column_stack([-np.log(np.clip(losses, 1e-12, 1e12)), steps])

    def close(self) -> None:
        self.backend.close()


def leave_out(included: NDArray[np.bool_]) -> Callable[[Sequence[int], TrainedDevices], None]:
    """Return what lets the targets that are not included send zeros. Target i is device i."""

    def replace(devices: Sequence[int], found: TrainedDevices) -> None:
        for row, device in enumerate(devices):
            if device < len(included) and not included[device]:
                found.updates[row] = 0.0
                found.largest[row] = 0.0

    return replace


def run_membership(scenario: Scenario, attack: MembershipAttack) -> MembershipResult:
    """Do the shadow runs, and attack. Raises SimulatorError where fewer than 8 runs were done in
    the time."""
    privacy = scenario.plan.privacy
    assert privacy is not None, "a plan without [privacy] is not audited"
    coins = np.array(
        [
            keyed_random.uniform(attack.seed, "membership", np.arange(attack.targets), run) < 0.5
            for run in range(attack.shadow_runs)
        ]
    )
    until, numbers = time.monotonic() + attack.seconds, list[Matrix]()
    with threadpool_limits(1), closing(ShadowRuns(scenario, attack)) as runs:
        for number, included in enumerate(coins):
            if time.monotonic() > until:
                break
            numbers.append(runs.run(number, included))
    if len(numbers) < FEWEST_RUNS:
        raise SimulatorError(
            f"{len(numbers)} shadow runs were done in {attack.seconds:g} s; the attack takes at "
            f"least {FEWEST_RUNS}. Ask for more of them, allow more --seconds, or take a smaller "
            "scenario"
        )
    return attack_runs(np.stack(numbers), coins[: len(numbers)], privacy.delta)


def attack_runs(
    numbers: NDArray[np.float64], coins: NDArray[np.bool_], delta: float
) -> MembershipResult:
    """Learn from the first half of the runs, and guess the coins of the others. ``numbers``: shape
    (runs, targets, features). ``coins``: shape (runs, targets)."""
    half = len(coins) // 2
    ratios = _ratios(numbers[:half], coins[:half], numbers[half:])
    truth = coins[half:]
    # One target of each run, another one in the next.
    rows = np.arange(len(truth))
    one = ratios[rows, rows % truth.shape[1]] > 0
    was = truth[rows, rows % truth.shape[1]]
    hits, alarms = int((one & was).sum()), int((one & ~was).sum())
    return MembershipResult(
        len(coins),
        {rate: _true_positives(ratios, truth, rate) for rate in FALSE_POSITIVE_RATES},
        guess(ratios.ravel(), truth.ravel(), delta),
        rates_bound(hits, int(was.sum()), alarms, int((~was).sum()), delta),
    )


def _ratios(
    learnt: NDArray[np.float64], coins: NDArray[np.bool_], attacked: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the logarithms of the densities' ratios, (runs, targets)."""
    inside = coins[:, :, None]
    counts = np.maximum(inside.sum(axis=0), 1), np.maximum((~inside).sum(axis=0), 1)
    with_it = np.where(inside, learnt, 0.0).sum(axis=0) / counts[0]
    without = np.where(inside, 0.0, learnt).sum(axis=0) / counts[1]
    # A target that was always in, or always out, teaches nothing.
    known = coins.any(axis=0) & ~coins.all(axis=0)
    rest = (learnt - np.where(inside, with_it, without))[:, known].reshape(-1, learnt.shape[2])
    covariance = rest.T @ rest / max(1, len(rest) - 2 * int(known.sum()))
    covariance += np.eye(len(covariance)) * 1e-9 * max(float(np.trace(covariance)), 1e-300)
    weights = np.linalg.solve(covariance, (with_it - without).T).T
    middle = (with_it + without) / 2
    found: NDArray[np.float64] = ((attacked - middle) * weights).sum(axis=2)
    return np.where(known, found, 0.0)


def _true_positives(ratios: NDArray[np.float64], truth: NDArray[np.bool_], rate: float) -> float:
    """Return the true positive rate at a false positive rate."""
    if truth.all() or not truth.any():
        return 0.0
    others = np.sort(ratios[~truth])[::-1]
    threshold = others[int(rate * len(others))]
    return float((ratios[truth] > threshold).mean())
