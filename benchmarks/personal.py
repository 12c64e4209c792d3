"""Personal models against the shared one, on each device's own unseen digits: labels skewed, or scanners that differ.

Twenty devices have scikit-learn's digits. In each round ten of them, drawn, train with the device's own functions, and
the coordinator's exact mean makes the next model. At the end every device measures what it would use on examples of
its own on which nobody trained. docs/personal.md says more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _measure as measure
import numpy as np
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_device.runtimes.runtime import open_runtime
from fleetlearn_device.training.algorithms import run_algorithm
from fleetlearn_device.training.kept_state import load_model
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_device.training.work import Inputs, Settings
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector, check_finite
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import digits

DEVICES, COHORT, ROUNDS = 20, 10, 60
EPOCHS, PERSONAL_EPOCHS, BATCH, LR = 2, 2, 10, 0.1
ALPHA = 0.1
"""Of the Dirichlet distribution by which the labels are shared out."""
TEST = 0.3
"""The share of each device's examples on which nobody trains."""
Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


class Method(NamedTuple):
    algorithm: str = "plain"
    personal: Sequence[str] | str = ()
    """Of the bundle."""
    mu: float = 0.0
    trained_on: bool = False
    """Whether each device trains the last shared model once more, for itself."""


METHODS = {
    "fedavg: the shared model": Method(),
    "fedavg, trained on": Method(trained_on=True),
    "alone: ditto, lambda 0": Method("ditto"),
    "ditto, lambda 0.1": Method("ditto", mu=0.1),
    "ditto, lambda 1": Method("ditto", mu=1.0),
    "fedper": Method(personal=["9"]),
    "fedrep": Method("fedrep", personal=["9"]),
    "fedbn": Method(personal="normalisation"),
}
SHARED = next(iter(METHODS))


class Device(NamedTuple):
    train: Arrays
    test: Arrays


def export(folder: Path, personal: Sequence[str] | str) -> Bundle:
    """Export a small network with BatchNorm, with a proximal step. The last layer is the module 9."""
    import torch
    from fleetlearn_export import LocalStep, export_bundle
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
            nn.Linear(64, digits.CLASSES),
        ]
    data = digits.data()
    example = data.x_train[:16], data.y_train[:16]
    path = folder / ("-".join(personal) if not isinstance(personal, str) else personal or "shared")
    options: dict[str, Any] = {"step": LocalStep(proximal=True), "metrics": {"accuracy": digits.accuracy}}
    return export_bundle(nn.Sequential(*layers), digits.loss, example, path, personal=personal, **options).bundle


def fleet(kind: str, seed: int) -> list[Device]:
    """Share out all digits. ``scanners``: the labels are alike, and each device has another contrast and brightness,
    half of them dark on light."""
    data, random = digits.data(), np.random.default_rng(seed)
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    alpha = ALPHA if kind == "labels" else 1e6
    devices = []
    for number, rows in enumerate(digits.dirichlet_shards(y, DEVICES, alpha, seed, minimum=20)):
        scans = x[rows]
        if kind == "scanners":
            scans = 1 - scans if number % 2 else scans
            scans = scans * np.float32(random.uniform(0.4, 1.6)) + np.float32(random.uniform(-0.5, 0.5))
        cut = round(TEST * len(rows))
        devices.append(Device((scans[cut:], y[rows[cut:]]), (scans[:cut], y[rows[:cut]])))
    return devices


def accuracies(path: Path, method: Method, kind: str, seed: int, rounds: int) -> list[float]:
    """Train, and return each device's accuracy on its own test examples with what it would use."""
    bundle, devices = open_bundle(path), fleet(kind, seed)
    runtime, random = open_runtime(bundle), np.random.default_rng(seed)
    hyper = {"lr": LR, "mu": method.mu}
    model: Vector = bundle.parameters()[: bundle.manifest.size]
    own: dict[int, Inputs] = {}
    """What each device keeps: its kept state and its personal model."""

    def train(device: int, algorithm: str, seed: int) -> Vector:
        inputs = own.get(device, Inputs(model))._replace(model=model)
        settings = Settings(hyper, EPOCHS, BATCH, seed, personal_epochs=PERSONAL_EPOCHS)
        found = run_algorithm(algorithm, runtime, bundle, devices[device].train, inputs, settings)
        own[device] = Inputs(model, found.result.kept_state, personal=found.personal)
        return found.parts[UPDATE]

    for number in range(rounds):
        total = exact_mean.init(len(model))
        for device in random.choice(DEVICES, COHORT, replace=False).tolist():
            update = train(device, method.algorithm, 1000 * number + device)
            weight = len(devices[device].train[1])
            exact_mean.add(total, ArrayUpdate(update), weight, check_finite(update), 1.0)
        model = (model + exact_mean.mean(total)).astype(np.float32)
    found = []
    for device, data in enumerate(devices):
        inputs = own.get(device, Inputs(model))
        personal = inputs.personal
        if method.trained_on:
            personal = model + train(device, "plain", 1000 * rounds + device)
        load_model(runtime, bundle, model, inputs.kept_state)
        if personal is not None:
            runtime.load(personal)
        measured = evaluate_data(runtime, data.test)
        found.append(measured.metric_sums["accuracy"] / measured.examples)
    return found


def table(results: Mapping[tuple[str, str], Sequence[Sequence[float]]], kind: str) -> list[Sequence[str]]:
    """``results``: (kind, method) -> each seed's devices' accuracies."""
    rows: list[Sequence[str]] = [
        ("each device uses", "accuracy, %: mean of the devices", "of the worst fifth of them", "devices better / worse")
    ]
    shared = np.array(results[kind, SHARED])
    for (data, name), runs in results.items():
        if data != kind:
            continue
        values = np.array(runs)  # (seeds, devices)
        means = 100 * values.mean(axis=1)
        worst = 100 * np.sort(values, axis=1)[:, : DEVICES // 5].mean(axis=1)
        better, worse = 100 * (values > shared).mean(), 100 * (values < shared).mean()
        rows.append(
            (
                name,
                f"{np.median(means):.1f} [{means.min():.1f}-{means.max():.1f}]",
                f"{np.median(worst):.1f} [{worst.min():.1f}-{worst.max():.1f}]",
                "" if name == SHARED else f"{better:.0f} % / {worse:.0f} %",
            )
        )
    return rows


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--data", nargs="+", choices=["labels", "scanners"], default=["labels", "scanners"])
    options.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    chosen = options.parse_args()
    jobs = list(product(chosen.data, METHODS, range(1, chosen.seeds + 1)))
    results: dict[tuple[str, str], list[list[float]]] = {}
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        kinds = {tuple(method.personal): method.personal for method in METHODS.values()}
        paths = {key: export(Path(folder), personal).path for key, personal in kinds.items()}
        waiting = [
            pool.submit(accuracies, paths[tuple(METHODS[name].personal)], METHODS[name], kind, seed, chosen.rounds)
            for kind, name, seed in jobs
        ]
        for number, ((kind, name, _), done) in enumerate(zip(jobs, waiting, strict=True), 1):
            results.setdefault((kind, name), []).append(done.result())
            if sys.stderr.isatty():
                print(f"\r{number} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
    for kind in chosen.data:
        print(f"## Data: {kind}\n\n{measure.table(table(results, kind))}\n")
    found = [{"data": kind, "method": name, "runs": runs} for (kind, name), runs in results.items()]
    measure.write_json(
        chosen.json, {key: value for key, value in vars(chosen).items() if key != "json"}, {"cells": found}
    )


if __name__ == "__main__":
    main()
