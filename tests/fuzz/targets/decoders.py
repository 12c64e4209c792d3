"""Targets: all that reads bytes from somebody else, or from a disk. Each takes any bytes, and
raises where a reader raises another error than it promises, or takes what it should refuse."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from bisect import bisect_left
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from pathlib import Path

import msgspec
import numpy as np
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.conversation.begun import decode_begun
from fleetlearn_coordinator.conversation.places import Places, Proven
from fleetlearn_coordinator.conversation.uploads import Upload, Uploads
from fleetlearn_coordinator.network.addresses import Networks
from fleetlearn_coordinator.network.forwarded import origin_of
from fleetlearn_coordinator.network.gate import Gate, RefusalError
from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_device.storage.credential import read_credential
from fleetlearn_device.storage.device_key import read_device_key
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory, describe
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.deltas import apply_delta
from fleetlearn_protocol.encodings import Encoding, find_encoding
from fleetlearn_protocol.errors import BundleError, Code, ProtocolError
from fleetlearn_protocol.frames import Buffer, Chunk, pack_chunk, unpack_chunk
from fleetlearn_protocol.manifest import MAX_MANIFEST_BYTES
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
from fleetlearn_protocol.messages import (
    Part,
    Report,
    decode_from_coordinator,
    decode_from_device,
    encode,
)
from fleetlearn_protocol.stored_report import read_report
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader

ELEMENTS = 10_000
"""Most elements of a vector: two blocks of top-k and a part of one."""
SCRATCH = "FLEETLEARN_FUZZ_SCRATCH"
BUNDLE, TASK = "b" * 64, "t1"
STATE_FILES = (
    "identity.json",
    "credential.json",
    "training.json",
    "pending/report.json",
    "pending/00000000.bin",
    f"pending/kept-{TASK}.{BUNDLE}",
    f"pending/tied-{TASK}.{BUNDLE}",
    f"pending/own-{TASK}.{BUNDLE}",
    f"kept/{BUNDLE}",
    f"tied/{BUNDLE}.{TASK}",
    f"bundles/{BUNDLE}/manifest.json",
    "version.json",
    "checkpoint",
    "device_key.json",
    "pending/unmasked.json",
    "pending/unmasked.bin",
)
"""Files of a state directory that the target writes, by their number."""


@cache
def scratch() -> Path:
    """Return a folder that lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=scratch_parent()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def scratch_parent() -> str | None:
    """Return where to make folders: in memory where that can be had. SCRATCH in the environment
    names another place."""
    return os.environ.get(SCRATCH) or ("/dev/shm" if Path("/dev/shm").is_dir() else None)


def messages(data: bytes) -> None:
    """A control message, in both directions. What decodes can be sent again, and is the same
    then."""
    for decode in (decode_from_device, decode_from_coordinator):
        try:
            message = decode(data)
        except ProtocolError:
            continue
        try:
            text = encode(message)
        except ProtocolError as error:
            # filled with its defaults, it may be just too large
            if error.code is not Code.TOO_LARGE:
                raise
        else:
            assert decode(text) == message


def chunks(data: bytes) -> None:
    """A binary frame."""
    try:
        chunk = unpack_chunk(data)
    except ProtocolError:
        return
    assert pack_chunk(*chunk) == data


def encodings(data: bytes) -> None:
    """Lines: the name of an encoding, a number of elements; then the bytes. What passes the check
    decodes to finite elements, the greatest of which is the one that the check said."""
    name, _, rest = data.partition(b"\n")
    number, _, content = rest.partition(b"\n")
    try:
        encoding = find_encoding(name.decode("latin-1"))
        elements = _number(number, encoding, content)
        largest = encoding.check(content, elements)
        vector = encoding.decode(content, elements)
    except ProtocolError:
        return
    assert elements is None or vector.shape == (elements,)
    assert vector.dtype == np.float32
    assert np.isfinite(vector).all()
    assert float(np.abs(vector).max(initial=0.0)) == largest, (largest, vector)
    assert encoding.size(vector.size) == len(content)


def _number(text: bytes, encoding: Encoding, content: bytes) -> int | None:
    """Return the number of elements; ``*``: one that fits the bytes, ``-``: None."""
    if text == b"-":
        return None
    if text == b"*":
        return bisect_left(range(ELEMENTS), len(content), key=encoding.size)
    return int(text) % ELEMENTS if text.isdigit() and len(text) < 20 else 0


class _Spool:
    """A file in memory."""

    def __init__(self) -> None:
        self.content = bytearray()

    def has_room(self) -> bool:
        return True

    def take_spool_file(self) -> int:
        return 1

    def free_spool_file(self, number: int) -> None:
        self.content.clear()

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        assert offset == len(self.content)
        self.content += content

    def write_checkpoint(self, number: int, content: bytes) -> None:
        self.checkpoint = content


class _Deaf:
    """A sender that does not care when it may send."""

    def arriving(self) -> int:
        return 0

    def granted(self, upload: Upload, now: float) -> None:
        pass

    def must_wait(self, upload: Upload) -> None:
        raise AssertionError


def uploads(data: bytes) -> None:
    """Lines: encodings, a number of elements, sizes of chunks; then the bytes of the update. After
    each third chunk the connection breaks, and the upload goes on from its checkpoint. What is
    complete at the end decodes, and its greatest element is the one that was found chunk by
    chunk."""
    first, _, rest = data.partition(b"\n")
    second, _, rest = rest.partition(b"\n")
    third, _, content = rest.partition(b"\n")
    elements = 1 + (int(second) % ELEMENTS if second.isdigit() and len(second) < 20 else 0)
    sizes = [int(word) % 20_000 for word in third.split() if word.isdigit() and len(word) < 20] or [
        len(content)
    ]
    try:
        found = [find_encoding(name.decode("latin-1")) for name in first.split()[:4]]
    except ProtocolError:
        return
    if not found:
        return
    parts, begin = [], 0
    for place, encoding in enumerate(found):
        end = begin + encoding.size(elements)
        parts.append(encoding.part(f"p{place}", content[begin:end].ljust(end - begin, b"\0")))
        begin = end
    report = Report(TASK, 1, tuple(parts), 1, 1, 1.0, True, 0.0)
    spool = _Spool()
    pool = Uploads(Places[Upload](1, 0.0, Proven(1)))
    upload = pool.offer("a", report, spool, lambda part: elements, _Deaf())
    pool.grant(0.0)
    turn = 0
    while upload.offset < min(report.size, len(content)):
        before = upload.offset
        size = 1 + sizes[turn % len(sizes)]
        turn += 1
        try:
            upload.receive(
                Chunk(upload.transfer, before, memoryview(content)[before : before + size])
            )
        except ProtocolError as error:
            assert (upload.offset, len(spool.content)) == (before, before)
            if error.code is not Code.WRONG_LENGTH or size == 1:
                return
            sizes = [size // 2 - 1]
        if turn % 3 == 0 and upload.offset:
            begun = pool.part(upload, 0.0)
            assert decode_begun(spool.checkpoint) == begun
            upload = pool.offer("a", report, spool, lambda part: elements, _Deaf(), begun)
            pool.grant(0.0)
    try:
        upload.check_complete()
    except ProtocolError:
        return
    begin = 0
    for part, encoding in zip(report.parts, found, strict=True):
        vector = encoding.decode(bytes(spool.content[begin : begin + part.size]), elements)
        begin += part.size
        assert np.isfinite(vector).all()
        assert float(np.abs(vector).max(initial=0.0)) == upload.largest[part.name]


def deltas(data: bytes) -> None:
    """Two bytes: elements of the base; then a difference from it."""
    base = bytes(4 * int.from_bytes(data[:2], "big"))
    try:
        made = apply_delta(base, data[2:])
    except ProtocolError:
        return
    assert len(made) == len(base)


def manifests(data: bytes) -> None:
    """A bundle's manifest. What is read can be written and read again, and its sizes are those of
    its tables."""
    try:
        manifest = read_manifest(data)
    except BundleError:
        return
    assert manifest.size <= manifest.local_size
    assert manifest.state_size >= 0
    assert all(".." not in path.split("/") and not path.startswith("/") for path in manifest.files)
    written = write_manifest(manifest)
    if len(written) <= MAX_MANIFEST_BYTES:
        assert read_manifest(written) == manifest


def bundles(data: bytes) -> None:
    """A bundle as a zip."""
    path = scratch() / "test.bundle"
    path.write_bytes(data)
    try:
        bundle = open_bundle(path)
        bundle.parameters()
        bundle.state()
    except BundleError:
        pass


def reports(data: bytes) -> None:
    """A stored report."""
    try:
        report = read_report(data)
    except msgspec.DecodeError:
        return
    assert read_report(msgspec.json.encode(report)) == report
    assert report.size > 0
    assert all(isinstance(part, Part) for part in report.parts)


def state_directories(data: bytes) -> None:
    """The files of a device's state directory, each after a line ``=NUMBER`` (STATE_FILES)."""
    folder = scratch() / "state"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bundles").mkdir(parents=True)
    for piece in data.split(b"\n=")[:12]:
        number, _, content = piece.removeprefix(b"=").partition(b"\n")
        if number.isdigit() and len(number) < 3:
            path = folder / STATE_FILES[int(number) % len(STATE_FILES)]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for read in (read_credential, read_device_key, describe):
        with suppress(StateError):
            read(folder)
    try:
        state = StateDirectory(folder)
    except StateError:
        return
    try:
        report = state.outbox.load()
        waits = state.outbox.load_unmasked()
        if waits is not None:
            state.outbox.unmasked_update(waits.task.task)
        state.kept_states.load(BUNDLE, 3)
        state.tied_vectors.begin(BUNDLE, TASK, 2)
        state.training_starts.count(TASK)
        state.checkpoint.load(TASK)
        if report is not None:
            sent = b"".join(unpack_chunk(frame).payload for frame in state.outbox.chunks(1, 0, 8))
            assert len(sent) == report.size
            state.outbox.drop(report.task)
    finally:
        state.close()


def plans(data: bytes) -> None:
    """A plan. What the engine and the aggregation need of one that is read can be had."""
    path = scratch() / "plan.toml"
    path.write_bytes(data)
    try:
        plan = Plan.load(path)
    except PlanError:
        return
    plan.engine_settings(15.0)
    plan.aggregator()
    plan.update_weights()
    assert plan.vectors is not None
    assert plan.largest_weight > 0


def services(data: bytes) -> None:
    """A service file."""
    path = scratch() / "service.toml"
    path.write_bytes(data)
    try:
        settings = ServiceSettings.load(path)
    except ServiceError:
        return
    assert 0 <= settings.port < 65536


@cache
def _gate() -> tuple[Gate, str]:
    """Return a gate with one device, ``known``, and a token with no use left."""
    identities = Identities(scratch() / "identities")
    token = identities.make_token(1, 4e9, ("tag",), 0.0)
    identities.enrol("known", "c" * 43, token, 0.0)
    return Gate(identities), token


def headers(data: bytes) -> None:
    """The headers of the request that opens a connection, a line each, before the gate. Nobody gets
    in without the device's credential."""
    gate, token = _gate()
    fields = Headers()
    for line in data.split(b"\n")[:64]:
        name, _, value = line.decode("latin-1").partition(":")
        with suppress(InvalidHeader):  # websockets refuses the request
            fields[name] = value.strip().replace("$token", token)
    with suppress(RefusalError):
        assert str(origin_of(fields, ip_address("10.0.0.1"), Networks(["10.0.0.0/8"])))
    before = len(gate.identities.devices())
    try:
        known = gate.check(fields, None)
    except RefusalError as refusal:
        if not 400 <= refusal.status < 500:
            raise
    else:
        assert known.device == "known"
        assert any("c" * 43 in value for _, value in fields.raw_items())
    assert len(gate.identities.devices()) == before
