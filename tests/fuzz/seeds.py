"""Valid inputs to begin from: the protocol's vectors and transcripts, and what the examples
have."""

from __future__ import annotations

import io
import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_device.peers.discovery import PeerAnnouncement
from fleetlearn_device.storage import kept_states, tied_vectors
from fleetlearn_protocol.deltas import encode_delta
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.frames import pack_chunk, pack_chunks
from fleetlearn_protocol.manifest import PARAMETERS
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.peer_messages import PeerModel, encode_for_peer
from fleetlearn_protocol.vector import checksum, digest
from fleetlearn_protocol.vertical.arrays import encode_arrays
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey, write_part
from fleetlearn_protocol.vertical.messages import PartyActivations, encode_from_party
from safetensors.numpy import save

from tests.fuzz.targets.decoders import TASK
from tests.fuzz.targets.peers import ELEMENTS, ENCODINGS
from tests.fuzz.targets.sockets import frame, handshake

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"


def corpus(target: str) -> list[bytes]:
    """Return the inputs that the repository has for a target."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def _vectors(name: str) -> Any:
    return json.loads((ROOT / "protocol" / "vectors" / f"{name}.json").read_text("utf-8"))


@cache
def _messages() -> list[dict[str, Any]]:
    return list(_vectors("messages")["valid"])


def messages() -> list[bytes]:
    return [row["text"].encode() for row in _messages()]


def chunks() -> list[bytes]:
    payloads = (b"\xff", bytes(4), bytes(16), b"\xab" * 128)
    return [
        pack_chunk(transfer, offset, payload)
        for transfer in (1, 2**32 - 1)
        for offset in (0, 8)
        for payload in payloads
    ]


def vertical() -> list[bytes]:
    """Return each valid message alone, activations with their chunks, and a checkpoint."""

    def written(frame: bytes, binary: bool = False) -> bytes:
        return (len(frame) + 2**15 * binary).to_bytes(2, "little") + frame

    h, y = np.arange(16, dtype=np.float32).reshape(4, 4), np.arange(4)
    parts, content = encode_arrays([("activations_bank", h), ("y", y)], "float32")
    said = encode_from_party(PartyActivations(1, 2, "a" * 64, parts)).encode()
    whole = written(said) + b"".join(written(each, True) for each in pack_chunks(0, content))
    key, state = PartKey("run", "a" * 64, "b" * 64), np.ones(2, np.float32)
    kept = write_part(key, KeptPart(3, h.reshape(-1), state))
    messages = [written(row["text"].encode()) for row in _vectors("vertical")["valid"]]
    return [whole, kept, *messages]


def peers() -> list[bytes]:
    """Return each valid message alone, and a whole model in each encoding."""

    def written(*frames: bytes) -> bytes:
        marks = (len(each) + (0 if each[:1] == b"{" else 2**15) for each in frames)
        return b"".join(
            mark.to_bytes(2, "little") + each for mark, each in zip(marks, frames, strict=True)
        )

    single = [b"\0" + written(row["text"].encode()) for row in _vectors("peers")["valid"]]
    model = np.linspace(-1, 1, ELEMENTS, dtype=np.float32)
    whole = []
    for place, name in enumerate(ENCODINGS):
        content = find_encoding(name).encode(model, 1)
        announced = PeerModel(1, 1, name, content.nbytes, checksum(content))
        frames = encode_for_peer(announced).encode(), pack_chunk(1, 0, content)
        whole.append(bytes([place]) + written(*frames))
    said = PeerAnnouncement("b", 8766, "x")
    return [*single, *whole, msgspec.json.encode(said)]


def encodings() -> list[bytes]:
    rows = _vectors("encodings")["valid"]
    return [
        b"%s\n*\n%s" % (row["encoding"].encode(), bytes.fromhex(row["hex"]))
        for row in rows
        if len(row["hex"]) < 8192
    ]


def uploads() -> list[bytes]:
    found = []
    for row in _vectors("encodings")["valid"]:
        elements, content = len(row["vector"]) // 8, bytes.fromhex(row["hex"])
        if len(content) < 4096:
            name = row["encoding"].encode()
            found.append(b"%s\n%d\n%d\n%s" % (name, elements - 1, len(content), content))
            found.append(b"%s %s\n%d\n7 63\n%s" % (name, name, elements - 1, content + content))
    return found


def deltas() -> list[bytes]:
    vectors = [np.zeros(size, np.float32) + value for size in (1, 7, 100) for value in (0.0, 1.5)]
    return [
        len(vector).to_bytes(2, "big") + encode_delta(np.zeros_like(vector), vector)
        for vector in vectors
    ]


def manifests() -> list[bytes]:
    return [_vectors("manifest")["valid"]["text"].encode()]


def bundles() -> list[bytes]:
    """A bundle of the vectors' manifest, whose files are a byte each except the parameters."""
    manifest = msgspec.json.decode(manifests()[0])
    tensors = {row["name"]: np.zeros(row["shape"], np.float32) for row in manifest["parameters"]}
    contents = dict.fromkeys(manifest["files"], b"x") | {PARAMETERS: save(tensors)}
    manifest["files"] = {
        path: {"sha256": digest(content), "size": len(content)}
        for path, content in contents.items()
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {"manifest.json": msgspec.json.encode(manifest), **contents}.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return [packed.getvalue()]


def reports() -> list[bytes]:
    text = [row["text"].encode() for row in _messages() if '"type":"report"' in row["text"]]
    old = (
        b'{"task":"t1","round":1,"size":4,"crc32":7,"encoding":"float32","examples":1,"steps":1,"epochs":1.0,'
        b'"complete":true,"loss":0.5}'
    )
    return [*text, old]


def state_directories() -> list[bytes]:
    vector = np.array([1.0, 2.0, 3.0], np.float32)
    report = Report(TASK, 1, (FLOAT32.part("update", vector.tobytes()),), 5, 1, 1.0, True, 0.5)
    crc = msgspec.structs.replace(report.parts[0], crc32=0)
    pending = msgspec.json.encode(msgspec.structs.replace(report, parts=(crc,)))
    kept = b"".join(map(bytes, kept_states.file_contents(vector)))
    tied = b"".join(
        map(bytes, tied_vectors.file_contents({"control": vector[:2], "residual": vector[1:]}))
    )
    files = {
        0: b'{"device":"camera-7"}',
        1: b'{"secret":"%s","next":null}' % (b"c" * 43),
        2: b'{"task":"t1","starts":2}',
        3: pending,
        4: vector.tobytes(),
        5: kept,
        6: tied,
        7: kept,
        8: kept,
        9: tied,
        10: manifests()[0],
    }
    pieces = {number: b"=%d\n%s" % (number, content) for number, content in files.items()}
    return [
        b"\n".join(pieces.values()),
        *(b"\n".join([pieces[0], piece]) for piece in pieces.values()),
    ]


def plans() -> list[bytes]:
    """The example, and short plans: each recipe, each section."""
    begin = b'name = "a"\nbundle = "b"\ndata_dir = "d"\n'
    rounds = (
        b"[round]\ngoal = 2\nover_selection = 1.5\nminimum = 1\ndeadline = 30.0\ngrace = "
        b'5.0\ngather = 0.5\nlate = "carry"\n'
    )
    sections = (
        rounds,
        b'[stop]\nrounds = 10\nmetric = "accuracy"\ntarget = 0.9',
        b'[encoding]\nup = "topk-0.01-int8"\ndown = "delta"',
        b'[selection]\nstrategy = "oort"\n[selection.require]\ntags = ["a"]',
        b"[pace]\nconnected = 100",
        b"[evaluation]\nevery = 2\ndevices = 10\nminimum = 3",
        b'[aggregation]\naggregator = "median"\nmax_norm = 2.0',
        b"[local]\nepochs = 2\nlr = 0.1\n[server]\nlr = 0.5",
        b'[staleness]\nfunction = "polynomial"\na = 0.5',
    )
    private = b"[privacy]\nnoise = 1.0\ndelta = 1e-6\npopulation = 1000\nclip = 0.5\n"
    recipes = [
        begin
        + b'recipe = "%s"\n[round]\ngoal = 5\n' % name.encode()
        + private * (recipe.mechanism is not None)
        + b"[clusters]\ncount = 2\n" * recipe.clusters
        for name, recipe in RECIPES.items()
    ]
    return [
        (ROOT / "examples" / "plan.toml").read_bytes(),
        *recipes,
        *(begin + section for section in sections),
    ]


def services() -> list[bytes]:
    tls = (
        b'host = "0.0.0.0"\nport = 1\nidentities = "i"\norigins = ["https://a.example"]\n'
        b'[tls]\ncertificate = "c.pem"\nkey = "k.pem"'
    )
    return [(ROOT / "examples" / "service.toml").read_bytes(), tls]


def headers() -> list[bytes]:
    secret = b"c" * 43
    return [
        b"Host: x\nAuthorization: Bearer %s\nFleetlearn-Device: known" % secret,
        b"Authorization: Bearer %s\nFleetlearn-Next-Credential: %s" % (secret, b"d" * 43),
        b"Authorization: Bearer %s\nFleetlearn-Device: other\nFleetlearn-Enrolment: $token"
        % (b"e" * 43),
        b"Sec-WebSocket-Protocol: fleetlearn.v1, fleetlearn.credential.%s, fleetlearn.device.known"
        % secret,
        b"Authorization: %s\nOrigin: https://evil.example" % secret,
        (
            b'Forwarded: for=1.2.3.4;proto=https, for="[2001:db8::1]:4711"\nX-Forwarded-For: '
            b"10.0.0.7, 1.2.3.4:80"
        ),
        b'Forwarded: for=unknown, for="_x"\nForwarded: FOR=10.0.0.1',
    ]


def administration() -> list[bytes]:
    lines = [
        b"GET /runs?of=a&x=%20 HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer abc\r\n\r\n",
        b'POST /runs/a/pause HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\n{"a": 1}',
        b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /refused HTTP/1.0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /%ff HTTP/1.1\r\nHost: a\r\nOrigin: https://a.example\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /page/app.js HTTP/1.1\r\nHost: a:1\r\nOrigin: http://a:1\r\n\r\n",
        b'POST /v1/session HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n{"token": 1}',
        b"GET /v1/session HTTP/1.1\r\nHost: [::1]:8\r\nCookie: a; fleetlearn-session-8=x\r\n\r\n",
        b"POST /v1/session/end HTTP/1.1\r\nHost: a\r\nX-CSRF-Token: \xe4\r\n\r\n",
        b"GET /v1/live?topics=host,run/a HTTP/1.1\r\nHost: a\r\nSec-Fetch-Site: none\r\n\r\n",
    ]
    return [*lines, lines[0] + lines[1]]


def page() -> list[bytes]:
    lines = [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /assets/a-0123abcd.js HTTP/1.1\r\nHost: a\r\nAccept-Encoding: br, gzip;q=0.5\r\n\r\n",
        b'GET /index.html HTTP/1.1\r\nHost: a\r\nIf-None-Match: W/"0-8", *\r\n\r\n',
        b"HEAD /assets/../index.html HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /../secret HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /%2e%2e%2fsecret HTTP/1.0\r\n\r\n",
        b"GET /.hidden HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /out HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /status.json?run=a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    ]
    return [*lines, b"".join(lines)]


def transcripts(sender: str) -> list[list[dict[str, Any]]]:
    """Return the messages that one side (``device``, ``coordinator``) says in each transcript, as
    they are written."""
    found = []
    for path in sorted((ROOT / "protocol" / "transcripts").glob("*.json")):
        for transcript in json.loads(path.read_text("utf-8")):
            said = [
                step[sender] for step in transcript["steps"] if isinstance(step.get(sender), dict)
            ]
            said = [
                row | {"task": "$task"} if "task" in row and row["type"] != "task" else row
                for row in said
            ]
            if said:
                found.append(said)
    return found


def conversations() -> list[bytes]:
    """Each message and each transcript, said by a device that has just been given a task."""
    device = [row["text"].encode() for row in _messages() if row["direction"] == "from-device"][::5]
    found = [b"0+\n0>2\n0" + text for text in device]
    for said in transcripts("device"):
        texts = [json.dumps(message) for message in said]
        found.append("\n".join(["0+", "0>1", *(f"0{text}" for text in texts)]).encode())
    return found


def sessions() -> list[bytes]:
    """Each message and each transcript, said to a device that has trained."""
    trained = (CORPUS / "sessions" / "trained").read_bytes() + b"\n"
    coordinator = [
        row["text"].encode() for row in _messages() if row["direction"] == "from-coordinator"
    ][::4]
    found = [trained + text + b"\n>5" for text in coordinator]
    for said in transcripts("coordinator"):
        lines = [
            json.dumps(message).encode() + b"\n>6" for message in said if message["type"] != "task"
        ]
        found.append(trained + b"\n".join(lines))
    return found


def sockets() -> list[bytes]:
    """Some messages, said by a device that has just been given a task."""
    device = [row["text"].encode() for row in _messages() if row["direction"] == "from-device"][
        ::12
    ]
    return [b"0+\n0>2\n0%s\n0>3" % text for text in device]


def streams() -> list[bytes]:
    """Frames after a good handshake, cut in different ways."""
    text = frame(1, b'{"type":"heartbeat"}')
    content = [
        text * 3,
        frame(1, b"{", fin=False) + frame(9, b"x") + frame(0, b"}") + text,
        frame(2, bytes(130)) + frame(10, b"") + frame(2, bytes(20)),
        frame(8, b"\x03\xe8bye") + text,
        frame(1, b"\xff\xfe") + text,
        frame(2, b"x", fin=False) * 30,
        b"\x81\xfe\x00\x05" + bytes(4) + b"hello",
        b"\x82\xff" + (20).to_bytes(8, "big") + b"\1\2\3\4" + bytes(20),
    ]
    found = [bytes([size]) + b"=" + frames for frames in content for size in (0, 2, 9)]
    return [
        *found,
        b"\x05" + handshake("dev-0") + text,
        b"\x01" + handshake("dev-0").replace(b"13", b"7"),
    ]
