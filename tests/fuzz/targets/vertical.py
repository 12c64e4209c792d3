"""What a party and a coordinator of a vertical or a split run read of each other, of checkpoints,
and of the parts of a model."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.vertical.alignment import check_sorted, read_hashes
from fleetlearn_protocol.vertical.arrays import decode_arrays, read_bottom
from fleetlearn_protocol.vertical.joined_model import PartModel, joined_model, origin_of
from fleetlearn_protocol.vertical.kept_part import key_of, read_part
from fleetlearn_protocol.vertical.messages import (
    ContentReader,
    PartyActivations,
    PartyRows,
    SplitBottom,
    decode_from_party,
    decode_to_party,
    encode_from_party,
    encode_to_party,
)

ROWS = 4
EXPECTED = [Input("activations_bank", "float32", (4,)), Input("y", "int64", ())]
MOST = 2**12


def vertical(data: bytes) -> None:
    """A connection: its frames with their length (two bytes, little-endian, the upper bit set for
    a binary one) before each. And the same bytes as a checkpoint."""
    key = key_of(data)
    assert key is None or read_part(data, key) is not None
    with suppress(ValueError):
        origin_of(data)
    with suppress(ValueError):
        joined_model([PartModel("bank", data)], {"bank": "activations_bank"}, data)
    reader: ContentReader | None = None
    place = 0
    while place + 2 <= len(data):
        length = int.from_bytes(data[place : place + 2], "little")
        frame = data[place + 2 : place + 2 + length % 2**15]
        place += 2 + length % 2**15
        with suppress(ProtocolError):
            if length < 2**15:
                reader = _read(frame)
            elif reader is not None:
                reader.add(frame)
            if reader is not None and reader.is_complete:
                _take(reader)
                reader = None


def _read(frame: bytes) -> ContentReader | None:
    with suppress(ProtocolError):
        told = decode_to_party(frame)
        assert decode_to_party(encode_to_party(told)) == told
    said = decode_from_party(frame)
    assert decode_from_party(encode_from_party(said)) == said
    return ContentReader(said, MOST)


def _take(reader: ContentReader) -> None:
    content = reader.content()
    message = reader.message
    if isinstance(message, PartyRows) and len(content) % 32 == 0 and content:
        check_sorted(read_hashes(content))
    if isinstance(message, SplitBottom):
        assert np.isfinite(read_bottom(content, 4)).all()
    if isinstance(message, PartyActivations):
        h, y = decode_arrays(message.arrays, content, EXPECTED, ROWS, "float32")
        assert np.isfinite(h).all()
        assert (h.shape, y.shape) == ((ROWS, 4), (ROWS,))
