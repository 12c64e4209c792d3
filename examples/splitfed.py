"""Devices with different rows train a model that is divided at a layer; one of them is killed.

    python -m examples.splitfed              all at the same time, averaged (SplitFed)
    python -m examples.splitfed --turns      one after the other
    python -m examples.splitfed --write work writes the model's parts and the devices' tables

The table is scikit-learn's digits: 1,797 images of 8 x 8. Three devices have 600, 500 and 337 of
them, unlike in number; each keeps the first layer and its images, a coordinator trains the rest:
four processes. The result is compared with PyTorch in one place. It takes a minute.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from examples.vertical import free_port, outputs_of

if TYPE_CHECKING:
    from torch import nn

DEVICES = ("attic", "barn", "cellar")
ROUNDS, BATCH, LR = 20, 32, 0.1
LAYER = "1"
"""The layer behind which the model is divided."""


class Table(NamedTuple):
    """Images and what they show."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]


def tables() -> tuple[dict[str, Table], Table]:
    """Return each device's table, and one that nobody trains on."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    order = np.random.default_rng(2026).permutation(len(y))
    *own, test = np.split(order, [600, 1100, 1437])
    devices = {name: Table(x[rows], y[rows]) for name, rows in zip(DEVICES, own, strict=True)}
    return devices, Table(x[test], y[test])


def model() -> nn.Module:
    """Return the model before training, the same each time."""
    import torch
    from torch import nn

    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def export(folder: Path, data: Table, optimizer: Literal["sgd", "adam"] = "sgd") -> Path:
    """Write digits.bundle, and the folder digits.split with device.bundle and top.bundle. Returns
    that folder."""
    import torch
    from fleetlearn_export import LocalStep, export_bundle
    from torch.nn import functional

    def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == y).float()

    example = data.x[:8], data.y[:8]
    export_bundle(
        model(),
        functional.cross_entropy,
        example,
        folder / "digits.bundle",
        split=LAYER,
        step=LocalStep(optimizer),
        metrics={"accuracy": accuracy},
    )
    return folder / "digits.split"


def write(folder: Path) -> Path:
    """Write the parts of the model, and each device's table. Returns the folder of the parts."""
    folder.mkdir(exist_ok=True)
    devices, _ = tables()
    for name, data in devices.items():
        np.savez(folder / f"{name}.npz", x=data.x, y=data.y)
    return export(folder, devices["attic"])


def batches(data: Table, place: int, first: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """Yield the mini-batches of a device's steps, as the run's schedule has them."""
    import torch
    from fleetlearn_protocol.vertical.schedule import rows_of_step, seed_of_step

    seed = seed_of_step(0, 0, 128 + place)
    for step in range(first, first + steps):
        rows = rows_of_step(step, len(data.y), BATCH, seed)
        yield torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])


def trained(part: nn.Module, data: Iterator[tuple[Any, Any]], optimizer: Any) -> None:
    """Train a model with PyTorch's own optimizer."""
    from torch.nn import functional

    for x, y in data:
        optimizer.zero_grad()
        functional.cross_entropy(part(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def trained_in_one_place(
    devices: dict[str, Table], rounds: int, round_steps: int | None, *, turns: bool
) -> nn.Module:
    """Train the whole model with PyTorch: on one device's rows after the other, or by Federated
    Averaging (McMahan et al. 2016, arXiv 1602.05629)."""
    import torch

    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=LR)
    for number in range(rounds):
        sums: dict[str, Any] = {}
        total = 0
        for place, data in enumerate(devices.values(), 1):
            steps = round_steps or max(1, len(data.y) // BATCH)
            rows = batches(data, place, number * steps, steps)
            if turns:
                trained(whole, rows, optimizer)
                continue
            own = copy.deepcopy(whole)
            trained(own, rows, torch.optim.SGD(own.parameters(), lr=LR))
            weight = steps * min(BATCH, len(data.y))
            total += weight
            for name, value in own.state_dict().items():
                sums[name] = sums.get(name, 0) + weight * value.double()
        if not turns:
            whole.load_state_dict({name: (value / total).float() for name, value in sums.items()})
    return whole


class Processes:
    """The coordinator and the devices, as their operators would start them."""

    def __init__(self, folder: Path, parts: Path, *, turns: bool, lines: dict[str, str]) -> None:
        """``lines``: of the plan, and what they are replaced by."""
        self.folder, self.parts = folder, parts
        self._plan = folder / "run" / "split.toml"
        flags = ["--turns"] if turns else []
        self._run("fleetlearn_coordinator", "split", "init", folder / "run", parts,
                  "--devices", ",".join(DEVICES), *flags)  # fmt: skip
        text = self._plan.read_text("utf-8")
        port = f"port = {free_port()}"
        for before, after in {"port = 8780": port, **lines}.items():
            assert before in text, before
            text = text.replace(before, after)
        self._plan.write_text(text, "utf-8")
        self.port = int(text.split("\nport = ")[1].split()[0])

    def coordinator(self) -> subprocess.Popen[bytes]:
        return self._start("fleetlearn_coordinator", "split", "serve", self._plan)

    def device(self, name: str) -> subprocess.Popen[bytes]:
        return self._start(
            "fleetlearn_device",
            "split",
            *("--coordinator", f"ws://127.0.0.1:{self.port}"),
            *("--bundle", self.parts / "device.bundle"),
            *("--data", self.folder / f"{name}.npz"),
            *("--name", name),
            *("--token-file", self.folder / "run" / f"{name}.token"),
        )

    def status(self) -> dict[str, Any]:
        """Return what the file that `status` shows says; empty before the first start."""
        file = self._plan.with_name("data") / "status.json"
        return dict(json.loads(file.read_bytes())) if file.exists() else {}

    def exported(self) -> Path:
        """Write the whole model as one ONNX file. Returns it."""
        file = self.folder / "model.onnx"
        self._run("fleetlearn_coordinator", "split", "export", self._plan, "--output", file)
        return file

    def _start(self, module: str, *arguments: object) -> subprocess.Popen[bytes]:
        with (self.folder / "processes.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)], stdout=log, stderr=log
            )

    def _run(self, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True)


def run(
    folder: Path,
    rounds: int = ROUNDS,
    *,
    turns: bool = False,
    round_steps: int | None = None,
    victims: tuple[str, ...] = ("barn",),
    lines: dict[str, str] | None = None,
) -> dict[str, float]:
    """Train with four processes, kill some of them on the way, and compare with one place. Returns
    what was found; the trained model is model.onnx in ``folder``. Raises RuntimeError if a process
    fails."""
    import torch

    devices, test = tables()
    parts = write(folder)
    own_lines = {"rounds = 50": f"rounds = {rounds}", "lr = 0.1": f"lr = {LR}", **(lines or {})}
    if round_steps is not None:
        own_lines["# round_steps = 10"] = f"round_steps = {round_steps}"
    processes = Processes(folder, parts, turns=turns, lines=own_lines)
    start: dict[str, Callable[[], subprocess.Popen[bytes]]] = {
        "coordinator": processes.coordinator,
        **{name: (lambda name=name: processes.device(name)) for name in DEVICES},  # type: ignore[misc]
    }
    running = {name: begin() for name, begin in start.items()}
    deaths = 0
    try:
        while any(one.poll() is None for one in running.values()):
            failed = [name for name, one in running.items() if one.poll() not in (None, 0)]
            if failed:
                log = (folder / "processes.log").read_text("utf-8", "replace")
                raise RuntimeError(f"{', '.join(failed)} failed:\n{log[-3000:]}")
            if deaths < len(victims):
                status, victim = processes.status(), victims[deaths]
                done, whole = status.get("step", 0), status.get("steps", 1)
                late = done > whole * (deaths + 1) // (len(victims) + 1)
                if late and done < whole and running[victim].poll() is None:
                    os.kill(running[victim].pid, signal.SIGKILL)
                    running[victim].wait()
                    running[victim] = start[victim]()
                    deaths += 1
            time.sleep(0.02)
    finally:
        for one in running.values():
            if one.poll() is None:
                one.kill()
            one.wait()
    found = outputs_of(processes.exported(), x=test.x)
    whole_model = trained_in_one_place(devices, rounds, round_steps, turns=turns)
    with torch.no_grad():
        expected = whole_model(torch.from_numpy(test.x)).numpy()
    status = processes.status()
    return {
        "deaths": deaths,
        "difference": float(np.abs(found - expected).max()),
        "accuracy": float((found.argmax(1) == test.y).mean()),
        "accuracy_in_one_place": float((expected.argmax(1) == test.y).mean()),
        "received": status["received"],
        "sent": status["sent"],
    }


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", action="store_true", help="one device after the other")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write the parts and the tables, and end"
    )
    options = parser.parse_args()
    if options.write is not None:
        print(f"wrote {write(options.write)}, and a table for each device")
        return
    with TemporaryDirectory(prefix="fleetlearn-split-") as folder:
        found = run(Path(folder), options.rounds, turns=options.turns)
    print("the barn's device was killed (SIGKILL) on the way, and came back")
    other = "one place, on one device's rows after the other" if options.turns else "FedAvg"
    print(f"largest difference of an output from PyTorch's {other}: {found['difference']:.2g}")
    print(
        f"accuracy on held-out images: {found['accuracy']:.3f}; "
        f"PyTorch's: {found['accuracy_in_one_place']:.3f}"
    )


if __name__ == "__main__":
    main()
