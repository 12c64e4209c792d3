"""Two parties with different features of the same patients train one model, one of them is killed,
and the result is the model trained in one place.

    python examples/vertical.py

The table is scikit-learn's breast cancer data: 569 patients, 30 measurements. A hospital has the
first 15 columns and the diagnoses, a laboratory the other 15; each lacks some patients and has its
own order. Both train a bottom, a coordinator trains the top: three processes. It takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

STEPS, BATCH, LR, EVERY = 300, 32, 0.1, 25
KEY = "0123456789abcdef" * 4
"""Real parties make theirs with `openssl rand -hex 32`."""


class Table(NamedTuple):
    """One party's data."""

    ids: NDArray[np.str_]
    x: NDArray[np.float32]


class Patients(NamedTuple):
    """What the parties have, and what nobody trains on."""

    hospital: Table
    y: NDArray[np.int64]
    """The diagnoses of the hospital's patients: 1 is benign."""
    laboratory: Table
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]


def patients() -> Patients:
    """Return the table, divided. A fifth is held out."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    random = np.random.default_rng(2026)
    x = ((found.data - found.data.mean(0)) / found.data.std(0)).astype(np.float32)
    y = found.target.astype(np.int64)
    ids = np.array([f"patient-{number:04d}" for number in range(len(y))])
    order = random.permutation(len(y))
    test, train = order[: len(y) // 5], order[len(y) // 5 :]
    hospital, laboratory = train[:-20], random.permutation(train[30:])
    return Patients(
        Table(ids[hospital], x[hospital, :15]),
        y[hospital],
        Table(ids[laboratory], x[laboratory, 15:]),
        x[test],
        y[test],
    )


class Model(NamedTuple):
    """The parts of the model before training."""

    hospital: nn.Module
    laboratory: nn.Module
    top: nn.Module


def model() -> Model:
    """Return the parts, the same each time."""
    import torch
    from torch import nn

    torch.manual_seed(7)
    return Model(
        nn.Sequential(nn.Linear(15, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(15, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)),
    )


def export(folder: Path, parts: Model, data: Patients) -> None:
    """Write hospital.bundle, laboratory.bundle and top.bundle."""
    import torch
    from fleetlearn_export import LocalStep, export_vertical
    from torch.nn import functional

    def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == y).float()

    rows = slice(0, 8)
    export_vertical(
        {
            "hospital": (parts.hospital, (data.hospital.x[rows],)),
            "laboratory": (parts.laboratory, (data.laboratory.x[rows],)),
        },
        parts.top,
        functional.cross_entropy,
        data.y[rows],
        folder,
        step=LocalStep("sgd"),
        metrics={"accuracy": accuracy},
        target_names=["y"],
    )


def trained_in_one_place(parts: Model, data: Patients, steps: int) -> None:
    """Train the modules themselves on the joined table, with PyTorch's own optimizer. Patients
    that both parties have, in the order and the batches of the run."""
    import torch
    from fleetlearn_protocol.vertical.alignment import hash_rows
    from fleetlearn_protocol.vertical.schedule import rows_of_step
    from torch.nn import functional

    tables = (data.hospital, data.laboratory)
    places = [dict(zip(table.ids.tolist(), range(len(table.ids)), strict=True)) for table in tables]
    common = sorted(set(places[0]) & set(places[1]))
    hashes = hash_rows(common, KEY.encode())
    order = [common[row] for row in np.argsort(hashes)]
    a = torch.from_numpy(data.hospital.x[[places[0][one] for one in order]])
    b = torch.from_numpy(data.laboratory.x[[places[1][one] for one in order]])
    y = torch.from_numpy(data.y[[places[0][one] for one in order]])
    weights = [value for part in parts for value in part.parameters()]
    optimizer = torch.optim.SGD(weights, lr=LR)
    for step in range(steps):
        rows = torch.from_numpy(rows_of_step(step, len(order), BATCH, 0).copy())
        joined = torch.cat([parts.hospital(a[rows]), parts.laboratory(b[rows])], 1)
        optimizer.zero_grad()
        loss = functional.cross_entropy(parts.top(joined), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Processes:
    """The coordinator and the parties, as their operators would start them."""

    def __init__(self, folder: Path, steps: int, labels: str = "hospital") -> None:
        self.folder, self._plan = folder, folder / "coordinator" / "vertical.toml"
        self._run("fleetlearn_coordinator", "vertical", "init", folder / "coordinator",
                  folder / "parts" / "top.bundle", "--labels", labels)  # fmt: skip
        text = self._plan.read_text("utf-8")
        for before, after in {
            "steps = 1000": f"steps = {steps}",
            "checkpoint_every = 100": f"checkpoint_every = {EVERY}",
            "port = 8780": f"port = {free_port()}",
            "lr = 0.1": f"lr = {LR}",
        }.items():
            text = text.replace(before, after)
        self._plan.write_text(text, "utf-8")
        self.port = int(text.split("port = ")[1].split()[0])
        (folder / "rows.key").write_text(KEY, "utf-8")

    def coordinator(self) -> subprocess.Popen[bytes]:
        return self._start("fleetlearn_coordinator", "vertical", "serve", self._plan)

    def party(self, name: str) -> subprocess.Popen[bytes]:
        return self._start(
            "fleetlearn_device",
            "vertical",
            *("--coordinator", f"ws://127.0.0.1:{self.port}"),
            *("--bundle", self.folder / "parts" / f"{name}.bundle"),
            *("--data", self.folder / f"{name}.npz"),
            *("--rows-key", self.folder / "rows.key"),
            *("--state", self.folder / name),
            *("--token-file", self.folder / "coordinator" / f"{name}.token"),
        )

    def status(self) -> dict[str, Any]:
        """Return what `status --json` says; empty before the first start."""
        found = self._run(
            "fleetlearn_coordinator", "vertical", "status", self._plan, "--json", check=False
        )
        return dict(json.loads(found)) if found else {}

    def step(self) -> int:
        """Return how many steps are done, from the file that `status` shows: the command would take
        longer than many steps."""
        file = self._plan.with_name("data") / "status.json"
        return int(json.loads(file.read_bytes())["step"]) if file.exists() else 0

    def exported(self) -> dict[str, Path]:
        """Write the trained parts as ONNX models, and all of them as one. Returns their files."""
        files = {name: self.folder / f"{name}.onnx" for name in ("hospital", "laboratory", "top")}
        self._run("fleetlearn_coordinator", "vertical", "export", self._plan, "--output",
                  files["top"])  # fmt: skip
        for name in ("hospital", "laboratory"):
            self._run(
                *("fleetlearn_device", "export-bottom", "--state", self.folder / name),
                *("--bundle", self.folder / "parts" / f"{name}.bundle", "--output", files[name]),
            )
        files["model"] = self.folder / "model.onnx"
        self._run("fleetlearn_coordinator", "vertical", "export", self._plan, "--output",
                  files["model"], "--bottom", files["laboratory"], "--bottom",
                  files["hospital"])  # fmt: skip
        return files

    def _start(self, module: str, *arguments: object) -> subprocess.Popen[bytes]:
        with (self.folder / "processes.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)], stdout=log, stderr=log
            )

    def _run(self, module: str, *arguments: object, check: bool = True) -> bytes:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        found = subprocess.run(command, check=check, capture_output=True)
        return found.stdout


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def outputs_of(file: Path, **arrays: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what stock ONNX Runtime computes from a file."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before its import: no telemetry
    import onnxruntime

    outputs: NDArray[np.float32] = onnxruntime.InferenceSession(file).run(None, arrays)[0]
    return outputs


def predicted(files: dict[str, Path], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the outputs of the three ONNX models together: each party computes its activations,
    and whoever has the top the rest."""
    activations = {
        f"activations_{name}": outputs_of(files[name], x=columns)
        for name, columns in (("hospital", x[:, :15]), ("laboratory", x[:, 15:]))
    }
    return outputs_of(files["top"], **activations)


def predicted_by_one_file(file: Path, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the outputs of the file that has all parts: each party's columns are an input of
    their own."""
    return outputs_of(file, **{"hospital.x": x[:, :15], "laboratory.x": x[:, 15:]})


def run(
    folder: Path, steps: int = STEPS, victims: tuple[str, ...] = ("laboratory",)
) -> dict[str, float]:
    """Train with three processes, kill some of them on the way, and compare with one place. Returns
    what was found; the trained parts are NAME.onnx in ``folder``. Raises RuntimeError if a process
    fails."""
    import torch

    folder.mkdir(exist_ok=True)
    data = patients()
    export(folder / "parts", model(), data)
    np.savez(folder / "hospital.npz", id=data.hospital.ids, x=data.hospital.x, y=data.y)
    np.savez(folder / "laboratory.npz", id=data.laboratory.ids, x=data.laboratory.x)
    processes = Processes(folder, steps)
    start: dict[str, Callable[[], subprocess.Popen[bytes]]] = {
        "coordinator": processes.coordinator,
        "hospital": lambda: processes.party("hospital"),
        "laboratory": lambda: processes.party("laboratory"),
    }
    running = {name: begin() for name, begin in start.items()}
    killed_at: list[int] = []
    try:
        while any(one.poll() is None for one in running.values()):
            failed = [name for name, one in running.items() if one.poll() not in (None, 0)]
            if failed:
                log = (folder / "processes.log").read_text("utf-8", "replace")
                raise RuntimeError(f"{', '.join(failed)} failed:\n{log[-3000:]}")
            if len(killed_at) < len(victims):
                step, victim = processes.step(), victims[len(killed_at)]
                late = step > steps * (len(killed_at) + 1) // (len(victims) + 1)
                if late and step < steps and running[victim].poll() is None:
                    os.kill(running[victim].pid, signal.SIGKILL)
                    running[victim].wait()
                    running[victim] = start[victim]()
                    killed_at.append(step)
            time.sleep(0.05)
    finally:
        for one in running.values():
            if one.poll() is None:
                one.kill()
            one.wait()
    files = processes.exported()
    found = predicted(files, data.x_test)
    together = predicted_by_one_file(files["model"], data.x_test)
    parts = model()
    trained_in_one_place(parts, data, steps)
    with torch.no_grad():
        x = torch.from_numpy(data.x_test)
        activations = [parts.hospital(x[:, :15]), parts.laboratory(x[:, 15:])]
        expected = parts.top(torch.cat(activations, 1)).numpy()
    return {
        "killed_at": max(killed_at, default=-1),
        "deaths": len(killed_at),
        "difference": float(np.abs(found - expected).max()),
        "one_file": float(np.abs(together - found).max()),
        "accuracy": float((found.argmax(1) == data.y_test).mean()),
        "accuracy_in_one_place": float((expected.argmax(1) == data.y_test).mean()),
    }


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    with TemporaryDirectory(prefix="fleetlearn-vertical-") as folder:
        found = run(Path(folder), steps)
    killed = found["killed_at"]
    print(f"the laboratory was killed (SIGKILL) at step {killed:.0f} of {steps}, and came back")
    print(f"largest difference of an output from training in one place: {found['difference']:.2g}")
    print(f"largest difference of the one ONNX file from its parts: {found['one_file']:g}")
    print(
        f"accuracy on held-out patients: {found['accuracy']:.3f}; "
        f"in one place: {found['accuracy_in_one_place']:.3f}"
    )


if __name__ == "__main__":
    main()
