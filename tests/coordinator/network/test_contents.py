"""Contents as frames, without a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.network.contents import Content, Contents
from fleetlearn_protocol import Code, ProtocolError, open_bundle
from fleetlearn_protocol.frames import CHUNK_BYTES, unpack_chunk
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

MODEL = np.linspace(-3, 2, 50_000, dtype=np.float32)


@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 7, 300_000, 300_001])
def test_frames_carry_the_content_from_any_offset(offset: int) -> None:
    """Read back by the websockets library's own parser, as a client would."""
    payload = np.random.default_rng(0).bytes(300_001)
    parser = Protocol(Side.CLIENT, state=State.OPEN)
    for frame in Content(9, payload).frames(offset):
        parser.receive_data(frame)
    received = bytearray()
    for event in parser.events_received():
        assert isinstance(event, Frame)
        assert event.opcode is Opcode.BINARY
        assert event.fin
        chunk = unpack_chunk(bytes(event.data))
        assert chunk.transfer == 9
        assert chunk.offset == offset + len(received)
        received += chunk.payload
    assert received == payload[offset:]


def test_only_the_newest_model_is_served(bundle_path: Path) -> None:
    contents = Contents(open_bundle(bundle_path))
    contents.publish("1" * 64, MODEL)
    contents.publish("2" * 64, MODEL)
    assert contents.find("2" * 64, 0).size == MODEL.nbytes
    with pytest.raises(ProtocolError) as caught:
        contents.find("1" * 64, 0)
    assert caught.value.code is Code.UNKNOWN_CONTENT
