"""Uploads without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.conversation.begun import (
    BegunUpload,
    BegunUploads,
    decode_begun,
    encode_begun,
)
from fleetlearn_coordinator.conversation.places import PROOF_FACTOR, WINDOW, Places, Proven
from fleetlearn_coordinator.conversation.uploads import (
    CHECKPOINT_BYTES,
    CHECKPOINT_SECONDS,
    Upload,
    Uploads,
    check_parts,
)
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.spooled_update import SpooledUpdate
from fleetlearn_protocol import Code, ProtocolError
from fleetlearn_protocol.encodings import FLOAT32, INT64, MASKED, MASKED64, find_encoding
from fleetlearn_protocol.formats.whole import sums_to_bytes
from fleetlearn_protocol.frames import CHUNK_BYTES, Chunk, pack_chunks, unpack_chunk
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector, checksum

UPDATE = np.linspace(-3, 2, 50_000, dtype=np.float32)


def elements_of(part: str) -> int:
    return len(UPDATE)


def report_of(task: str, update: Vector = UPDATE) -> Report:
    return Report(task, 1, (FLOAT32.part("update", update),), 5, 1, 1.0, True, 0.5)


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    (tmp_path / "run").mkdir()
    return FileBlobs(tmp_path / "run")


RATE = 1000.0


def make(limit: int) -> Uploads:
    return Uploads(Places(limit, RATE, Proven(100)))


class Deaf:
    """A sender that is told nothing here."""

    def arriving(self) -> int:
        return 0

    def granted(self, upload: Upload, now: float) -> None:
        raise AssertionError

    def must_wait(self, upload: Upload) -> None:
        raise AssertionError


def offer(
    uploads: Uploads,
    device: str,
    report: Report,
    spool: FileBlobs,
    elements_of: Callable[[str], int],
    begun: BegunUpload | None = None,
) -> Upload:
    return uploads.offer(device, report, spool, elements_of, Deaf(), begun)


def granted(
    uploads: Uploads,
    blobs: FileBlobs,
    task: str,
    update: Vector = UPDATE,
    begun: BegunUpload | None = None,
) -> Upload:
    report = report_of(task, update)
    upload = offer(uploads, "device", report, blobs, lambda part: len(update), begun)
    assert list(uploads.grants(0.0)) == [upload]
    return upload


def finished(uploads: Uploads, upload: Upload, now: float = 0.0) -> int:
    """The update is complete, and was saved. Returns the number of its spool file."""
    uploads.finish(upload, now)
    return uploads.complete(upload)


def test_an_upload_is_spooled_hashed_and_measured(blobs: FileBlobs) -> None:
    uploads = make(1)
    upload = granted(uploads, blobs, "t1")
    for message in pack_chunks(upload.transfer, UPDATE.tobytes()):
        upload.receive(unpack_chunk(message))
    upload.check_complete()
    assert upload.largest == {"update": 3.0}
    spool_file = finished(uploads, upload)
    assert (
        b"".join(bytes(part) for part in blobs.read_spool_file(spool_file, UPDATE.nbytes))
        == UPDATE.tobytes()
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
def test_chunks_that_are_refused_change_nothing(
    blobs: FileBlobs, offset: int, payload: bytes, code: Code
) -> None:
    upload = granted(make(1), blobs, "t1")
    (message,) = pack_chunks(1, payload)
    chunk = unpack_chunk(message)._replace(offset=offset)
    with pytest.raises(ProtocolError) as caught:
        upload.receive(chunk)
    assert caught.value.code is code
    for message in pack_chunks(upload.transfer, UPDATE.tobytes()):
        upload.receive(unpack_chunk(message))
    upload.check_complete()
    with pytest.raises(ProtocolError) as caught:
        upload.receive(chunk._replace(offset=UPDATE.nbytes))
    assert caught.value.code is Code.WRONG_LENGTH


def test_sums_come_without_the_zeros_at_their_end(blobs: FileBlobs) -> None:
    content = bytes(sums_to_bytes(np.array([5, 0, -7, 0, 0], np.int64)))
    part = INT64.part("sums", content)
    report, uploads = msgspec.structs.replace(report_of("t1"), parts=(part,)), make(1)
    asked, five = {"sums": "int64"}, {"sums": 5}.__getitem__
    check_parts(report, asked, five)
    for size in (0, 20, 48):
        wrong = msgspec.structs.replace(part, size=size)
        with pytest.raises(ProtocolError, match="its 5 elements take 40"):
            check_parts(msgspec.structs.replace(report, parts=(wrong,)), asked, five)
    upload = offer(uploads, "device", report, blobs, five)
    assert list(uploads.grants(0.0)) == [upload]
    for message in pack_chunks(upload.transfer, content):
        upload.receive(unpack_chunk(message))
    upload.check_complete()
    assert upload.largest == {"sums": 7.0}


def test_masked_sums_come_whole(blobs: FileBlobs) -> None:
    """Where their zeros begin would tell of the device; each is twelve bytes, whatever they are."""
    words = np.random.default_rng(1).integers(0, 2**32, 15, np.uint32)
    part = MASKED64.part("sums", words.tobytes())
    report = msgspec.structs.replace(report_of("t1"), parts=(part,))
    asked, five = {"sums": "masked64"}, {"sums": 5}.__getitem__
    check_parts(report, asked, five)
    for size in (12, 48, 40, 64, 72):
        wrong = msgspec.structs.replace(part, size=size)
        with pytest.raises(ProtocolError, match="its 5 elements take 60") as refused:
            check_parts(msgspec.structs.replace(report, parts=(wrong,)), asked, five)
        assert refused.value.code is Code.WRONG_LENGTH
    for encoding in ("int64", "masked"):
        wrong = msgspec.structs.replace(part, encoding=encoding)
        with pytest.raises(ProtocolError) as refused:
            check_parts(msgspec.structs.replace(report, parts=(wrong,)), asked, five)
        assert refused.value.code is Code.WRONG_PARTS
    uploads = make(1)
    upload = offer(uploads, "device", report, blobs, five)
    assert list(uploads.grants(0.0)) == [upload]
    for message in pack_chunks(upload.transfer, words.tobytes()):
        upload.receive(unpack_chunk(message))
    upload.check_complete()
    assert upload.largest == {"sums": 0.0}
    sums = SpooledUpdate(blobs, finished(uploads, upload), part, 0, 5)
    np.testing.assert_array_equal(np.concatenate([each.copy() for each in sums.words()]), words)
    with pytest.raises(ProtocolError, match="came as masked64; int64 was expected"):
        next(sums.whole_numbers())


def masked_report(words: np.ndarray) -> Report:
    parts = (MASKED.part("update", words.tobytes()),)
    return msgspec.structs.replace(report_of("t1"), parts=parts)


def test_masked_words_are_uploaded_whatever_they_are(blobs: FileBlobs) -> None:
    """As floats some of them would be infinite; the last one is the weight, after the vector's
    elements."""
    words = np.random.default_rng(1).integers(0, 2**32, len(UPDATE) + 1, np.uint32)
    words[:2] = 0x7F800000, 0xFFC00000
    report, uploads = masked_report(words), make(1)
    check_parts(report, {"update": "masked"}, elements_of)
    upload = offer(uploads, "device", report, blobs, elements_of)
    assert list(uploads.grants(0.0)) == [upload]
    for message in pack_chunks(upload.transfer, words.tobytes()):
        upload.receive(unpack_chunk(message))
    upload.check_complete()
    assert upload.largest == {"update": 0.0}
    number = finished(uploads, upload)
    update = SpooledUpdate(blobs, number, report.parts[0], 0, len(UPDATE))
    np.testing.assert_array_equal(np.concatenate([part.copy() for part in update.words()]), words)
    with pytest.raises(ProtocolError, match="masked words have no floats"):
        next(iter(update))
    with pytest.raises(ProtocolError, match="masked words have no floats"):
        update.read(0, 10)


def test_a_task_that_wants_a_masked_update_takes_no_other(blobs: FileBlobs) -> None:
    with pytest.raises(ProtocolError) as refused:
        check_parts(report_of("t1"), {"update": "masked"}, elements_of)
    assert refused.value.code is Code.WRONG_PARTS
    with pytest.raises(ProtocolError, match="its 50001 elements take 200004") as refused:
        check_parts(
            masked_report(np.zeros(len(UPDATE), np.uint32)), {"update": "masked"}, elements_of
        )
    assert refused.value.code is Code.WRONG_LENGTH
    upload = granted(make(1), blobs, "t1")
    for message in pack_chunks(upload.transfer, UPDATE.tobytes()):
        upload.receive(unpack_chunk(message))
    assert upload.spool_file is not None
    plain = SpooledUpdate(blobs, upload.spool_file, upload.report.parts[0], 0, len(UPDATE))
    with pytest.raises(ProtocolError, match="came as float32; masked was expected"):
        next(plain.words())


def test_each_part_of_an_upload_is_checked_by_itself(blobs: FileBlobs) -> None:
    first, second = UPDATE[:3].tobytes(), UPDATE[3:5].tobytes()
    parts = FLOAT32.part("a", first), FLOAT32.part("b", second)
    uploads = make(1)
    upload = offer(
        uploads,
        "device",
        msgspec.structs.replace(report_of("t1"), parts=parts),
        blobs,
        {"a": 3, "b": 2}.__getitem__,
    )
    assert list(uploads.grants(0.0)) == [upload]
    with pytest.raises(
        ProtocolError, match="a chunk of 16 bytes at 0; part a ends at 12"
    ) as caught:
        upload.receive(Chunk(1, 0, memoryview(first + second[:4])))
    assert caught.value.code is Code.WRONG_LENGTH
    for offset, payload in ((0, first[:8]), (8, first[8:]), (12, second)):
        upload.receive(Chunk(1, offset, memoryview(payload)))
    upload.check_complete()
    upload.report = msgspec.structs.replace(
        upload.report, parts=(parts[0], msgspec.structs.replace(parts[1], crc32=7))
    )
    with pytest.raises(
        ProtocolError, match=f"part b has CRC-32 {parts[1].crc32:08x}; 00000007 was announced"
    ) as caught:
        upload.check_complete()
    assert caught.value.code is Code.WRONG_HASH


@pytest.mark.parametrize("name", ["int8", "int4", "topk-0.01-int8"])
def test_chunks_hold_whole_blocks(blobs: FileBlobs, name: str) -> None:
    """The last block may be shorter, at the part's end alone; there its elements are known."""
    encoding, seed = find_encoding(name), 3
    vector = UPDATE[: 2 * 4096 + 77]
    content = encoding.encode(vector, seed)
    uploads, whole = make(1), encoding.size(4096)
    report = msgspec.structs.replace(report_of("t1"), parts=(encoding.part("update", content),))
    upload = offer(uploads, "device", report, blobs, lambda part: len(vector))
    assert list(uploads.grants(0.0)) == [upload]
    for size in (whole - 1, whole + 1):
        with pytest.raises(
            ProtocolError, match=f"expected a multiple of {encoding.block_bytes}"
        ) as caught:
            upload.receive(Chunk(1, 0, content[:size]))
        assert caught.value.code is Code.WRONG_LENGTH
    for start in (0, whole):
        upload.receive(Chunk(1, start, content[start : start + whole]))
    bad = bytearray(content[2 * whole :])
    bad[: 2 if encoding.block == 4096 else 4] = b"\xff\xff\xff\xff"[
        : 2 if encoding.block == 4096 else 4
    ]
    with pytest.raises(ProtocolError) as caught:
        upload.receive(Chunk(1, 2 * whole, memoryview(bad)))
    assert caught.value.code is (Code.BAD_ENCODING if encoding.block == 4096 else Code.NOT_FINITE)
    upload.receive(Chunk(1, 2 * whole, content[2 * whole :]))
    upload.check_complete()
    assert upload.largest == {"update": np.abs(encoding.decode(content, len(vector))).max()}
    update = SpooledUpdate(blobs, finished(uploads, upload), report.parts[0], 0, len(vector))
    decoded = encoding.decode(content, len(vector))
    assert np.concatenate(list(update)).tobytes() == decoded.tobytes()
    assert update.read(4096, len(vector)).tobytes() == decoded[4096:].tobytes()
    assert update.read(0, 4096).tobytes() == decoded[:4096].tobytes()


def test_a_paused_upload_goes_on_with_the_same_bytes_only(blobs: FileBlobs) -> None:
    uploads = make(1)
    upload = granted(uploads, blobs, "t1")
    upload.receive(unpack_chunk(next(pack_chunks(1, UPDATE.tobytes()))))
    kept = BegunUploads(1, blobs.free_spool_file)
    begun = uploads.part(upload, 0.0)
    assert begun is not None
    kept.keep(begun)
    assert kept.bytes_kept == begun.offset == CHUNK_BYTES
    again = granted(uploads, blobs, "t1", begun=kept.take("t1", upload.report.parts))
    assert (again.offset, again.crc32, again.largest) == (
        CHUNK_BYTES,
        begun.crc32,
        begun.largest,
    )
    assert not kept.bytes_kept
    sent(again, blobs)
    again.check_complete()
    begun = uploads.part(again, 0.0)
    assert begun is not None
    kept.keep(begun)
    assert kept.take("t1", report_of("t1", UPDATE + 1).parts) is None
    assert not kept.bytes_kept
    assert blobs.take_spool_file() == begun.spool_file, "its file is free"


def test_spool_files_are_bounded_whatever_breaks(blobs: FileBlobs, tmp_path: Path) -> None:
    uploads, kept = make(4), BegunUploads(4, blobs.free_spool_file)
    for number in range(50):
        upload = granted(uploads, blobs, f"t{number}")
        upload.receive(unpack_chunk(next(pack_chunks(1, UPDATE.tobytes()))))
        begun = uploads.part(upload, 0.0)
        assert begun is not None
        kept.keep(begun)
    assert len(list((tmp_path / "run" / "uploads").glob("slot-????"))) <= 6
    assert len(blobs.checkpoints()) == 4
    kept.forget(unless=())
    assert blobs.checkpoints() == {}
    taken = {blobs.take_spool_file() for _ in range(6)}
    assert len(taken) == 6, "a spool file was given twice"


def test_the_end_of_one_run_s_round_leaves_another_run_s_tasks(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = FileBlobs(tmp_path / "other")
    uploads = make(2)
    for spool, task in ((blobs, "t1"), (other, "t2")):
        assert uploads.first_spoiled(task, spool)
    uploads.forget_tasks(blobs, unless=())
    assert uploads.first_spoiled("t1", blobs)
    assert not uploads.first_spoiled("t2", other)


def test_a_waiting_upload_that_leaves_makes_room(blobs: FileBlobs) -> None:
    uploads = make(1)
    first, second, third = (
        offer(uploads, "device", report_of(f"t{number}"), blobs, elements_of) for number in range(3)
    )
    assert list(uploads.grants(0.0)) == [first]
    assert uploads.part(second, 0.0) is None, "nothing came of it"
    uploads.drop(first)
    assert list(uploads.grants(0.0)) == [third]


def test_an_upload_waits_for_a_spool_file_and_one_that_has_its_file_goes_on(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path, spool_files=1)
    uploads = make(2)
    first = granted(uploads, blobs, "t1")
    sent(first, blobs)
    second = offer(uploads, "device", report_of("t2"), blobs, elements_of)
    assert list(uploads.grants(0.0)) == []
    begun = uploads.part(first, 0.0)
    uploads.drop(second)
    again = granted(uploads, blobs, "t1", begun=begun)
    offer(uploads, "device", report_of("t3"), blobs, elements_of)
    assert list(uploads.grants(0.0)) == []
    uploads.drop(again)
    assert [upload.report.task for upload in uploads.grants(0.0)] == ["t3"]


def sent(upload: Upload, blobs: FileBlobs, chunks: int = 1) -> None:
    """Send this many of the upload's chunks, from where it is."""
    for message in list(pack_chunks(upload.transfer, UPDATE.tobytes(), upload.offset))[:chunks]:
        upload.receive(unpack_chunk(message))


def test_an_upload_that_loses_its_place_keeps_its_bytes_and_what_is_on_its_way(
    blobs: FileBlobs,
) -> None:
    uploads = make(1)
    slow = granted(uploads, blobs, "slow")
    sent(slow, blobs)
    next_ = offer(uploads, "next", report_of("next"), blobs, elements_of)
    # what came counts in the first window, and in the second nothing came
    uploads.places.measure(WINDOW)
    assert list(uploads.grants(WINDOW)) == []
    uploads.places.measure(2 * WINDOW)
    assert list(uploads.grants(2 * WINDOW)) == [slow, next_]
    assert (slow in uploads.places, next_ in uploads.places.held) == (False, True)
    first = slow.transfer
    sent(slow, blobs)  # on its way when it was told to wait
    assert slow.offset == UPDATE.nbytes
    uploads.queue(slow)
    uploads.drop(next_)
    assert list(uploads.grants(3 * WINDOW)) == [slow]
    assert (slow.offset, slow.transfer != first) == (UPDATE.nbytes, True)
    slow.check_complete()


def test_of_uploads_without_a_place_those_that_brought_least_begin_again(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    """16 peers that send 4 bytes each must not cost a slow device its megabytes, nor the disk a
    file for each."""
    uploads = make(2)
    moving, slow = granted(uploads, blobs, "moving"), granted(uploads, blobs, "slow")
    sent(slow, blobs)
    slow.slow = True
    crawlers = []
    for number in range(20):
        crawler = offer(uploads, f"c{number}", report_of(f"c{number}"), blobs, elements_of)
        list(uploads.grants(number))
        (message,) = pack_chunks(crawler.transfer, bytes(4))
        crawler.receive(unpack_chunk(message))
        crawler.slow = True
        crawlers.append(crawler)
    assert list(uploads.places.held) == [moving, crawlers[-1]]
    assert slow.offset == CHUNK_BYTES
    assert [crawler.offset for crawler in crawlers if crawler.spool_file is not None] == [
        4,
        4,
    ]  # one with a place, one not
    assert len(list((tmp_path / "run" / "uploads").iterdir())) <= 2 * 2 + 1
    lost = next(crawler for crawler in crawlers if crawler.spool_file is None)
    assert (lost.offset, lost.transfer, lost.crc32, lost.largest) == (0, 0, {}, {})


@pytest.mark.parametrize(
    ("took", "proves"),
    [(WINDOW, True), (WINDOW + 0.1, True), (UPDATE.nbytes / (PROOF_FACTOR * RATE) + 0.1, False)],
)
def test_an_update_that_came_quickly_proves_its_device(
    blobs: FileBlobs, took: float, proves: bool
) -> None:
    uploads = make(1)
    upload = granted(uploads, blobs, "t1")
    sent(upload, blobs, 2)
    finished(uploads, upload, took)
    assert ("device" in uploads.places.proven) is proves


def test_an_update_that_came_in_parts_proves_nothing_by_its_last_part(blobs: FileBlobs) -> None:
    uploads = make(1)
    upload = granted(uploads, blobs, "t1")
    sent(upload, blobs)
    begun = uploads.part(upload, 0.0)
    again = offer(uploads, "device", report_of("t1"), blobs, elements_of, begun)
    list(uploads.grants(500.0))
    sent(again, blobs)
    finished(uploads, again, 500.1)
    assert "device" not in uploads.places.proven


# Begun uploads


def begun_at(offset: int, task: str = "t1", spool_file: int = 0) -> BegunUpload:
    parts = report_of(task).parts
    return BegunUpload("device", task, parts, spool_file, offset, {"update": 7}, {"update": 3.0})


def test_a_checkpoint_says_what_it_was_given() -> None:
    begun = begun_at(1000)
    assert decode_begun(encode_begun(begun)) == begun


def test_a_checkpoint_that_was_changed_or_cut_short_says_nothing() -> None:
    content = encode_begun(begun_at(1000))
    for size in range(len(content)):
        assert decode_begun(content[:size]) is None
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        assert decode_begun(bytes(changed)) is None
    other = b'{"device": "a"}'
    assert decode_begun(checksum(other).to_bytes(4, "little") + other) is None, "another version"


def test_of_kept_uploads_the_one_with_the_fewest_bytes_is_dropped() -> None:
    freed: list[int] = []
    kept = BegunUploads(2, freed.append)
    for number, offset in enumerate((500, 20, 900, 30)):
        kept.keep(begun_at(offset, f"t{number}", number))
    assert freed == [1, 3]
    assert kept.bytes_kept == 1400
    kept.keep(begun_at(600, "t0", 7))
    assert freed == [1, 3, 0], "a task has one upload"
    kept.forget(unless=["t2"])
    assert freed == [1, 3, 0, 7]
    assert kept.take("t1", report_of("t1").parts) is None
    assert kept.take("t2", report_of("t2").parts) == begun_at(900, "t2", 2)


def test_a_checkpoint_is_due_after_so_many_bytes_or_seconds(blobs: FileBlobs) -> None:
    uploads = make(1)
    upload = granted(uploads, blobs, "t1")
    assert not upload.needs_checkpoint(CHECKPOINT_SECONDS - 0.1)
    assert upload.needs_checkpoint(CHECKPOINT_SECONDS)
    upload.offset = CHECKPOINT_BYTES - 1
    assert not upload.needs_checkpoint(0.0)
    upload.offset += 1
    assert upload.needs_checkpoint(0.0)
    upload.write_checkpoint(3.0)
    assert not upload.needs_checkpoint(3.0)
    assert {number: decode_begun(each) for number, each in blobs.checkpoints().items()} == {
        upload.spool_file: upload.begun()
    }
    uploads.drop(upload)
    assert blobs.checkpoints() == {}
