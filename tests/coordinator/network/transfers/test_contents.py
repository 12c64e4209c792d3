"""Contents as frames, without a network."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.network.transfers.contents import (
    NEAR,
    Contents,
    FramedContent,
    Older,
    SelectedContent,
    StoredContent,
)
from fleetlearn_coordinator.storage.file_bytes import FileBytes
from fleetlearn_protocol import Code, ProtocolError, open_bundle, pack_bundle
from fleetlearn_protocol.encodings import FLOAT16
from fleetlearn_protocol.frames import CHUNK_BYTES, unpack_chunk
from fleetlearn_protocol.manifest import EVAL, TRAIN
from fleetlearn_protocol.messages import MAX_PIECES, MOST_ROWS, ContentSelection, Piece
from fleetlearn_protocol.vector import digest
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

MODEL = np.linspace(-3, 2, 50_000, dtype=np.float32)


@pytest.mark.parametrize(
    "offset", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 7, 300_000, 300_001]
)
def test_frames_carry_the_content_from_any_offset(offset: int) -> None:
    """Read back by the websockets library's own parser, as a client would."""
    payload = np.random.default_rng(0).bytes(300_001)
    parser = Protocol(Side.CLIENT, state=State.OPEN)
    for frame in FramedContent(9, payload).frames(offset):
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


@pytest.mark.parametrize(("offset", "end"), [(0, CHUNK_BYTES), (5, 6), (7, 300_001), (0, 70_000)])
@pytest.mark.parametrize("stored", [False, True])
def test_frames_go_up_to_any_end(tmp_path: Path, offset: int, end: int, stored: bool) -> None:
    payload = np.random.default_rng(0).bytes(300_001)
    (tmp_path / "content").write_bytes(payload)
    content = (
        StoredContent(9, FileBytes(tmp_path / "content")) if stored else FramedContent(9, payload)
    )
    parser = Protocol(Side.CLIENT, state=State.OPEN)
    for _ in range(2):  # frames that are kept are those of whole chunks
        for frame in content.frames(offset, end):
            parser.receive_data(frame)
        events = parser.events_received()
        chunks = [unpack_chunk(bytes(event.data)) for event in events if isinstance(event, Frame)]
        assert b"".join(chunk.payload for chunk in chunks) == payload[offset:end]
        assert chunks[0].offset == offset
    for frame in content.frames(0):
        parser.receive_data(frame)
    events = parser.events_received()
    whole = [unpack_chunk(bytes(event.data)) for event in events if isinstance(event, Frame)]
    assert b"".join(chunk.payload for chunk in whole) == payload


def test_only_the_newest_model_is_served(bundle_path: Path) -> None:
    contents = Contents(open_bundle(bundle_path))
    contents.publish({"1" * 64: MODEL.tobytes()}, {})
    contents.publish({"2" * 64: MODEL.tobytes()}, {})
    assert contents.find("2" * 64, 0).size == MODEL.nbytes
    with pytest.raises(ProtocolError) as caught:
        contents.find("1" * 64, 0)
    assert caught.value.code is Code.UNKNOWN_CONTENT


def test_older_models_are_served_from_their_files_while_tasks_need_them(
    bundle_path: Path, tmp_path: Path
) -> None:
    contents, old = Contents(open_bundle(bundle_path)), np.arange(len(MODEL), dtype=np.float32)
    (tmp_path / "v1").write_bytes(b"header" + old.tobytes() + b"state")
    where = Older(FileBytes(tmp_path / "v1", 6), old.nbytes)
    assert contents.publish({"1" * 64: old.tobytes()}, {}) == []
    transfer = contents.find("1" * 64, 0).transfer
    assert contents.publish({"2" * 64: MODEL.tobytes()}, {"1" * 64: where}) == []
    found = contents.find("1" * 64, 0)
    assert isinstance(found, StoredContent)
    assert found.transfer != transfer, "chunks of the two cannot be taken for each other"
    assert received(found, 5) == old.tobytes()[5:]
    contents.serve_older("0" * 64, where)  # another device came back with a task of it
    assert contents.publish({"3" * 64: MODEL.tobytes()}, {"1" * 64: where}) == ["0" * 64, "2" * 64]
    assert contents.publish({"4" * 64: MODEL.tobytes()}, {}) == ["1" * 64, "3" * 64]
    with pytest.raises(ProtocolError):
        contents.find("1" * 64, 0)


@pytest.mark.parametrize("offset", [0, 1, 2, 131071, 131072, 200001])
def test_an_older_model_is_served_as_float16_from_its_file(
    bundle_path: Path, tmp_path: Path, offset: int
) -> None:
    contents, old = (
        Contents(open_bundle(bundle_path)),
        np.linspace(-3, 3, 150_000, dtype=np.float32),
    )
    (tmp_path / "v1").write_bytes(b"header" + old.tobytes() + b"state")
    contents.serve_older("1" * 64, Older(FileBytes(tmp_path / "v1", 6), 2 * len(old), FLOAT16))
    found = contents.find("1" * 64, offset)
    assert found.size == 2 * len(old)
    assert received(found, offset) == FLOAT16.encode(old)[offset:]


def received(content: FramedContent | StoredContent, offset: int) -> bytes:
    """What a device has after the frames, in whose order there are no gaps."""
    parser = Protocol(Side.CLIENT, state=State.OPEN)
    payload = bytearray()
    for frame in content.frames(offset):
        parser.receive_data(frame)
        for event in parser.events_received():
            assert isinstance(event, Frame)
            chunk = unpack_chunk(bytes(event.data))
            assert (chunk.transfer, chunk.offset) == (content.transfer, offset + len(payload))
            payload += chunk.payload
    return bytes(payload)


@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES, 300_000, 300_001])
def test_a_large_file_is_read_from_the_disk(tmp_path: Path, offset: int) -> None:
    payload = np.random.default_rng(0).bytes(300_001)
    (tmp_path / "file").write_bytes(payload)
    large = StoredContent(9, FileBytes(tmp_path / "file"))
    (tmp_path / "file").unlink()
    assert large.size == len(payload)
    assert received(large, offset) == payload[offset:]


def test_a_large_file_that_is_cut_short_is_not_sent_as_if_it_were_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(300_001))
    large = StoredContent(9, FileBytes(tmp_path / "file"))
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(200_000)
    with pytest.raises(OSError, match="cut short"):
        received(large, 0)


def test_a_bundles_large_files_are_not_held(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fleetlearn_coordinator.network.transfers.contents.LARGE", 200_000)
    bundle = open_bundle(bundle_path)
    train, evaluation = (bundle.manifest.file(path).sha256 for path in (TRAIN, EVAL))
    contents = Contents(bundle)
    assert isinstance(contents.find(train, 0), StoredContent)
    assert isinstance(contents.find(evaluation, 0), FramedContent)
    assert received(contents.find(train, 7), 7) == bundle.read(TRAIN)[7:]
    packed = Contents(open_bundle(pack_bundle(bundle_path, tmp_path / "packed.zip")))
    assert isinstance(packed.find(train, 0), FramedContent)
    assert received(packed.find(train, 7), 7) == bundle.read(TRAIN)[7:]


class CountedBytes(FileBytes):
    """A file that knows how often it was read, and in which threads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads = 0
        self.threads = set[int]()

    def read(self, begin: int, size: int) -> bytes:
        self.reads += 1
        self.threads.add(threading.get_ident())
        return super().read(begin, size)


def test_the_most_pieces_of_a_file_are_few_reads_beside_the_event_loop(tmp_path: Path) -> None:
    """Each second byte of 8 MB, by a message of 37 kB: 4 million stretches."""
    width = 2 * MOST_ROWS
    payload = np.random.default_rng(0).bytes(MAX_PIECES * width)
    (tmp_path / "content").write_bytes(payload)
    file = CountedBytes(tmp_path / "content")
    pieces = tuple(Piece(width * number, 1, True) for number in range(MAX_PIECES))
    selection = ContentSelection(pieces, (0, *[1] * (MOST_ROWS - 1)))
    selected = SelectedContent(StoredContent(9, file), selection)
    assert asyncio.run(selected.make()) == digest(payload[::2])
    assert selected.size == len(payload) // 2
    assert file.reads <= MAX_PIECES + len(payload) // NEAR
    assert threading.get_ident() not in file.threads
    parser = Protocol(Side.CLIENT, state=State.OPEN)
    for frame in selected.frames(CHUNK_BYTES + 1, 3 * CHUNK_BYTES):
        parser.receive_data(frame)
    events = parser.events_received()
    chunks = [unpack_chunk(bytes(event.data)) for event in events if isinstance(event, Frame)]
    sent = b"".join(chunk.payload for chunk in chunks)
    assert sent == payload[::2][CHUNK_BYTES + 1 : 3 * CHUNK_BYTES]
