"""Five devices train one model of digits without a coordinator, and one of them is killed.

    python -m examples.peers [--peers 5] [--steps 25] [--topology ring] [--mode steps] [FOLDER]

Each device is a process, with its share of the scans (few digits on each), its own key,
and an address book that all have alike; they talk over TLS on this machine. In the middle one is
killed (SIGKILL) and started again. At the end each device's model is measured on scans that no
device has. FOLDER keeps everything; without it a temporary folder is used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol import open_bundle

from examples import digits
from examples.demo.processes import Child, DemoError, end_all

DEVICE = (sys.executable, "-m", "fleetlearn_device")
PATIENCE = 300.0
"""Seconds until the example gives up."""
SETTINGS = """mode = "{mode}"
deadline = 20
topology = {{ kind = "{topology}" }}
training = {{ epochs = 2, batch_size = 20, seed = 1, hyper = {{ lr = 0.1 }} }}

"""


class Outcome(NamedTuple):
    """What the models are worth in the end."""

    accuracies: list[float]
    """Of each device's model, on scans that no device has."""
    distance: float
    """The largest distance of a device's model from their mean, divided by the mean's norm."""


class PeersOnThisMachine:
    """Devices in a folder: bundle, shares of the data, state directories, address book."""

    def __init__(
        self, folder: Path, peers: int, steps: int, topology: str, mode: str, bundle: Path
    ) -> None:
        self.folder, self.steps, self.bundle = folder, steps, bundle
        self.names = [f"roof-{number}" for number in range(1, peers + 1)]
        self.book = folder / "peers.toml"
        scans = digits.data()
        shards = digits.dirichlet_shards(scans.y_train, peers, alpha=0.5, seed=3)
        cards = []
        for name, port, rows in zip(self.names, _free_ports(peers), shards, strict=True):
            np.savez(folder / f"{name}.npz", x=scans.x_train[rows], y=scans.y_train[rows])
            command = [*DEVICE, "peer-card", "--state", self.state(name), "--name", name]
            command += ["--address", f"127.0.0.1:{port}"]
            cards.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        settings = SETTINGS.format(mode=mode, topology=topology)
        self.book.write_text(settings + "\n".join(cards))
        self.children = {name: self._child(name) for name in self.names}

    def state(self, name: str) -> str:
        return str(self.folder / name)

    def _child(self, name: str) -> Child:
        files = ["--book", self.book, "--bundle", self.bundle]
        own = ["--data", self.folder / f"{name}.npz", "--state", self.state(name)]
        command = [*DEVICE, "peer", *files, *own, "--steps", self.steps]
        return Child(name, command, self.folder / f"{name}.log")

    def step_of(self, name: str) -> int:
        """Return the newest step of a device, as its disk says."""
        from fleetlearn_device.peers.peer_store import read_record

        stored = read_record(Path(self.state(name)) / "peer")
        return 0 if stored is None else stored.record.step

    def wait_for(self, name: str, step: int) -> None:
        """Return when a device is at a step. Raises DemoError."""
        end = time.monotonic() + PATIENCE
        while self.step_of(name) < step and self.children[name].running:
            if time.monotonic() > end:
                raise DemoError(self.children[name].last_words())
            time.sleep(0.05)

    def wait_for_all(self) -> None:
        """Return when all devices have done their steps. Raises DemoError."""
        end = time.monotonic() + PATIENCE
        for child in self.children.values():
            while child.running and time.monotonic() < end:
                time.sleep(0.05)
            if child.status != 0:
                raise DemoError(child.last_words())

    def outcome(self) -> Outcome:
        """Return what the devices' models are worth."""
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before its import: no telemetry
        import onnxruntime
        from fleetlearn_device.peers.peer_store import PeerStore

        scans, bundle = digits.data(), open_bundle(self.bundle)
        accuracies, models = [], []
        for name in self.names:
            folder = Path(self.state(name))
            session = onnxruntime.InferenceSession(folder / "model.onnx")
            (scores,) = session.run(None, {session.get_inputs()[0].name: scans.x_test})
            accuracies.append(float((scores.argmax(1) == scans.y_test).mean()))
            models.append(PeerStore(folder, bundle.sha256, bundle.manifest.size, 0).own()[0])
        mean = np.mean(models, axis=0)
        distances = [float(np.linalg.norm(model - mean)) for model in models]
        return Outcome(accuracies, max(distances) / float(np.linalg.norm(mean)))


def _free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def export(bundle: Path) -> None:
    """Write the digits' bundle, unless it is there."""
    if not bundle.exists():
        from fleetlearn_export import export_bundle

        export_bundle(path=bundle, **digits.export())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="default: a temporary one")
    parser.add_argument("--peers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--topology", default="ring")
    parser.add_argument("--mode", choices=["steps", "gossip"], default="steps")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        given = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
        print("exporting the model ...", flush=True)
        export(folder / "digits.bundle")
        how = options.topology, options.mode, folder / "digits.bundle"
        fleet = PeersOnThisMachine(folder, options.peers, options.steps, *how)
        children = [*fleet.children.values()]
        stack.callback(end_all, children)
        for child in children:
            child.start()
        print(f"{options.peers} devices train, each with its own scans ...", flush=True)
        victim = random.choice(fleet.names)
        fleet.wait_for(victim, options.steps // 2)
        fleet.children[victim].kill()
        print(f"{victim} was killed at step {fleet.step_of(victim)}, and is started again")
        fleet.children[victim].start()
        fleet.wait_for_all()
        outcome = fleet.outcome()
        for name, accuracy in zip(fleet.names, outcome.accuracies, strict=True):
            print(f"{name}: {accuracy:.1%} of 359 scans that no device has")
        print(f"no model is further than {outcome.distance:.2%} from their mean")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
