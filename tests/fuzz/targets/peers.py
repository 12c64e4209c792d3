"""What a peer reads of its neighbours and of its network, and what it reads of files."""

from __future__ import annotations

import numpy as np
from fleetlearn_device.peers.discovery import Discovery, PeerAnnouncement
from fleetlearn_device.peers.model_frames import ArrivedModel, IncomingModel
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.peer_messages import PeerModel, decode_from_peer, encode_for_peer

ELEMENTS = 300
ENCODINGS = ("float32", "float16", "int8", "int4")


def peers(data: bytes) -> None:
    """A connection: its frames with their length (two bytes, little-endian, the upper bit set for
    a binary one) before each, after a byte that chooses the encoding. And the same bytes as an
    announcement."""
    _announced(data)
    if not data:
        return
    encoding = find_encoding(ENCODINGS[data[0] % len(ENCODINGS)])
    incoming = IncomingModel(encoding, ELEMENTS)
    place = 1
    try:
        while place + 2 <= len(data):
            length = int.from_bytes(data[place : place + 2], "little")
            frame = data[place + 2 : place + 2 + length % 2**15]
            place += 2 + length % 2**15
            if length >= 2**15:
                _arrived(incoming.chunk(frame))
                continue
            message = decode_from_peer(frame)
            assert decode_from_peer(encode_for_peer(message)) == message
            if isinstance(message, PeerModel):
                incoming.begin(message)
    except ProtocolError:
        return


def _arrived(model: ArrivedModel | None) -> None:
    if model is not None and model.vector is not None:
        assert model.vector.shape == (ELEMENTS,)
        assert np.isfinite(model.vector).all()
    elif model is not None:
        assert model.why


def _announced(data: bytes) -> None:
    moved: list[str] = []
    discovery = Discovery(PeerAnnouncement("a", 1, "x"), ("b",), moved.append)
    discovery.datagram_received(data, ("127.0.0.1", 5))
    assert set(moved) <= {"b"}
