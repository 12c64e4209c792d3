"""Clusters against one shared model, and against a model for each group whose devices are known,
where devices fall into three groups.

Thirty devices have scikit-learn's digits: turned by 0, 1 or 2 quarters, or with labels that mean
other digits in each group. Every run is the simulator's, with the real engine. After the last round
every device measures the model that it would use on examples of its own on which nobody trained.
docs/studies/clusters.md says more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _clusters_data import DEVICES, GROUPS, fleet, group_of
from fleetlearn_coordinator.aggregation.clusters import best_of
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.scenario.scenario import Scenario
from personal import export

COHORT, ROUNDS = 15, 40
EPOCHS, BATCH, LR = 2, 10, 0.1
HERE = Path(__file__).resolve().parent
ONE, ORACLE = "one model (fedavg)", "a model for each group, known"
METHODS = (ONE, "ifca, 2 clusters", "ifca, 3 clusters", "ifca, 4 clusters", ORACLE)


class Result(NamedTuple):
    """What came of a run."""

    accuracies: list[float]
    """Of each device, with the model that fits its training examples best."""
    pure: float
    """The share of the devices that are in a cluster in which their group is the majority."""
    together: float
    """The share of the devices that are with the most of their own group."""


def run(bundle: Path, kind: str, seed: int, rounds: int, clusters: int) -> list[Vector]:
    """Simulate. Returns the models. ``clusters`` 0: one model."""
    tables: dict[str, Any] = {
        "name": "clusters",
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "recipe": "ifca" if clusters else "fedavg",
            "local": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "evaluate": False},
            "round": {"goal": COHORT, "over_selection": 1.0, "weighting": "uniform"},
            "stop": {"rounds": rounds},
        },
        "population": {"size": DEVICES},
        "data": {"kind": "function", "function": f"_clusters_data:{kind}", "path": str(HERE)},
    }
    if clusters:
        tables["plan"]["clusters"] = {"count": clusters}
    if kind[-1].isdigit():  # one group alone, as many of it in a round as in the others' rounds
        tables["population"]["size"] = DEVICES // GROUPS
        tables["plan"]["round"]["goal"] = COHORT // GROUPS
    models: list[Vector] = []

    def take(found: Fleet) -> None:
        family = found.coordinator.family
        models[:] = [model.copy() for model in family.models_of(found.coordinator.model).values()]

    options = Options(backend="bundle", workers=1, events=False, checkpoint=10**9)
    with TemporaryDirectory() as folder:
        simulate(Scenario.read(tables, bundle.parent), Path(folder) / "run", options, progress=take)
    return models


def result_of(bundle: Path, method: str, kind: str, seed: int, rounds: int) -> Result:
    """Simulate, and measure what each device would use."""
    if method == ORACLE:
        models = [run(bundle, f"{kind}_{each}", seed, rounds, 0)[0] for each in range(GROUPS)]
    else:
        models = run(bundle, kind, seed, rounds, 0 if method == ONE else int(method.split()[1]))
    runtime, accuracies, chosen = open_runtime(open_bundle(bundle)), [], []
    for number, device in enumerate(fleet(kind, seed)):
        losses = []
        for model in models:
            runtime.load(model)
            found = evaluate_data(runtime, device.train)
            losses.append(found.loss_sum / found.examples)
        chosen.append(group_of(number) if method == ORACLE else best_of(losses))
        runtime.load(models[chosen[-1]])
        found = evaluate_data(runtime, device.test)
        accuracies.append(found.metric_sums["accuracy"] / found.examples)
    table = np.zeros((len(models), GROUPS))
    for number, cluster in enumerate(chosen):
        table[cluster, group_of(number)] += 1
    return Result(accuracies, table.max(axis=1).sum() / DEVICES, table.max(axis=0).sum() / DEVICES)


def row(name: str, found: Sequence[Result]) -> Sequence[str]:
    means = 100 * np.array([np.mean(result.accuracies) for result in found])
    worst = 100 * np.array([np.sort(result.accuracies)[: DEVICES // 5].mean() for result in found])
    exact = sum(result.pure == 1 and result.together == 1 for result in found)
    pure, together = (
        100 * np.mean([getattr(result, which) for result in found]) for which in Result._fields[1:]
    )
    groups = "" if name == ONE else f"{exact} of {len(found)}"
    return (
        name,
        *(f"{np.median(each):.1f} [{each.min():.1f}-{each.max():.1f}]" for each in (means, worst)),
        groups,
        "" if name == ONE else f"{pure:.0f}, {together:.0f}",
    )


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument(
        "--data", nargs="+", choices=["turned", "labels"], default=["turned", "labels"]
    )
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    chosen = options.parse_args()
    jobs = list(product(chosen.data, METHODS, range(1, chosen.seeds + 1)))
    results: dict[tuple[str, str], list[Result]] = {}
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        bundle = export(Path(folder), ())
        waiting = [
            pool.submit(result_of, bundle, method, kind, seed, chosen.rounds)
            for kind, method, seed in jobs
        ]
        for number, ((kind, name, _), done) in enumerate(zip(jobs, waiting, strict=True), 1):
            results.setdefault((kind, name), []).append(done.result())
            if sys.stderr.isatty():
                print(f"\r{number} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
    head = (
        "models", "accuracy, %", "worst fifth, %", "exactly the three groups",
        "devices where their group is the majority, with most of their group, %",
    )  # fmt: skip
    for kind in chosen.data:
        rows = [row(name, found) for (data, name), found in results.items() if data == kind]
        print(f"## {kind}\n\n{measure.table([head, *rows])}\n")
    measure.write_json(
        chosen.json,
        {key: value for key, value in vars(chosen).items() if key != "json"},
        {
            "cells": [
                {"data": kind, "method": name, "runs": [each._asdict() for each in found]}
                for (kind, name), found in results.items()
            ]
        },
    )


if __name__ == "__main__":
    main()
