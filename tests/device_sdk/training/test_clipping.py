from __future__ import annotations

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from fleetlearn_device.training.clipping import encode_clipped
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol.encodings import Encoding, find_encoding
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.formats.rows import Format
from fleetlearn_protocol.vector import Vector
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

NAMES = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int4",
    "topk-0.3",
    "topk-0.3-float16",
    "topk-0.3-int8",
]


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def exact_square(found: Vector) -> Fraction:
    """The square of the L2 norm, without any rounding."""
    return sum((Fraction(float(value)) ** 2 for value in found if value), Fraction(0))


def test_a_long_update_is_scaled_to_the_bound_by_hand() -> None:
    sent = encode_clipped(find_encoding("float32"), vector(3, 0, -4), None, 1, 2.5)
    assert sent.clipped
    assert sent.meant.tolist() == [1.5, 0, -2]
    assert np.frombuffer(sent.content, "<f4").tolist() == [1.5, 0, -2]


@pytest.mark.parametrize("bound", [5.0, 5.5])
def test_an_update_no_longer_than_the_bound_travels_bit_for_bit(bound: float) -> None:
    update = vector(3, -0.0, -4)
    sent = encode_clipped(find_encoding("float32"), update, None, 1, bound)
    assert not sent.clipped
    assert bytes(sent.content) == update.tobytes()


def test_what_earlier_updates_left_is_in_the_bound() -> None:
    sent = encode_clipped(find_encoding("float32"), vector(3, 0), vector(0, 4), 1, 2.5)
    assert sent.clipped
    assert sent.meant.tolist() == [1.5, 2]


def test_a_sum_beyond_float32_is_clipped_not_infinite() -> None:
    huge = vector(3e38, -3e38)
    sent = encode_clipped(find_encoding("float32"), huge, huge, 1, 1.0)
    np.testing.assert_allclose(sent.meant, [sqrt(0.5), -sqrt(0.5)], rtol=1e-6)


def test_rounding_that_makes_an_update_longer_is_taken_back() -> None:
    """bfloat16 has 8 bits: 1.0059 is rounded up to 1.0078, which is longer than the bound. This is
    no clipping: the update was not too long before it was encoded."""
    update, bound = vector(1.0059), 1.006
    encoding = find_encoding("bfloat16")
    assert encoding.decode(encoding.encode(update), 1)[0] > bound
    sent = encode_clipped(encoding, update, None, 1, bound)
    assert (sent.clipped, sent.meant.tolist()) == (False, [1.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_is_not_finite_has_diverged(name: str, bad: float) -> None:
    with pytest.raises(DivergedError, match="not finite"):
        encode_clipped(find_encoding(name), vector(1, bad), None, 1, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_normal_updates_lose_next_to_nothing_of_the_bound(name: str) -> None:
    """Where clipping is needed the update has nearly the bound's length: it is not made shorter
    than that without need."""
    update = np.random.default_rng(3).standard_normal(10_000).astype(np.float32)
    sent = encode_clipped(find_encoding(name), update, None, 5, 0.5)
    assert sent.clipped
    kept = 0.85 if name.startswith("topk") else 0.998
    assert kept * 0.5 < np.linalg.norm(sent.meant.astype(np.float64)) <= 0.5


def elements() -> st.SearchStrategy[float]:
    extreme = [0.0, -0.0, 1e-45, -1e-38, 6e-8, 65504.0, 7e4, 3.4e38, -3.4e38, 1.0, 1 + 2**-23]
    return st.one_of(st.sampled_from(extreme), st.floats(width=32))


@given(
    name=st.sampled_from(NAMES),
    update=arrays(np.float32, st.integers(1, 70), elements=elements()),
    with_left=st.booleans(),
    seed=st.integers(0, 2**53 - 1),
    bound=st.one_of(st.sampled_from([1e-30, 4e-8, 1e-7, 1.0, 1e30]), st.floats(1e-30, 1e30)),
)
@example("float16", vector(*[4e-8] * 3), False, 0, 4e-8)
@example("int8", vector(*[1e-45] * 9), True, 0, 1e-30)
def test_no_bytes_mean_more_than_the_bound(
    name: str, update: Vector, with_left: bool, seed: int, bound: float
) -> None:
    """Whatever the update, its encoding and the bound: the norm of what is decoded, without any
    rounding, is at most the bound (and the last bits of the sum in float64)."""
    encoding, left = find_encoding(name), update[::-1].copy() if with_left else None
    try:
        sent = encode_clipped(encoding, update, left, seed, bound)
    except DivergedError:
        assert not np.isfinite(update).all()
        return
    except ProtocolError:  # half precision ends at 65504: no encoding can make these bytes
        assert "float16" in name
        assert bound > 65504
        return
    meant = encoding.decode(sent.content, len(update))
    encoding.check(sent.content, len(update))
    assert meant.tobytes() == sent.meant.tobytes()
    assert exact_square(meant) <= Fraction(bound * (1 + 2.0**-45)) ** 2
    # what stays on the device is no longer than the bound either, give or take a rounding
    kept = np.linalg.norm(sent.whole.astype(np.float64) - meant)
    assert kept <= 2 * bound


def test_each_try_goes_twice_as_far() -> None:
    """Just below 1 + 2^-7 the nearest bfloat16 is 1 + 2^-7. What it is too long by is 2^-23 of it:
    in steps of that size it would take 32,768 tries to where 1 is nearer."""
    update = np.nextafter(vector(1 + 2**-7), np.float32(0))
    sent = encode_clipped(find_encoding("bfloat16"), update, None, 1, float(update[0]))
    assert (sent.clipped, sent.meant.tolist()) == (False, [1.0])


def test_where_no_bytes_are_short_enough_zeros_are_sent() -> None:
    """Of an encoding that makes a little more than 0.5 of all that is not 0, none but zeros are at
    most 0.5 long. No encoding of the protocol is so coarse."""
    signs = Format(
        lambda elements: elements,
        lambda rows, fractions: (rows != 0).astype(np.uint8),
        lambda content, elements: content * np.float32(0.5 + 2**-24),
        lambda content, elements: float(content.max(initial=0)),
    )
    sent = encode_clipped(Encoding("signs", 1, signs), vector(0, -4), None, 1, 0.5)
    assert bytes(sent.content) == bytes(2)
    assert sent.meant.tolist() == [0, 0]
    assert sent.clipped
