"""What peers say to each other: messages, digests of topologies, the differences of exchanges."""

from __future__ import annotations

import hashlib
import json
from typing import Any, get_args

import msgspec
import numpy as np
from bounds import inside, outside
from fleetlearn_protocol import peer_messages as p
from fleetlearn_protocol.vector import Vector
from make_messages import dumps, plain_default
from msgspec import inspect as types

A, B = "a" * 64, "0123456789abcdef" * 4
EXAMPLES: dict[str, p.FromPeer] = {
    "peer-hello": p.PeerHello(
        version=1,
        peer="roof-1",
        bundle=A,
        topology=B,
        settings={"mode": "steps", "epochs": "1", "hyper.lr": "0.1"},
        step=7,
        have=7,
        voted=7,
        finished=True,
    ),
    "peer-model": p.PeerModel(7, 1, "float32", 90408, 0x9BE3E0A3),
    "peer-vote": p.PeerVote(7, True, "its checksum is wrong"),
    "peer-finished": p.PeerFinished(),
    "peer-refusal": p.PeerRefusal("bundle", "give all peers one bundle"),
}


def peers() -> dict[str, Any]:
    assert [*EXAMPLES] == [kind.__struct_config__.tag for kind in get_args(p.FromPeer)]
    valid, invalid = [], []
    for tag, example in EXAMPLES.items():
        full = json.loads(msgspec.json.encode(example))
        struct = types.type_info(type(example))
        assert isinstance(struct, types.StructType)
        defaults = {f.name: plain_default(f) for f in struct.fields if not f.required}
        # What two peers compare by name has its cases below.
        fields = tuple(field for field in struct.fields if field.name != "settings")
        bounded = msgspec.structs.replace(struct, fields=fields)
        required = {name: value for name, value in full.items() if name not in defaults}
        valid += [
            _case(tag, "every field", full),
            _case(tag, "required fields alone", required, full | defaults),
            _case(tag, "an unknown field", full | {"later": 1}, full),
        ]
        valid += [_case(tag, name, full | change) for name, change in inside(bounded)]
        for name, change in outside(bounded):
            text = dumps(full | change)
            invalid.append({"name": f"{tag}: {name}", "text": text, "code": "bad-message"})
        for field in struct.fields:
            if field.required:
                text = dumps({name: full[name] for name in full if name != field.name})
                name = f"{tag}: without {field.name}"
                invalid.append({"name": name, "text": text, "code": "bad-message"})
    hello = json.loads(msgspec.json.encode(EXAMPLES["peer-hello"]))
    for name, settings in [
        ("33 settings", {f"s{number}": "1" for number in range(33)}),
        ("a setting that is no text", {"epochs": 1}),
        ("a long setting", {"epochs": "1" * 101}),
        ("a setting whose name is none", {"": "1"}),
    ]:
        text = dumps(hello | {"settings": settings})
        invalid.append({"name": f"peer-hello: {name}", "text": text, "code": "bad-message"})
    invalid += [
        {"name": "a device's message", "text": '{"type":"heartbeat"}', "code": "unknown-type"},
        {"name": "no object", "text": "[]", "code": "bad-message"},
        {
            "name": "too long",
            "pieces": [['{"type":"peer-finished","x":"', 1], ["a", 65536], ['"}', 1]],
            "code": "too-large",
        },
    ]
    return {
        "valid": valid,
        "invalid": invalid,
        "topologies": _topologies(),
        "differences": _differences(),
    }


def _case(
    tag: str, name: str, given: dict[str, Any], fields: dict[str, Any] | None = None
) -> dict[str, Any]:
    case: dict[str, Any] = {"name": f"{tag}: {name}", "text": dumps(given)}
    return case if fields is None or fields == given else {**case, "fields": fields}


def _topologies() -> list[dict[str, Any]]:
    """The texts are written by hand here, and not by what reads them."""
    third, half = "0x1.5555560000000p-2", "0x1.0000000000000p-1"
    ring = ["a", "b", "c", "d", "", *(f"{i} {j} {third}" for i, j in ("01", "03", "12", "23"))]
    pairs = ["a", "b", "c", "d", "", f"0 1 {half}", f"2 3 {half}", "", f"0 2 {half}", f"1 3 {half}"]
    rows = [("ring", ring), ("one-peer-exponential", pairs)]
    return [
        {
            "topology": kind,
            "peers": list("abcd"),
            "text": "\n".join(lines),
            "digest": hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest(),
        }
        for kind, lines in rows
    ]


def _differences() -> list[dict[str, Any]]:
    own = np.array([1, -2.5, 0.1, 1e30, 1e-45], np.float32)
    theirs = np.array([0.3, 2.5, 0.2, -1e30, 3e-45], np.float32)
    cases = []
    for weight in (1 / 3, 1 / 2, 0.2):
        difference: Vector = np.float32(weight) * (theirs - own)
        cases.append(
            {
                "weight": float(np.float32(weight)),
                "own": own.tobytes().hex(),
                "theirs": theirs.tobytes().hex(),
                "difference": difference.tobytes().hex(),
            }
        )
    return cases
