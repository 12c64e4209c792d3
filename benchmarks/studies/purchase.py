"""Next purchase, one customer of CDNOW on each device: the published BG/NBD model, fitted by
Newton's method to customers who are never together, and a network that FedAvg trains.

The fit is a run of own functions: devices return gradient and Hessian of their likelihood. The
network is trained with all devices, with silent ones, and with differential privacy. Every run is
the simulator's, with the real engine. docs/studies/purchase.md says more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import _purchase_bgnbd as bgnbd
import numpy as np
from _purchase_data import (
    CALIBRATION,
    END,
    WINDOW,
    answering,
    bought,
    calibration,
    histories,
    purchases,
)
from _purchase_network import (
    PRIVATE_REPORTS,
    TESTS,
    Way,
    export,
    in_one_place,
    quality,
    trained,
)
from fleetlearn_protocol.computations.bundle import read_questions, write_computation_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario

HERE = Path(__file__).resolve().parent
PUBLISHED = (0.243, 4.414, 0.793, 2.426)
"""Of Fader, Hardie and Lee 2005, section 7, for the sample's 2,357 customers."""
PUBLISHED_LIKELIHOOD, PUBLISHED_CORRELATION, PUBLISHED_ZEROS = -9582.4, 0.626, 0.23
"""From the same section: the log-likelihood; the correlation of expected and real purchases in the
next 39 weeks; the mean expected purchases of those who had not bought again (real: 0.24)."""
LAWS = {"41 % answer": (0.41, 0.0), "recent buyers answer": (1.0, 26.0)}
"""Arguments of ``answering``. With either, 41 % of the devices answer."""
PRIVATE = {
    (1000, 0.5): (2.0,),
    (1000, 2.0): (0.5, 1.0, 2.0),
    (200, 2.0): (2.0, 8.0),
}
"""Cohorts and clip norms of runs with differential privacy, and their epsilons."""
WEEKS = WINDOW / 7
SEEDS = 2


def fit(sample: bool, answers: tuple[float, float] | None) -> dict[str, Any]:
    """Fit the BG/NBD model in a simulated fleet, of the sample or all customers.

    answers: the arguments of ``answering``; a round then ends when all who do have reported.
    """
    people = len(calibration(sample).x)
    goal = people if answers is None else int(np.count_nonzero(answering(sample, *answers)))
    with TemporaryDirectory() as folder:
        questions = read_questions(HERE / "_purchase_bgnbd.toml")
        bundle = Path(folder) / "bgnbd.bundle"
        write_computation_bundle(bundle, questions.name, questions.settings)
        tables: dict[str, Any] = {
            "seed": 1,
            "plan": {
                "bundle": str(bundle),
                "recipe": "function",
                "round": {"goal": goal, "minimum": goal, "over_selection": 1.0},
            },
            "service": {"max_connections": people},
            "population": {"size": people, "connected": people},
            "data": {
                "kind": "function",
                "function": "_purchase_data:own_history",
                "path": str(HERE),
                "seed": int(sample),
            },
        }
        if answers is not None:
            share, weeks = answers
            parameters = {"sample": int(sample), "share": share, "weeks": weeks}
            tables["failures"] = {"law": "_purchase_data:silent", "parameters": parameters}
        plugins = ("_purchase_bgnbd", "_purchase_data")
        scenario = Scenario.read(tables, Path(folder), plugins=plugins)
        options = Options(workers=1, events=False, checkpoint=10**9)
        outcome = simulate(scenario, Path(folder) / "run", options)
    assert outcome is not None
    result = outcome.summary["result"]
    state = {name: np.array(values) for name, values in result["state"].items()}
    parameters = np.exp(state["log_parameters"])
    return {
        "customers": goal,
        "rounds": result["rounds"],
        "reports": outcome.summary["reports"],
        "lost": sum(outcome.summary["lost"].values()),
        "parameters": parameters.tolist(),
        "errors": bgnbd.standard_errors(state).tolist(),
        "log_likelihood": result["metrics"]["log_likelihood"],
        **held_out(parameters, sample),
        **predicted(parameters),
    }


def held_out(parameters: bgnbd.Floats, sample: bool) -> dict[str, float]:
    """Compare what a fit expects of the next 39 weeks with what was bought."""
    known = calibration(sample)
    real = bought(purchases(), CALIBRATION, END)
    if sample:
        real = real[purchases().sample]
    expected = bgnbd.expected(parameters, *known, weeks=(END - CALIBRATION) / 7)
    new = known.x == 0
    return {
        "correlation": float(np.corrcoef(expected, real)[0, 1]),
        "mean_error": float(np.abs(expected - real).mean()),
        "zeros_expected": float(expected[new].mean()),
        "zeros_real": float(real[new].mean()),
        "expected": float(expected.sum()),
        "real": int(real.sum()),
    }


def predicted(parameters: bgnbd.Floats) -> dict[str, Any]:
    """Return how good a fit's probabilities of buying are, as for the network."""
    of = purchases()
    return {
        name: quality(
            bgnbd.chance(parameters, *histories(of, day), weeks=WEEKS),
            bought(of, day, day + WINDOW) > 0,
        )._asdict()
        for name, day in TESTS.items()
    }


def simple() -> dict[str, dict[str, Any]]:
    """Return what the share who bought and one number of each customer are worth."""
    of = purchases()
    found: dict[str, dict[str, Any]] = {"everybody alike": {}, "who bought last": {}}
    for name, day in TESTS.items():
        buys = bought(of, day, day + WINDOW) > 0
        known = histories(of, day)
        alike = np.full(len(buys), buys.mean())
        found["everybody alike"][name] = quality(alike, buys)._asdict()
        # An order alone: as probabilities these would mean nothing.
        order = quality(1 / (1 + known.age - known.t_x), buys)
        found["who bought last"][name] = {"auc": order.auc}
    return found


def ways() -> list[Way]:
    """Return all ways to train the network."""
    found = [Way("FedAvg"), Way("FedAvg, 5 passes", epochs=5)]
    found += [Way(f"FedAvg, {name}", answers=law) for name, law in LAWS.items()]
    for (cohort, clip), epsilons in PRIVATE.items():
        for epsilon in (None, *epsilons):
            noise = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
            name = f"cohort {cohort}, clip {clip:g}, {noise}"
            rounds = PRIVATE_REPORTS // cohort
            found.append(Way(name, cohort, rounds, clip=clip, epsilon=epsilon))
    return found


def fits_table(fits: Mapping[str, Mapping[str, Any]]) -> list[Sequence[str]]:
    """Parameters with their standard errors, and what the holdout says of them."""
    head = (*bgnbd.NAMES, "log-likelihood", "correlation", "new ones: expected", "real", "rounds")
    rows: list[Sequence[str]] = [("fit", *head)]
    figures = PUBLISHED_LIKELIHOOD, PUBLISHED_CORRELATION, PUBLISHED_ZEROS, 0.24
    rows.append(("published", *map(str, PUBLISHED), *map(str, figures), ""))
    for name, found in fits.items():
        pairs = zip(found["parameters"], found["errors"], strict=True)
        shown = [f"{value:.3f} ± {error:.3f}" for value, error in pairs]
        shown.append(f"{found['log_likelihood']:.1f}")
        holdout = ("correlation", "zeros_expected", "zeros_real")
        shown += [f"{found[key]:.3f}" for key in holdout]
        rows.append((name, *shown, str(found["rounds"])))
    return rows


def quality_table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Sequence[str]]:
    """Quality of probabilities: medians over seeds, with the least and the greatest."""
    columns = {"AUC": "auc", "log loss": "log_loss", "mean, %": "mean"}
    head = [f"{test}: {column}" for test in TESTS for column in columns]
    rows: list[Sequence[str]] = [("how", *head, "tasks lost, %")]
    for name, runs in results.items():
        shown = []
        for test in TESTS:
            for key in columns.values():
                values = [run[test][key] for run in runs if key in run[test]]
                shown.append(_spread(values, key == "mean"))
        lost = [run["lost"] / (run["lost"] + run["reports"]) for run in runs if "lost" in run]
        rows.append((name, *shown, f"{100 * np.median(lost):.0f}" if lost else ""))
    return rows


def _spread(values: Sequence[float], share: bool) -> str:
    if not values:
        return ""
    show: Callable[[float], str] = (lambda v: f"{100 * v:.1f}") if share else (lambda v: f"{v:.4f}")
    middle, least, greatest = map(show, (np.median(values), min(values), max(values)))
    return middle if least == greatest else f"{middle} [{least}-{greatest}]"


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--quick", action="store_true", help="the published fit, one training")
    options.add_argument("--seeds", type=int, default=SEEDS, help="of the network's runs")
    options.add_argument("--workers", type=int, default=2, help="runs at a time")
    options.add_argument("--figure", type=Path, metavar="FILE.svg", help="draw it")
    chosen = options.parse_args()
    published, everybody = "the sample's 2,357", "all 23,570"
    wanted: dict[str, tuple[bool, tuple[float, float] | None]] = {published: (True, None)}
    trainings = ways()
    if chosen.quick:
        chosen.seeds = 1
        trainings = [way._replace(rounds=20) for way in trainings[:1]]
    else:
        wanted[everybody] = (False, None)
        wanted |= {f"the sample, {name}": (True, law) for name, law in LAWS.items()}
    seeds = range(1, chosen.seeds + 1)
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        fitted = {name: pool.submit(fit, *of) for name, of in wanted.items()}
        bundle = export(Path(folder))
        runs = {
            way.name: [pool.submit(trained, bundle, way, seed) for seed in seeds]
            for way in trainings
        }
        central = [pool.submit(in_one_place, bundle, seed) for seed in seeds]
        fits = {name: done.result() for name, done in fitted.items()}
        qualities: dict[str, Sequence[Mapping[str, Any]]]
        qualities = {name: [found] for name, found in simple().items()}
        qualities |= {f"BG/NBD, {name}": [found] for name, found in fits.items()}
        qualities["the network in one place"] = [done.result() for done in central]
        qualities |= {name: [done.result() for done in each] for name, each in runs.items()}
    print(measure.table(fits_table(fits)))
    print()
    print(measure.table(quality_table(qualities)))
    if chosen.figure is not None:
        from _purchase_figure import draw  # matplotlib takes its time

        draw(chosen.figure, fits[published]["parameters"], qualities)
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "figure")}
    measure.write_json(chosen.json, settings, {"fits": fits, "network": qualities})


if __name__ == "__main__":
    main()
