"""Control messages: valid ones with what they decode to, invalid ones with the code of their
refusal."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
from bounds import allowed, inside, outside
from fleetlearn_protocol import messages as m
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, fields_of
from msgspec import inspect as types

DEVICE, COORDINATOR = "from-device", "from-coordinator"
A, B = "a" * 64, "0123456789abcdef" * 4
KEY = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"

MEASURED = m.Evaluation(1200, 412.5, {"accuracy": 1000.0})
EXAMPLES: dict[str, m.FromDevice | m.FromCoordinator] = {
    "check-in": m.CheckIn(
        protocol=1,
        device="camera-7.attic",
        examples=1200,
        runtime="onnx 1.31.1",
        software="fleetlearn-device 0.1.0",
        held=m.Held("t3-1", 3),
        memory=8 * 2**30,
        tags=("attic", "region-2"),
        tier="pi-5",
        charging=True,
        network="unmetered",
        exchanges=("evaluation",),
        algorithms=("scaffold", "feddyn"),
        encodings=("float32", "float16", "int8", "topk"),
        models=(A, B),
        trusts=(KEY,),
        challenge="5eed" * 16,
        newest_protocol=3,
        error="onnxruntime is not installed",
        wants="model",
        privacy=("clip", "local-noise", "secure"),
        functions=("kmeans", "my_package.rules:newton"),
    ),
    "heartbeat": m.Heartbeat("t4-11", 250, 262144),
    "fetch": m.Fetch(
        A,
        131072,
        8519680,
        http=True,
        selection=m.ContentSelection((m.Piece(0, 4), m.Piece(4, 256, True)), (5, 0, 17)),
    ),
    "finished": m.TaskFinished("t4-11"),
    "report": m.Report(
        task="t4-11",
        round=4,
        parts=(
            m.Part("update", "float32", 6653480, 0x9BE3E0A3),
            m.Part("control", "int8", 1663370, 0),
        ),
        examples=1200,
        steps=120,
        epochs=2.0,
        complete=True,
        loss=0.25,
        metrics={"accuracy": 0.9375},
        seconds=12.5,
        evaluation=m.Evaluation(1200, 412.5, {"accuracy": 1000.0}),
        personal=m.Evaluation(1200, 206.25, {"accuracy": 1100.0}),
        clipped=True,
        sealed="5e" * 80,
        signature="a0" * 64,
    ),
    "uploaded": m.Uploaded("t4-11"),
    "reply": m.Reply("t-e2-7", "evaluation", fields_of(MEASURED), 1.5),
    "failed": m.Failed("t4-11", "diverged", "step 7's loss is nan: a smaller lr may help"),
    "welcome": m.Welcome(
        "fleetlearn 0.1.0",
        15.0,
        131072,
        "120 examples; selection.least_examples is 500",
        2,
        "round 12 has its devices",
        m.SharedModel("ab" * 32, m.VectorReference("model", "cd" * 32, 40, "float32")),
    ),
    "task": m.Task(
        task="t4-11",
        round=4,
        bundle=A,
        vectors=(
            m.VectorReference("model", B, 6653480, "float32", m.Delta(A, B, 4000000)),
            m.VectorReference("control", A, 1663370, "int8"),
        ),
        parts={"update": "float32", "control": "int8"},
        hyper={"lr": 0.1, "mu": 0.01},
        epochs=2,
        batch_size=20,
        seed=2**53 - 1,
        deadline=600.0,
        time_budget=60.5,
        evaluate=True,
        algorithm="scaffold",
        kept="t2-7",
        personal_epochs=1,
        clip=0.5,
        local_noise=0.25,
        privacy=m.PrivacyNote(spent=3.125, delta=1e-6, epsilon=8.0),
        secure=m.SecureTask(
            mode="helper",
            minimum=20,
            bits=18,
            most_weight=500,
            least_factor=0.25,
            helper=KEY,
            noise=1.5,
            reports=30,
        ),
        schedule=m.StepSchedule("cosine", 10, 0.25, 3, 0.5, 200, 0.001, 400),
        function="my_package.rules:two_rates",
        encoding=m.OwnEncoding("my_package.formats:signs", {"share": 0.5}),
    ),
    "question": m.Question(
        task="t-e2-7",
        kind="evaluation",
        deadline=120.0,
        phase=2,
        content={"later": [1, None]},
        bundle=A,
        vectors=(m.VectorReference("model", B, 6653480, "float32"),),
    ),
    "trust": m.Trust((KEY,)),
    "signed": m.Signed('{"type":"trust","keys":[]}', KEY, "a0" * 64),
    "come-back": m.ComeBack(300.0, "no-task"),
    "content": m.Content(
        7, A, 6653480, 131072, 8519680, f"https://cdn.example.org/fleet/contents/{A}", B
    ),
    "weighing": m.TaskWeighing("t4-11", 0.5),
    "grant": m.Grant("t4-11", 4294967295, 0),
    "waiting": m.Waiting("t4-11", A),
    "accepted": m.Accepted("t4-11"),
    "cancel": m.Cancel("t4-11", Code.ROUND_OVER, "round 4 is over: it has its 8 reports"),
    "refused": m.Refused(Code.STALE_ROUND, "task t3-1 is of round 3; round 4 is open", "t3-1", A),
}
TAGS = {DEVICE: [str(kind.__struct_config__.tag) for kind in get_args(m.FromDevice)]}
TAGS[COORDINATOR] = [tag for tag in EXAMPLES if tag not in TAGS[DEVICE]]


def direction_of(tag: str) -> str:
    return DEVICE if tag in TAGS[DEVICE] else COORDINATOR


def messages() -> dict[str, Any]:
    valid, invalid = [], []
    for tag, example in EXAMPLES.items():
        full = plain(tag)
        struct = types.type_info(type(example))
        assert isinstance(struct, types.StructType)
        defaults = {f.name: plain_default(f) for f in struct.fields if not f.required}
        for name, given, fields in [
            ("every field", full, full),
            (
                "required fields alone",
                {k: v for k, v in full.items() if k not in defaults},
                full | defaults,
            ),
            ("an unknown field", full | {"later": {"x": [1, None]}}, full),
            ("another order", dict(reversed(full.items())), full),
        ]:
            valid.append(entry(tag, f"{tag}: {name}", dumps(given), fields=fields))
        for name, change in inside(struct):
            valid.append(entry(tag, f"{tag}: {name}", dumps(full | change), fields=full | change))
        for name, change in outside(struct):
            invalid.append(entry(tag, f"{tag}: {name}", dumps(full | change), code="bad-message"))
        for field in struct.fields:
            if field.required:
                given = {k: v for k, v in full.items() if k != field.name}
                invalid.append(
                    entry(tag, f"{tag}: without {field.name}", dumps(given), code="bad-message")
                )
        other = COORDINATOR if direction_of(tag) == DEVICE else DEVICE
        invalid.append(
            {
                "name": f"{tag}: the wrong way",
                "direction": other,
                "text": dumps(full),
                "code": "unknown-type",
            }
        )
    return {
        "valid": valid + by_hand_valid(),
        "invalid": invalid + by_hand_invalid(),
        "contents": contents(),
    }


def contents() -> list[dict[str, Any]]:
    """Contents of each kind of exchange: ``good`` ones, and others that are refused with
    bad-message."""
    rows = []
    for kind, (question, reply, *_) in EXCHANGE_KINDS.items():
        for tag, struct in (("question", question), ("reply", reply)):
            about = {"kind": kind, "of": tag}
            info = types.type_info(struct)
            assert isinstance(info, types.StructType)
            full = allowed(info)[0]
            rows.append({**about, "name": "every field", "content": full, "good": True})
            for good, changes in ((True, inside(info)), (False, outside(info))):
                for name, change in changes:
                    row = {"name": name, "content": full | change, "good": good}
                    rows.append(about | row)
            for field in info.fields:
                if field.required:
                    content = {k: v for k, v in full.items() if k != field.name}
                    row = {"name": f"without {field.name}", "content": content, "good": False}
                    rows.append(about | row)
    return rows


def by_hand_valid() -> list[dict[str, Any]]:
    beat = {"type": "heartbeat", "task": None, "steps": 0, "fetched": 0}
    welcome = {
        "type": "welcome",
        "coordinator": "x",
        "heartbeat": 15.0,
        "chunk_bytes": 4,
        "ineligible": "",
        "protocol": 1,
        "waits": "",
        "newest": None,
        "warning": "",
    }
    return [
        entry("heartbeat", "white space", ' \n\t{ "type" : "heartbeat" }\r\n', fields=beat),
        entry("heartbeat", "escaped letters", r'{"t\u0079pe":"heart\u0062eat"}', fields=beat),
        entry("heartbeat", "-0 is 0", '{"type":"heartbeat","steps":-0}', fields=beat),
        entry(
            "welcome",
            "an integer where a number is wanted",
            '{"type":"welcome","coordinator":"x","heartbeat":15,"chunk_bytes":4}',
            fields=welcome,
        ),
        entry(
            "welcome",
            "100 characters of 4 bytes each",
            dumps(welcome | {"coordinator": "\U0001f331" * 100}),
            fields=welcome | {"coordinator": "\U0001f331" * 100},
        ),
        entry(
            "welcome",
            "a number with exponent",
            dumps(welcome).replace("15.0", "1.5E+1"),
            fields=welcome,
        ),
    ]


def by_hand_invalid() -> list[dict[str, Any]]:
    filler = [['{"type":"heartbeat","x":"', 1], ["a", m.MAX_CONTROL_BYTES], ['"}', 1]]
    both = [
        ("no type", "{}", "bad-message"),
        ("type is null", '{"type":null}', "bad-message"),
        ("type is a number", '{"type":1}', "bad-message"),
        ("an unknown type", '{"type":"gossip"}', "unknown-type"),
        ("a type in capitals", '{"type":"Heartbeat"}', "unknown-type"),
        ("an empty type", '{"type":""}', "unknown-type"),
        ("nothing", "", "bad-message"),
        ("white space alone", "  ", "bad-message"),
        ("an array", '["heartbeat"]', "bad-message"),
        ("a string", '"heartbeat"', "bad-message"),
        ("null", "null", "bad-message"),
        ("two objects", '{"type":"heartbeat"}{"type":"heartbeat"}', "bad-message"),
        ("cut short", '{"type":"heartbeat"', "bad-message"),
        ("a comma too many", '{"type":"heartbeat",}', "bad-message"),
        ("single quotes", "{'type':'heartbeat'}", "bad-message"),
        ("a comment", '{"type":"heartbeat"}//', "bad-message"),
        ("a byte order mark", '\ufeff{"type":"heartbeat"}', "bad-message"),
        ("NaN", '{"type":"heartbeat","x":NaN}', "bad-message"),
        ("Infinity", '{"type":"heartbeat","x":-Infinity}', "bad-message"),
        ("a raw line feed in a string", '{"type":"heartbeat","x":"\n"}', "bad-message"),
    ]
    cases = [
        {"name": name, "direction": direction, "text": text, "code": code}
        for direction in (DEVICE, COORDINATOR)
        for name, text, code in both
    ]
    cases += [
        {"name": "too long", "direction": direction, "pieces": filler, "code": "too-large"}
        for direction in (DEVICE, COORDINATOR)
    ]
    cases += [
        entry(
            "report",
            f"a loss of {loss}",
            dumps(plain("report")).replace("0.25", loss),
            code="bad-message",
        )
        for loss in ("1e400", "-1e400", "1.0000001e30", "NaN", "Infinity", "1" + "0" * 400)
    ]
    # Only a coordinator reads these: a browser's WebSocket or JSON parser decides some of them
    # before a program can.
    cases += [
        {"name": name, "direction": DEVICE, "hex": content.hex(), "code": "bad-message"}
        for name, content in [
            ("not UTF-8", b'{"type":"heartbeat","x":"\xff"}'),
            ("an overlong encoding", b'{"type":"heartbeat","x":"\xc0\xaf"}'),
            ("an encoded surrogate", b'{"type":"heartbeat","x":"\xed\xa0\x80"}'),
        ]
    ]
    deep = [['{"type":"heartbeat","x":', 1], ["[", 30000], ["]", 30000], ["}", 1]]
    cases += [
        {"name": "30,000 levels", "direction": DEVICE, "pieces": deep, "code": "bad-message"},
        entry(
            "failed",
            "a lone surrogate",
            dumps(plain("failed")).replace("step 7", r"\ud800"),
            code="bad-message",
        ),
        entry(
            "heartbeat",
            "an integer with a fraction of 0",
            '{"type":"heartbeat","steps":1.0}',
            code="bad-message",
        ),
        entry(
            "heartbeat", "type twice", '{"type":"heartbeat","type":"welcome"}', code="unknown-type"
        ),
    ]
    return cases


def entry(tag: str, name: str, text: str, **more: Any) -> dict[str, Any]:
    """``fields`` are left out where they are what the text says."""
    if "fields" in more and json.loads(text) == more["fields"]:
        del more["fields"]
    return {"name": name, "direction": direction_of(tag), "text": text, **more}


def plain(tag: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(msgspec.json.encode(EXAMPLES[tag]))
    return fields


def plain_default(field: types.Field) -> Any:
    return msgspec.to_builtins(
        field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    )


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
