from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_device.training.sent_parts import encode_parts, residual_of
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.vector import Vector

UPDATE = np.array([0.5, -3, 1, 0, 2], np.float32)
CONTROL = np.ones(5, np.float32)


def test_only_top_k_leaves_a_residual() -> None:
    for name in ("float32", "float16", "int8", "int4"):
        assert residual_of({"update": name}) == ()
        assert encode_parts({"update": name}, {"update": UPDATE}, 1, {}).tied == {}
    assert residual_of({"update": "topk-0.4-int8", "control": "float32"}) == ("residual",)


def test_what_did_not_travel_is_added_to_the_next_update_by_hand() -> None:
    asked = {"update": "topk-0.4"}
    first = encode_parts(asked, {"update": UPDATE}, 1, {})
    assert find_encoding("topk-0.4").decode(first.contents["update"], 5).tolist() == [
        0,
        -3,
        0,
        0,
        2,
    ]
    assert {name: vector.tolist() for name, vector in first.tied.items()} == {
        "residual": [0.5, 0, 1, 0, 0]
    }
    second = encode_parts(asked, {"update": UPDATE}, 1, first.tied)
    assert find_encoding("topk-0.4").decode(second.contents["update"], 5).tolist() == [
        0,
        -3,
        2,
        0,
        0,
    ]
    assert second.tied["residual"].tolist() == [1, 0, 0, 0, 2]


@pytest.mark.parametrize("name", ["topk-0.05", "topk-0.05-float16", "topk-0.05-int8"])
def test_nothing_is_lost_over_many_rounds(name: str) -> None:
    """The sum of what was decoded and the residual is the sum of the updates, what values are
    rounded to included."""
    draws, encoding = np.random.default_rng(0), find_encoding(name)
    total, arrived, tied = np.zeros(5000), np.zeros(5000), dict[str, Vector]()
    for seed in range(30):
        update = draws.standard_normal(5000).astype(np.float32)
        contents, tied = encode_parts({"update": name}, {"update": update}, seed, tied)
        total += update
        arrived += encoding.decode(contents["update"], 5000)
    np.testing.assert_allclose(arrived + tied["residual"], total, atol=1e-4)
    assert np.abs(tied["residual"]).max() < np.abs(total).max()


def test_other_parts_are_encoded_as_they_are() -> None:
    asked = {"update": "topk-0.4", "control": "float32"}
    sent = encode_parts(
        asked, {"update": UPDATE, "control": CONTROL}, 1, {"residual": UPDATE, "control": UPDATE}
    )
    assert sent.contents["control"] == CONTROL.tobytes()
    assert list(sent.contents) == ["update", "control"]
    assert list(sent.tied) == ["residual"]


def test_a_part_that_its_encoding_cannot_hold_has_diverged() -> None:
    with pytest.raises(DivergedError, match="float16 holds up to 65504"):
        encode_parts({"update": "float16"}, {"update": 1e5 * UPDATE}, 1, {})
