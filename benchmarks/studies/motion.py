"""Ten people who wear a watch: FedAvg and personal models, for the people who train and for one who
does not.

Each of ten people is left out in turn, the nine others are the devices, and all of them take part
in each round. Every run is the simulator's, with the real engine. After the last round the nine
measure what they would use on the ends of their recordings, on which nobody trained; and the tenth,
on whose recordings nobody trained, measures what a newcomer has. docs/studies/motion.md says more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _motion_data import CHANNELS, EXERCISES, WIDTH, joined, people
from _personal_data import Device
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.algorithms import run_algorithm
from fleetlearn_device.training.kept_state import load_model
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_device.training.work import Inputs, TaskSettings
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.kept_rows import NO_ROW
from personal import Method, Used

ROUNDS, EPOCHS, BATCH, LR = 16, 1, 20, 0.1
OWN_EPOCHS = 5
"""Passes of a newcomer over the own windows."""
HEAD = "13"
"""The module of the last layer."""
HERE = Path(__file__).resolve().parent
ALONE = "each person alone"
CENTRAL = "all in one place"
METHODS = {
    CENTRAL: Method(),
    "fedavg": Method(),
    "fedavg, trained on": Method(trained_on=True),
    "fedper": Method("fedper", [HEAD]),
    "fedbn": Method("fedbn", "normalisation"),
}


class Figures(NamedTuple):
    """What came of one run. Accuracies are shares of windows."""

    trained: list[float]
    """Of each of the nine, with what they would use, on the ends of their recordings."""
    newcomer: float
    """Of the tenth, with the shared model and, where parts are personal, their initial values, on
    all windows."""
    newcomer_before: float
    """The same on the ends of the recordings."""
    newcomer_statistics: float
    """The same with the statistics of normalisation from the windows before them, without labels
    (Li et al. 2016, Revisiting Batch Normalization For Practical Domain Adaptation, arXiv
    1603.04779)."""
    newcomer_after: float
    """The same after training on the windows before them, with labels."""


def export(folder: Path, personal: Sequence[str] | str) -> Path:
    """Export a small convolutional network over time, with BatchNorm."""
    import torch
    from fleetlearn_export import LocalStep, export_bundle
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths, layers = (len(CHANNELS), 16, 32, 48), []
        for before, after in pairwise(widths):
            layers += [nn.Conv1d(before, after, 5), nn.BatchNorm1d(after), nn.ReLU()]
            layers += [nn.MaxPool1d(2)]
        layers[-1] = nn.AdaptiveAvgPool1d(1)
        layers += [nn.Flatten(), nn.Linear(widths[-1], len(EXERCISES))]
    example = torch.randn(BATCH, len(CHANNELS), WIDTH), torch.arange(BATCH) % len(EXERCISES)
    path = folder / f"{''.join(personal) or 'shared'}.bundle"
    export_bundle(
        nn.Sequential(*layers),
        nn.functional.cross_entropy,
        example,
        path,
        step=LocalStep(proximal=True),  # as Used asks
        metrics={"accuracy": lambda output, y: (output.argmax(1) == y).float()},
        personal=personal,
    )
    return path


def scenario(bundle: Path, name: str, left_out: int, rounds: int) -> Scenario:
    method = METHODS[name]
    local: dict[str, Any] = {
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "lr": LR,
        "evaluate": False,
    }
    central = name == CENTRAL
    devices = 1 if central else len(people()) - 1
    function = "everybody" if central else "others"
    tables = {
        "name": "motion",
        "seed": 1 + left_out,
        "plan": {
            "bundle": str(bundle),
            "recipe": method.recipe,
            "local": local,
            "round": {"goal": devices, "over_selection": 1.0},
            "stop": {"rounds": rounds},
        },
        "population": {"size": devices},
        "data": {
            "kind": "function",
            "function": f"_motion_data:{function}",
            "path": str(HERE),
            "seed": left_out,
        },
    }
    return Scenario.read(tables, bundle.parent)


def simulated_once(names: Sequence[str]) -> list[list[str]]:
    """Return the methods that differ in what is measured alone, together."""
    together: dict[str, list[str]] = {}
    for name in names:
        key = f"{name == CENTRAL} {METHODS[name]._replace(trained_on=False)}"
        together.setdefault(key, []).append(name)
    return [*together.values()]


def figures(
    bundle: Path, names: Sequence[str], left_out: int, rounds: int
) -> list[tuple[str, Figures]]:
    """Simulate without one person, and measure what each of these methods would use."""
    models: list[tuple[Vector, list[Vector | None]]] = []

    def take(run: Fleet) -> None:
        if len(run.history) == rounds:
            models.append((run.coordinator.model.copy(), _kept(run)))

    options = Options(backend="bundle", workers=1, events=False, checkpoint=10**9)
    with TemporaryDirectory() as folder:
        simulate(
            scenario(bundle, names[0], left_out, rounds),
            Path(folder) / "run",
            options,
            progress=take,
        )
    (model, kept), newcomer = models[0], people()[left_out]
    nine = [each for each in people() if each is not newcomer]
    if names[0] == CENTRAL:
        kept = [None] * len(nine)
    results = []
    for name in names:
        used = Used(open_bundle(bundle), open_runtime(bundle), METHODS[name])
        trained = [
            used.accuracy(data, number, model, own)
            for number, (data, own) in enumerate(zip(nine, kept, strict=True))
        ]
        results.append((name, Figures(trained, *_newcomer(used, newcomer, model))))
    return results


def alone(bundle: Path, rounds: int) -> list[float]:
    """Return each person's accuracy after as many passes over the own windows, without others."""
    opened, runtime = open_bundle(bundle), open_runtime(bundle)
    found = []
    for number, person in enumerate(people()):
        settings = TaskSettings({"lr": LR, "mu": 0.0}, rounds * EPOCHS, BATCH, seed=number)
        model = Inputs(opened.parameters())
        run_algorithm("plain", runtime, opened, person.train, model, settings)
        found.append(_accuracy(runtime, person.test))
    return found


def _kept(run: Fleet) -> list[Vector | None]:
    """Return what each device has kept."""
    rows = run.coordinator.kept
    if rows is None:
        return [None] * run.scenario.population.size
    assert rows.states is not None
    numbers = [rows.states.of([device])[0] for device in range(run.scenario.population.size)]
    return [None if row == NO_ROW else rows.states.file.read(row) for row in numbers]


def _newcomer(used: Used, person: Device, model: Vector) -> tuple[float, ...]:
    """Return the newcomer's accuracies: see ``Figures``."""
    bundle, runtime, _ = used
    load_model(runtime, bundle, model, None)
    every = joined([person.train, person.test])
    found = [_accuracy(runtime, every), _accuracy(runtime, person.test)]
    for lr in (0.0, LR):  # steps of length 0 change the statistics alone
        settings = TaskSettings({"lr": lr, "mu": 0.0}, OWN_EPOCHS, BATCH, seed=0)
        run_algorithm("plain", runtime, bundle, person.train, Inputs(model), settings)
        found.append(_accuracy(runtime, person.test))
    return tuple(found)


def _accuracy(runtime: Any, data: Any) -> float:
    measured = evaluate_data(runtime, data)
    return measured.metric_sums["accuracy"] / measured.examples


def table(own: Sequence[float], results: Mapping[str, Sequence[Figures]]) -> list[Sequence[str]]:
    """Means over the people who were left out; the worst is the worst person's."""
    rows: list[Sequence[str]] = [
        (
            "method",
            "the nine: ends of their recordings, %",
            "worst of them, %",
            "newcomer, at once: all windows, %",
            "worst newcomer, %",
            "newcomer, at once: ends, %",
            "with own statistics: ends, %",
            f"after {OWN_EPOCHS} passes over the own windows: ends, %",
        )
    ]
    rows.append((ALONE, *(f"{100 * value:.1f}" for value in (np.mean(own), min(own))), *5 * [""]))
    for name, runs in results.items():
        columns = [
            np.mean([run.trained for run in runs]),
            np.mean([min(run.trained) for run in runs]),
            np.mean([run.newcomer for run in runs]),
            np.min([run.newcomer for run in runs]),
            np.mean([run.newcomer_before for run in runs]),
            np.mean([run.newcomer_statistics for run in runs]),
            np.mean([run.newcomer_after for run in runs]),
        ]
        rows.append((name, *(f"{100 * value:.1f}" for value in columns)))
    return rows


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--people", type=int, default=len(people()), help="left out in turn")
    options.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="draw motion.svg there")
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    options.add_argument(
        "--quick", action="store_true", help="two rounds without one person: shows that it runs"
    )
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.people, chosen.methods = 2, 1, ["fedavg", "fedbn"]
    jobs = list(product(simulated_once(chosen.methods), range(chosen.people)))
    results: dict[str, list[Figures]] = {name: [] for name in chosen.methods}
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        kinds = {tuple(METHODS[name].personal): METHODS[name].personal for name in chosen.methods}
        paths = {key: export(Path(folder), personal) for key, personal in kinds.items()}
        waiting = [
            pool.submit(
                figures, paths[tuple(METHODS[names[0]].personal)], names, each, chosen.rounds
            )
            for names, each in jobs
        ]
        own_model = pool.submit(alone, next(iter(paths.values())), chosen.rounds)
        for number, done in enumerate(waiting, 1):
            for name, found in done.result():
                results[name].append(found)
            if sys.stderr.isatty():
                print(f"\r{number} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
        own = own_model.result()
    print(f"\n{measure.table(table(own, results))}\n")
    if chosen.figures:
        import _motion_figure  # matplotlib takes its time

        print(_motion_figure.draw(own, results, chosen.figures), file=sys.stderr)
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "figures")}
    measure.write_json(
        chosen.json,
        settings,
        {ALONE: own} | {name: [run._asdict() for run in runs] for name, runs in results.items()},
    )


if __name__ == "__main__":
    main()
