"""Training without a coordinator: how far the peers' models are apart, by topology, and what that
costs in accuracy and bytes, beside FedAvg.

Every run is the simulator's, with a small network for scikit-learn's digits that trains for real.
Runs are kept in --keep: started again, the command goes on with those that are missing.
docs/studies/peers.md says more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _dropout_data import scans
from _peers_theory import contraction, expected_error, gap_in_closed_form, measured_error
from dropout import export_digits, kept_run
from fleetlearn_device.peers.spectrum import spectral_gap
from fleetlearn_device.peers.topologies import Topology
from fleetlearn_simulator.peers.peers_run import simulate_peers
from fleetlearn_simulator.results.loaded_run import read_run
from fleetlearn_simulator.results.run_folder import ROUNDS, SUMMARY, read_json, read_rows
from fleetlearn_simulator.run import Options
from fleetlearn_simulator.scenario.scenario import Scenario

PEERS, STEPS, EXAMPLES, EPOCHS, BATCH, LR = 64, 100, 20, 2, 10, 0.1
LOCAL_STEPS = EPOCHS * EXAMPLES // BATCH
TOPOLOGIES = (
    "ring",
    "torus",
    "random-regular",
    "exponential",
    "one-peer-exponential",
    "complete",
)
DATA = {
    "alike": {"kind": "dirichlet", "alpha": 100.0},
    "skewed": {"kind": "dirichlet", "alpha": 0.1},
}
FEDAVG, GOSSIP, VANISHING = "FedAvg", "exponential, gossip", "exponential, 30 % vanish"
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"peers": {"topology": name}} for name in TOPOLOGIES},
    GOSSIP: {"peers": {"topology": "exponential", "mode": "gossip"}},
    VANISHING: {"peers": {"topology": "exponential"}, "failures": {"crash": 0.3}},
    FEDAVG: {},
}
OPTIONS = Options(backend="vectorized", workers=1, events=False, checkpoint=10**9, test=0)
LAST = 20
"""Steps at the end over which consensus error and pull are averaged."""


class PeerCell(NamedTuple):
    """Runs that differ in their seeds alone."""

    data: str
    way: str


def scenario(bundle: Path, cell: PeerCell, seed: int, steps: int) -> Scenario:
    way = {"peers": {}, **WAYS[cell.way]}
    way["peers"] = {**way["peers"], "tested": 0}
    tables = {
        "name": cell.way.replace(", ", "-").replace(" % ", "-"),
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "recipe": "fedavg",
            "local": {"epochs": EPOCHS, "batch_size": BATCH, "evaluate": False, "lr": LR},
            "round": {"goal": PEERS, "over_selection": 1.0},
            "stop": {"rounds": steps},
        },
        "population": {"size": PEERS},
        "data": {
            **DATA[cell.data],
            "arrays": str(bundle.with_name("digits.npz")),
            "examples": EXAMPLES,
        },
        **way,
    }
    return Scenario.read(tables, bundle.parent)


def figures(bundle: Path, cell: PeerCell, seed: int, steps: int) -> dict[str, float]:
    """Return the figures of a run. It is simulated unless its folder has it already."""
    run = scenario(bundle, cell, seed, steps)
    folder = bundle.parent / cell.data / run.name / f"seed-{seed}-{steps}"
    if cell.way == FEDAVG:
        rows = kept_run(run, folder, OPTIONS._replace(test=steps)).rows
        accuracy = float(rows[-1].test["accuracy"] or 0.0)
        return {
            "accuracy": accuracy,
            "own": accuracy,
            "worst": accuracy,
            "best": accuracy,
            "bytes": sum(sum(row.bytes.values()) for row in rows) / PEERS / len(rows),
        }
    given = folder / "given.json"
    text = json.dumps({"tables": run.tables}, indent=1)
    if not ((folder / SUMMARY).exists() and given.exists() and given.read_text("utf-8") == text):
        simulate_peers(run, folder, OPTIONS)
        given.write_text(text, "utf-8")
    summary, rows_of = read_json(folder / SUMMARY), read_rows(folder, ROUNDS)
    own = summary["peers"]["own"]["accuracy"]
    last = [row["peers"] for row in rows_of[-LAST:]]
    return {
        "accuracy": summary["test"]["accuracy"],
        "own": own["mean"],
        "worst": own["least"],
        "best": own["greatest"],
        "bytes": sum(summary["bytes"].values()) / PEERS / len(read_run(folder).rows),
        "consensus": float(np.mean([row["consensus"] for row in last])),
        "pull": float(np.mean([row.get("pull", np.nan) for row in last])),
    }


def theory(seed: int) -> dict[str, dict[str, float]]:
    """Return what follows from the matrices alone, by topology."""
    found = {}
    for name in TOPOLOGIES:
        matrices = Topology(name, seed=seed).matrices(PEERS)  # type: ignore[arg-type]
        noise, steady = expected_error(matrices)
        of_noise, of_steady = measured_error(matrices)
        found[name] = {
            "neighbours": float(np.mean([len(matrix.weights) / PEERS for matrix in matrices])),
            "gap": spectral_gap(matrices),
            "closed form": gap_in_closed_form(name, PEERS),
            "contraction": contraction(matrices),
            "noise": noise,
            "steady": steady,
            "noise measured": of_noise,
            "steady measured": of_steady,
        }
    return found


def of_matrices(known: Mapping[str, Mapping[str, float]]) -> list[Sequence[str]]:
    """Return the table that shows mixing without training."""
    rows: list[Sequence[str]] = [
        (
            "topology",
            "neighbours",
            "gap: closed form, computed",
            "disagreement left by a mixing: 1 - gap, measured",
            "error by noise: closed form, measured",
            "error by a steady pull: closed form, measured",
        )
    ]
    for name, row in known.items():
        closed = "none" if np.isnan(row["closed form"]) else f"{row['closed form']:.5f}"
        rows.append(
            (
                name,
                f"{row['neighbours']:g}",
                f"{closed}, {row['gap']:.5f}",
                f"{1 - row['gap']:.5f}, {row['contraction']:.5f}",
                f"{row['noise']:.3f}, {row['noise measured']:.3f}",
                f"{row['steady']:.3f}, {row['steady measured']:.3f}",
            )
        )
    return rows


def of_runs(results: Mapping[PeerCell, Sequence[Mapping[str, float]]], data: str) -> Any:
    """The table of the runs on these data: medians over seeds."""
    rows: list[Sequence[str]] = [
        (
            "",
            "consensus error",
            "accuracy of the mean model",
            "own models, mean",
            "own models, worst",
            "kB a step, each",
        )
    ]
    for cell, runs in results.items():
        if cell.data == data:
            middle = {key: float(np.median([run[key] for run in runs])) for key in runs[0]}
            rows.append(
                (
                    cell.way,
                    f"{middle['consensus']:.3f}" if "consensus" in middle else "",
                    *(f"{100 * middle[key]:.1f} %" for key in ("accuracy", "own", "worst")),
                    f"{middle['bytes'] / 1000:.1f}",
                )
            )
    return rows


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--keep", type=Path, default=Path("peers.runs"), help="folder of the finished runs"
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=STEPS, help="mixings of a run")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="draw peers.svg there")
    chosen = options.parse_args()
    chosen.keep.mkdir(parents=True, exist_ok=True)
    bundle = chosen.keep.absolute() / "digits.bundle"
    x, y = scans()
    np.savez(bundle.with_name("digits.npz"), x=x, y=y)
    export_digits(bundle, [64, 32, 10], (PEERS, LOCAL_STEPS), BATCH)
    cells = [PeerCell(data, way) for data, way in product(DATA, chosen.ways)]
    results: dict[PeerCell, list[dict[str, float]]] = {cell: [] for cell in cells}
    for number, (cell, seed) in enumerate(product(cells, range(1, chosen.seeds + 1)), 1):
        results[cell].append(figures(bundle, cell, seed, chosen.steps))
        if sys.stderr.isatty():
            done = f"{number} of {len(cells) * chosen.seeds} runs"
            print(f"\r{done}", end="", flush=True, file=sys.stderr)
    known = theory(seed=1)
    print(f"\n## Mixing alone, {PEERS} peers\n\n{measure.table(of_matrices(known))}\n")
    for data in DATA:
        print(f"## Training, data: {data}\n\n{measure.table(of_runs(results, data))}\n")
    if chosen.figures:
        import _peers_figure  # matplotlib takes its time

        print(_peers_figure.draw(results, known, chosen.figures), file=sys.stderr)
    settings = {
        key: value for key, value in vars(chosen).items() if key not in ("json", "keep", "figures")
    }
    shown = [cell._asdict() | {"runs": runs} for cell, runs in results.items()]
    measure.write_json(chosen.json, settings, {"matrices": known, "cells": shown})


if __name__ == "__main__":
    main()
