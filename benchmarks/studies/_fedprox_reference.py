"""Rounds of FedAvg and FedProx in float64 and NumPy, for the devices that reported: fedprox.py
compares with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_coordinator.rounds.commands import Assign
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_device.training.shuffling import permutation
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from numpy.typing import NDArray

DEVICES = 30
FEATURES, CLASSES = 60, 10
EPOCHS, BATCH, LR = 20, 10, 0.01
Floats = NDArray[np.float64]
Model = tuple[Floats, Floats]
"""Weights (classes, features) and bias (classes,)."""


def seeds_of(seed: int, number: int) -> dict[int, int]:
    """The seed of each device's task in a round, from the engine: one that gives tasks to all."""
    settings = Settings(
        goal=DEVICES,
        cohort=DEVICES,
        minimum=DEVICES,
        deadline=1.0,
        grace=0.0,
        gather=0.0,
        seed=seed,
    )
    engine = Engine(settings, round=number - 1)
    commands = [
        command
        for device in range(DEVICES)
        for command in engine.check_in(name_of(device), None, 0.0)
    ]
    return {
        device_of(command.device): command.seed
        for command in commands
        if isinstance(command, Assign)
    }


def logs(model: Model, x: Floats) -> Floats:
    """Logarithms of the classes' probabilities."""
    weight, bias = model
    z = x @ weight.T + bias
    z -= z.max(axis=1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)))


def one_round(
    source: Source, model: Model, reported: dict[int, int], seeds: dict[int, int], mu: float
) -> Model:
    """A round in float64: the mean of the devices' models, weighted by their examples."""
    ends = [
        local(source.arrays(device), model, seeds[device], steps, mu)
        for device, steps in reported.items()
    ]
    weights = source.examples(np.array([*reported], np.int64)).astype(np.float64)
    weight, bias = (
        np.average(np.stack(parts), axis=0, weights=weights) for parts in zip(*ends, strict=True)
    )
    return weight, bias


def local(data: tuple[NDArray[Any], ...], model: Model, seed: int, steps: int, mu: float) -> Model:
    """w <- w - lr (gradient + mu (w - the round's w)), batch after batch, in a new order in each
    epoch."""
    x, target = data[0].astype(np.float64), np.eye(CLASSES)[data[1]]
    orders = (permutation(len(x), seed, epoch) for epoch in range(EPOCHS))
    batches = [
        order[begin : begin + BATCH] for order in orders for begin in range(0, len(x), BATCH)
    ]
    (weight, bias), (first_weight, first_bias) = model, model
    for batch in batches[:steps]:
        error = (np.exp(logs((weight, bias), x[batch])) - target[batch]) / len(batch)
        weight = weight - LR * (error.T @ x[batch] + mu * (weight - first_weight))
        bias = bias - LR * (error.sum(axis=0) + mu * (bias - first_bias))
    return weight, bias


def apart(model: Model, exact: Model) -> float:
    """The largest difference of an element, in units of the largest element."""
    largest = max(float(np.abs(part).max()) for part in exact)
    return (
        max(float(np.abs(one - other).max()) for one, other in zip(model, exact, strict=True))
        / largest
    )
