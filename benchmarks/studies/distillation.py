"""What ensemble distillation (FedDF) makes of models that saw different things: two clients in the
plane, FedDF against FedAvg on skewed digits, and a family of three architectures against each of
them alone.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, arXiv 2006.07242:
figure 1, tables 1 and 4. docs/studies/distillation.md says more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _distillation_models import (
    bundles_of,
    clients_in_the_plane,
    noise_in_the_plane,
    scans,
    test_points,
    test_scans,
)
from _distillation_rounds import InProcessRun, LocalData, logits_of
from fleetlearn_coordinator import Plan
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.vector import Vector

from examples import digits

ALPHAS = (0.01, 0.1, 1.0)
DEVICES, COHORT, ROUNDS, EPOCHS = 20, 8, 15, 20
MEMBERS = ("linear", "mlp", "cnn")
OF_EACH = 4
"""Devices of each member of the family."""
FAMILY_ROUNDS, FAMILY_EPOCHS = 10, 5
FAMILY_ALPHA = 0.1


def plan_of(folder: Path, **tables: Any) -> Plan:
    usual: dict[str, Any] = {"name": "distillation", "round": {"goal": 1}}
    return Plan.read(usual | tables, folder)


def in_the_plane(folder: Path, seed: int) -> dict[str, Any]:
    """Return the models of the figure: name -> model, and their accuracies on all classes."""
    bundle, distilled = bundles_of("plane", folder)
    data = folder / "plane.npz"
    np.savez(data, x=noise_in_the_plane(seed))
    local = {"lr": 0.1, "epochs": 100, "batch_size": 10}
    files = {"data": str(data), "bundle": str(distilled.path), "steps": 1000, "lr": 0.01}
    models: dict[str, Vector] = {}
    clients = [LocalData(0, client) for client in clients_in_the_plane(seed)]
    run = None
    for name, tables in {"FedAvg's mean": {}, "FedDF": {"distil": files}}.items():
        plan = plan_of(folder, bundle=str(bundle.path), local=local, **tables)
        run = InProcessRun(plan, {"": bundle})
        run.round(clients)
        models[name] = run.state.model
    assert run is not None
    models = {f"client {number}": model for number, model in enumerate(run.trained, 1)} | models
    test = test_points(seed)
    accuracies = {name: run.accuracy(0, model, test) for name, model in models.items()}
    mean = np.mean([logits_of(bundle, model, test["x"]) for model in run.trained], axis=0)
    accuracies["the ensemble"] = float((mean.argmax(1) == test["y"]).mean())
    return {"models": models, "accuracy": accuracies, "clients": [each.data for each in clients]}


def skewed(folder: Path, alpha: float, seed: int, distil: bool) -> list[float]:
    """Return the test accuracy after each round. 8 of 20 devices take part in a round."""
    bundle, distilled = bundles_of("mlp", folder)
    x, y, unlabelled = scans()
    np.savez(folder / "unlabelled.npz", x=unlabelled)
    shards = digits.dirichlet_shards(y, DEVICES, alpha, seed)
    files = {"data": str(folder / "unlabelled.npz"), "bundle": str(distilled.path)}
    tables = {"distil": files | {"batch_size": 64, "lr": 0.003}} if distil else {}
    local = {"lr": 0.1, "epochs": EPOCHS, "batch_size": 10}
    run = InProcessRun(
        plan_of(folder, bundle=str(bundle.path), seed=seed, local=local, **tables), {"": bundle}
    )
    random, found = np.random.default_rng(seed), []
    for _ in range(ROUNDS):
        chosen = random.permutation(DEVICES)[:COHORT]
        run.round([LocalData(0, {"x": x[shards[k]], "y": y[shards[k]]}) for k in chosen])
        found.append(run.accuracy(0, run.state.model, test_scans()))
    return found


def family(folder: Path, seed: int, teachers: str) -> dict[str, float]:
    """Return the test accuracy of each member at the end. Each has four devices.
    ``teachers``: empty: each member is alone with its devices."""
    bundles: dict[str, Bundle] = {name: bundles_of(name, folder)[0] for name in MEMBERS}
    x, y, unlabelled = scans()
    np.savez(folder / "unlabelled.npz", x=unlabelled)
    shards = digits.dirichlet_shards(y, OF_EACH * len(MEMBERS), FAMILY_ALPHA, seed)
    members: dict[str, Any] = {name: {"bundle": str(bundles[name].path)} for name in MEMBERS}
    tables: dict[str, Any] = {"family": members}
    if teachers:
        for name in MEMBERS:
            members[name]["distil"] = str(bundles_of(name, folder)[1].path)
        data = str(folder / "unlabelled.npz")
        tables["distil"] = {"data": data, "teachers": teachers, "batch_size": 64, "lr": 0.003}
    local = {"lr": 0.1, "epochs": FAMILY_EPOCHS, "batch_size": 10}
    run = InProcessRun(plan_of(folder, seed=seed, local=local, **tables), bundles)
    devices = [
        LocalData(number % len(MEMBERS), {"x": x[shard], "y": y[shard]})
        for number, shard in enumerate(shards)
    ]
    for _ in range(FAMILY_ROUNDS):
        run.round(devices)
    return {
        name: run.accuracy(place, model, test_scans())
        for place, (name, model) in enumerate(run.models().items())
    }


def spread(values: Sequence[float]) -> str:
    """Return the median of accuracies in per cent, and the least and the greatest."""
    least, middle, most = (100 * np.quantile(values, [0, 0.5, 1])).tolist()
    return f"{middle:.1f} [{least:.1f}-{most:.1f}]"


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the figures there")
    chosen = options.parse_args()
    seeds = range(1, chosen.seeds + 1)
    with measure.scratch() as folder:
        plane = in_the_plane(folder, 1)
        curves = {
            (alpha, name): [skewed(folder, alpha, seed, name == "feddf") for seed in seeds]
            for alpha in ALPHAS
            for name in ("fedavg", "feddf")
        }
        families = {
            name or "alone": [family(folder, seed, name) for seed in seeds]
            for name in ("", "members", "devices")
        }
        rows: list[Sequence[str]] = [("model", "accuracy on all three classes")]
        rows += [(name, f"{100 * value:.1f}") for name, value in plane["accuracy"].items()]
        print(f"## Two clients in the plane\n\n{measure.table(rows)}\n")
        rows = [("recipe", *(f"alpha = {alpha:g}" for alpha in ALPHAS))]
        for name in ("fedavg", "feddf"):
            last = ([float(np.mean(run[-5:])) for run in curves[alpha, name]] for alpha in ALPHAS)
            rows.append((name, *map(spread, last)))
        print(f"## Skewed digits: mean of the last five rounds\n\n{measure.table(rows)}\n")
        rows = [("teachers", *MEMBERS)]
        for name, runs in families.items():
            rows.append((name, *(spread([run[member] for run in runs]) for member in MEMBERS)))
        print(f"## Three architectures\n\n{measure.table(rows)}\n")
        if chosen.figures:
            import _distillation_figures  # matplotlib takes its time

            bundle = bundles_of("plane", folder)[0]
            for file in _distillation_figures.draw(plane, curves, bundle, chosen.figures):
                print(file, file=sys.stderr)
    results = {
        "plane": plane["accuracy"],
        "skewed": {f"{name}, alpha {alpha:g}": runs for (alpha, name), runs in curves.items()},
        "families": families,
    }
    measure.write_json(chosen.json, {"seeds": chosen.seeds}, results)


if __name__ == "__main__":
    main()
