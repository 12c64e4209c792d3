"""Personal models against the shared one, on each device's own unseen digits: labels skewed, or scanners that differ.

Twenty devices have scikit-learn's digits. In each round ten of them, drawn, train with the device's own functions, and
the coordinator's exact mean makes the next model. After some rounds every device measures what it would use on examples
of its own on which nobody trained. docs/personal.md says more.
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
from fleetlearn_device.training.work import Inputs, Outcome, Settings
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector, check_finite
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import digits

DEVICES, COHORT, ROUNDS = 20, 10, (10, 20, 60)
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


def accuracies(path: Path, method: Method, kind: str, seed: int, rounds: Sequence[int]) -> list[list[float]]:
    """Train. Returns, after each of these numbers of rounds, each device's accuracy on its own test examples with what
    it would use."""
    bundle, devices = open_bundle(path), fleet(kind, seed)
    runtime, random = open_runtime(bundle), np.random.default_rng(seed)
    model: Vector = bundle.parameters()[: bundle.manifest.size]
    own: dict[int, Inputs] = {}
    """What each device keeps: its kept state and its personal model."""

    def train(device: int, seed: int) -> Outcome:
        inputs = own.get(device, Inputs(model))._replace(model=model)
        settings = Settings({"lr": LR, "mu": method.mu}, EPOCHS, BATCH, seed, personal_epochs=PERSONAL_EPOCHS)
        return run_algorithm(method.algorithm, runtime, bundle, devices[device].train, inputs, settings)

    def measure(device: int, seed: int) -> float:
        inputs = own.get(device, Inputs(model))
        personal = model + train(device, seed).parts[UPDATE] if method.trained_on else inputs.personal
        load_model(runtime, bundle, model, inputs.kept_state)
        if personal is not None:
            runtime.load(personal)
        measured = evaluate_data(runtime, devices[device].test)
        return measured.metric_sums["accuracy"] / measured.examples

    found = []
    for number in range(1, max(rounds) + 1):
        total = exact_mean.init(len(model))
        for device in random.choice(DEVICES, COHORT, replace=False).tolist():
            outcome = train(device, 1000 * number + device)
            own[device] = Inputs(model, outcome.result.kept_state, personal=outcome.personal)
            update, weight = outcome.parts[UPDATE], outcome.result.examples
            exact_mean.add(total, ArrayUpdate(update), weight, check_finite(update), 1.0)
        model = (model + exact_mean.mean(total)).astype(np.float32)
        if number in rounds:
            found.append([measure(device, 1000 * number + DEVICES + device) for device in range(DEVICES)])
    return found


def table(
    results: Mapping[tuple[str, str], Sequence[Sequence[Sequence[float]]]], kind: str, rounds: Sequence[int]
) -> list[Sequence[str]]:
    """``results``: (kind, method) -> for each seed and number of rounds the devices' accuracies."""
    after = [f"after {number} rounds, %" for number in rounds]
    rows: list[Sequence[str]] = [("each device uses", *after, "worst fifth of the devices, %", "devices better, worse")]
    shared = np.array(results[kind, SHARED])[:, -1]
    for (data, name), runs in results.items():
        if data != kind:
            continue
        values = np.array(runs)  # (seeds, numbers of rounds, devices)
        means, last = values.mean(axis=2), values[:, -1]
        worst = np.sort(last, axis=1)[:, : DEVICES // 5].mean(axis=1)
        better, worse = (100 * found.mean() for found in (last > shared, last < shared))
        beside = "" if name == SHARED else f"{better:.0f} %, {worse:.0f} %"
        rows.append((name, *(_spread(column) for column in means.T), _spread(worst), beside))
    return rows


def _spread(values: NDArray[np.float64]) -> str:
    return f"{100 * np.median(values):.1f} [{100 * values.min():.1f}-{100 * values.max():.1f}]"


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rounds", type=int, nargs="+", default=[*ROUNDS], help="after which is measured")
    options.add_argument("--data", nargs="+", choices=["labels", "scanners"], default=["labels", "scanners"])
    options.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    chosen = options.parse_args()
    jobs = list(product(chosen.data, METHODS, range(1, chosen.seeds + 1)))
    results: dict[tuple[str, str], list[list[list[float]]]] = {}
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        kinds = {tuple(method.personal): method.personal for method in METHODS.values()}
        paths = {key: export(Path(folder), personal).path for key, personal in kinds.items()}
        waiting = [
            pool.submit(
                accuracies, paths[tuple(METHODS[name].personal)], METHODS[name], kind, seed, sorted(chosen.rounds)
            )
            for kind, name, seed in jobs
        ]
        for number, ((kind, name, _), done) in enumerate(zip(jobs, waiting, strict=True), 1):
            results.setdefault((kind, name), []).append(done.result())
            if sys.stderr.isatty():
                print(f"\r{number} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
    for kind in chosen.data:
        print(f"## Data: {kind}\n\n{measure.table(table(results, kind, sorted(chosen.rounds)))}\n")
    found = [{"data": kind, "method": name, "runs": runs} for (kind, name), runs in results.items()]
    measure.write_json(
        chosen.json, {key: value for key, value in vars(chosen).items() if key != "json"}, {"cells": found}
    )


if __name__ == "__main__":
    main()
