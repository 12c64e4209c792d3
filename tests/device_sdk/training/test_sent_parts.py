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
        contents, tied, _ = encode_parts({"update": name}, {"update": update}, seed, tied)
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


def test_a_clipped_update_leaves_what_did_not_travel_of_the_clipped_one_by_hand() -> None:
    """What clipping took away is gone: half of everything here."""
    asked = {"update": "topk-0.5"}
    sent = encode_parts(asked, {"update": np.array([-4, 3], np.float32)}, 1, {}, clip=2.5)
    assert find_encoding("topk-0.5").decode(sent.contents["update"], 2).tolist() == [-2, 0]
    assert sent.tied["residual"].tolist() == [0, 1.5]
    assert sent.clipped is True
    second = encode_parts(asked, {"update": np.array([0, 0.5], np.float32)}, 1, sent.tied, clip=2.5)
    assert find_encoding("topk-0.5").decode(second.contents["update"], 2).tolist() == [0, 2]
    assert second.tied["residual"].tolist() == [0, 0]
    assert second.clipped is False


@pytest.mark.parametrize("name", ["topk-0.05", "topk-0.05-float16", "topk-0.05-int8"])
def test_the_residual_of_clipped_updates_does_not_grow(name: str) -> None:
    draws, tied = np.random.default_rng(0), dict[str, Vector]()
    for seed in range(40):
        update = 100 * draws.standard_normal(5000).astype(np.float32)
        sent = encode_parts({"update": name}, {"update": update}, seed, tied, clip=0.5)
        tied = sent.tied
        assert sent.clipped
        assert np.linalg.norm(tied["residual"].astype(np.float64)) <= 0.5


def test_other_parts_are_not_clipped() -> None:
    asked = {"update": "float32", "buffers": "float32"}
    sent = encode_parts(asked, {"update": UPDATE, "buffers": UPDATE}, 1, {}, clip=0.1)
    assert sent.contents["buffers"] == UPDATE.tobytes()
    assert np.linalg.norm(np.frombuffer(sent.contents["update"], "<f4")) <= 0.1


def test_without_a_bound_nobody_looks_at_the_norm() -> None:
    assert encode_parts({"update": "float32"}, {"update": UPDATE}, 1, {}).clipped is None
