"""The subjects of a run's bus on NATS, and the words with which a bus begins.

===================================== =========== ===========================================
subject                               publisher   what
===================================== =========== ===========================================
PREFIX.RUN.engine                     the engine  ``EngineThere``, for all gateways
PREFIX.RUN.hello.GATEWAY              a gateway   ``BusWanted``
PREFIX.RUN.welcome.GATEWAY            the engine  ``BusOffered``, the answer
PREFIX.RUN.up.GATEWAY.ENGINE.BUS      a gateway   the frames of a bus
PREFIX.RUN.down.GATEWAY.ENGINE.BUS    the engine  the frames of a bus
===================================== =========== ===========================================

ENGINE is a random name of an engine process: another one hears nothing of its buses.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class EngineThere(msgspec.Struct, frozen=True, array_like=True):
    """An engine process has the run."""

    epoch: int
    """Above that of all engine processes that had the run before."""


class BusWanted(msgspec.Struct, frozen=True, array_like=True):
    """A gateway wants a bus."""

    bus: str
    """Its random name for the bus."""
    process: str = ""
    """A random name of its process. Empty: of an earlier release."""


class BusOffered(msgspec.Struct, frozen=True, array_like=True):
    """An engine process answers a gateway that wants a bus, which is there from the first frame
    on."""

    bus: str
    """As in ``BusWanted``."""
    engine: str
    """The engine process's name."""
    epoch: int
    """As in ``EngineThere``."""
    number: int
    """The gateway's number, from now on."""


class Subjects(NamedTuple):
    """The subjects of one run."""

    base: str

    @property
    def engine(self) -> str:
        return f"{self.base}.engine"

    def hello(self, gateway: str) -> str:
        return f"{self.base}.hello.{gateway}"

    def welcome(self, gateway: str) -> str:
        return f"{self.base}.welcome.{gateway}"

    def up(self, gateway: str, engine: str, bus: str) -> str:
        return f"{self.base}.up.{gateway}.{engine}.{bus}"

    def down(self, gateway: str, engine: str, bus: str) -> str:
        return f"{self.base}.down.{gateway}.{engine}.{bus}"


def subjects_of(prefix: str, run: str) -> Subjects:
    """Return the subjects of a run, by the name of its plan."""
    return Subjects(f"{prefix}.{token_of(run)}")


def token_of(name: str) -> str:
    """Return a name as a part of a subject, in which a dot would be two parts."""
    return name.replace(".", "~")
