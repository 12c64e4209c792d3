"""Federated statistics on one machine: three devices with a table each, and what came out beside
the same numbers of all rows in one place.

    python examples/federated_statistics.py [--secure] [FOLDER]

--secure: the devices mask their sums in pairs, so that the coordinator learns nothing but the total
of all three. The result is the same, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROWS = {"north": 1000, "south": 400, "west": 150}
SECURE = """
[secure]
mode = "pairwise"
dropouts = 0.0                   # of three devices none may vanish in the middle of a round
"""


def table(rows: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    age = np.clip(np.round(random.normal(52, 21, rows)), 0, 104)
    age[random.random(rows) < 0.03] = np.nan
    return {
        "age": age,
        "weight": np.round(random.normal(74, 14, rows), 1),
        "smoker": random.choice(["yes", "no", ""], rows, p=[0.2, 0.7, 0.1]),
        "city": np.array([f"city {number}" for number in random.zipf(1.7, rows) % 200]),
    }


def command(name: str, *words: str) -> list[str]:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or name
    return [found, *words]


def run(folder: Path, *, secure: bool) -> dict[str, Any]:
    """Serve the questions to three devices until the run is over. Returns all rows."""
    tables = {name: table(rows, seed) for seed, (name, rows) in enumerate(ROWS.items())}
    for name, columns in tables.items():
        np.savez(folder / f"{name}.npz", **columns)
    questions, bundle = HERE / "questions.toml", folder / "patients.bundle"
    make = ["make-bundle", str(questions), "--output", str(bundle)]
    subprocess.run(command("fleetlearn-coordinator", *make), check=True)
    plan = folder / "statistics.toml"
    plan.write_text((HERE / "statistics.toml").read_text() + (SECURE if secure else ""))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = folder / "service.toml"
    service.write_text(f"port = {port}\n")
    serve = command("fleetlearn-coordinator", "serve", str(plan), "--service", str(service))
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log)
        url = f"ws://127.0.0.1:{port}"
        devices = []
        for name in tables:
            words = ["run", "--coordinator", url, "--state", str(folder / name), "--name", name]
            words += ["--data", str(folder / f"{name}.npz"), "--until-finished"]
            start = command("fleetlearn-device", *words)
            devices.append(subprocess.Popen(start, stdout=log, stderr=log))
        try:
            for process in devices:
                process.wait(timeout=300)
        finally:
            for process in (*devices, server):
                process.terminate()
                process.wait(timeout=30)
    return {name: np.concatenate([each[name] for each in tables.values()]) for name in table(1, 0)}


def main(folder: Path, *, secure: bool) -> None:
    pooled = run(folder, secure=secure)
    show = ["result", str(folder / "statistics.toml")]
    subprocess.run(command("fleetlearn-coordinator", *show), check=True)
    printed = subprocess.check_output(command("fleetlearn-coordinator", *show, "--json"))
    age = json.loads(printed)["result"]["columns"]["age"]
    there = pooled["age"][~np.isnan(pooled["age"])]
    print("\nThe same of all rows in one place, and how far the devices' result is from it:")
    median = age["quantiles"][1]["value"]
    rows = {
        "mean of age": (there.mean(), age["mean"]),
        "deviation of age": (there.std(), age["deviation"]),
        "median of age": (np.quantile(there, 0.5, method="lower"), median),
        "rows without age": (len(pooled["age"]) - len(there), age["missing"]),
    }
    for name, (expected, found) in rows.items():
        print(f"{name:20} {expected:<14.10g} {abs(found - expected):.2g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Federated statistics on one machine.")
    parser.add_argument("folder", nargs="?", type=Path, help="where files go; default: none stay")
    parser.add_argument("--secure", action="store_true", help="mask the devices' sums")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        main(given.folder or Path(made), secure=given.secure)
