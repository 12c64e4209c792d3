"""Personal models against the shared one, on each device's own unseen digits: labels skewed, or
scanners that differ.

Twenty devices have scikit-learn's digits; a round is ten of them. Every run is the simulator's,
with the real engine. After some rounds every device measures what it would use on examples of its
own on which nobody trained. docs/studies/personal.md says more.
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

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _personal_data import DEVICES, Device, fleet
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.algorithms import ALGORITHMS, run_algorithm
from fleetlearn_device.training.kept_state import kept_state_size, load_model
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_device.training.work import Inputs, TaskSettings
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.kept_rows import NO_ROW
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples import digits

COHORT, ROUNDS = 10, (10, 20, 60)
EPOCHS, BATCH, LR = 2, 10, 0.1
HERE = Path(__file__).resolve().parent


class Method(NamedTuple):
    recipe: str = "fedavg"
    personal: Sequence[str] | str = ()
    """Of the bundle."""
    mu: float = 0.0
    trained_on: bool = False
    """Whether each device trains the shared model once more, for itself."""
    hyper: Mapping[str, float] = {}
    """Of the algorithm."""


METHODS = {
    "fedavg: the shared model": Method(),
    "fedavg, trained on": Method(trained_on=True),
    "alone: ditto, lambda 0": Method("ditto"),
    "ditto, lambda 0.1": Method("ditto", mu=0.1),
    "ditto, lambda 1": Method("ditto", mu=1.0),
    "pfedme, lambda 1": Method("pfedme", mu=1.0, hyper={"inner_steps": 5, "outer_lr": 1.0}),
    "apfl, alpha 0.5": Method("apfl"),
    "apfl, adaptive": Method("apfl", hyper={"adapt_alpha": 1.0}),
    "fedper": Method("fedper", ["9"]),
    "fedrep": Method("fedrep", ["9"]),
    "fedbn": Method("fedbn", "normalisation"),
}
SHARED = next(iter(METHODS))


def export(folder: Path, personal: Sequence[str] | str) -> Path:
    """Export a small network with BatchNorm, with a proximal step. The last layer is the module
    9."""
    import torch
    from fleetlearn_export import LocalStep, export_bundle
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(
                nn.Conv2d(8, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
            ),
            nn.Linear(64, digits.CLASSES),
        ]
    data = digits.data()
    example = data.x_train[:16], data.y_train[:16]
    path = folder / f"{''.join(personal) or 'shared'}.bundle"
    options: dict[str, Any] = {
        "step": LocalStep(proximal=True),
        "metrics": {"accuracy": digits.accuracy},
    }
    export_bundle(nn.Sequential(*layers), digits.loss, example, path, personal=personal, **options)
    return path


def scenario(bundle: Path, method: Method, kind: str, rounds: int, seed: int) -> Scenario:
    local: dict[str, Any] = {
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "lr": LR,
        "mu": method.mu,
        "evaluate": False,
    }
    if method.recipe in ("ditto", "fedrep"):
        local["personal_epochs"] = EPOCHS
    if method.hyper:
        local["hyper"] = dict(method.hyper)
    tables = {
        "name": method.recipe,
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "recipe": method.recipe,
            "local": local,
            "round": {"goal": COHORT, "over_selection": 1.0},
            "stop": {"rounds": rounds},
        },
        "population": {"size": DEVICES},
        "data": {"kind": "function", "function": f"_personal_data:{kind}", "path": str(HERE)},
    }
    return Scenario.read(tables, bundle.parent)


class Used(NamedTuple):
    """What measures the models that devices would use."""

    bundle: Bundle
    runtime: Runtime
    method: Method

    def accuracy(self, data: Device, number: int, model: Vector, kept: Vector | None) -> float:
        """Return the accuracy on the device's test examples. ``kept``: what it has kept, if
        anything."""
        if self.method.trained_on:
            settings = TaskSettings({"lr": LR, "mu": 0.0}, EPOCHS, BATCH, seed=number)
            run_algorithm("plain", self.runtime, self.bundle, data.train, Inputs(model), settings)
            model = self.runtime.parameters.copy()
        if kept is not None and not kept_state_size(self.bundle.manifest):
            own = ALGORITHMS[self.method.recipe].measured
            model, kept = own(kept, model, self.bundle.manifest), None  # a personal model
        load_model(self.runtime, self.bundle, model, kept)
        measured = evaluate_data(self.runtime, data.test)
        return measured.metric_sums["accuracy"] / measured.examples


def accuracies(
    bundle: Path, method: Method, kind: str, seed: int, rounds: Sequence[int]
) -> list[list[float]]:
    """Simulate. Returns, after each of these numbers of rounds, each device's accuracy with what it
    would use."""
    used = Used(open_bundle(bundle), open_runtime(bundle), method)
    of_seeds: list[list[float]] = []

    def measured(run: Fleet) -> None:
        number = len(run.history)
        if number not in rounds:
            return
        coordinator = run.coordinator
        rows = None if coordinator.kept is None else coordinator.kept.states
        accuracies = []
        for device, data in enumerate(fleet(kind, run.scenario.data.seed)):
            (row,) = [NO_ROW] if rows is None else rows.of([device])
            kept = None if rows is None or row == NO_ROW else rows.file.read(row)
            accuracies.append(
                used.accuracy(data, DEVICES * number + device, coordinator.model, kept)
            )
        of_seeds.append(accuracies)

    options = Options(backend="bundle", workers=1, events=False, checkpoint=10**9)
    with TemporaryDirectory() as folder:
        simulate(
            scenario(bundle, method, kind, max(rounds), seed),
            Path(folder) / "run",
            options,
            progress=measured,
        )
    return of_seeds


def table(
    results: Mapping[tuple[str, str], Sequence[Sequence[Sequence[float]]]],
    kind: str,
    rounds: Sequence[int],
) -> list[Sequence[str]]:
    """``results``: (kind, method) -> for each seed and number of rounds the devices' accuracies."""
    after = [f"after {number} rounds, %" for number in rounds]
    rows: list[Sequence[str]] = [
        ("each device uses", *after, "worst fifth of the devices, %", "devices better, worse")
    ]
    shared = np.array(results[kind, SHARED])[:, -1]
    for (data, name), runs in results.items():
        if data != kind:
            continue
        values = np.array(runs)  # (seeds, numbers of rounds, devices)
        means, last = values.mean(axis=2), values[:, -1]
        worst = np.sort(last, axis=1)[:, : DEVICES // 5].mean(axis=1)
        better, worse = (100 * changed.mean() for changed in (last > shared, last < shared))
        beside = "" if name == SHARED else f"{better:.0f} %, {worse:.0f} %"
        rows.append((name, *(_spread(column) for column in means.T), _spread(worst), beside))
    return rows


def _spread(values: NDArray[np.float64]) -> str:
    return f"{100 * np.median(values):.1f} [{100 * values.min():.1f}-{100 * values.max():.1f}]"


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument(
        "--rounds", type=int, nargs="+", default=[*ROUNDS], help="after which is measured"
    )
    options.add_argument(
        "--data", nargs="+", choices=["labels", "scanners"], default=["labels", "scanners"]
    )
    options.add_argument(
        "--methods", nargs="+", choices=[*METHODS], default=[*METHODS], metavar="METHOD",
        help="only these, beside the shared model",
    )  # fmt: skip
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    chosen = options.parse_args()
    methods = [name for name in METHODS if name in (SHARED, *chosen.methods)]
    jobs = list(product(chosen.data, methods, range(1, chosen.seeds + 1)))
    results: dict[tuple[str, str], list[list[list[float]]]] = {}
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        kinds = {tuple(method.personal): method.personal for method in METHODS.values()}
        paths = {key: export(Path(folder), personal) for key, personal in kinds.items()}
        waiting = [
            pool.submit(
                accuracies,
                paths[tuple(METHODS[name].personal)],
                METHODS[name],
                kind,
                seed,
                sorted(chosen.rounds),
            )
            for kind, name, seed in jobs
        ]
        for number, ((kind, name, _), done) in enumerate(zip(jobs, waiting, strict=True), 1):
            results.setdefault((kind, name), []).append(done.result())
            if sys.stderr.isatty():
                print(f"\r{number} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
    for kind in chosen.data:
        print(f"## Data: {kind}\n\n{measure.table(table(results, kind, sorted(chosen.rounds)))}\n")
    cells = [{"data": kind, "method": name, "runs": runs} for (kind, name), runs in results.items()]
    measure.write_json(
        chosen.json,
        {key: value for key, value in vars(chosen).items() if key != "json"},
        {"cells": cells},
    )


if __name__ == "__main__":
    main()
