"""Boosted trees on one machine: three clinics, each with a table of tumours that it keeps. The
trees are those of all rows in one table, to the last bit, and any ONNX Runtime predicts with them.

    python examples/federated_boosting.py [FOLDER]
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

HERE = Path(__file__).parent
CLINICS = {"north": 250, "south": 120, "west": 56}
ROUNDS, DEPTH = 40, 3


def command(name: str, *words: str) -> list[str]:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or name
    return [found, *words]


def coordinator(*words: str) -> str:
    return subprocess.check_output(command("fleetlearn-coordinator", *words), text=True)


def write_table(path: Path, names: list[str], x: Any, y: Any) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "benign"])
        writer.writerows([*row, label] for row, label in zip(x.tolist(), y.tolist(), strict=True))


def questions(names: list[str]) -> str:
    """Return what `make-bundle` takes: which columns there are, which is to be predicted, how."""
    lines = ['name = "tumours"\nkind = "boosted-trees"\nlabel = "benign"\nloss = "logistic"']
    lines += [f"rounds = {ROUNDS}\ndepth = {DEPTH}"]
    lines += [f'[[columns]]\nname = "{name}"' for name in names]
    return "\n".join(lines)


def run(folder: Path, tables: Mapping[str, Path]) -> bytes:
    """Grow the trees of these tables, a device for each. Returns them as an ONNX file."""
    folder.mkdir()
    shutil.copy(folder.parent / "tumours.bundle", folder)
    plan = (HERE / "boosting.toml").read_text().replace("= 3", f"= {len(tables)}")
    (folder / "boosting.toml").write_text(plan)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "service.toml").write_text(f"port = {port}\n")
    serve = ["serve", str(folder / "boosting.toml"), "--service", str(folder / "service.toml")]
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(command("fleetlearn-coordinator", *serve), stdout=log, stderr=log)
        devices = []
        for name, table in tables.items():
            words = ["run", "--coordinator", f"ws://127.0.0.1:{port}", "--name", name]
            words += ["--state", str(folder / name), "--data", str(table), "--until-finished"]
            start = command("fleetlearn-device", *words)
            devices.append(subprocess.Popen(start, stdout=log, stderr=log))
        try:
            for process in devices:
                if process.wait(timeout=600):
                    raise RuntimeError(f"a device failed: see {folder / 'log.txt'}")
        finally:
            for process in (*devices, server):
                process.terminate()
                process.wait(timeout=30)
    model = folder / "trees.onnx"
    coordinator("export-model", str(folder / "boosting.toml"), "--output", str(model))
    return model.read_bytes()


def main(folder: Path) -> None:
    data = load_breast_cancer()
    names = [str(name) for name in data.feature_names]
    x, y = data.data.astype(np.float32), data.target
    order = np.random.default_rng(0).permutation(len(x))
    cuts = np.cumsum([*CLINICS.values()])
    *parts, test = np.split(order, cuts)
    tables = {name: folder / f"{name}.csv" for name in CLINICS}
    for (name, path), part in zip(tables.items(), parts, strict=True):
        write_table(path, names, x[part], y[part])
        print(f"{name} has {len(part)} rows")
    train = order[: cuts[-1]]
    write_table(folder / "all.csv", names, x[train], y[train])
    (folder / "trees.toml").write_text(questions(names))
    bundle = str(folder / "tumours.bundle")
    print(coordinator("make-bundle", str(folder / "trees.toml"), "--output", bundle), end="")

    clinics = run(folder / "clinics", tables)
    one_place = run(folder / "one-place", {"all": folder / "all.csv"})
    for name, model in {"three clinics": clinics, "all rows in one table": one_place}.items():
        print(f"{name}: trees of {len(model)} bytes, SHA-256 {hashlib.sha256(model).hexdigest()}")
    if clinics != one_place:
        raise SystemExit("the trees differ")
    print("the trees are the same, bit for bit")

    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before its import: no telemetry
    import onnxruntime

    session = onnxruntime.InferenceSession(clinics, providers=["CPUExecutionProvider"])
    chance = session.run(["probabilities"], {"x": x[test]})[0][:, 1]
    peer = HistGradientBoostingClassifier(max_iter=ROUNDS, early_stopping=False)
    theirs = peer.fit(x[train], y[train]).decision_function(x[test])
    print(f"AUC on {len(test)} rows that nobody trained on: {roc_auc_score(y[test], chance):.4f}")
    print(f"scikit-learn's trees of all rows in one table:  {roc_auc_score(y[test], theirs):.4f}")
    plan = folder / "clinics" / "boosting.toml"
    shown = json.loads(coordinator("result", str(plan), "--json"))["result"]
    print("what the trees split by, as shares of what they gain:")
    for name, share in list(shown["columns"].items())[:5]:
        print(f"  {name:24} {share:.1%}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
