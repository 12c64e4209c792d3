"""The simulator: device-rounds a second, and what a round of a large population costs.

small: 1,000 devices with 50 examples, softmax regression 60 -> 10, 100 a round, 5 steps of 10 each:
both back ends with everything on, against the bare train_many.onnx, a PyTorch loop, client after
client, and pfl-research and Flower where they are installed.
cnn: the CNN of McMahan et al. 2017 on a few devices, against the PyTorch loop in as many processes.
large: 10^6 devices that come and go with the time of day, 10 % of the tasks lost, 10,000 reports a
round: the CPU of the process that keeps the books, while others train.
asynchronous: the same devices with different speeds, 10,000 tasks at a time: synchronous rounds of
10,000 reports beside a model with every 1,000.
curve: the same CPU with 100 reports a round, for populations of 10^3 to 10^7.

All contenders of a part run once before any runs again, each in separate processes. The simulator
trains on the ONNX Runtime of --python; --peers names an environment that has pfl-research, Flower
or both. With --provider cuda, for small and cnn, the simulator, train_many.onnx and the loop in
PyTorch train on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _measure as measure
import _models
import numpy as np
import torch
from fleetlearn_export import TrainMany, export_bundle
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.scenario.scenario import Scenario
from torch import nn
from torch.nn import functional

HERE = Path(__file__).parent
LIMIT = 1800.0
"""Seconds that one contender may take."""
TOLERANCE = 0.01
"""Relative difference of the losses above which other programs did not do the same work. Other
devices in the rounds change it by 0.002."""
CORES = len(os.sched_getaffinity(0))
BOOKS = max(2, CORES)
"""Worker processes where the parent's CPU is measured: with one it would train itself."""
BUFFERS = 10
"""Asynchronous: models for as many reports as there are tasks at a time."""
Settings = dict[str, Any]
Runs = dict[str, list[dict[str, float]]]


def export_softmax(file: Path) -> None:
    """Softmax regression 60 -> 10, with the graph for 100 devices at once."""

    def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == y).float()

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of the exporters that it calls
        torch.manual_seed(0)
        example = torch.randn(10, 60), torch.randint(10, (10,))
        model, metrics, many = nn.Linear(60, 10), {"accuracy": accuracy}, TrainMany(100, 5)
        export_bundle(model, functional.cross_entropy, example, file, metrics=metrics, many=many)


def export_cnn(file: Path) -> None:
    case = _models.make("mcmahan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_bundle(case.module, case.loss, case.batch(2), file, metrics=case.metrics)


def scenario(bundle: Path, size: int, goal: int, rounds: int, **sections: Any) -> Settings:
    """Return a scenario's tables. ``batch``, ``examples`` and ``over`` belong to the plan and the
    data; all other options are sections."""
    batch, examples = sections.pop("batch", 10), sections.pop("examples", 50)
    round_ = {"goal": goal, "over_selection": sections.pop("over", 1.0), "deadline": 3600.0}
    plan = {
        "bundle": str(bundle),
        "recipe": "fedavg",
        "local": {"epochs": 1, "batch_size": batch, "lr": 0.01, "evaluate": False},
        "round": round_,
        "stop": {"rounds": rounds},
    }
    data = {"kind": "synthetic", "alpha": 0.5, "beta": 0.5, "examples": examples, "test": 0.0}
    return {
        "name": "benchmark",
        "seed": 1,
        "plan": plan,
        "population": {"size": size},
        "data": data,
        **sections,
    }


def data_of(tables: Settings, folder: Path) -> Settings:
    """Return the settings of the contenders of _other_frameworks.py, and write the same devices'
    data to a file."""
    run = Scenario.read(tables, folder)
    source = source_of(run, open_bundle(run.plan.bundle))
    rows = [source.arrays(device) for device in range(run.population.size)]
    file = folder / f"{run.population.size}-devices.npz"
    np.savez(file, x=np.stack([x for x, _ in rows]), y=np.stack([y for _, y in rows]))
    return {"data": str(file), "batch": run.plan.local.batch_size, "lr": run.plan.local.lr}


class Contest:
    """Runs contenders as processes. ``folder`` is where they work; ``python`` and ``peers`` are
    interpreters; ``provider`` is where they train."""

    def __init__(self, folder: Path, python: str, peers: str, provider: str) -> None:
        self.folder, self.number, self.provider = folder, 0, provider
        self.pythons = {
            "simulator": python,
            "kernel": python,
            "pytorch": sys.executable,
            "pfl": peers,
            "flower": peers,
        }

    def version(self, kind: str, *modules: str) -> str:
        """Return the version of the first module that a kind of contender needs, or nothing if one
        is not installed."""
        code = f"import {', '.join(modules)}; print({modules[0]}.__version__)"
        done = subprocess.run([self.pythons[kind], "-c", code], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    def run(self, kind: str, settings: Settings, processes: int = 1) -> dict[str, float]:
        """The figures; of several processes at a time the sum of their rates. Raises RuntimeError
        with the output of one that failed."""
        started = []
        for turn in range(processes):
            self.number += 1
            folder = self.folder / f"run-{self.number}"
            folder.mkdir()
            file = folder / "settings.json"
            file.write_text(
                json.dumps(
                    {"provider": self.provider, **settings, "folder": str(folder), "turn": turn}
                )
            )
            program = str(HERE / "_simulator_contender.py")
            command = [self.pythons[kind], program, kind, str(file), str(time.monotonic())]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        results = []
        try:
            for process in started:
                output, errors = process.communicate(timeout=LIMIT)
                if process.returncode:
                    raise RuntimeError(f"{kind} failed:\n{errors[-3000:]}")
                figures: dict[str, float] = json.loads(output.splitlines()[-1])
                results.append(figures)
        finally:
            for process in started:
                process.kill()
                process.communicate()
        print(".", end="", flush=True, file=sys.stderr)
        rate = sum(result["device_rounds_per_s"] for result in results)
        return results[0] | {"device_rounds_per_s": rate}


def in_turns(
    contenders: dict[str, Callable[[], dict[str, float]]], repeats: int, against: str | None = None
) -> dict[str, Any]:
    """Return the middle of each contender's figures. ``ratio`` compares its rate with the rate of
    ``against`` in the same repeat."""
    runs: Runs = {name: [] for name in contenders}
    for _ in range(repeats):
        turn = {name: contend() for name, contend in contenders.items()}
        for name, figures in turn.items():
            ratio = (
                {"ratio": figures["device_rounds_per_s"] / turn[against]["device_rounds_per_s"]}
                if against
                else {}
            )
            runs[name].append(figures | ratio)
    return {
        name: {key: measure.middle([row[key] for row in rows]) for key in rows[0]} | {"runs": rows}
        for name, rows in runs.items()
    }


def small(contest: Contest, bundle: Path, repeats: int, scale: float) -> dict[str, Any]:
    goal = 100
    data = data_of(scenario(bundle, 1000, goal, 1), contest.folder)

    def simulated(
        backend: str, rounds: int, workers: int = CORES
    ) -> Callable[[], dict[str, float]]:
        tables = scenario(bundle, 1000, goal, rounds)
        settings = {"scenario": tables, "backend": backend, "workers": workers, "warm": rounds // 2}
        return lambda: contest.run("simulator", settings)

    def loop(processes: int, kind: str = "pytorch") -> Callable[[], dict[str, float]]:
        rounds = _many(40, scale)
        settings = {
            **data,
            "model": "softmax",
            "cohort": goal // processes,
            "rounds": rounds,
            "warm": rounds // 2,
        }
        return lambda: contest.run(kind, settings, processes)

    def bare(processes: int) -> Callable[[], dict[str, float]]:
        settings = {"graph": str(bundle / "graphs/train_many.onnx"), "batch": 10, "lr": 0.01}
        return lambda: contest.run("kernel", {**settings, "rounds": _many(3000, scale)}, processes)

    contenders = {
        f"simulator, vectorized, {CORES} workers": simulated("vectorized", _many(3000, scale)),
        "simulator, vectorized, no workers": simulated("vectorized", _many(3000, scale), 1),
        f"simulator, bundle, {CORES} workers": simulated("bundle", _many(300, scale)),
        "train_many.onnx alone, 1 process": bare(1),
        f"train_many.onnx alone, {CORES} processes": bare(CORES),
        f"PyTorch, {CORES} processes": loop(CORES),
        "PyTorch, 1 process": loop(1),
    }
    peers = {}
    for kind, (title, processes, *modules) in PEERS.items():
        if version := contest.version(kind, *modules):
            peers[f"{title} {version}, {processes}"] = loop(1, kind)
        else:
            print(f"{title} is not installed: not compared", file=sys.stderr)
    figures = in_turns(contenders | peers, repeats, "PyTorch, 1 process")
    expected = figures["PyTorch, 1 process"]["loss"]["median"]
    for name in peers:
        loss = figures[name]["loss"]["median"]
        if abs(loss - expected) > TOLERANCE * expected:
            raise RuntimeError(
                f"{name} ends with the loss {loss}, the loop in PyTorch with {expected}"
            )
    return figures


def cnn(contest: Contest, bundle: Path, repeats: int, scale: float) -> dict[str, Any]:
    """Eight devices for each core, all of them in a round, 5 steps of 20 each. On a GPU in one
    process too."""
    goal, rounds = 8 * CORES, _many(12, scale)
    tables = scenario(bundle, goal, goal, rounds, batch=20, examples=100)
    data = data_of(tables, contest.folder)
    shared = {"rounds": rounds, "warm": rounds // 2}

    def simulated(workers: int) -> dict[str, float]:
        return contest.run(
            "simulator", {**shared, "scenario": tables, "backend": "bundle", "workers": workers}
        )

    def loop(processes: int) -> dict[str, float]:
        settings = {**shared, **data, "model": "mcmahan", "cohort": goal // processes}
        return contest.run("pytorch", settings, processes)

    contenders: dict[str, Callable[[], dict[str, float]]] = {
        f"simulator, bundle, {CORES} workers": partial(simulated, CORES),
        f"PyTorch, {CORES} processes": partial(loop, CORES),
    }
    if contest.provider != "cpu":
        contenders |= {
            "simulator, bundle, no workers": partial(simulated, 1),
            "PyTorch, 1 process": partial(loop, 1),
        }
    return in_turns(contenders, repeats, f"PyTorch, {CORES} processes")


def away(bundle: Path, size: int, goal: int, rounds: int) -> Settings:
    """Return a scenario of devices that come and go with the day. A tenth of their tasks fails."""
    return scenario(
        bundle,
        size,
        goal,
        rounds,
        over=1.3,
        availability={"kind": "diurnal"},
        failures={"crash": 0.1},
    )


def books(contest: Contest, tables: Settings, warm: int) -> dict[str, float]:
    return contest.run(
        "simulator", {"scenario": tables, "backend": "vectorized", "workers": BOOKS, "warm": warm}
    )


def large(contest: Contest, bundle: Path, repeats: int, scale: float) -> dict[str, Any]:
    size, goal = _many(1_000_000, scale), _many(10_000, scale)
    name = f"{size:,} devices, {goal:,} reports a round"
    return in_turns({name: lambda: books(contest, away(bundle, size, goal, 6), 2)}, repeats)


def asynchronous(contest: Contest, bundle: Path, repeats: int, scale: float) -> dict[str, Any]:
    """``cpu_ratio`` compares the parent's CPU for each report with that of synchronous rounds in
    the same repeat."""
    size, most = _many(1_000_000, scale), _many(10_000, scale)
    tables = {"synchronous rounds": (away(bundle, size, most, 6), 2)}
    buffered = away(bundle, size, most, 6 * BUFFERS)
    buffered["plan"] |= {
        "recipe": "fedbuff",
        "round": {"goal": most // BUFFERS, "concurrency": most},
    }
    tables["asynchronous"] = (buffered, 2 * BUFFERS)
    for run, _ in tables.values():
        run |= {"compute": {"step_seconds": 20.0}, "tiers": {"device": {"spread": 0.7}}}
        run["plan"]["round"]["deadline"] = 7200.0
    contenders: dict[str, Callable[[], dict[str, float]]] = {
        f"{name}, {most:,} at a time": partial(books, contest, run, warm)
        for name, (run, warm) in tables.items()
    }
    results = in_turns(contenders, repeats)
    first = next(iter(results.values()))["runs"]
    for figures in results.values():
        rows = [run["parent_cpu_us_each"] for run in figures["runs"]]
        ratios = [own / other["parent_cpu_us_each"] for own, other in zip(rows, first, strict=True)]
        figures["cpu_ratio"] = measure.middle(ratios)
    return results


def curve(contest: Contest, bundle: Path, repeats: int, scale: float) -> dict[str, Any]:
    rounds = _many(60, scale)

    def at(size: int) -> Callable[[], dict[str, float]]:
        return lambda: books(contest, away(bundle, size, 100, rounds), rounds // 3)

    return in_turns({f"{10**power:,} devices": at(10**power) for power in range(3, 8)}, repeats)


PEERS = {
    "pfl": ("pfl-research", "1 process", "pfl"),
    "flower": ("Flower", f"{CORES} Ray actors", "flwr", "ray"),
}
"""Kind -> name, processes, what it needs."""
PARTS = {"small": small, "cnn": cnn, "large": large, "asynchronous": asynchronous, "curve": curve}
COLUMNS = {
    "device-rounds/s": "device_rounds_per_s",
    "ratio to PyTorch": "ratio",
    "CPU-us of all, each": "cpu_us_per_device_round",
    "first round after, s": "first_round_s",
    "parent's CPU-ms a round": "parent_cpu_ms_per_round",
    "parent's CPU-us, each": "parent_cpu_us_each",
    "ratio to synchronous": "cpu_ratio",
    "ms a round": "clock_ms_per_round",
    "peak RSS of all, MiB": "peak_rss_mib",
    "parent's": "parent_peak_rss_mib",
    "tasks without a report a round": "lost",
}


def _many(usual: int, scale: float) -> int:
    return max(4, round(usual * scale))


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="times the usual rounds, and the size of the two large parts",
    )
    options.add_argument(
        "--python", default=sys.executable, help="the simulator's interpreter (default: this one)"
    )
    options.add_argument(
        "--peers",
        default=sys.executable,
        help="the one of pfl-research and Flower (default: this one)",
    )
    options.add_argument("--provider", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    chosen = options.parse_args()
    if chosen.provider != "cpu" and {*chosen.parts} - {"small", "cnn"}:
        options.error(f"--provider {chosen.provider} is for --parts small cnn")
    with measure.scratch() as folder:
        contest, results = Contest(folder, chosen.python, chosen.peers, chosen.provider), {}
        runtime = contest.version("simulator", "onnxruntime")
        for part in chosen.parts:
            bundle = folder / ("cnn.bundle" if part == "cnn" else "softmax.bundle")
            if not bundle.exists():
                (export_cnn if part == "cnn" else export_softmax)(bundle)
            results[part] = PARTS[part](contest, bundle, chosen.repeats, chosen.scale)
    print(file=sys.stderr)
    rows = [("part", "contender", *COLUMNS)]
    for part, contenders in results.items():
        for name, figures in contenders.items():
            cells = [
                measure.show(figures[key]) if key in figures else "" for key in COLUMNS.values()
            ]
            rows.append((part, name, *cells))
    print(measure.table(rows))
    print(f"\nThe simulator trained on ONNX Runtime {runtime}, provider {chosen.provider}.")
    settings = {
        "repeats": chosen.repeats,
        "scale": chosen.scale,
        "onnxruntime": runtime,
        "provider": chosen.provider,
    }
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
