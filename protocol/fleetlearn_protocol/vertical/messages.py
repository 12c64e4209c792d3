"""What the parties of a vertical run, or the devices of a split run, and its coordinator say to
each other. A party is a device of either: the messages that both kinds of run have say party.

The frames are those of a device and a coordinator: JSON objects with a ``type`` in text frames,
chunks in binary frames. PROTOCOL.md, "Split models between machines", is the specification.
"""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.messages import (
    Checksum,
    Digest,
    Identifier,
    Name,
    Number,
    Numbers,
    Text,
    decode_tagged,
    encode_checked,
)
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.alignment import HASH_BYTES, MOST_ROWS
from fleetlearn_protocol.vertical.arrays import ArrayPart

VERTICAL_VERSION = 1
"""The version of this conversation."""
VERTICAL_PROTOCOL = "fleetlearn.vertical.v1"
"""The WebSocket subprotocol that both sides name in the handshake."""
MOST_CONTENT = MOST_ROWS * HASH_BYTES
"""Most bytes that follow a message."""
MOST_LOSS = 1e30
"""Largest loss that a message can say. That of a step which diverged is larger, or no number."""

MOST_STEPS = 2**31
"""Most steps of a party or a device in a run."""

Step = Annotated[int, Meta(ge=0, le=MOST_STEPS)]
Attempt = Annotated[int, Meta(ge=1, le=2**31)]
Rows = Annotated[int, Meta(ge=0, le=MOST_ROWS)]
Size = Annotated[int, Meta(ge=0, le=MOST_CONTENT)]


class PartyJoin(msgspec.Struct, frozen=True, tag="join"):
    """The first message of a party."""

    version: Annotated[int, Meta(ge=1, le=10**6)]
    """The version of this conversation."""
    party: Name
    """The party's name in the run."""
    bundle: Digest
    """SHA-256 of its bottom's manifest."""


class PartyState(msgspec.Struct, frozen=True, tag="state"):
    """What a party has of the run whose terms it was told."""

    rows: Annotated[int, Meta(ge=1, le=MOST_ROWS)]
    """Rows of its data."""
    alignment: Digest | None
    """The common rows that it knows for these rows: SHA-256 of their hashes. None: it knows none
    yet, or its rows have changed."""
    checkpoints: Annotated[tuple[Step, ...], Meta(max_length=8)]
    """After how many steps it has kept its bottom. 0 is always there: the initial one. A device of
    a split run keeps none."""


class PartyRows(msgspec.Struct, frozen=True, tag="rows"):
    """The hashes of the party's rows follow, in rising order, 32 bytes each."""

    size: Size
    """Bytes that follow."""
    crc32: Checksum
    """Of these bytes."""


class PartyActivations(msgspec.Struct, frozen=True, tag="activations"):
    """What a party's bottom made of a step's rows follows."""

    attempt: Attempt
    """The attempt that is on."""
    step: Step
    """The step, from 0 on."""
    rows: Digest | None
    """SHA-256 of the hashes of the step's rows, in their order in the batch: it is the same for all
    parties, or they do not mean the same rows. None in a split run, where each device has rows of
    its own."""
    arrays: Annotated[tuple[ArrayPart, ...], Meta(min_length=1, max_length=64)]
    """The activations; then the targets, from the party that has them."""


class PartyDone(msgspec.Struct, frozen=True, tag="done"):
    """The party has done the last step, and has kept its bottom."""

    attempt: Attempt
    """The attempt that is on."""


class SplitBottom(msgspec.Struct, frozen=True, tag="bottom"):
    """A device of a split run has done the steps that it was told to do. Its bottom follows, as
    little-endian float32: the parameters, then the optimizer's state where the terms say so."""

    attempt: Attempt
    """The attempt that is on."""
    size: Size
    """Bytes that follow."""
    crc32: Checksum
    """Of these bytes."""


class PartyStops(msgspec.Struct, frozen=True, tag="stops"):
    """The party cannot go on, and ends."""

    text: Text
    """For people."""


class VerticalTerms(msgspec.Struct, frozen=True, tag="terms"):
    """What the run is. Answers `join`, and is said again when a run that was interrupted goes on:
    the party forgets the step that it is in, and answers `state`."""

    run: Identifier
    """The run's name; a party's checkpoints are of one run."""
    part: Annotated[int, Meta(ge=1, le=64)]
    """The party's place among the parties, from 1 on: its bottom draws from seeds of that part."""
    targets: Annotated[tuple[Input, ...], Meta(max_length=64)]
    """Arrays that the party is to send with its activations: the labels."""
    seed: Annotated[int, Meta(ge=0, le=2**53 - 1)]
    """What the order of the rows and the parts' random numbers come from."""
    batch_size: Annotated[int, Meta(ge=1, le=2**20)]
    """Rows of a step."""
    steps: Annotated[int, Meta(ge=1, le=2**31)]
    """How many steps the run has."""
    checkpoint_every: Annotated[int, Meta(ge=1, le=2**31)]
    """Steps from one checkpoint of all sides to the next; there is one after the last step too."""
    hyper: Numbers
    """Of the step."""
    encoding: Identifier
    """Of activations and gradients."""


class RowsWanted(msgspec.Struct, frozen=True, tag="rows-wanted"):
    """The party is to send the hashes of its rows."""


class CommonRows(msgspec.Struct, frozen=True, tag="common-rows"):
    """Which of the party's rows are common to all parties follows: a bit for each of its hashes,
    in their order. The party checks that the common hashes have this digest, and answers
    `state`."""

    rows: Annotated[int, Meta(ge=1, le=MOST_ROWS)]
    """How many are common."""
    digest: Digest
    """SHA-256 of the common hashes in rising order."""
    size: Size
    """Bytes that follow."""
    crc32: Checksum
    """Of these bytes."""


class VerticalBegin(msgspec.Struct, frozen=True, tag="begin"):
    """Everybody goes on from the checkpoint after this many steps."""

    attempt: Attempt
    """Another one each time. What is said of an earlier attempt does not count."""
    step: Step
    """Steps that are done; the next one is the step of this number."""


class PartyGradients(msgspec.Struct, frozen=True, tag="gradients"):
    """The gradient for the activations of this step follows: of each row's own loss. The
    coordinator's own checkpoint, where one is due after the step, is durable."""

    attempt: Attempt
    """The attempt that is on."""
    step: Step
    """The step, from 0 on."""
    arrays: Annotated[tuple[ArrayPart, ...], Meta(min_length=1, max_length=1)]
    """The gradient alone."""
    loss: Number
    """The batch's mean loss before the step."""


class SplitTerms(msgspec.Struct, frozen=True, tag="split-terms"):
    """What a split run is: devices with rows of their own train one bottom, in rounds. Answers
    `join`; the device answers `state`."""

    run: Identifier
    """The run's name."""
    part: Annotated[int, Meta(ge=1, le=64)]
    """The device's place among the devices, from 1 on."""
    targets: Annotated[tuple[Input, ...], Meta(min_length=1, max_length=64)]
    """Arrays that the device is to send with its activations: the labels."""
    seed: Annotated[int, Meta(ge=0, le=2**53 - 1)]
    """The device's own: what the order of its rows and its bottom's random numbers come from."""
    batch_size: Annotated[int, Meta(ge=1, le=2**20)]
    """Rows of a step."""
    hyper: Numbers
    """Of the step."""
    encoding: Identifier
    """Of activations and gradients. Bottoms travel as float32."""
    carries_state: bool
    """Whether the optimizer's state goes with the bottom, from one device to the next. Otherwise
    each round begins with the initial state."""


class SplitBegin(msgspec.Struct, frozen=True, tag="round"):
    """The device is to train the bottom that follows, in the form of `bottom`, and send it back."""

    attempt: Attempt
    """Another one each time. What is said of an earlier attempt does not count."""
    round: Step
    """Rounds, or turns, that are done."""
    step: Step
    """The device's first step: the one that takes the rows of this number."""
    steps: Annotated[int, Meta(ge=1, le=2**31)]
    """How many steps to do."""
    size: Size
    """Bytes that follow."""
    crc32: Checksum
    """Of these bytes."""


class VerticalPause(msgspec.Struct, frozen=True, tag="pause"):
    """There is nothing to do: a party is gone, or it is another device's turn. What was begun and
    not ended is given up; what is kept stays."""

    text: Text
    """What is waited for, for people."""


class VerticalFinished(msgspec.Struct, frozen=True, tag="finished"):
    """The training is over. The party ends."""


class VerticalRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """The party cannot take part; the coordinator closes the connection. The party ends, since
    nothing changes by itself."""

    text: Text
    """Why, for people."""


FromParty = (
    PartyJoin | PartyState | PartyRows | PartyActivations | PartyDone | SplitBottom | PartyStops
)
"""Every message of a party."""
ToParty = (
    VerticalTerms
    | RowsWanted
    | CommonRows
    | VerticalBegin
    | PartyGradients
    | SplitTerms
    | SplitBegin
    | VerticalPause
    | VerticalFinished
    | VerticalRefusal
)
"""Every message to a party."""

_from_party: msgspec.json.Decoder[FromParty] = msgspec.json.Decoder(FromParty)
_to_party: msgspec.json.Decoder[ToParty] = msgspec.json.Decoder(ToParty)
_party_tags = frozenset(kind.__struct_config__.tag for kind in get_args(FromParty))
_coordinator_tags = frozenset(kind.__struct_config__.tag for kind in get_args(ToParty))


def encode_from_party(message: FromParty) -> str:
    """Return a party's message as the text of one frame. Raises ProtocolError (bad-message) where
    the coordinator would refuse it."""
    return encode_checked(message, decode_from_party)


def encode_to_party(message: ToParty) -> str:
    """Return a message to a party as the text of one frame. Raises ProtocolError (bad-message)
    where the party would refuse it."""
    return encode_checked(message, decode_to_party)


def decode_from_party(text: str | bytes) -> FromParty:
    """Read what a party sent. Raises ProtocolError (too-large, unknown-type, bad-message)."""
    return decode_tagged(text, _from_party, _party_tags)


def decode_to_party(text: str | bytes) -> ToParty:
    """Read what a coordinator sent. Raises ProtocolError (too-large, unknown-type, bad-message)."""
    return decode_tagged(text, _to_party, _coordinator_tags)


def announced_bytes(message: FromParty | ToParty) -> int:
    """Return how many bytes follow the message, as chunks."""
    if isinstance(message, PartyRows | CommonRows | SplitBottom | SplitBegin):
        return message.size
    if isinstance(message, PartyActivations | PartyGradients):
        return sum(part.size for part in message.arrays)
    return 0


class ContentReader:
    """Collects the bytes that follow a message."""

    def __init__(self, message: FromParty | ToParty, most: int) -> None:
        """``most``: bytes that may follow. Raises ProtocolError (too-large)."""
        self.message = message
        self._size = announced_bytes(message)
        if self._size > most:
            raise ProtocolError(
                Code.TOO_LARGE, f"{self._size} bytes were announced; at most {most} are expected"
            )
        self._content = bytearray()

    @property
    def is_complete(self) -> bool:
        return len(self._content) == self._size

    def add(self, frame: bytes) -> None:
        """Take one chunk. Raises ProtocolError: no chunk, another place, more than was
        announced."""
        chunk = unpack_chunk(frame)
        if chunk.offset != len(self._content) or chunk.transfer:
            raise ProtocolError(
                Code.WRONG_OFFSET,
                f"a chunk of transfer {chunk.transfer} at {chunk.offset}; expected transfer 0 at "
                f"{len(self._content)}",
            )
        if len(self._content) + len(chunk.payload) > self._size:
            raise ProtocolError(
                Code.WRONG_LENGTH, f"more than the {self._size} announced bytes were sent"
            )
        self._content += chunk.payload

    def content(self) -> bytes:
        """Return the bytes. Raises ProtocolError (wrong-hash) where they are not those of the
        message's checksum; arrays have theirs."""
        content = bytes(self._content)
        crc32 = getattr(self.message, "crc32", None)
        if crc32 is not None and checksum(content) != crc32:
            raise ProtocolError(
                Code.WRONG_HASH, "the bytes have another CRC-32 than the message says"
            )
        return content
