"""How late a flight from New York arrives, learned by 4,000 aircraft that are online before they
leave: synchronous rounds beside FedBuff.

Each aircraft is a device that has its own flights of 2013. It is online in the ninety minutes
before it leaves New York, as it really left; at night hardly any is, and who leaves while it trains
is lost. Every run is the simulator's, with the real engine. docs/studies/flights.md says more.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _flights_data import SCALE, all_flown, fleet, write_online
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.results.loaded_run import read_run, series
from fleetlearn_simulator.results.run_statistics import lost_share
from fleetlearn_simulator.scenario.scenario import Scenario

HERE = Path(__file__).resolve().parent
EPOCHS, BATCH, LR = 2, 32, 0.02
HIDDEN = 32
STEP_SECONDS, SPREAD = 60.0, 0.8
"""Of a step on the median device, and the deviation of the logarithm of devices' speeds. They are
invented: a task of the median aircraft, with 43 flights, takes four minutes."""
DEADLINE = 1800.0
OUT = 39
"""Tasks out at a time."""
HOUR = 3600.0
KNOWN = "least squares, departure known"
PASSES = 5
"""Of the training in one place."""
TESTS = 50
"""Tests of the model in a run, about."""


class Method(NamedTuple):
    """One way to train."""

    recipe: str
    round: Mapping[str, float]
    """[round] of the plan."""
    rounds: int
    """In a day, about; fewer are run where the days are over."""


METHODS = {
    "FedAvg": Method("fedavg", {"goal": 39, "over_selection": 1.0}, 40),
    "FedAvg, over-selection": Method("fedavg", {"goal": 30, "over_selection": 1.3}, 60),
    "FedBuff": Method("fedbuff", {"goal": 10, "concurrency": OUT}, 450),
}


class Curve(NamedTuple):
    """What a run gave."""

    hours: list[float]
    """Since midnight before 1 January."""
    rmse: list[float]
    """Minutes, on the days that test, at these hours."""
    mae: list[float]
    tasks: int
    """That were given out."""
    lost: float
    """The share of them that came to nothing."""


def export(folder: Path) -> Path:
    """Export the network: features -> delay."""
    import torch
    from fleetlearn_export import LocalStep, export_bundle
    from torch import Tensor, nn

    def squared(output: Tensor, y: Tensor) -> Tensor:
        return ((output - y) ** 2)[:, 0]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return squared(output, y).mean() / 2

    features = fleet().x.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    path = folder / "flights.bundle"
    export_bundle(
        model,
        loss,
        (torch.zeros(BATCH, features), torch.zeros(BATCH, 1)),
        path,
        step=LocalStep(),
        metrics={
            "squared_error": squared,
            "absolute_error": lambda output, y: (output - y).abs()[:, 0],
        },
    )
    return path


def scenario(bundle: Path, method: Method, rounds: int, online: Path | None, seed: int) -> Scenario:
    """online: the file of when devices are; None: always."""
    tables: dict[str, Any] = {
        "name": method.recipe,
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "recipe": method.recipe,
            "local": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "evaluate": False},
            "round": {**method.round, "deadline": DEADLINE},
            "stop": {"rounds": rounds},
        },
        "population": {"size": len(fleet().begins) - 1},
        "data": {"kind": "function", "function": "_flights_data:own_flights", "path": str(HERE)},
        "compute": {"step_seconds": STEP_SECONDS},
        "tiers": {"aircraft": {"spread": SPREAD}},
    }
    if online is not None:
        tables["availability"] = {"kind": "trace", "file": str(online)}
    return Scenario.read(tables, bundle.parent)


def run(
    bundle: Path, method: Method, online: Path | None, days: float, seed: int
) -> dict[str, Any]:
    """Simulate these days."""
    rounds = max(2, round(method.rounds * days))
    simulated = scenario(bundle, method, rounds, online, seed)
    test = max(1, rounds // TESTS)
    options = Options(backend="bundle", workers=1, events=False, checkpoint=10**9, test=test)
    with TemporaryDirectory() as folder:
        simulate(simulated, Path(folder) / "run", options)
        done = read_run(Path(folder) / "run")
    points = series(done)
    at, squares = points["squared_error"]["test"]
    _, absolute = points["absolute_error"]["test"]
    hours = np.array([done.rows[index].time for index in at]) / HOUR
    tasks = sum(sum(each.assigned.values()) for each in done.rows)
    errors = SCALE * np.sqrt(squares), SCALE * absolute
    return Curve(
        hours.tolist(), errors[0].tolist(), errors[1].tolist(), tasks, lost_share(done)
    )._asdict()


def in_one_place(bundle: Path, passes: int) -> dict[str, float]:
    """Train with all flights at hand, in the same steps."""
    from fleetlearn_device.runtimes.open_runtime import open_runtime
    from fleetlearn_device.training.algorithms import run_algorithm
    from fleetlearn_device.training.train import evaluate_data
    from fleetlearn_device.training.work import Inputs, TaskSettings
    from fleetlearn_protocol import open_bundle

    opened, runtime, found = open_bundle(bundle), open_runtime(bundle), fleet()
    settings = TaskSettings({"lr": LR}, passes, BATCH, seed=0)
    run_algorithm(
        "plain", runtime, opened, (found.x, found.y), Inputs(opened.parameters()), settings
    )
    measured = evaluate_data(runtime, (found.x_test, found.y_test))
    sums = measured.metric_sums
    return {
        "rmse": float(SCALE * np.sqrt(sums["squared_error"] / measured.examples)),
        "mae": SCALE * sums["absolute_error"] / measured.examples,
    }


def departure_known() -> dict[str, float]:
    """Return the errors of least squares on the departure's delay and the time in the air, on the
    flights that it was fitted to: what others report of these data."""
    flights = all_flown()
    known = [flights["left"] - flights["scheduled"], flights["air_time"]]
    columns = np.stack([*known, np.ones(len(known[0]))], axis=1)
    weights = np.linalg.lstsq(columns, flights["delay"], rcond=None)[0]
    errors = flights["delay"] - columns @ weights
    freedom = len(errors) - columns.shape[1]
    return {
        "rmse": float(np.sqrt(np.sum(errors**2) / freedom)),
        "mae": float(np.abs(errors).mean()),
    }


def constants_and_line() -> dict[str, dict[str, float]]:
    """Return the errors of the mean, the median and least squares of all flights."""
    found = fleet()
    with_one = [np.c_[x, np.ones(len(x))].astype(np.float64) for x in (found.x, found.x_test)]
    weights = np.linalg.lstsq(with_one[0], found.y[:, 0], rcond=None)[0]
    predictions = {
        "the mean delay": found.y.mean(),
        "the median delay": np.median(found.y),
        "least squares": with_one[1] @ weights,
    }
    results = {}
    for name, values in predictions.items():
        errors = SCALE * (found.y_test[:, 0].astype(np.float64) - values)
        results[name] = {
            "rmse": float(np.sqrt(np.mean(errors**2))),
            "mae": float(np.abs(errors).mean()),
        }
    return results


def table(
    central: Mapping[str, Mapping[str, float]],
    found: Mapping[str, Mapping[str, Any]],
    target: float,
) -> list[list[str]]:
    """Return the rows of the results."""
    rows = [
        [
            "how",
            "RMSE at the end, minutes",
            "MAE, minutes",
            f"hours to an RMSE of {target:.1f}",
            "hours simulated",
            "tasks",
            "lost, %",
        ]
    ]
    for name, errors in central.items():
        rows.append([name, f"{errors['rmse']:.2f}", f"{errors['mae']:.2f}", *4 * [""]])
    for name, curve in found.items():
        hours = first_below(curve, target)
        rows.append(
            [
                name,
                *(f"{np.mean(curve[key][-5:]):.2f}" for key in ("rmse", "mae")),
                "never" if hours is None else f"{hours:.1f}",
                f"{curve['hours'][-1]:.1f}",
                str(curve["tasks"]),
                f"{100 * curve['lost']:.1f}",
            ]
        )
    return rows


def first_below(curve: Mapping[str, Any], target: float) -> float | None:
    """Return the hour of the first test that reached the target, or None."""
    pairs = zip(curve["hours"], curve["rmse"], strict=True)
    return next((hour for hour, error in pairs if error <= target), None)


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a morning, one pass")
    options.add_argument("--days", type=float, default=2.0, help="simulated, about")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--workers", type=int, default=2, help="runs at a time")
    options.add_argument("--figure", type=Path, metavar="FILE.svg", help="draw the curves")
    chosen = options.parse_args()
    passes = PASSES
    if chosen.quick:
        chosen.days, passes = 0.1, 1
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        online = Path(folder) / "online.csv"
        write_online(fleet(), online)
        bundle = export(Path(folder))
        waiting = {
            f"{name}{', always online' if file is None else ''}": pool.submit(
                run, bundle, method, file, chosen.days, chosen.seed
            )
            for file in (online, None)
            for name, method in METHODS.items()
        }
        one_place = pool.submit(in_one_place, bundle, passes)
        central = {KNOWN: departure_known()} | constants_and_line()
        central["the same network in one place"] = one_place.result()
        found = {name: each.result() for name, each in waiting.items()}
    target = (central["least squares"]["rmse"] + central["the mean delay"]["rmse"]) / 2
    print(measure.table(table(central, found, target)))
    if chosen.figure is not None:
        from _flights_figure import draw  # matplotlib takes its time

        draw(chosen.figure, central, found)
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "figure")}
    measure.write_json(
        chosen.json, settings, {"central": central, "federated": found, "target": target}
    )


if __name__ == "__main__":
    main()
