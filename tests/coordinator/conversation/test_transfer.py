"""Contents and uploads without a network."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.conversation.places import PROOF, WINDOW, Places, Proven
from fleetlearn_coordinator.conversation.transfer import (
    STALLED_PER_PLACE,
    Content,
    Contents,
    Download,
    Downloads,
    Upload,
    Uploads,
)
from fleetlearn_coordinator.storage.store import Store
from fleetlearn_protocol import Code, ProtocolError, open_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import CHUNK_BYTES, Chunk, pack_chunks, unpack_chunk
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

UPDATE = np.linspace(-3, 2, 50_000, dtype=np.float32)


def report_of(task: str, update: Vector = UPDATE) -> Report:
    return Report(task, 1, (FLOAT32.part("update", update),), 5, 1, 1.0, True, 0.5)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run", "b" * 64)


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
    contents.publish("1" * 64, UPDATE)
    contents.publish("2" * 64, UPDATE)
    assert contents.find("2" * 64, 0).size == UPDATE.nbytes
    with pytest.raises(ProtocolError) as caught:
        contents.find("1" * 64, 0)
    assert caught.value.code is Code.UNKNOWN_CONTENT


RATE = 1000.0


def make(store: Store, limit: int) -> Uploads:
    return Uploads(store, Places(limit, RATE, Proven(100)))


def granted(uploads: Uploads, task: str, update: Vector = UPDATE) -> Upload:
    upload = uploads.offer("device", report_of(task, update))
    assert list(uploads.grants(0.0)) == [upload]
    return upload


def test_an_upload_is_spooled_hashed_and_measured(store: Store) -> None:
    uploads = make(store, 1)
    upload = granted(uploads, "t1")
    for message in pack_chunks(upload.transfer, UPDATE.tobytes()):
        upload.take(unpack_chunk(message), store)
    upload.check_complete()
    assert upload.largest == 3.0
    slot = uploads.keep(upload, 0.0)
    np.testing.assert_array_equal(
        np.frombuffer(b"".join(map(bytes, store.read_slot(slot, upload.report.parts[0]))), np.float32), UPDATE
    )
    assert not uploads.active


@pytest.mark.parametrize(
    ("offset", "payload", "code"),
    [
        (4, b"1234", Code.WRONG_OFFSET),
        (0, b"12345", Code.WRONG_LENGTH),
        (0, np.full(2, np.inf, np.float32).tobytes(), Code.NOT_FINITE),
        (0, np.full(2, np.nan, np.float32).tobytes(), Code.NOT_FINITE),
    ],
)
def test_chunks_that_are_refused_change_nothing(store: Store, offset: int, payload: bytes, code: Code) -> None:
    upload = granted(make(store, 1), "t1")
    (message,) = pack_chunks(1, payload)
    chunk = unpack_chunk(message)._replace(offset=offset)
    with pytest.raises(ProtocolError) as caught:
        upload.take(chunk, store)
    assert caught.value.code is code
    for message in pack_chunks(upload.transfer, UPDATE.tobytes()):
        upload.take(unpack_chunk(message), store)
    upload.check_complete()
    with pytest.raises(ProtocolError) as caught:
        upload.take(chunk._replace(offset=UPDATE.nbytes), store)
    assert caught.value.code is Code.WRONG_LENGTH


def test_each_part_of_an_upload_is_checked_by_itself(store: Store) -> None:
    first, second = UPDATE[:3].tobytes(), UPDATE[3:5].tobytes()
    parts = FLOAT32.part("a", first), FLOAT32.part("b", second)
    uploads = make(store, 1)
    upload = uploads.offer("device", msgspec.structs.replace(report_of("t1"), parts=parts))
    assert list(uploads.grants(0.0)) == [upload]
    with pytest.raises(ProtocolError, match="a chunk of 16 bytes at 0; part a ends at 12") as caught:
        upload.take(Chunk(1, 0, memoryview(first + second[:4])), store)
    assert caught.value.code is Code.WRONG_LENGTH
    for offset, payload in ((0, first[:8]), (8, first[8:]), (12, second)):
        upload.take(Chunk(1, offset, memoryview(payload)), store)
    upload.check_complete()
    upload.report = msgspec.structs.replace(upload.report, parts=(parts[0], msgspec.structs.replace(parts[1], crc32=7)))
    with pytest.raises(
        ProtocolError, match=f"part b has CRC-32 {parts[1].crc32:08x}; 00000007 was announced"
    ) as caught:
        upload.check_complete()
    assert caught.value.code is Code.WRONG_HASH


def test_a_paused_upload_goes_on_with_the_same_bytes_only(store: Store) -> None:
    uploads = make(store, 1)
    upload = granted(uploads, "t1")
    upload.take(unpack_chunk(next(pack_chunks(1, UPDATE.tobytes()))), store)
    uploads.pause(upload)
    again = granted(uploads, "t1")
    assert again is upload
    assert again.offset == CHUNK_BYTES
    uploads.pause(again)
    other = granted(uploads, "t1", UPDATE + 1)
    assert other is not upload
    assert other.offset == 0


def test_slots_are_bounded_whatever_breaks(store: Store, tmp_path: Path) -> None:
    uploads = make(store, 4)
    for number in range(50):
        upload = granted(uploads, f"t{number}")
        upload.take(unpack_chunk(next(pack_chunks(1, UPDATE.tobytes()))), store)
        uploads.pause(upload)
    assert len(list((tmp_path / "run" / "uploads").iterdir())) <= 6
    uploads.forget_all()
    taken = {store.take_slot() for _ in range(6)}
    assert len(taken) == 6, "a slot was given twice"


def test_a_waiting_upload_that_leaves_makes_room(store: Store) -> None:
    uploads = make(store, 1)
    first, second, third = (uploads.offer("device", report_of(f"t{number}")) for number in range(3))
    assert list(uploads.grants(0.0)) == [first]
    uploads.pause(second)
    uploads.drop(first)
    assert list(uploads.grants(0.0)) == [third]


def sent(upload: Upload, store: Store, chunks: int = 1) -> None:
    """Take so many of its chunks, from where it is."""
    for message in list(pack_chunks(upload.transfer, UPDATE.tobytes(), upload.offset))[:chunks]:
        upload.take(unpack_chunk(message), store)


def test_an_upload_that_loses_its_place_keeps_its_bytes_and_what_is_on_its_way(store: Store) -> None:
    uploads = make(store, 1)
    slow = granted(uploads, "slow")
    sent(slow, store)
    next_ = uploads.offer("next", report_of("next"))
    uploads.places.measure(WINDOW)  # what came counts in the first window, and in the second nothing came
    assert list(uploads.grants(WINDOW)) == []
    uploads.places.measure(2 * WINDOW)
    assert list(uploads.grants(2 * WINDOW)) == [slow, next_]
    assert (slow in uploads.places, next_ in uploads.places.held) == (False, True)
    first = slow.transfer
    sent(slow, store)  # on its way when it was told to wait
    assert slow.offset == UPDATE.nbytes
    uploads.queue(slow)
    uploads.drop(next_)
    assert list(uploads.grants(3 * WINDOW)) == [slow]
    assert (slow.offset, slow.transfer != first) == (UPDATE.nbytes, True)
    slow.check_complete()


def test_of_uploads_without_a_place_those_that_brought_least_begin_again(store: Store, tmp_path: Path) -> None:
    """16 peers that send 4 bytes each must not cost a slow device its megabytes, nor the disk a file for each."""
    uploads = make(store, 2)
    moving, slow = granted(uploads, "moving"), granted(uploads, "slow")
    sent(slow, store)
    slow.slow = True
    crawlers = []
    for number in range(20):
        crawler = uploads.offer(f"c{number}", report_of(f"c{number}"))
        list(uploads.grants(number))
        (message,) = pack_chunks(crawler.transfer, bytes(4))
        crawler.take(unpack_chunk(message), store)
        crawler.slow = True
        crawlers.append(crawler)
    assert list(uploads.places.held) == [moving, crawlers[-1]]
    assert slow.offset == CHUNK_BYTES
    assert [crawler.offset for crawler in crawlers if crawler.slot is not None] == [4, 4]  # one with a place, one not
    assert len(list((tmp_path / "run" / "uploads").iterdir())) <= 2 * 2 + 1
    lost = next(crawler for crawler in crawlers if crawler.slot is None)
    assert (lost.offset, lost.transfer, lost.crc32, lost.largest) == (0, 0, {}, 0.0)


@pytest.mark.parametrize(
    ("took", "proves"),
    [(WINDOW, True), (WINDOW + 0.1, True), (UPDATE.nbytes / (PROOF * RATE) + 0.1, False)],
)
def test_an_update_that_came_quickly_proves_its_device(store: Store, took: float, proves: bool) -> None:
    uploads = make(store, 1)
    upload = granted(uploads, "t1")
    sent(upload, store, 2)
    uploads.keep(upload, took)
    assert ("device" in uploads.places.proven) is proves


def test_an_update_that_came_in_parts_proves_nothing_by_its_last_part(store: Store) -> None:
    uploads = make(store, 1)
    upload = granted(uploads, "t1")
    sent(upload, store)
    uploads.pause(upload)
    again = uploads.offer("device", report_of("t1"))
    list(uploads.grants(500.0))
    sent(again, store)
    uploads.keep(again, 500.1)
    assert "device" not in uploads.places.proven


class Reader(asyncio.WriteTransport):
    """A transport whose other side read some of what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.unread, self.aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


def test_downloads_without_a_place_that_nobody_reads_are_bounded() -> None:
    downloads = Downloads(Places(1, RATE, Proven(1)))
    readers = [Download(f"d{number}", "0" * 64, Reader()) for number in range(3 + STALLED_PER_PLACE)]
    for number, download in enumerate(readers):
        downloads.ask(download, idle=False)
        downloads.go_on(number)
        download.sent += 200_000
        download.transport.unread = 200_000  # type: ignore[attr-defined]
        assert download.turn.is_set()
        downloads.places.measure(number + WINDOW)
        if number == 3:  # this one reads, if slowly, and waits for its turn again: nothing is held for it
            readers[0].transport.unread = 0  # type: ignore[attr-defined]
            downloads.ask(readers[0], idle=True)
    aborted = [download.device for download in readers if download.transport.aborted]  # type: ignore[attr-defined]
    assert aborted == ["d1"]
