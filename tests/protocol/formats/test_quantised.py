from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from fleetlearn_protocol.encodings import INT4, INT8, Encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.quantised import quantise
from fleetlearn_protocol.splitmix64 import Fractions
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

both = pytest.mark.parametrize(
    ("encoding", "levels"), [(INT8, 127), (INT4, 7)], ids=["int8", "int4"]
)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def test_bytes_by_hand() -> None:
    """Elements that are integers of the scale are exact, whatever is drawn."""
    vector = np.array([127, -127, 1, 0, -64], np.float32)
    assert INT8.encode(vector, 5).hex() == "0000803f" + "7f8101 00c0".replace(" ", "")
    assert INT4.encode(np.array([7, -7, 1, 0, -4], np.float32), 5).hex() == "0000803f" + "97010c"
    assert INT8.decode(bytes.fromhex("000000407f80ff"), 3).tolist() == [254, -256, -2]
    assert INT4.decode(bytes.fromhex("00000040" + "878f"), 3).tolist() == [14, -16, -2]


def test_a_block_has_its_own_scale() -> None:
    vector = np.repeat(np.array([127, 254, 0.0], np.float32), (256, 256, 3))
    content = INT8.encode(vector)
    assert [content[place : place + 4].hex() for place in (0, 260, 520)] == [
        "0000803f",
        "00000040",
        "00000000",
    ]
    assert INT8.decode(content, 515).tolist() == vector.tolist()


@both
def test_rounding_is_unbiased_element_by_element_in_closed_form(
    encoding: Encoding, levels: int
) -> None:
    """With a fraction below the distance to the integer above, an element is rounded down, else up.
    As the fractions are k / 2^32 and all k are equally likely, the expected value is the element's,
    but for less than 2^-32 of a scale: worked out here in exact arithmetic."""
    vector = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    for x in vector[0]:
        scales, _ = quantise(vector, levels, Fractions(0))
        scale = Fraction(float(scales[0, 0]))
        ratio = Fraction(float(x)) / scale
        assert abs(ratio) <= levels
        below = math.floor(ratio)
        first_up = math.ceil((1 - (ratio - below)) * 2**32)  # the least k that is rounded up
        expected = below + Fraction(2**32 - first_up, 2**32)
        assert abs(expected - ratio) < Fraction(1, 2**32)
        for k, rounded in (
            (first_up - 1, below),
            (first_up, below + 1),
            (0, below),
            (2**32 - 1, below + 1),
        ):
            if 0 <= k < 2**32:
                drawn = Fixed(k / 2**32)
                place = int(np.flatnonzero(vector[0] == x)[0])
                assert quantise(vector, levels, drawn)[1][0, place] == rounded


class Fixed(Fractions):
    """Draws the same fraction each time."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def next(self, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.full(count, self._fraction)


@both
def test_the_mean_over_many_seeds_is_the_vector(encoding: Encoding, levels: int) -> None:
    vector = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    decoded = [
        encoding.decode(encoding.encode(vector, seed), 300).astype(np.float64)
        for seed in range(2000)
    ]
    scales = np.concatenate(
        [
            np.full(len(block), np.abs(block).max() / levels)
            for block in np.split(vector, range(encoding.block, 300, encoding.block))
        ]
    )
    errors = (np.mean(decoded, axis=0) - vector) / scales
    # An element's variance is at most a quarter of its scale squared: 5 standard errors of 300
    # elements.
    assert np.abs(errors).max() < 5 * 0.5 / math.sqrt(2000)
    assert abs(errors.mean()) < 5 * 0.5 / math.sqrt(2000 * 300)
    assert np.abs(np.array(decoded) - vector).max() <= scales.max() * (1 + 1e-6)


@both
@given(hnp.arrays(np.float32, (1, 9), elements=FINITE), st.sampled_from([0.0, 0.5, 1 - 2.0**-32]))
def test_no_integer_is_beyond_the_levels(
    encoding: Encoding, levels: int, vector: np.ndarray, fraction: float
) -> None:  # type: ignore[type-arg]
    scales, integers = quantise(vector, levels, Fixed(fraction))
    assert np.abs(integers.astype(int)).max() <= levels
    assert np.isfinite(scales).all()
    assert (scales.astype(np.float64) * levels >= np.abs(vector).max()).all()


def test_the_half_byte_without_an_element_is_zero() -> None:
    """Else the greatest element of a block would be one that it does not have."""
    content = bytearray(INT4.encode(np.array([1.0, 2.0, 3.0], np.float32)))
    assert INT4.check(content, 3) == 3.0
    content[-1] |= 0x70
    with pytest.raises(
        ProtocolError, match="the last half byte of block 0 has no element"
    ) as caught:
        INT4.check(content, 3)
    assert caught.value.code is Code.BAD_ENCODING


@both
@pytest.mark.parametrize("scale", ["0000c07f", "0000807f", "000080ff"])
def test_a_scale_that_is_not_finite(encoding: Encoding, levels: int, scale: str) -> None:
    good = encoding.encode(np.ones(encoding.block, np.float32)).tobytes()
    with pytest.raises(
        ProtocolError, match=r"the scale of block 1 is -?(nan|inf); it and the"
    ) as caught:
        encoding.check(good + bytes.fromhex(scale) + bytes(encoding.block_bytes - 4))
    assert caught.value.code is Code.NOT_FINITE


@both
def test_elements_that_are_not_finite_though_the_scale_is(encoding: Encoding, levels: int) -> None:
    content = np.array([3e38], "<f4").tobytes() + b"\x77" * (encoding.block_bytes - 4)
    with pytest.raises(
        ProtocolError,
        match=r"the scale of block 0 is 3\.0+5.*e\+38; it and the block's elements must",
    ):
        encoding.check(content)
