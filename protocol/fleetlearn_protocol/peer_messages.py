"""What peers say to each other: devices that train with their neighbours, without a coordinator.

The frames are those of a device and a coordinator: JSON objects with a ``type`` in text frames,
chunks in binary frames. PROTOCOL.md, "Peers", is the specification.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from fleetlearn_protocol.messages import (
    Checksum,
    Digest,
    Identifier,
    Label,
    RoundNumber,
    Text,
    Transfer,
    VectorSize,
    decode_tagged,
    encode_checked,
)

PEER_PROTOCOL_VERSION = 1
"""The version of the conversation between peers."""
PEER_PROTOCOL_NAME = "fleetlearn.peers.v1"
"""The WebSocket subprotocol that both sides name in the handshake."""
MAX_SETTINGS = 32
"""Most settings that peers compare by name."""


class PeerHello(msgspec.Struct, frozen=True, tag="peer-hello"):
    """The first message of each side. Both sides send it without waiting for the other's."""

    version: Annotated[int, Meta(ge=1, le=10**6)]
    """The version of this conversation."""
    peer: Identifier
    """The sender's name in the address book."""
    bundle: Digest
    """SHA-256 of the bundle's manifest."""
    topology: Digest
    """SHA-256 of the peers' names and of all weights between them."""
    settings: Annotated[dict[Identifier, Label], Meta(max_length=MAX_SETTINGS)]
    """What all peers must have alike, by name, each value as a text."""
    step: RoundNumber
    """The sender's newest step: 0 before its first."""
    have: RoundNumber
    """The newest exchange on this edge for which the sender voted that it has the receiver's
    model. 0: none."""
    voted: RoundNumber
    """The newest exchange on this edge for which the sender voted at all."""
    finished: bool = False
    """The sender has done all of its steps."""


class PeerModel(msgspec.Struct, frozen=True, tag="peer-model"):
    """The sender's model for an exchange follows, as chunks with this transfer number."""

    number: Annotated[int, Meta(ge=1, le=2**31)]
    """The exchange. In synchronous training: the sender's step."""
    transfer: Transfer
    """Another one for each model on a connection."""
    encoding: Identifier
    """As the settings say."""
    size: VectorSize
    """Bytes of all chunks together."""
    crc32: Checksum
    """Of the same bytes."""


class PeerVote(msgspec.Struct, frozen=True, tag="peer-vote"):
    """Whether the sender takes part in an exchange. A vote is durable before it is sent, and never
    changes. The exchange counts if both sides voted that they have the other's model."""

    number: Annotated[int, Meta(ge=1, le=2**31)]
    """The exchange."""
    have: bool
    """True: the sender has the receiver's model, durably. False: this exchange does not count."""
    text: Text = ""
    """Why not, for people."""


class PeerFinished(msgspec.Struct, frozen=True, tag="peer-finished"):
    """The sender has done all of its steps, and begins no exchange any more."""


class PeerRefusal(msgspec.Struct, frozen=True, tag="peer-refusal"):
    """The sender takes no part in training with the receiver, and closes the connection."""

    reason: Literal["version", "bundle", "topology", "settings", "name", "protocol"]
    """What differs; ``protocol``: what the receiver sent breaks the protocol."""
    text: Text
    """For people."""


FromPeer = PeerHello | PeerModel | PeerVote | PeerFinished | PeerRefusal
"""Every message of a peer."""

_decoder: msgspec.json.Decoder[FromPeer] = msgspec.json.Decoder(FromPeer)
_tags = frozenset(kind.__struct_config__.tag for kind in get_args(FromPeer))


def encode_for_peer(message: FromPeer) -> str:
    """Return the message as the text of one frame. Raises ProtocolError (bad-message) where the
    other side would refuse it."""
    return encode_checked(message, decode_from_peer)


def decode_from_peer(text: str | bytes) -> FromPeer:
    """Read what a peer sent. Raises ProtocolError (too-large, unknown-type, bad-message)."""
    return decode_tagged(text, _decoder, _tags)
