"""The blobs: the bytes that a run must remember. file_blobs.py keeps them in files.

There are three kinds. A *spool file* holds one update, from its first byte until the aggregator's
state has it; it is known by its number. The *aggregator's state* is written in two places in turns,
so that one of them is always whole. A *model* is kept with its server optimizer's state, by its
version. The ledger says which of these bytes count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from fleetlearn_protocol.frames import Buffer

if TYPE_CHECKING:  # who reads a ledger alone need not wait for numpy
    from numpy.typing import NDArray

    from fleetlearn_coordinator.storage.served_objects import ServedObjects

Tensors: TypeAlias = "Mapping[str, NDArray[Any]]"
PARAMETERS = "parameters"
"""The tensor of a model that is its parameter vector; the others are the state beside it."""

PART_BYTES = 2**17
"""Bytes of a spool file that are read at a time, by default: they stay in the processor's cache."""


class StoredBytes(Protocol):
    """Bytes in the store, open to be read for as long as somebody has this object, also after they
    are dropped."""

    size: int
    """How many they are."""

    def read(self, begin: int, size: int) -> bytes:
        """Return ``size`` bytes from ``begin`` on, or fewer where these end before that or were cut
        short. ``begin`` is at most ``self.size``. May be called from any thread, by several at a
        time. Raises OSError."""


class BytesWithin:
    """Stored bytes from one place of others on, such as a member's model within a family's."""

    def __init__(self, content: StoredBytes, begin: int, size: int) -> None:
        """``begin``, ``size``: in bytes, of ``content``."""
        self._content, self._begin, self.size = content, begin, size

    def read(self, begin: int, size: int) -> bytes:
        return self._content.read(self._begin + begin, min(size, self.size - begin))


class StoredModels(Protocol):
    """The models of one run, to be read in any process and any thread.

    A model is here from ``Blobs.save_model`` until ``Blobs.drop_models``, whole, and never changes.
    The newest may be one that does not count yet: the ledger says which versions are committed, and
    with which SHA-256.
    """

    def model_versions(self) -> list[int]:
        """Return the versions of the models that are here, in order."""

    def model_size(self, version: int) -> int | None:
        """Return how many bytes the model takes, with the state beside it. None: it is not here."""

    def load_model(self, version: int, sha256: str) -> dict[str, NDArray[Any]]:
        """Return a model's tensors, PARAMETERS among them. Raises StoreError where it is missing or
        damaged, or its parameter vector has another SHA-256 than this."""

    def open_tensor(self, version: int, name: str = PARAMETERS) -> StoredBytes:
        """Open a tensor of a model, by default the parameter vector, as its little-endian bytes.
        They are not checked. Raises StoreError where the model or the tensor is missing,
        StoreUnavailableError where it cannot be opened."""

    def where_model(self, version: int) -> str:
        """Return where the model is or would be, for messages to people."""


class Blobs(StoredModels, Protocol):
    """The bytes of one run, for the coordinator that holds its lock. No other process writes them.

    One thread calls it, except where a method says otherwise. What was written survives the death
    of the process as soon as the call returns, and what was only partly written never counts: the
    ledger's rows, written afterwards, say what does. With ``durable = "power"``,
    ``settle_spool_files``, ``save_aggregator`` and ``save_model`` make it survive a loss of power
    too.
    """

    is_slow: bool
    """Whether what makes bytes count takes so long that the event loop must not wait for it:
    ``settle_spool_files``, ``save_aggregator``, ``save_model`` and ``drop_models``."""
    served: ServedObjects | None
    """Where what devices may fetch can be published. None: these bytes are in no object store."""

    # Spool files

    def has_room(self) -> bool:
        """Return whether another spool file may be taken. ``take_spool_file`` does not ask."""

    def take_spool_file(self) -> int:
        """Return the number of a free spool file, which may hold old bytes. It is taken until
        ``free_spool_file``, in this process alone: a later one takes those back whose updates count
        (``reserve_spool_file``)."""

    def reserve_spool_file(self, number: int) -> None:
        """Take the spool file of this number, with the bytes that an earlier process wrote. Call it
        for all such files before the first ``take_spool_file``, once for each."""

    def free_spool_file(self, number: int) -> None:
        """The bytes of the spool file are not needed any more, nor its checkpoint. Call once for
        each time that it was taken."""

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        """Write at an offset in bytes. Bytes may be written again, in any order. Raises OSError."""

    def write_checkpoint(self, number: int, content: bytes) -> None:
        """Write beside the spool file, which is taken, what is known of its bytes, in place of what
        was written before: a later process finds one or the other, whole. Where it cannot be
        written, what was there stays."""

    def checkpoints(self) -> dict[int, bytes]:
        """Return the checkpoints that an earlier process left, by the numbers of their spool files.
        After a loss of power they may be damaged, or know of bytes that are lost."""

    def drop_checkpoint(self, number: int) -> None:
        """Remove the checkpoint of the spool file, if there is one. Raises OSError."""

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = PART_BYTES
    ) -> Iterator[memoryview]:
        """Yield ``size`` bytes from ``begin`` on, in parts of ``part_bytes`` that share one buffer;
        the last may be shorter. May be called from any thread. A file that is freed and taken
        meanwhile yields the other upload's bytes. Raises StoreError (fewer bytes than that were
        written), OSError."""

    def settle_spool_files(self, sizes: Mapping[int, int]) -> None:
        """Make the updates in these spool files survive as much as ``durable`` asks for. Call
        before the rows that make them count. May be called from any thread, once at a time.
        ``sizes``: number of a spool file -> bytes of its update. Raises OSError, StoreError."""

    def where_spool_file(self, number: int) -> str:
        """Return where the spool file is, for messages to people."""

    # The aggregator's state

    def has_aggregator(self) -> bool:
        """Return whether there is a place for the aggregator's state. There is none in a new run,
        or where somebody removed a damaged one in order to give up the open round."""

    def open_aggregator(self) -> None:
        """Make the place if it is missing. Call once, before the state is saved."""

    def save_aggregator(self, turn: int, tensors: Tensors) -> int:
        """Write the aggregator's state as the one of this turn, 0 or 1; the other turn's stays as
        it is. Returns the CRC-32 of its bytes. May be called from any thread, once at a time.
        Raises OSError."""

    def load_aggregator(self, turn: int, like: Tensors, crc32: int) -> dict[str, NDArray[Any]]:
        """Return the saved state of this turn: tensors with the names, types and shapes of
        ``like``. Raises StoreError: a short file, or bytes with another CRC-32 than ``crc32``."""

    def where_aggregator(self) -> str:
        """Return what somebody has to remove to give up the open round, for messages to people."""

    # Models

    def save_model(self, version: int, tensors: Tensors) -> None:
        """Write a model: whole when this returns, and not there before. One that is there is
        replaced: an earlier process died before its rows counted. May be called from any thread.
        Raises StoreError (the disk is full), OSError."""

    def drop_models(self, versions: Iterable[int]) -> None:
        """Remove these models, if they are there. May be called from any thread. Raises OSError."""

    def drop_drafts(self) -> None:
        """Remove what an earlier process left of a model that it did not write to its end. Call at
        the start."""

    def close(self) -> None:
        """Free what it holds. Call once; nothing may be asked afterwards."""
