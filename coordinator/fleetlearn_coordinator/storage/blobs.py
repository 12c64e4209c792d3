"""The blobs: the bytes that a run must remember. file_blobs.py keeps them in files.

There are three kinds. A *spool file* holds one update, from its first byte until the aggregator's state has it; it is
known by its number. The *aggregator's state* is written in turns to two files, so that one of them is always whole. A
*model* is kept with its server optimizer's state, by its version. Which of these bytes count is for the ledger to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from fleetlearn_protocol.frames import Buffer
from numpy.typing import NDArray

Tensors: TypeAlias = Mapping[str, NDArray[Any]]
PARAMETERS = "parameters"
"""The tensor of a model that is its parameter vector; the others are the state beside it."""

PART_BYTES = 2**17
"""Bytes of a spool file that are read at a time, by default: they stay in the processor's cache."""


class Blobs(Protocol):
    """The bytes of one run."""

    def has_room(self) -> bool:
        """Return whether another spool file may be taken."""

    def take_spool_file(self) -> int:
        """Return the number of a free spool file, which may hold old bytes."""

    def reserve_spool_file(self, number: int) -> None:
        """Take the spool file of this number, which an earlier process had. Call before ``take_spool_file``."""

    def free_spool_file(self, number: int) -> None:
        """The bytes of the spool file are not needed any more."""

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        """Write at an offset in bytes. Raises OSError."""

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = PART_BYTES
    ) -> Iterator[memoryview]:
        """Yield ``size`` bytes from ``begin`` on, in parts of ``part_bytes`` that share one buffer; the last may be
        shorter. Safe to call from any thread. Raises StoreError (a short file)."""

    def settle_spool_file(self, number: int) -> None:
        """Make what was written survive as much as the plan asks for (``durable``)."""

    def save_aggregator(self, turn: int, tensors: Tensors) -> int:
        """Write the aggregator's state to the file of this turn, 0 or 1. Returns the CRC-32 of its bytes. Safe to call
        from any thread, once at a time."""

    def load_aggregator(self, turn: int, like: Tensors, crc32: int | None) -> dict[str, NDArray[Any]]:
        """Return the saved state: tensors with the names, types and shapes of ``like``. Raises StoreError: a short
        file, or bytes with another CRC-32 than ``crc32`` (None: an earlier version saved the state without a
        checksum)."""

    def save_model(self, version: int, tensors: Tensors) -> None:
        """Write a model's file. Safe to call from any thread. Raises StoreError (the disk is full)."""

    def load_model(self, version: int, sha256: str) -> dict[str, NDArray[Any]]:
        """Return the tensors of a model's file. Raises StoreError (missing, damaged, or with another hash)."""

    def find_tensor(self, version: int, name: str = PARAMETERS) -> tuple[str, int]:
        """Return the path of a model's file, and the byte at which a tensor begins: by default the parameter vector.
        Raises StoreError (missing)."""

    def model_versions(self) -> list[int]:
        """Return the versions of the models that have a file, in order."""

    def drop_models(self, versions: Iterable[int]) -> None:
        """Remove the files of these models, if they are there. Safe to call from any thread."""

    # The paths of these files, for messages to people.

    def where_spool_file(self, number: int) -> str: ...

    def where_aggregator(self) -> str: ...

    def where_model(self, version: int) -> str: ...

    def close(self) -> None: ...
