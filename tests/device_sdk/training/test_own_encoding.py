"""Own encodings on a device: which tasks it takes, what it sends and keeps, what its owner's code
does wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.session.abilities import unsupported
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.own_algorithm import open_task_encoding
from fleetlearn_device.training.sent_parts import encode_parts, residual_of
from fleetlearn_device.training.train import DivergedError, TrainingError
from fleetlearn_protocol import BlockFormat
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.messages import (
    OwnEncoding,
    Part,
    Report,
    SecureTask,
    Task,
    VectorReference,
)
from fleetlearn_protocol.own_encodings import open_encoding
from fleetlearn_protocol.vector import Vector
from own_formats import as_own, signs

WANTED = OwnEncoding("thin_updates:signs", {"block": 64.0})
NAME = open_encoding(WANTED, signs(64), "there", residual=True).name
TASK = Task(
    task="t-1",
    round=1,
    bundle="a" * 64,
    vectors=(VectorReference("model", "b" * 64, 8, "float32"),),
    parts={"update": NAME},
    hyper={},
    epochs=1,
    batch_size=10,
    seed=1,
    deadline=10.0,
    encoding=WANTED,
)


def test_a_task_of_it_is_taken_where_its_owner_allows_it() -> None:
    assert unsupported(TASK, (), ()) is None
    open_task_encoding(TASK, {WANTED.function: signs})
    with pytest.raises(UnsupportedError, match="--allow-function thin_updates:signs allows it"):
        open_task_encoding(TASK, {"a:b": signs})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"encoding": None}, "and names no function that makes the encoding"),
        ({"parts": {"update": "int8"}}, "as int8, and names the function thin_updates:signs"),
        ({"clip": 1.0}, "with a mask, a bound, noise, or rows"),
        ({"secure": SecureTask("helper", 2, 16)}, "with a mask, a bound, noise, or rows"),
        ({"parts": {"update": NAME, "rows": "uint32"}}, "with a mask, a bound, noise, or rows"),
        ({"parts": {"update": NAME, "more": "float32"}}, "asks for the parts update"),
    ],
)
def test_what_no_device_encodes_so(changes: dict[str, Any], text: str) -> None:
    task = msgspec.structs.replace(TASK, **changes)
    assert text in (unsupported(task, (), (), can_mask=True) or "")


def test_what_did_not_travel_is_added_to_the_next_update() -> None:
    """The sum of what was decoded and the residual is the sum of the updates."""
    assert residual_of({"update": NAME}) == ("residual",)
    assert residual_of({"update": NAME.removesuffix("-residual")}) == ()
    draws, encoding = np.random.default_rng(0), find_encoding(NAME)
    total, arrived, tied = np.zeros(1000), np.zeros(1000), dict[str, Vector]()
    for seed in range(30):
        update = draws.standard_normal(1000).astype(np.float32)
        sent = encode_parts({"update": NAME}, {"update": update}, seed, tied)
        tied = sent.tied
        total += update
        arrived += encoding.decode(sent.contents["update"], 1000)
    np.testing.assert_allclose(arrived + tied["residual"], total, atol=1e-4)


def fails(rows: Any, fractions: Any) -> Any:
    raise RuntimeError("a mistake")


def holds_none(rows: Any, fractions: Any) -> Any:
    raise ProtocolError(Code.OUT_OF_RANGE, "too large for me")


@pytest.mark.parametrize(
    ("encode", "kind", "text"),
    [
        (fails, TrainingError, "encode failed: RuntimeError: a mistake"),
        (lambda rows, fractions: rows, TrainingError, "encode returned float32"),
        (holds_none, DivergedError, "too large for me"),
    ],
)
def test_what_the_owner_s_code_does_wrong_ends_the_task(
    encode: Callable[..., Any], kind: type[Exception], text: str
) -> None:
    made = as_own("int8")
    wrong = BlockFormat(made.block, made.size, encode, made.decode)
    name = open_encoding(OwnEncoding("a:wrong"), wrong, "the encoding a:wrong").name
    with pytest.raises(kind, match=text) as refused:
        encode_parts({"update": name}, {"update": np.ones(300, np.float32)}, 1, {})
    assert (kind is DivergedError) == isinstance(refused.value, DivergedError)


def test_an_update_on_the_disk_is_sent_by_a_device_that_does_not_know_its_encoding(
    tmp_path: Path,
) -> None:
    """It was started again, and has had no task since."""
    content = bytes(range(200))
    part = Part("update", f"own-36-{'0' * 12}", len(content), 0)
    state = StateDirectory(tmp_path)
    state.outbox.save(Report("t1", 3, (part,), 7, 3, 2.0, True, 0.5), (content,))
    chunks = [unpack_chunk(frame) for frame in state.outbox.chunks(5, 0, 100)]
    assert [len(chunk.payload) for chunk in chunks] == [72, 72, 56]
    state.close()
