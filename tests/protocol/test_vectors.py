"""The test vectors: made by their script, and read as another SDK reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol.deltas import apply_delta, encode_delta
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.errors import BundleError, Code, ProtocolError
from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.frames import pack_chunk, unpack_chunk
from fleetlearn_protocol.manifest import Parameter
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
from fleetlearn_protocol.messages import (
    Question,
    Reply,
    decode_from_coordinator,
    decode_from_device,
    encode,
)
from fleetlearn_protocol.vector import checksum, digest, flatten, gather, scatter, views

FOLDER = Path(__file__).parents[2] / "protocol" / "vectors"
DECODE = {"from-device": decode_from_device, "from-coordinator": decode_from_coordinator}
Case = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="ascii"))
    return made


MESSAGES, FRAMES, VECTOR, ENCODED, MANIFEST = map(
    load, ("messages", "frames", "vector", "encodings", "manifest")
)


def content(case: Case) -> bytes:
    """What a case gives: ``text``, ``hex``, or ``pieces`` of text, each with how often it stands
    there."""
    if "hex" in case:
        return bytes.fromhex(case["hex"])
    return (
        case["text"]
        if "text" in case
        else "".join(piece * times for piece, times in case["pieces"])
    ).encode()


def repeated(pieces: list[tuple[str, int]]) -> bytes:
    return b"".join(bytes.fromhex(piece) * times for piece, times in pieces)


def named(cases: list[Case]) -> Any:
    return pytest.mark.parametrize(
        "case", cases, ids=[f"{case.get('direction', '')} {case['name']}" for case in cases]
    )


def test_the_files_are_what_their_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "make.py", tmp_path], check=True, timeout=60)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in FOLDER.glob("*.json")}


@pytest.mark.parametrize(
    "case", MESSAGES["contents"], ids=lambda case: f"{case['of']} {case['name']}"
)
def test_the_content_of_an_exchange(case: Case) -> None:
    kind, given = case["kind"], case["content"]
    questions = {
        "question": Question("t", kind, 9.0, content=given),
        "reply": Reply("t", kind, given),
    }
    if case["good"]:
        content_of(questions[case["of"]])
    else:
        with pytest.raises(ProtocolError) as caught:
            content_of(questions[case["of"]])
        assert caught.value.code is Code.BAD_MESSAGE


@named(MESSAGES["valid"])
def test_valid_message(case: Case) -> None:
    fields = case.get("fields") or json.loads(case["text"])
    message = DECODE[case["direction"]](case["text"])
    assert json.loads(msgspec.json.encode(message)) == fields
    assert DECODE[case["direction"]](content(case)) == message
    assert DECODE[case["direction"]](encode(message)) == message


@named(MESSAGES["invalid"])
def test_invalid_message(case: Case) -> None:
    with pytest.raises(ProtocolError) as caught:
        DECODE[case["direction"]](content(case))
    assert caught.value.code == case["code"]
    assert 0 < len(caught.value.text) <= 1000


def test_every_code_that_reading_a_message_can_raise_is_shown() -> None:
    assert {case["code"] for case in MESSAGES["invalid"]} == {
        "bad-message",
        "unknown-type",
        "too-large",
    }


@named(FRAMES["valid"])
def test_valid_frame(case: Case) -> None:
    payload = repeated(case["payload"])
    frame = bytes.fromhex(case["header"]) + payload
    assert unpack_chunk(frame) == (case["transfer"], case["offset"], payload)
    assert pack_chunk(case["transfer"], case["offset"], payload) == frame


@named(FRAMES["invalid"])
def test_invalid_frame(case: Case) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack_chunk(repeated(case["frame"]))
    assert caught.value.code == case["code"]


def test_vector() -> None:
    table = [
        Parameter(row["name"], tuple(row["shape"]), row["offset"], row.get("buffer", False))
        for row in VECTOR["table"]
    ]
    buffers = [slice(row.offset, row.offset + prod(row.shape)) for row in table if row.buffer]
    given = {name: np.array(values, np.float32) for name, values in VECTOR["tensors"].items()}
    model, trained, update = (
        bytes.fromhex(VECTOR[name]["hex"]) for name in ("model", "trained", "update")
    )
    assert flatten(given, table).tobytes() == model
    assert {name: view.tolist() for name, view in views(FLOAT32.decode(model), table).items()} == {
        name: values.tolist() for name, values in given.items()
    }
    assert VECTOR["encoding"] == FLOAT32.name
    assert FLOAT32.encode(FLOAT32.decode(trained)).tobytes() == trained
    difference = FLOAT32.decode(trained) - FLOAT32.decode(model)
    scatter(difference, buffers, 0.0)
    assert difference.tobytes() == update
    assert gather(FLOAT32.decode(trained), buffers).tobytes() == bytes.fromhex(
        VECTOR["buffers"]["hex"]
    )
    for name in ("model", "trained", "update", "buffers"):
        assert digest(bytes.fromhex(VECTOR[name]["hex"])) == VECTOR[name]["sha256"]
        assert checksum(bytes.fromhex(VECTOR[name]["hex"])) == VECTOR[name]["crc32"]


@named(VECTOR["invalid"])
def test_invalid_vector(case: Case) -> None:
    with pytest.raises(ProtocolError) as caught:
        FLOAT32.check(bytes.fromhex(case["hex"]), case["elements"])
    assert caught.value.code == case["code"]


@pytest.mark.parametrize(
    "case", ENCODED["valid"], ids=[case["encoding"] for case in ENCODED["valid"]]
)
def test_encoded_vector(case: Case) -> None:
    vector = FLOAT32.decode(bytes.fromhex(case["vector"]))
    encoding = find_encoding(case["encoding"])
    content = encoding.encode(vector, case["seed"])
    assert content.hex() == case["hex"]
    assert (
        encoding.check(content, len(vector)) == np.abs(encoding.decode(content, len(vector))).max()
    )


@named(ENCODED["invalid"])
def test_invalid_encoded_vector(case: Case) -> None:
    with pytest.raises(ProtocolError) as caught:
        find_encoding(case["encoding"]).check(bytes.fromhex(case["hex"]), case["elements"])
    assert caught.value.code == case["code"]


@named(ENCODED["deltas"])
def test_delta(case: Case) -> None:
    base, vector = bytes.fromhex(case["base"]), bytes.fromhex(case["vector"])
    assert apply_delta(base, bytes.fromhex(case["hex"])) == vector
    assert apply_delta(base, encode_delta(FLOAT32.decode(base), FLOAT32.decode(vector))) == vector


@named(ENCODED["invalid_deltas"])
def test_invalid_delta(case: Case) -> None:
    with pytest.raises(ProtocolError) as caught:
        apply_delta(bytes.fromhex(case["base"]), bytes.fromhex(case["hex"]))
    assert caught.value.code == case["code"]


def test_manifest() -> None:
    valid = MANIFEST["valid"]
    manifest = read_manifest(valid["text"].encode())
    assert write_manifest(manifest).decode() == valid["text"]
    assert digest(valid["text"].encode()) == valid["sha256"]
    assert (manifest.size, manifest.local_size) == (valid["elements"], valid["local_elements"])


@named(MANIFEST["accepted"])
def test_accepted_manifest(case: Case) -> None:
    fields = json.loads(MANIFEST["valid"]["text"]) | case["change"]
    manifest = read_manifest(json.dumps(fields).encode())
    assert read_manifest(write_manifest(manifest)) == manifest
    assert json.loads(write_manifest(manifest))["version"] == fields["version"]


@named(MANIFEST["invalid"])
def test_invalid_manifest(case: Case) -> None:
    if "change" not in case and "without" not in case:
        given = content(case)
    else:
        fields = json.loads(MANIFEST["valid"]["text"]) | case.get("change", {})
        fields.pop(case.get("without"), None)
        given = json.dumps(fields).encode()
    with pytest.raises(BundleError) as caught:
        read_manifest(given)
    assert caught.value.code == case["code"]
    assert 0 < len(caught.value.text) <= 1000
