from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest
from fleetlearn_protocol import messages as m
from fleetlearn_protocol.errors import MAX_TEXT, Code, FleetError, ProtocolError, clip
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, content_of, fields_of
from hypothesis import given
from hypothesis import strategies as st

REPORT = m.Report("t1-1", 1, (m.Part("update", "float32", 40, 0),), 100, 5, 1.0, True, 0.5)


def refused(text: str | bytes, decode: Any = m.decode_from_device) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(text)
    return caught.value


def test_tags_are_one_for_each_message_and_told_apart_by_direction() -> None:
    tags = [
        kind.__struct_config__.tag for kind in get_args(m.FromDevice) + get_args(m.FromCoordinator)
    ]
    assert len(set(tags)) == len(tags) == 21


@pytest.mark.parametrize("kind", get_args(m.FromDevice) + get_args(m.FromCoordinator))
def test_every_message_has_a_docstring_and_is_immutable(kind: type[m.Message]) -> None:
    assert kind.__doc__
    assert kind.__struct_config__.frozen


def test_encoded_as_its_field_names() -> None:
    assert json.loads(m.encode(m.Fetch("0" * 64, 5))) == {
        "type": "fetch",
        "sha256": "0" * 64,
        "offset": 5,
        "end": None,
        "http": False,
        "selection": None,
    }


def test_bytes_and_text_decode_alike() -> None:
    text = m.encode(REPORT)
    assert m.decode_from_device(text) == m.decode_from_device(text.encode()) == REPORT


def test_the_error_names_the_field_and_what_was_expected() -> None:
    error = refused('{"type":"heartbeat","steps":-1}')
    assert error.code is Code.BAD_MESSAGE
    assert error.text == "heartbeat does not fit the protocol: Expected `int` >= 0 - at `$.steps`"


def test_the_error_names_the_types_that_are_known() -> None:
    error = refused('{"type":"gossip"}')
    assert error.code is Code.UNKNOWN_TYPE
    assert error.text == (
        "a message of type 'gossip' was sent; here go check-in, failed, fetch, finished, "
        "heartbeat, reply, report, uploaded"
    )


def test_a_sender_s_own_words_do_not_decide_the_code() -> None:
    """msgspec's text for a wrong literal quotes it, so the text must not be searched for the
    field's name."""
    error = refused('{"type":"failed","task":"t","code":"x - at `$.type`"}')
    assert error.code is Code.BAD_MESSAGE


def test_an_unknown_type_is_named_briefly() -> None:
    assert len(refused(json.dumps({"type": "x" * 60000})).text) < 200


@pytest.mark.parametrize(
    ("size", "good"), [(m.MAX_CONTROL_BYTES, True), (m.MAX_CONTROL_BYTES + 1, False)]
)
@pytest.mark.parametrize("letter", ["a", "é", "🌱"])
def test_the_limit_is_in_bytes_of_utf8(size: int, good: bool, letter: str) -> None:
    start, end = '{"type":"heartbeat","x":"', '"}'
    room = size - len(start) - len(end)
    width = len(letter.encode())
    text = start + letter * (room // width) + "a" * (room % width) + end
    assert len(text.encode()) == size
    for given_text in (text, text.encode()):
        if good:
            assert m.decode_from_device(given_text) == m.Heartbeat()
        else:
            assert refused(given_text).code is Code.TOO_LARGE


def test_text_with_a_lone_surrogate() -> None:
    assert refused('{"type":"heartbeat","x":"\ud800"}').code is Code.BAD_MESSAGE


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (msgspec.structs.replace(REPORT, loss=math.nan), "$.loss"),
        (msgspec.structs.replace(REPORT, metrics={"accuracy": math.inf}), "$.metrics"),
        (msgspec.structs.replace(REPORT, task="../up"), "$.task"),
        (m.Failed("t", "stopping", "x" * 1001), "$.text"),
        (m.Welcome("x", 0.0, 4), "$.heartbeat"),
        (m.Cancel("t", Code.ROUND_OVER, "x" * 1001), "$.text"),
    ],
)
def test_what_would_be_refused_is_not_sent(message: Any, field: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(field)) as caught:
        m.encode(message)
    assert caught.value.code is Code.BAD_MESSAGE


@pytest.mark.parametrize("text", ["\ud800", 1j])
def test_what_is_no_json_is_not_sent(text: Any) -> None:
    with pytest.raises(ProtocolError, match="Failed cannot be sent") as caught:
        m.encode(m.Failed("t", "stopping", text))
    assert caught.value.code is Code.BAD_MESSAGE


def test_a_message_above_the_limit_is_not_sent() -> None:
    wide = {("m" * 100 + str(i)): 0.1 for i in range(64)}
    m.encode(msgspec.structs.replace(REPORT, metrics=wide))  # 64 long names fit
    wide = {("m" * 1100 + str(i)): 0.1 for i in range(64)}
    with pytest.raises(ProtocolError) as caught:
        m.encode(msgspec.structs.replace(REPORT, metrics=wide))
    assert caught.value.code is Code.TOO_LARGE


IDENTIFIERS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
VALUES = [
    None,
    True,
    0,
    1,
    -1,
    2**53,
    0.5,
    1e31,
    "",
    "t1",
    "0" * 64,
    "x" * 1001,
    "float32",
    "stopping",
    [],
    {},
    {"update": "float32"},
    [{"name": "x", "encoding": "x", "size": 1, "crc32": 0}],
]
FIELDS = sorted({name for kind in get_args(m.FromDevice) for name in kind.__struct_fields__})
TAGS = [kind.__struct_config__.tag for kind in get_args(m.FromDevice)]


def outcome(text: str | bytes) -> m.FromDevice | Code:
    try:
        return m.decode_from_device(text)
    except ProtocolError as error:
        return error.code


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_code(content: bytes) -> None:
    found = outcome(content)
    # Hypothesis takes strings of the code above too, such as a whole heartbeat.
    assert found in (Code.BAD_MESSAGE, Code.UNKNOWN_TYPE) or isinstance(found, m.Heartbeat)


@given(st.sampled_from(TAGS), st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES)))
def test_any_fields_are_a_message_that_can_be_sent_or_refused(
    tag: str, fields: dict[str, Any]
) -> None:
    found = outcome(json.dumps({"type": tag, **fields}))
    assert found is Code.BAD_MESSAGE or outcome(m.encode(found)) == found


@given(
    st.builds(
        m.Report,
        task=IDENTIFIERS,
        round=st.integers(0, 2**31),
        parts=st.lists(
            st.builds(
                m.Part,
                name=IDENTIFIERS,
                encoding=IDENTIFIERS,
                size=st.integers(1, m.MAX_VECTOR_BYTES),
                crc32=st.integers(0, 2**32 - 1),
            ),
            min_size=1,
            max_size=m.MAX_VECTORS,
        ).map(tuple),
        examples=st.integers(1, 2**31),
        steps=st.integers(1, 2**31),
        epochs=st.floats(0, 1e6),
        complete=st.booleans(),
        loss=st.floats(-1e30, 1e30),
        metrics=st.dictionaries(
            st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.-]{0,127}\Z"),
            st.floats(-1e30, 1e30),
            max_size=64,
        ),
        seconds=st.floats(0, 366 * 86400),
        evaluation=st.none()
        | st.builds(m.Evaluation, st.integers(1, 2**31), st.floats(-1e30, 1e30)),
    )
)
def test_a_report_within_bounds_comes_back_exactly(report: m.Report) -> None:
    assert m.decode_from_device(m.encode(report)) == report


def test_codes_are_words_that_never_change() -> None:
    assert [code.value for code in Code] == [
        "bad-message",
        "unknown-type",
        "too-large",
        "bad-version",
        "bad-frame",
        "out-of-turn",
        "duplicate",
        "unknown-task",
        "stale-round",
        "not-wanted",
        "unknown-content",
        "wrong-offset",
        "wrong-length",
        "wrong-hash",
        "wrong-parts",
        "bad-encoding",
        "not-finite",
        "out-of-range",
        "norm-too-large",
        "busy",
        "replaced",
        "round-over",
    ]


@given(
    st.text(st.characters(), max_size=2 * MAX_TEXT)
    | st.just("x" * MAX_TEXT)
    | st.just("x" * (MAX_TEXT + 1))
)
def test_an_error_s_text_always_fits_a_message(text: str) -> None:
    error = FleetError(Code.BUSY, text)
    refusal = m.Refused(error.code, error.text)
    assert m.decode_from_coordinator(m.encode(refusal)) == refusal
    assert str(error) == f"{error.text} [busy]"


def test_messages_need_no_numpy() -> None:
    code = (
        "import sys; from fleetlearn_protocol import Code, ProtocolError, errors, frames, "
        "messages\nassert not {'numpy', 'safetensors'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_vectors_and_parts_by_name() -> None:
    assert REPORT.part("update") == REPORT.parts[0]
    two = msgspec.structs.replace(REPORT, parts=(*REPORT.parts, m.Part("control", "float32", 8, 0)))
    assert (REPORT.size, two.size) == (40, 48)
    with pytest.raises(KeyError, match="control"):
        REPORT.part("control")
    model = m.VectorReference("model", "0" * 64, 40, "float32")
    task = m.Task("t1", 1, "0" * 64, (model,), {"update": "float32"}, {}, 1, 0, 0, 1.0)
    assert task.vector("model") == model
    with pytest.raises(KeyError, match="control"):
        task.vector("control")


def test_clip() -> None:
    assert clip("as it is") == "as it is"
    assert clip("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert clip("x" * (MAX_TEXT + 1)) == "x" * (MAX_TEXT - 1) + "…"
    assert clip("a\ud800b") == "a?b"


@pytest.mark.parametrize("kind", EXCHANGE_KINDS)
def test_what_an_exchange_sends_is_what_the_table_says(kind: str) -> None:
    row = EXCHANGE_KINDS[kind]
    content = {} if row.listed is None else {row.listed: ["c1"]}
    question = m.Question("t-e1-1", kind, 9.0, content=content, bundle="0" * 64)
    assert m.decode_from_coordinator(m.encode(question)) == question
    assert isinstance(content_of(question), row.question)


def test_a_content_comes_back_as_its_kind_and_is_checked() -> None:
    found = m.Evaluation(5, 2.5, {"accuracy": 3.0})
    reply = m.Reply("t-e1-1", "evaluation", fields_of(found))
    assert content_of(m.decode_from_device(m.encode(reply))) == found
    nan = m.Reply("t-e1-1", "evaluation", fields_of(m.Evaluation(5, math.nan)))
    for bad, text in [
        (nan, "loss_sum"),
        (m.Reply("t-e1-1", "evaluation", {"examples": 5}), "loss_sum"),
        (m.Reply("t-e1-1", "gossip"), "the kind gossip came; known are evaluation"),
    ]:
        with pytest.raises(ProtocolError, match=text) as caught:
            content_of(bad)
        assert caught.value.code is Code.BAD_MESSAGE
