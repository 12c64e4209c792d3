"""What parties of a vertical run and its coordinator say, hashes of rows, and which rows a step
takes."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
from bounds import inside, outside
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.vertical import messages as v
from fleetlearn_protocol.vertical.alignment import digest_of, hash_rows
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.schedule import order_of_epoch, seed_of_step
from make_messages import dumps, plain_default
from msgspec import inspect as types

A, B = "a" * 64, "0123456789abcdef" * 4
KEY = "the parties share this key alone"
H = ArrayPart("activations_bank", "float32", 64, 0x9BE3E0A3)
FROM_PARTY: dict[str, v.FromParty] = {
    "join": v.PartyJoin(1, "bank", A),
    "state": v.PartyState(300, B, (0, 50, 100)),
    "rows": v.PartyRows(9600, 7),
    "activations": v.PartyActivations(2, 51, A, (H, ArrayPart("y", "plain", 16, 1))),
    "done": v.PartyDone(2),
    "bottom": v.SplitBottom(3, 4096, 9),
    "stops": v.PartyStops("the disk is full"),
}
TO_PARTY: dict[str, v.ToParty] = {
    "terms": v.VerticalTerms(
        "run-1", 1, (Input("y", "int64", (), 2),), 0, 32, 1000, 100, {"lr": 0.1}, "float32"
    ),
    "rows-wanted": v.RowsWanted(),
    "common-rows": v.CommonRows(250, A, 38, 5),
    "begin": v.VerticalBegin(2, 50),
    "gradients": v.PartyGradients(2, 51, (H,), 0.25),
    "split-terms": v.SplitTerms(
        "run-2", 2, (Input("y", "int64", (), 2),), 5, 32, {"lr": 0.1}, "float16", False
    ),
    "round": v.SplitBegin(3, 7, 70, 10, 4096, 9),
    "pause": v.VerticalPause("for shop"),
    "finished": v.VerticalFinished(),
    "refused": v.VerticalRefusal("no row is common"),
}


def vertical() -> dict[str, Any]:
    """Return the cases."""
    valid: list[dict[str, Any]] = []
    invalid: list[dict[str, Any]] = []
    for direction, examples, kinds in (
        ("from-party", FROM_PARTY, v.FromParty),
        ("to-party", TO_PARTY, v.ToParty),
    ):
        assert [*examples] == [kind.__struct_config__.tag for kind in get_args(kinds)]
        for tag, example in examples.items():
            made, refused = _cases(direction, tag, example)
            valid += made
            invalid += refused
    ids: list[Any] = ["anna", "17", "\u00fc", "x" * 100]
    hashes = hash_rows(ids, KEY.encode())
    rows = [
        {"id": one, "hash": row.ljust(32, b"\0").hex()}
        for one, row in zip(ids, hashes.tolist(), strict=True)
    ]
    return {
        "valid": valid,
        "invalid": invalid,
        "key": KEY,
        "hashes": rows,
        "digest": digest_of(hashes),
        "orders": [
            {
                "rows": n,
                "seed": seed,
                "epoch": epoch,
                "order": order_of_epoch(n, seed, epoch).tolist(),
            }
            for n, seed, epoch in ((5, 0, 0), (5, 0, 1), (12, 2**53 - 1, 3))
        ],
        "seeds": [
            {"step": step, "seed": seed, "part": part, "drawn": seed_of_step(step, seed, part)}
            for step, seed, part in ((0, 0, 0), (1, 0, 0), (0, 0, 1), (77, 2**53 - 1, 2))
        ],
    }


def _cases(
    direction: str, tag: str, example: msgspec.Struct
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    full = json.loads(msgspec.json.encode(example))
    struct = types.type_info(type(example))
    assert isinstance(struct, types.StructType)
    defaults = {field.name: plain_default(field) for field in struct.fields if not field.required}
    assert not defaults
    plain = tuple(each for each in struct.fields if each.name not in ("arrays", "targets", "hyper"))
    bounded = msgspec.structs.replace(struct, fields=plain)

    def case(name: str, message: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
        named = {"name": f"{tag}: {name}", "direction": direction}
        return {**named, "text": dumps(message), "read": read}

    valid = [
        case("every field", full, full),
        case("an unknown field", full | {"later": 1}, full),
        *(case(name, full | change, full | change) for name, change in inside(bounded)),
    ]
    wrong = {name: full | change for name, change in outside(bounded)}
    for field in struct.fields:
        wrong[f"without {field.name}"] = {name: full[name] for name in full if name != field.name}
    named = {"direction": direction, "code": "bad-message"}
    return valid, [
        {"name": f"{tag}: {name}", "text": dumps(message), **named}
        for name, message in wrong.items()
    ]
