"""peer/status.json: how a peer is, for ``fleetlearn-device status``. It is not synced: nothing but
people reads it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from fleetlearn_device.peers.machine import (
    Catching,
    Collecting,
    Lingering,
    Lonely,
    PeerEnded,
    PeerMachine,
    Stage,
    Working,
)
from fleetlearn_device.peers.peer_store import FOLDER
from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.state_directory import is_running, state_folder
from fleetlearn_device.storage.status import read_status

FILE = "status.json"
DOES: dict[type[Stage], str] = {
    Working: "trains",
    Collecting: "waits for its neighbours' models",
    Lonely: "waits for any neighbour to be there",
    Catching: "waits for a neighbour's model to go on with",
    Lingering: "has done all steps, and waits for neighbours that need its answer",
    PeerEnded: "has done all steps",
}
"""What a peer does in each stage, for people."""


class NeighbourStatus(msgspec.Struct, frozen=True):
    """One neighbour, as the peer sees it."""

    connected: bool
    finished: bool
    last_exchange: int
    """The newest exchange in which the peer got its model. 0: none."""
    refused: str = ""
    """Why the two do not train together. Empty: they do, or nothing is known."""


class PeerStatus(msgspec.Struct, frozen=True):
    """The contents of the file. Times are seconds since 1970."""

    peer: str
    started: float
    running: bool
    """False: the process ended. It may also have been killed."""
    does: str
    step: int
    steps: int
    trainings: int
    examples: int
    loss: float | None
    """Of the last training of this process."""
    neighbours: dict[str, NeighbourStatus]
    written: float

    @property
    def connected(self) -> bool:
        """A neighbour was connected when the file was written."""
        return any(neighbour.connected for neighbour in self.neighbours.values())


class PeerStatusFile:
    """Writes the file whenever it changes."""

    def __init__(self, folder: Path, name: str, machine: PeerMachine, examples: int) -> None:
        self._path, self._name, self._machine = folder / FILE, name, machine
        self._examples, self._started = examples, time.time()
        self._loss: float | None = None
        self.refusals: dict[str, str] = {}
        self._before: PeerStatus | None = None

    def trained(self, loss: float) -> None:
        """A training ended with this loss."""
        self._loss = loss

    def refused(self, neighbour: str, why: str) -> None:
        """A neighbour does not train with this peer."""
        self.refusals[neighbour] = why

    def write(self, *, running: bool = True) -> None:
        """Write the file if something changed. Raises OSError."""
        machine = self._machine
        record, edges = machine.record, machine.exchanges.edges
        for name, edge in edges.items():
            if edge.connected:
                self.refusals.pop(name, None)
        neighbours = {
            name: NeighbourStatus(
                edge.connected, edge.record.finished, edge.record.have, self.refusals.get(name, "")
            )
            for name, edge in edges.items()
        }
        status = PeerStatus(
            peer=self._name,
            started=self._started,
            running=running,
            does=DOES[type(machine.stage)],
            step=record.step,
            steps=machine.rules.steps,
            trainings=record.trainings,
            examples=self._examples,
            loss=self._loss,
            neighbours=neighbours,
            written=0.0,
        )
        if status == self._before:
            return
        self._before = status
        draft = self._path.with_name(f"{FILE}.tmp")
        now = msgspec.structs.replace(status, written=time.time())
        draft.write_bytes(checked_json(now))
        draft.replace(self._path)


def read_peer_status(folder: Path) -> PeerStatus | None:
    """Return the status in a folder peer/; None where there is none, or it is damaged."""
    try:
        return read_checked_json((folder / FILE).read_bytes(), PeerStatus)
    except (OSError, msgspec.DecodeError):
        return None


def peer_in(given: str) -> PeerStatus | None:
    """Return how the device of a state directory is as a peer. None: it is none, or served a
    coordinator since. Raises StateError, OSError."""
    folder = state_folder(given)
    status, other = read_peer_status(folder / FOLDER), read_status(folder)
    if status is None or (other is not None and other.written > status.written):
        return None
    return msgspec.structs.replace(status, running=is_running(folder))


def peer_lines(status: PeerStatus) -> list[tuple[str, str]]:
    """Return (what it is about, text) of each line for people."""
    does = status.does if status.running else "is not running"
    progress = f"step {status.step} of {status.steps}, {status.trainings} trainings"
    loss = "" if status.loss is None else f", loss {status.loss:.4g}"
    lines = [("peer", f"{status.peer} {does}"), ("progress", f"{progress}{loss}")]
    for name, neighbour in status.neighbours.items():
        here = "connected" if neighbour.connected and status.running else "not connected"
        if neighbour.finished:
            here = "has done all steps"
        if neighbour.refused:
            here = neighbour.refused
        last = f"; last model: {neighbour.last_exchange}" if neighbour.last_exchange else ""
        lines.append(("with", f"{name}: {here}{last}"))
    return lines
