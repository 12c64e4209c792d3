from __future__ import annotations

import msgspec
import pytest
from fleetlearn_device.session.abilities import unsupported
from fleetlearn_protocol.messages import Task, VectorReference

VECTORS = (VectorReference("model", "b" * 64, 8, "float32"),)
TASK = Task(
    "t1", 3, "a" * 64, VECTORS, {"update": "float32"}, {}, 1, 0, 5, 60.0, clip=0.5, local_noise=1.0
)


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8"])
def test_noise_on_an_update_that_is_bounded_is_known(encoding: str) -> None:
    task = msgspec.structs.replace(TASK, parts={"update": encoding})
    assert unsupported(task, (), ()) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": None}, "does not bound the update"),
        ({"parts": {"update": "float32", "buffers": "float32"}}, "asks for the part buffers"),
        ({"parts": {"update": "topk-0.01"}}, "as topk-0.01, which leaves out most of it"),
    ],
)
def test_noise_that_does_not_hide_what_is_sent_is_not_added(
    changes: dict[str, object], words: str
) -> None:
    text = unsupported(msgspec.structs.replace(TASK, **changes), (), ())
    assert text is not None
    assert words in text
    without = msgspec.structs.replace(TASK, **changes, local_noise=None)
    assert unsupported(without, (), ()) is None, "without noise it is a task like any other"


def test_a_masked_update_is_not_known_yet_and_nothing_is_sent_in_its_place() -> None:
    task = msgspec.structs.replace(TASK, local_noise=None, parts={"update": "masked"})
    text = unsupported(task, (), ())
    assert text is not None
    assert "asks for the parts update (masked); this device knows update (float32" in text
    (model,) = TASK.vectors
    masked = msgspec.structs.replace(model, encoding="masked")
    sent = msgspec.structs.replace(TASK, local_noise=None, vectors=(masked,))
    assert "sends the vectors model (masked)" in str(unsupported(sent, (), ()))
