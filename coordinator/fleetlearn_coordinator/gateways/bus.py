"""What carries batches between a gateway and the engine process. local_bus.py is one: a socket of
this machine."""

from __future__ import annotations

from typing import Protocol


class BusUser(Protocol):
    """Whoever speaks on one end of a bus."""

    def received(self, batch: bytes) -> None:
        """The next batch of the peer arrived, whole and in order."""

    def lost(self, why: str) -> None:
        """Batches of the peer, or for the peer, may be missing from now on: this bus is over.
        Called once, also after ``Bus.close``. ``why`` is for people."""

    def writable(self) -> None:
        """The bus is not ``full`` any more."""


class Bus(Protocol):
    """One end of a connection between a gateway and the engine process. Batches arrive in order,
    each once, or the bus is lost."""

    @property
    def full(self) -> bool:
        """Whether so much waits to be carried that the user should wait for ``writable``, and let
        what is said meanwhile be the next batch."""

    def send(self, batch: bytes) -> None:
        """Carry a batch to the peer. Never blocks. Nothing is carried once the bus is lost."""

    def close(self) -> None:
        """End the bus, once what was sent is carried."""
