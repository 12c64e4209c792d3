"""Three models of the digits in one run: gateways train a CNN, phones a small network, and every
other device a linear model.

    python -m examples.family [--rounds 20] [--alpha 1.0] [--distil] [--output family-demo]

exports the three bundles, starts a coordinator and six devices with examples/family.toml, kills one
of the devices on the way, and prints what each model makes of the digits that nobody trained on.
With --distil the three models teach each other after each round (docs/algorithms/distillation.md),
by 400 scans without labels that no device has. A small --alpha makes devices' digits differ more.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from examples import digits
from examples.demo.command_line import own_folder
from examples.demo.processes import Child, DemoError, end_all, exit_on_signals, run_command

if TYPE_CHECKING:
    import torch

PLAN = Path(__file__).with_suffix(".toml")
DEVICES = {"gateway": 2, "phone": 2, "sensor": 2}
"""Tag -> how many devices have it. No member of the plan asks for ``sensor``."""
MEMBERS = ("cnn", "mlp", "linear")
PATIENCE = 300.0
"""Seconds that the run may take."""
UNLABELLED = 400
"""Scans that no device has, with --distil."""
DISTIL = """
[distil]
data = "unlabelled.npz"      # without labels
batch_size = 64
lr = 0.003
"""


class Asked(NamedTuple):
    """What the command was asked for."""

    rounds: int
    alpha: float
    distil: bool


def cnn() -> dict[str, Any]:
    """The arguments of ``fleetlearn_export.export_bundle`` for the member ``cnn``."""
    return {**digits.export(), "name": "cnn"}


def mlp() -> dict[str, Any]:
    """The same for the member ``mlp``."""
    from torch import nn

    return _with("mlp", lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))


def linear() -> dict[str, Any]:
    """The same for the member ``linear``."""
    from torch import nn

    return _with("linear", lambda: nn.Sequential(nn.Linear(64, 10)))


def _with(name: str, layers: Any) -> dict[str, Any]:
    """Return the arguments for a model of the scans as rows of 64 pixels."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: torch.nn.Module = nn.Sequential(nn.Flatten(), *layers())
    return {**digits.export(), "model": model, "name": name}


def write_files(folder: Path, port: int, asked: Asked) -> dict[str, Path]:
    """Export the bundles, and write the plan, the service file and the devices' data. Returns name
    of each device -> its data."""
    plan = PLAN.read_text("utf-8").replace("rounds = 20", f"rounds = {asked.rounds}")
    for member in MEMBERS:
        _export(folder, member, folder / f"{member}.bundle")
        if asked.distil:
            _export(folder, member, folder / f"{member}-distil.bundle", "--distillation")
            own = f'bundle = "{member}.bundle"'
            plan = plan.replace(own, f'{own}\ndistil = "{member}-distil.bundle"')
    x, y = digits.data()[:2]
    if asked.distil:
        plan += DISTIL
        np.savez(folder / "unlabelled.npz", x=x[:UNLABELLED])
        x, y = x[UNLABELLED:], y[UNLABELLED:]
    (folder / "family.toml").write_text(plan, "utf-8")
    (folder / "service.toml").write_text(f"port = {port}\n", "utf-8")
    shards = digits.dirichlet_shards(y, sum(DEVICES.values()), asked.alpha, seed=1)
    names = [f"{tag}-{number}" for tag, count in DEVICES.items() for number in range(count)]
    files = {}
    for name, rows in zip(names, shards, strict=True):
        files[name] = folder / f"{name}.npz"
        np.savez(files[name], x=x[rows], y=y[rows])
    return files


def _export(folder: Path, member: str, bundle: Path, *options: str) -> None:
    command = [_program("fleetlearn-export"), f"examples.family:{member}", "--output", bundle]
    run_command(member, [*command, *options], folder / f"export-{member}.log", timeout=170.0)


def _program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def run(folder: Path, asked: Asked) -> dict[str, float]:
    """Run the family to its end. Returns name of each member -> its accuracy on the held-out
    digits."""
    from examples.demo.fleet import free_port

    port = free_port()
    files = write_files(folder, port, asked)
    serve = ["serve", folder / "family.toml", "--service", folder / "service.toml"]
    log = folder / "coordinator.log"
    coordinator = Child("the coordinator", [_program("fleetlearn-coordinator"), *serve], log)
    devices = {name: _device(folder, name, port, data) for name, data in files.items()}
    try:
        for child in (coordinator, *devices.values()):
            child.start()
        _kill_one(devices["phone-1"], coordinator)
        assert coordinator.process is not None
        if coordinator.process.wait(PATIENCE):
            raise DemoError(coordinator.last_words())
    finally:
        end_all([*devices.values(), coordinator])
    return {member: accuracy_of(folder, member) for member in MEMBERS}


def _device(folder: Path, name: str, port: int, data: Path) -> Child:
    command = [_program("fleetlearn-device"), "run", "--coordinator", f"ws://127.0.0.1:{port}"]
    own = ["--data", data, "--state", folder / f"{name}.state", "--name", name]
    tag = name.partition("-")[0]
    words = [*command, *own, "--tag", tag, "--until-finished"]
    return Child(name, words, folder / f"{name}.log")


def _kill_one(device: Child, coordinator: Child) -> None:
    """Kill a device in its first task, and start it again: it goes on with its member."""
    until = time.monotonic() + PATIENCE
    while not any("training" in line for line in device.new_lines()):
        if not (device.running and coordinator.running) or time.monotonic() > until:
            raise DemoError(f"{coordinator.last_words()}\n{device.last_words()}")
        time.sleep(0.02)
    device.kill()
    print(f"{device.name} was killed in its first task, and is started again")
    device.start()


def accuracy_of(folder: Path, member: str) -> float:
    """Export a member's newest model as an ONNX file, and return its accuracy on the held-out
    digits."""
    from examples import predict

    file = folder / f"{member}.onnx"
    command = [_program("fleetlearn-coordinator"), "export-model", folder / "family.toml"]
    options = ["--member", member, "--output", file]
    run_command("export-model", [*command, *options], folder / "export.log", timeout=60.0)
    data = digits.data()
    return float((predict.predict(file, data.x_test) == data.y_test).mean())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.family", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet distribution")
    parser.add_argument("--distil", action="store_true", help="let the models teach each other")
    parser.add_argument("--output", type=Path, default=Path("family-demo"), metavar="DIR")
    options = parser.parse_args()
    if not re.fullmatch("[1-9][0-9]{0,2}", str(options.rounds)):
        parser.error(f"--rounds takes 1 to 999; {options.rounds} was given")
    exit_on_signals()
    folder: Path = options.output.absolute()
    old = [folder / "family.run", *folder.glob("*.state"), *folder.glob("*.bundle")]
    try:
        with own_folder(folder, old):
            for log in folder.glob("*.log"):
                log.unlink()
            found = run(folder, Asked(options.rounds, options.alpha, options.distil))
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1
    for member, accuracy in found.items():
        print(f"{member}: accuracy {accuracy:.3f} on the held-out digits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
