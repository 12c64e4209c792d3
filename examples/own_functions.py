"""Own functions on one machine: three devices with a table each, and what came out beside
scikit-learn's model of all rows in one place.

    python examples/own_functions.py [kmeans | newton | partial_fit] [FOLDER]

The functions of both sides are in examples/functions/; each device allows its own by name.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FUNCTIONS = Path(__file__).parent / "functions"
ALLOWED = {"kmeans": "kmeans:sums", "newton": "newton:sums", "partial_fit": "partial_fit:fit"}
ROWS = (600, 250, 90)
SERVICE = 'port = {port}\n[plugins]\nmodules = ["{name}"]\nfolder = "{folder}"\n'
PLAN = """
name = "{name}"
bundle = "{name}.bundle"
recipe = "function"
[round]
goal = 3
minimum = 3
"""


def table(name: str, device: int) -> dict[str, Any]:
    random = np.random.default_rng(device)
    if name == "kmeans":
        places = np.array([[155.0, 55.0], [172.0, 70.0], [186.0, 93.0]])
        x = places[random.integers(0, 3, ROWS[device])] + random.normal(0, 4, (ROWS[device], 2))
        return {"height": x[:, 0], "weight": x[:, 1]}
    x = random.normal(device / 3, 1.0, (ROWS[device], 3))
    chance = 1 / (1 + np.exp(-(x @ [1.0, -2.0, 0.5] + 0.3)))
    relapse = (random.random(len(x)) < chance).astype(np.int64)
    return {"age": x[:, 0], "dose": x[:, 1], "pulse": x[:, 2], "relapse": relapse}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Serve the run to three devices until it is over. Returns the result."""
    coordinator = [sys.executable, "-m", "fleetlearn_coordinator"]
    plan, service = folder / "plan.toml", folder / "service.toml"
    make = ["make-bundle", str(FUNCTIONS / f"{name}.toml"), "-o", str(folder / f"{name}.bundle")]
    subprocess.run([*coordinator, *make], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan.write_text(PLAN.format(name=name))
    service.write_text(SERVICE.format(port=port, name=name, folder=FUNCTIONS))
    with (folder / "log.txt").open("w") as log:
        serve = [*coordinator, "serve", str(plan), "--service", str(service)]
        processes = [subprocess.Popen(serve, stdout=log, stderr=log)]
        for device in range(3):
            data = folder / f"{device}.npz"
            np.savez(data, **table(name, device))
            words = ["run", "--coordinator", f"ws://127.0.0.1:{port}", "--data", str(data)]
            words += ["--state", str(folder / f"device-{device}"), "--until-finished"]
            words += ["--allow-function", ALLOWED[name]]
            start = [sys.executable, "-m", "fleetlearn_device", *words]
            # Functions are looked for in the current folder too.
            processes.append(subprocess.Popen(start, stdout=log, stderr=log, cwd=FUNCTIONS))
        try:
            for process in processes:
                process.wait(timeout=300)
        finally:
            for process in processes:
                process.terminate()
                process.wait(timeout=30)
    subprocess.run([*coordinator, "result", str(plan)], check=True)
    shown = subprocess.check_output([*coordinator, "result", str(plan), "--json"])
    found: dict[str, Any] = json.loads(shown)["result"]
    return found


def compare(name: str, found: dict[str, Any]) -> None:
    try:
        from sklearn.cluster import KMeans
        from sklearn.linear_model import LogisticRegression
    except ModuleNotFoundError:
        print("\nBeside scikit-learn's result: pip install scikit-learn, and start this again")
        return

    tables = [table(name, device) for device in range(3)]
    whole = {key: np.concatenate([each[key] for each in tables]) for key in tables[0]}
    if name == "kmeans":
        x = np.column_stack([whole["height"], whole["weight"]])
        start = np.array([[150.0, 50.0], [170.0, 60.0], [190.0, 100.0]])
        own = KMeans(3, init=start, n_init=1, tol=0, max_iter=500).fit(x).cluster_centers_
        centres = np.array(found["state"]["centres"])
        print(f"\nfarthest from KMeans of all rows: {np.abs(centres - own).max():.1e}")
        return
    x = np.column_stack([whole["age"], whole["dose"], whole["pulse"]])
    model = LogisticRegression(tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    model.fit(x, whole["relapse"])
    if name == "newton":
        optimum = np.append(model.coef_, model.intercept_)
        distance = np.abs(np.array(found["state"]["model"]) - optimum).max()
        print(f"\nfarthest from LogisticRegression of all rows: {distance:.1e}")
    else:
        print(f"\naccuracy on the devices' own rows, before the mean: {found['metrics']}")
        print(f"LogisticRegression of all rows: {model.score(x, whole['relapse']):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Own functions on one machine.")
    parser.add_argument("name", nargs="?", choices=[*ALLOWED], default="kmeans")
    parser.add_argument("folder", nargs="?", type=Path, help="where files go; default: none stay")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        compare(given.name, run(given.name, (given.folder or Path(made)).absolute()))
