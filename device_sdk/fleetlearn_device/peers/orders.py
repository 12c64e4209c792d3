"""The commands that a peer's state machine gives to its owner, who carries them out in order.

*Own* is the peer's model as it was last committed. The *difference* of an exchange with a neighbour
is weight * (its model - own), both as they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetlearn_protocol.peer_messages import FromPeer

from fleetlearn_device.peers.record import PeerRecord

Differences = tuple[tuple[str, int], ...]
"""(neighbour, number of the exchange) of each."""


@dataclass(frozen=True, slots=True)
class TrainPeer:
    """Train from own + these differences; answer with ``trained``."""

    differences: Differences
    number: int
    """How often the peer trained before: decides the order of the examples."""
    take: str | None = None
    """Begin from this neighbour's newest model that has arrived, in place of own and of the
    differences, which are dropped."""


@dataclass(frozen=True, slots=True)
class CommitModel:
    """Make the record and a new own durable, both or neither.

    Own becomes the trained model (``trained``), or stays; then these differences are added.
    """

    record: PeerRecord
    trained: bool
    differences: Differences


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Make the record durable."""

    record: PeerRecord


@dataclass(frozen=True, slots=True)
class OfferModel:
    """Send own to the neighbour for exchange ``number``. Keep it as it was sent until the next
    offer on this edge, whatever becomes of own."""

    neighbour: str
    number: int


@dataclass(frozen=True, slots=True)
class StoreDifference:
    """Make the difference of an exchange durable: ``weight`` * (the model that arrived for
    ``number`` - own as it was offered). The neighbour's model is not needed after that."""

    neighbour: str
    number: int
    weight: float


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send the message, if there is a connection."""

    neighbour: str
    message: FromPeer


@dataclass(frozen=True, slots=True)
class WriteResult:
    """All steps are done, and own is the result: write it for its owner."""


@dataclass(frozen=True, slots=True)
class PeerNote:
    """A line for the log."""

    text: str
    warning: bool = False


Order = (
    TrainPeer
    | CommitModel
    | SaveRecord
    | OfferModel
    | StoreDifference
    | SendToPeer
    | WriteResult
    | PeerNote
)
Orders = list[Order]
