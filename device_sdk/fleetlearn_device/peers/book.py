"""The address book: a TOML file that all peers have alike. It says who takes part, who is whose
neighbour, and how everybody trains.

::

    run = "summer"                       # this training; the next one has another name
    mode = "steps"                       # or "gossip"
    topology = { kind = "ring" }
    training = { epochs = 1, batch_size = 20, hyper = { lr = 0.1 } }

    [[peer]]                             # as `fleetlearn-device peer-card` prints it
    name = "roof-1"
    address = "192.168.1.11:8766"
    certificate = "MIIBIjCB1aADAg..."
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import msgspec.toml
import numpy as np
from fleetlearn_protocol.encodings import FLOAT32, find_encoding, leaves_residual
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import Identifier, Name, Positive
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.toml_faults import fault_in_words
from fleetlearn_protocol.vector import digest
from msgspec import Meta

from fleetlearn_device.peers.mixing import MixingMatrix
from fleetlearn_device.peers.topologies import Topology

MOST_PEERS = 1000
"""In one address book."""


class BookError(ValueError):
    """An address book that cannot be used. The text names the file, what is wrong and what to
    do."""


class PeerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer in the address book."""

    name: Identifier
    certificate: Annotated[str, Meta(max_length=4096)]
    """Its self-signed certificate, DER in base64."""
    address: Annotated[str, Meta(max_length=300)] | None = None
    """HOST:PORT. None: it is found on the local network (``--discover``)."""

    @property
    def der(self) -> bytes:
        """The certificate's bytes."""
        return base64.b64decode(self.certificate, validate=True)

    @property
    def place(self) -> tuple[str, int] | None:
        """Host and port."""
        return None if self.address is None else split_address(self.address)


class PeerTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a peer trains between two exchanges."""

    epochs: Annotated[int, Meta(ge=1, le=10**6)] = 1
    """Passes over its data."""
    local_steps: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Most steps of the optimizer. 0: as many as the passes have."""
    batch_size: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """0: all examples in one step."""
    seed: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0
    hyper: dict[Name, float] = {}
    """Such as lr. What is not here has the bundle's default."""


class PeerBook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file."""

    peer: tuple[PeerEntry, ...]
    run: Identifier | None = None
    """The training's name: state directories of another training are refused. None: nothing tells
    two trainings apart."""
    mode: Literal["steps", "gossip"] = "steps"
    """``steps``: synchronous; ``gossip``: pairs, and nobody waits."""
    topology: Topology = Topology()
    training: PeerTraining = PeerTraining()
    encoding: str = FLOAT32.name
    """How models travel."""
    deadline: Positive = 60.0
    """Seconds that a peer waits for its neighbours' models in a step."""
    take_after: Annotated[int, Meta(ge=1, le=2**31)] = 10
    """A peer that is more steps than this behind its neighbours goes on with a neighbour's
    model."""

    @property
    def names(self) -> tuple[str, ...]:
        """The peers in the order of the rows of W."""
        return tuple(entry.name for entry in self.peer)

    def entry(self, name: str) -> PeerEntry:
        """Return a peer's entry. Raises KeyError."""
        return self.peer[self.names.index(name)]


def read_book(given: str) -> PeerBook:
    """Read an address book. The file of its matrix is beside it. Raises BookError."""
    try:
        path = in_home(given)
        book = msgspec.toml.decode(path.read_bytes(), type=PeerBook)
    except ImportError:
        raise BookError(
            f"{given}: Python 3.10 needs a package to read TOML: pip install tomli"
        ) from None
    except msgspec.ValidationError as error:
        fault = f"{fault_in_words(error, PeerBook)}. docs/start/peers.md says more"
        raise BookError(f"{given} is no address book: {fault}") from None
    except msgspec.DecodeError as error:
        raise BookError(f"{given} is no address book, and no TOML: {error}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BookError(f"the address book {given} cannot be read: {why}") from None
    try:
        _check(book)
    except (ValueError, FleetError) as error:
        raise BookError(f"{given}: {getattr(error, 'text', error)}") from None
    if book.topology.file is None:
        return book
    file = str(Path(path).absolute().parent / book.topology.file)
    topology = msgspec.structs.replace(book.topology, file=file)
    return msgspec.structs.replace(book, topology=topology)


def _check(book: PeerBook) -> None:
    names = book.names
    if not 2 <= len(names) <= MOST_PEERS:
        raise ValueError(f"it has {len(names)} peers; expected 2 to {MOST_PEERS}, each [[peer]]")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is there twice; each peer has one entry")
    if leaves_residual(find_encoding(book.encoding).name) or "masked" in book.encoding:
        raise ValueError(
            f"encoding = {book.encoding!r} is for updates, and peers send whole models; expected "
            "float32, float16, bfloat16, int8 or int4"
        )
    certificates: dict[bytes, str] = {}
    for entry in book.peer:
        _ = entry.place
        try:
            der = entry.der
        except (binascii.Error, ValueError):
            raise ValueError(
                f"the certificate of {entry.name} is not base64; copy the whole line that "
                "`fleetlearn-device peer-card` prints on that device"
            ) from None
        if der in certificates:
            raise ValueError(f"{certificates[der]} and {entry.name} have one certificate")
        certificates[der] = entry.name


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, or of [IPV6]:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"the address {address!r} was given; expected HOST:PORT")
    return host, int(port)


class PeerGraph:
    """Who is whose neighbour, and what each counts. Raises BookError where the topology is
    impossible with this number of peers."""

    def __init__(self, book: PeerBook) -> None:
        self.names = book.names
        self._weights: dict[tuple[str, int], dict[str, float]] = {}
        try:
            self.matrices = book.topology.matrices(len(book.peer))
        except ValueError as error:
            raise BookError(f"the topology of the address book: {error}") from None

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Return all neighbours of a peer, in the order of the book."""
        row = self.names.index(name)
        found = {other for matrix in self.matrices for other in matrix.row(row)}
        return tuple(self.names[other] for other in sorted(found))

    def weights(self, name: str, step: int) -> dict[str, float]:
        """Return the neighbours of a peer in a step with their weights, which are float32 and the
        same for both sides."""
        turn = (step - 1) % len(self.matrices)
        if (name, turn) not in self._weights:
            row = self.names.index(name)
            self._weights[name, turn] = self._row(self.matrices[turn], row)
        return self._weights[name, turn]

    def _row(self, matrix: MixingMatrix, row: int) -> dict[str, float]:
        pairs = ((other, min(row, other), max(row, other)) for other in matrix.row(row))
        return {
            self.names[other]: float(np.float32(matrix.row(low)[high]))
            for other, low, high in pairs
        }

    def digest(self) -> str:
        """Return the SHA-256 that peers compare: of a text with a line for each name, and for each
        matrix an empty line and a line ``I J WEIGHT`` for each pair I < J, WEIGHT being the
        float32 in C's notation %a as Python's float.hex has it."""
        lines = list(self.names)
        for matrix in self.matrices:
            lines.append("")
            for low in range(len(self.names)):
                for high, weight in matrix.row(low).items():
                    if low < high:
                        lines.append(f"{low} {high} {float(np.float32(weight)).hex()}")
        return digest("\n".join(lines).encode())


def compared_settings(book: PeerBook) -> dict[str, str]:
    """Return what all peers must have alike, by name, as texts."""
    training = book.training
    hyper = {f"hyper.{name}": repr(float(value)) for name, value in training.hyper.items()}
    return {
        **({} if book.run is None else {"run": book.run}),
        "mode": book.mode,
        "encoding": book.encoding,
        "epochs": str(training.epochs),
        "local_steps": str(training.local_steps),
        "batch_size": str(training.batch_size),
        "seed": str(training.seed),
        **dict(sorted(hyper.items())),
    }
