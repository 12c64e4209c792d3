"""FedProx's experiment on synthetic data with stragglers: Li et al., Federated Optimization in
Heterogeneous Networks, arXiv 1812.06127, section 5, figures 1 and 2, in the simulator.

Softmax regression on 30 devices. 10 of them take part in a round; 0, 50 and 90 % of these stop
after 1 to 19 of 20 epochs. FedAvg discards their work, FedProx takes it, with and without its
proximal term, or with an adaptive mu. Every method has the same devices, stragglers and orders of
examples in every round. The first rounds of each run are repeated in float64 and NumPy.
docs/studies/fedprox.md says more.

Finished runs stay in a folder: started again, it goes on with those that are missing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _fedprox_reference as reference
import _fedprox_show as show
import _measure as measure
import numpy as np
import torch
from _fedprox_reference import BATCH, CLASSES, DEVICES, EPOCHS, FEATURES, LR, Model
from fleetlearn_export import LocalStep, TrainMany, export_bundle
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import views
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import EVENTS, read_rows
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.choice import BackendChoice
from numpy.typing import NDArray
from torch import nn

SETS: dict[str, dict[str, Any]] = {
    "iid": {"iid": True},
    "0,0": {"alpha": 0.0, "beta": 0.0},
    "0.5,0.5": {"alpha": 0.5, "beta": 0.5},
    "1,1": {"alpha": 1.0, "beta": 1.0},
}
DROPS = (0.0, 0.5, 0.9)
METHODS = {"fedavg": 0.0, "fedprox-0": 0.0, "fedprox-1": 1.0, "fedprox-adaptive": 0.0}
"""And their mu; the last one's follows the loss, and begins at 1 on iid data, at 0 on others, as in
the paper. Without stragglers the first two are the same."""
ADAPTIVE = "fedprox-adaptive"
COHORT = 10
BLOCK = 4, 10
"""Devices and steps of a call: devices differ much in size, so that more would mostly wait for
one."""
LATENCY = 10.0
DEADLINE = 21.0
"""Seconds. All time is latency, there and back: those that train report after 20 s. Who takes a
discarded straggler's place, after 10 s, has no time left; in the paper nobody does."""
CHECKED = 5
"""Rounds that are repeated in float64."""


class Cell(NamedTuple):
    """One run."""

    seed: int
    """Of the data, the devices and the orders."""
    data: str
    drop: float
    method: str

    @property
    def file(self) -> str:
        return f"{self.data}_{self.drop:g}_{self.method}_{self.seed}.json"


def cells(sets: Iterable[str], drops: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
    """All runs, the first seed's first."""
    names = [(data, drop, method) for data in sets for drop in drops for method in METHODS]
    wanted = [row for row in names if row[1] or row[2] != "fedprox-0"]
    return [Cell(seed, *row) for seed in seeds for row in wanted]


def export(file: Path) -> None:
    """Softmax regression with a proximal step, from zero; the cross-entropy is written out, in
    fewer operators than PyTorch's, which can leave out labels."""

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (
            -(torch.log_softmax(outputs, 1) * (y[:, None] == torch.arange(CLASSES))).sum(1).mean()
        )

    model = nn.Linear(FEATURES, CLASSES)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    example = torch.randn(10, FEATURES), torch.randint(CLASSES, (10,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        export_bundle(
            model, loss, example, file, step=LocalStep(proximal=True), many=TrainMany(*BLOCK)
        )


def scenario(bundle: Path, cell: Cell, rounds: int) -> Scenario:
    """The paper's protocol."""
    average, adaptive = cell.method == "fedavg", cell.method == ADAPTIVE
    mu = 1.0 if adaptive and cell.data == "iid" else METHODS[cell.method]
    local = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "evaluate": adaptive, "mu": mu}
    plan = {
        "bundle": str(bundle),
        "recipe": "fedavg" if average else ADAPTIVE if adaptive else "fedprox",
        "local": local,
        "round": {"goal": COHORT, "minimum": 1, "over_selection": 1.0, "deadline": DEADLINE},
        "stop": {"rounds": rounds},
    }
    tables = {
        "name": "fedprox",
        "seed": cell.seed,
        "plan": plan,
        "population": {"size": DEVICES},
        "data": {"kind": "synthetic", **SETS[cell.data]},
        "compute": {"step_seconds": 0.0},
        "tiers": {"all": {"latency": LATENCY, "download": 1e12, "upload": 1e12}},
        "failures": {"stragglers": cell.drop, "exact_stragglers": True, "discard": average},
    }
    return Scenario.read(tables, bundle.parent)


class Took(NamedTuple):
    """The devices that took part in a round."""

    drawn: list[int]
    """The devices that were chosen first, in the order of their choice."""
    reported: dict[int, int]
    """Devices whose work was taken, and their steps."""
    discarded: list[int]
    """Drawn devices that were stragglers. Other devices took their places, and their work was not
    used."""


def run(
    bundle: Path, cell: Cell, rounds: int, backend: BackendChoice, folder: Path
) -> dict[str, Any]:
    """A run's curves. Raises RuntimeError where a round had other stragglers than the paper's
    would."""
    rule = scenario(bundle, cell, rounds)
    opened = open_bundle(bundle)
    source = source_of(rule, opened)
    parts = [source.arrays(device) for device in range(DEVICES)]
    x, y = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    test = source.test()
    assert test is not None
    curves: dict[str, Any] = {"loss": [], "accuracy": []}
    models: list[Model] = []
    mus: list[float] = []

    def follow(fleet: Fleet) -> None:
        weight, bias = (
            array.astype(np.float64)
            for array in views(fleet.model, opened.manifest.travelling).values()
        )
        curves["loss"].append(
            float(-reference.logs((weight, bias), x)[np.arange(len(y)), y].mean())
        )
        curves["accuracy"].append(
            float((reference.logs((weight, bias), test[0]).argmax(axis=1) == test[1]).mean())
        )
        models.extend([(weight, bias)] if len(models) < CHECKED else [])
        mus.append(
            fleet.history[-1]["mu"]["used"] if cell.method == ADAPTIVE else METHODS[cell.method]
        )

    simulate(
        rule, folder, Options(backend=backend, workers=1, checkpoint=10**9, test=0), progress=follow
    )
    took = read_rounds(folder)
    sizes = source.examples(np.arange(DEVICES))
    slow = [check_round(cell, round_, EPOCHS * -(-sizes // BATCH)) for round_ in took]
    exact, difference = (np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)), 0.0
    for number, (row, model, mu) in enumerate(zip(took, models, mus, strict=False), 1):
        seeds = reference.seeds_of(cell.seed, number)
        exact = reference.one_round(source, exact, row.reported, seeds, mu)
        difference = max(difference, reference.apart(model, exact))
    curves |= {"mu": mus} if cell.method == ADAPTIVE else {}
    return curves | {
        "drawn": [round_.drawn for round_ in took],
        "slow": slow,
        "difference": difference,
    }


def read_rounds(folder: Path) -> list[Took]:
    """Read from the event log who took part in each round."""
    rounds: list[Took] = []
    for event in read_rows(folder, EVENTS):
        match event["event"]:
            case "opened":
                rounds.append(Took([], {}, []))
            case "assigned" if len(rounds[-1].drawn) < COHORT:
                rounds[-1].drawn.append(event["device"])
            case "accepted":
                rounds[-1].reported[event["device"]] = event["steps"]
            case "lost" if event["cause"] == "straggler" and event["device"] in rounds[-1].drawn:
                rounds[-1].discarded.append(event["device"])
    return rounds


def check_round(cell: Cell, took: Took, steps: NDArray[np.int64]) -> list[int]:
    """The stragglers. Raises RuntimeError where it is not a round of the paper's."""
    partial = [device for device, done in took.reported.items() if done < steps[device]]
    slow = took.discarded if cell.method == "fedavg" else partial
    ends = sorted([*took.reported, *took.discarded])
    if (
        len(slow) != round(COHORT * cell.drop)
        or ends != sorted(took.drawn)
        or len(partial) + len(took.discarded) != len(slow)
    ):
        raise RuntimeError(f"{cell}: {took}")
    return sorted(slow)


def finished(file: Path, rounds: int) -> dict[str, Any] | None:
    """Return the run that was kept, if it has this many rounds."""
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found if found and len(found["loss"]) == rounds else None


def run_and_keep(
    bundle: Path, cell: Cell, rounds: int, backend: BackendChoice, folder: Path, file: Path
) -> None:
    found = run(bundle, cell, rounds, backend, folder)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(file)  # never half a file


def run_missing(
    wanted: Sequence[Cell], rounds: int, backend: BackendChoice, keep: Path, workers: int
) -> None:
    missing = [cell for cell in wanted if finished(keep / cell.file, rounds) is None]
    if not missing:
        return
    with (
        measure.scratch() as folder,
        ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        bundle = folder / "softmax.bundle"
        export(bundle)
        waiting = [
            pool.submit(
                run_and_keep, bundle, cell, rounds, backend, folder / str(number), keep / cell.file
            )
            for number, cell in enumerate(missing)
        ]
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                future.result()
                print(f"\r{done} of {len(missing)} runs", end="", flush=True, file=sys.stderr)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print(file=sys.stderr)


def check_paired(found: dict[Cell, dict[str, Any]]) -> None:
    """Raise RuntimeError where methods did not have the same devices in a round."""
    for cell, curves in found.items():
        other = found[cell._replace(method="fedavg")]
        if any(curves[key] != other[key] for key in ("drawn", "slow")):
            raise RuntimeError(f"{cell} had other devices than fedavg")


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    options.add_argument(
        "--drops", nargs="+", type=float, choices=DROPS, default=DROPS, help="shares of stragglers"
    )
    options.add_argument(
        "--seeds", nargs="+", type=int, default=[*range(5)], help="one for each data set of a kind"
    )
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--backend", choices=("vectorized", "bundle"), default="vectorized")
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    options.add_argument(
        "--keep", type=Path, default=Path("fedprox.runs"), help="folder of the finished runs"
    )
    options.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw the training losses to FILE, a .png"
    )
    chosen = options.parse_args()
    chosen.keep.mkdir(parents=True, exist_ok=True)
    wanted = cells(chosen.sets, chosen.drops, chosen.seeds)
    run_missing(wanted, chosen.rounds, chosen.backend, chosen.keep, chosen.workers)
    curves_of = {cell: json.loads((chosen.keep / cell.file).read_text()) for cell in wanted}
    check_paired(curves_of)
    runs: dict[show.Key, list[dict[str, Any]]] = {}
    for cell, curves in curves_of.items():
        runs.setdefault((cell.data, cell.drop, cell.method), []).append(curves)
    levels = show.levels_of(runs)
    paired = show.paired_of(levels)
    difference = max(curves["difference"] for curves in curves_of.values())
    print(show.tables(levels, paired))
    print(
        f"\nThe first {CHECKED} rounds of all {len(curves_of)} runs were within {difference:.1e} "
        "of float64."
    )
    if chosen.figure:
        show.draw(runs, chosen.figure)
    unstated = {"keep", "figure", "json", "workers"}
    settings = {key: value for key, value in vars(chosen).items() if key not in unstated}
    results = {
        "levels": show.nested(levels),
        "paired": show.nested(paired),
        "from_float64": difference,
    }
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
