"""Whose data are damaged: what a plan with [quality] finds, and how often it is wrong.

Two questions, in the simulator, which runs the coordinator's own engine and its own arithmetic:

* the four hospitals of docs/studies/hospitals.md: in the set-up ``damaged`` the third one's sensor
  reads 4 too much. Is it found, and is any other hospital accused, there or where nothing is
  damaged?
* digits on ten devices, one of which has wrong labels: how many must be wrong for it to be found,
  and how good is the estimate of how many?

docs/operate/data-quality.md says how a plan asks for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
import torch
from fleetlearn_export import export_bundle
from fleetlearn_protocol import Bundle
from fleetlearn_simulator.results.run_folder import exchanges_file, read_rows
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from hospitals import HOSPITALS, SETUPS, export
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

DAMAGED = ("d00000002", 1)
"""The device and the feature."""
ROUNDS = 10
DEVICES, NOISY = 10, 3
"""Of digits: how many devices, and which of them has wrong labels."""
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Of wrong labels that are tried."""
PLAN: dict[str, Any] = {
    "recipe": "fedavg",
    "quality": {"every": ROUNDS},
    "stop": {"rounds": ROUNDS},
}


def last_look(tables: dict[str, Any], base: Path, folder: Path) -> dict[str, Any]:
    """Run a scenario, and return the summary of its last look."""
    options = Options(backend="bundle", workers=1, events=False, checkpoint=10**9, test=0)
    simulate(Scenario.read(tables, base), folder, options)
    return read_rows(folder, exchanges_file("quality"))[-1]


def hospitals_look(bundle: Bundle, setup: str, seed: int, folder: Path) -> dict[str, Any]:
    plan = PLAN | {
        "bundle": str(bundle.path),
        "local": {"epochs": 10, "batch_size": 0, "lr": 0.1},
        "round": {"goal": HOSPITALS, "minimum": HOSPITALS, "over_selection": 1.0},
    }
    tables = {
        "name": "hospitals",
        "seed": seed,
        "plan": plan,
        "population": {"size": HOSPITALS},
        "data": {"kind": "hospitals", "setup": setup, "test": 0.0},
    }
    return last_look(tables, bundle.path.parent, folder)


def hospitals_row(bundle: Bundle, setup: str, seeds: int, folder: Path) -> dict[str, Any]:
    """Return how often which hospital was named."""
    found, false_alarms, sure, deviations = 0, 0, [], []
    for seed in range(seeds):
        look = hospitals_look(bundle, setup, seed, folder / f"{setup}-{seed}")
        named = {(each["device"], each["feature"]): each for each in look["features"]}
        right = named.pop(DAMAGED, None) if setup == "damaged" else None
        if right is not None:
            found += 1
            sure.append(right["log10_p"])
            deviations.append(right["deviations"])
        accused = {device for device, _ in named} | {each["device"] for each in look["losses"]}
        false_alarms += bool(accused - ({DAMAGED[0]} if setup == "damaged" else set()))
    row: dict[str, Any] = {"setup": setup, "runs": seeds, "false alarms": false_alarms}
    if setup == "damaged":
        row |= {
            "found": found,
            "median deviations": float(np.median(deviations)) if found else None,
            "median p": 10 ** float(np.median(sure)) if found else None,
        }
    return row


def scans() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scikit-learn's digits: x from 0 to 1, (n, 64), and y."""
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int64)


def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == y).to(torch.float32).mean()


def digits_bundle(folder: Path) -> Bundle:
    x, y = scans()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        return export_bundle(
            model,
            functional.cross_entropy,
            (torch.from_numpy(x[:4]), torch.from_numpy(y[:4])),
            folder / "digits.bundle",
            metrics={"accuracy": accuracy},
        ).bundle


def labels_look(bundle: Bundle, share: float, seed: int, folder: Path) -> dict[str, Any]:
    """Return the look at ten devices with 140 digits each."""
    generator = np.random.default_rng(seed)
    x, y = scans()
    order = generator.permutation(len(y))[: DEVICES * 140]
    x, y = x[order], y[order].copy()
    device = np.repeat(np.arange(DEVICES), 140)
    wrong = (device == NOISY) & (generator.random(len(y)) < share)
    y[wrong] = (y[wrong] + generator.integers(1, 10, int(wrong.sum()))) % 10
    arrays = folder.with_suffix(".npz")
    names = [each.name for each in bundle.manifest.batch]
    columns: dict[str, Any] = {**dict(zip(names, (x, y), strict=True)), "device": device}
    np.savez(arrays, **columns)
    plan = PLAN | {
        "bundle": str(bundle.path),
        "local": {"epochs": 5, "batch_size": 20, "lr": 0.1},
        "round": {"goal": DEVICES, "minimum": DEVICES, "over_selection": 1.0},
        "quality": {"every": ROUNDS, "classes": 10},
    }
    tables = {
        "name": "digits",
        "seed": seed,
        "plan": plan,
        "population": {"size": DEVICES},
        "data": {"kind": "column", "arrays": str(arrays), "column": "device", "test": 0.0},
    }
    look = last_look(tables, bundle.path.parent, folder)
    return look | {"planted": float(wrong.sum() / (device == NOISY).sum())}


def labels_row(bundle: Bundle, share: float, seeds: int, folder: Path) -> dict[str, Any]:
    """Return how often the device with wrong labels was named, and what was estimated."""
    name = f"d{NOISY:08d}"
    found, false_alarms, errors, sure = 0, 0, [], []
    for seed in range(seeds):
        look = labels_look(bundle, share, seed, folder / f"labels-{share}-{seed}")
        named = {each["device"]: each for each in look["losses"]}
        right = named.pop(name, None) if share else None
        if right is not None:
            found += 1
            sure.append(right["log10_p"])
            errors.append(right["wrong_labels"] - look["planted"])
        accused = set(named) | {each["device"] for each in look["features"]}
        false_alarms += bool(accused - ({name} if share else set()))
    row: dict[str, Any] = {
        "wrong labels": share,
        "runs": seeds,
        "found": found,
        "false alarms": false_alarms,
    }
    if found:
        row |= {
            "median p": 10 ** float(np.median(sure)),
            "median error of the estimate": float(np.median(errors)),
        }
    return row


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="data sets of each row")
    chosen = parser.parse_args()
    with measure.scratch() as folder:
        bundle = export(folder)
        hospitals = [hospitals_row(bundle, setup, chosen.seeds, folder) for setup in SETUPS]
        bundle = digits_bundle(folder)
        labels = [labels_row(bundle, share, chosen.seeds, folder) for share in SHARES]
    print(_table(hospitals), _table(labels), sep="\n\n")
    measure.write_json(
        chosen.json, {"seeds": chosen.seeds}, {"hospitals": hospitals, "labels": labels}
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [f"{row[name]:.3g}" if isinstance(row.get(name), float) else str(row.get(name, ""))
         for name in columns]
        for row in rows
    ]  # fmt: skip
    return measure.table([columns, *cells])


if __name__ == "__main__":
    main()
