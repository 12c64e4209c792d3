"""The weighted mean: exact, so independent of order, and refusing what it could not add exactly."""

import math
from fractions import Fraction

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.exact_mean import (
    BLOCK,
    GRIDS,
    MAX_ELEMENT,
    MAX_UPDATES,
    MAX_WEIGHT,
    Sum,
    multiplier,
)
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

Updates = list[tuple[Vector, int]]


def some_updates(size: int, count: int, seed: int = 0) -> Updates:
    """Elements of magnitudes 1e-30 to 1e6, both signs, some zeros; weights from 1 to the most."""
    random = np.random.default_rng(seed)
    updates: Updates = []
    for index in range(count):
        top = 6 if index % 2 else 0
        vector = 10.0 ** random.uniform(-30, top, size)
        vector *= random.choice([-1.0, 0.0, 1.0], size, p=[0.45, 0.1, 0.45])
        updates.append((vector.astype(np.float32), int(MAX_WEIGHT ** random.uniform(0, 1))))
    return updates


def add_vector(total: Sum, vector: Vector, weight: int) -> None:
    exact_mean.add(total, (vector,), weight, float(np.abs(vector).max()))


def added(size: int, updates: Updates) -> Sum:
    total = exact_mean.init(size)
    for vector, weight in updates:
        add_vector(total, vector, weight)
    return total


def bits(total: Sum) -> tuple[object, ...]:
    bins = {exponent: held.tobytes() for exponent, held in total.bins.items()}
    return bins, total.whole.copy(), total.weight, total.count


UNIT = GRIDS[-1]
"""The exponent of the finest grid."""


def whole(total: Sum) -> tuple[list[int], int, int]:
    """The sum in units of the finest grid, however the bins share it: exact, as they are multiples
    of their grids."""
    sums = [0] * total.size
    for exponent, held in total.bins.items():
        for element, value in enumerate(np.ldexp(held, -exponent).tolist()):
            sums[element] += int(value) << (exponent - UNIT)
    return sums, total.weight, total.count


def finest(largest: Fraction) -> int:
    """The exponent of the grid at which an update of this largest product ends, from the
    docstring's words."""
    end = -44
    while end > UNIT and 0 < largest < Fraction(2) ** (end + 24):
        end -= 36
    return end


def rounded(updates: Updates, element: int) -> int:
    """The sum of the products, each rounded to its update's finest grid, halves to even: in units
    of the finest."""
    found = 0
    for vector, weight in updates:
        end = finest(Fraction(float(np.abs(vector).max(initial=0.0))) * weight)
        product = Fraction(float(vector[element])) * weight
        found += round(product / Fraction(2) ** end) << (end - UNIT)
    return found


def error(updates: Updates) -> Fraction:
    """The most that the mean of these may be off by: what was dropped of each, and 2 roundings are
    for the caller."""
    ends = [finest(Fraction(float(np.abs(vector).max())) * weight) for vector, weight in updates]
    return sum(Fraction(2) ** (end - 1) for end in ends) / sum(weight for _, weight in updates)


def columns(updates: Updates) -> tuple[Vector, np.ndarray, np.ndarray]:
    """Updates, weights, largest elements."""
    rows = np.stack([vector for vector, _ in updates])
    weights = np.array([weight for _, weight in updates], np.int64)
    return rows, weights, np.abs(rows).max(axis=1).astype(np.float64)


def kinds(size: int, count: int) -> list[Updates]:
    """Updates that need two of the usual bins, updates for which one is enough, updates at the
    border of the two, very large and very small ones, and all of these."""
    far = some_updates(size, count)
    small = [np.float32(2.0**-20 / max(np.abs(vector).max(), 1.0)) for vector, _ in far]
    near = [(row[0] * by, 1 + row[1] % 50) for row, by in zip(far, small, strict=True)]
    weights = [(64, 63, 65, 1, 9)[place % 5] for place in range(count)]
    edge = [(np.clip(row[0], -2, 2), weight) for row, weight in zip(far, weights, strict=True)]
    large = [np.float32(MAX_ELEMENT / max(np.abs(vector).max(), 1.0)) for vector, _ in far]
    huge = [(row[0] * by, row[1]) for row, by in zip(far, large, strict=True)]
    tiny = [(vector * np.float32(1e-38), weight) for vector, weight in near]
    every = [[far, near, edge, huge, tiny][place % 5][place] for place in range(count)]
    return [far, near, edge, huge, tiny, every]


def mean_in_fractions(updates: Updates, element: int) -> Fraction:
    weighted = sum(
        (Fraction(float(vector[element])) * weight for vector, weight in updates), Fraction()
    )
    return weighted / sum(weight for _, weight in updates)


@pytest.mark.parametrize(("size", "count"), [(1, 2), (7, 40), (1000, 25), (BLOCK + 3, 12)])
def test_a_hundred_random_orders_give_the_same_bits(size: int, count: int) -> None:
    random = np.random.default_rng(1)
    for updates in kinds(size, count):
        expected = added(size, updates)
        exactly, mean = whole(expected), exact_mean.mean(expected).tobytes()
        for turn in range(100):
            total = added(size, [updates[place] for place in random.permutation(count)])
            assert turn % 10 or whole(total) == exactly
            assert exact_mean.mean(total).tobytes() == mean


def test_a_plain_float64_sum_does_depend_on_order() -> None:
    """If these updates were too easy, the tests above would show nothing."""
    updates = some_updates(1000, 25)
    forwards, backwards = np.zeros(1000), np.zeros(1000)
    for vector, weight in updates:
        forwards += vector.astype(np.float64) * weight
    for vector, weight in updates[::-1]:
        backwards += vector.astype(np.float64) * weight
    assert not np.array_equal(forwards, backwards)


def test_the_mean_is_the_exact_one_to_its_last_roundings() -> None:
    updates = some_updates(300, 40, seed=3)
    mean = exact_mean.mean(added(300, updates))
    for element in range(300):
        exact = mean_in_fractions(updates, element)
        off = abs(Fraction(float(mean[element])) - exact)
        assert off <= Fraction(1, 2**45) + abs(exact) / 2**51


def test_a_mean_by_hand() -> None:
    total = exact_mean.init(3)
    add_vector(total, np.array([1.0, 0.5, -2.0], np.float32), 1)
    add_vector(total, np.array([4.0, 0.25, 2.0], np.float32), 2)
    add_vector(total, np.array([-1.0, 0.0, 0.0], np.float32), 5)
    # (1 + 8 - 5) / 8, (0.5 + 0.5) / 8, (-2 + 4) / 8
    assert exact_mean.mean(total).tolist() == [0.5, 0.125, 0.25]
    assert (total.weight, total.count) == (8, 3)


def test_the_mean_agrees_with_fsum_on_ordinary_updates() -> None:
    random = np.random.default_rng(5)
    vectors = [(random.standard_normal(500) * 1e-2).astype(np.float32) for _ in range(30)]
    weights = [int(weight) for weight in random.integers(1, 2000, 30)]
    mean = exact_mean.mean(added(500, list(zip(vectors, weights, strict=True))))
    for element in range(500):
        exact = math.fsum(
            float(v[element]) * w for v, w in zip(vectors, weights, strict=True)
        ) / sum(weights)
        assert math.isclose(mean[element], exact, rel_tol=1e-15, abs_tol=2.0**-45)


FLOAT32 = st.floats(width=32, allow_nan=False, min_value=-MAX_ELEMENT, max_value=MAX_ELEMENT)
SCALES = st.sampled_from([0, 0, 0, 7, 20, 40, 60, 100, 140]).map(lambda by: np.float32(2.0**-by))


@st.composite
def some_rows(draw: st.DrawFn) -> Updates:
    """Updates of every magnitude that float32 has, up to the largest allowed, with any weight."""
    size = draw(st.integers(1, 5))
    rows = st.lists(FLOAT32, min_size=size, max_size=size)
    vectors = rows.map(lambda row: np.array(row, np.float32))
    update = st.tuples(vectors, SCALES, st.integers(1, MAX_WEIGHT) | st.integers(1, 100))
    drawn = draw(st.lists(update, min_size=1, max_size=12))
    return [(vector * scale, weight) for vector, scale, weight in drawn]


@settings(max_examples=200, deadline=None)
@given(some_rows(), st.data())
def test_any_updates_in_any_order_and_over_a_restart(updates: Updates, data: st.DataObject) -> None:
    size = len(updates[0][0])
    expected = added(size, updates)
    assert whole(expected)[0] == [rounded(updates, place) for place in range(size)]
    many = exact_mean.init(size)
    rows, *others = columns(updates)
    exact_mean.add_many(many, [rows], *others)

    shuffled = data.draw(st.permutations(updates))
    cut = data.draw(st.integers(0, len(shuffled)))
    saved = save(exact_mean.to_tensors(added(size, shuffled[:cut])))
    total = exact_mean.from_tensors(load(saved))
    for vector, weight in shuffled[cut:]:
        add_vector(total, vector, weight)

    for other in (many, total):
        assert whole(other) == whole(expected)
        assert exact_mean.mean(other).tobytes() == exact_mean.mean(expected).tobytes()
    for place, value in enumerate(exact_mean.mean(total)):
        exact = mean_in_fractions(updates, place)
        assert abs(Fraction(float(value)) - exact) <= error(updates) + abs(exact) / 2**51


@settings(max_examples=100, deadline=None)
@given(some_rows(), st.integers(1, 5))
def test_partial_sums_add_up_to_the_whole_one(updates: Updates, cuts: int) -> None:
    """Bins of the same grid are sums of multiples of it: those of several sums together are those
    of one."""
    size = len(updates[0][0])
    total = exact_mean.init(size)
    for first in range(cuts):
        part = added(size, updates[first::cuts])
        for exponent, held in part.bins.items():
            total.bin_of(exponent)[:] += held
        total.weight, total.count = total.weight + part.weight, total.count + part.count
    expected = added(size, updates)
    assert whole(total) == whole(expected)
    assert exact_mean.mean(total).tobytes() == exact_mean.mean(expected).tobytes()


@settings(max_examples=100, deadline=None)
@given(some_rows(), st.lists(st.integers(-400, 0), min_size=12, max_size=12))
def test_any_factor_leaves_as_many_digits(updates: Updates, exponents: list[int]) -> None:
    """Each is off by at most 2^-25 of its largest product, or 2^-45 or 2^-297."""
    rows, weights, largest = columns(updates)
    shares = np.ldexp(1.0, exponents[: len(updates)])
    one, many = exact_mean.init(rows.shape[1]), exact_mean.init(rows.shape[1])
    exact_mean.add_many(many, [rows], weights, largest, shares)
    numbers = (column.tolist() for column in (weights, largest, shares))
    for vector, weight, most, share in zip(rows, *numbers, strict=True):
        exact_mean.add(one, [vector], weight, most, share)
    assert whole(one) == whole(many)
    assert exact_mean.mean(one).tobytes() == exact_mean.mean(many).tobytes()
    times = [Fraction(multiplier(int(w), s)) for w, s in zip(weights, shares, strict=True)]
    tolerance = Fraction(0)
    for most, by in zip(largest.tolist(), times, strict=True):
        tolerance += min(Fraction(1, 2**45), max(Fraction(most) * by / 2**25, Fraction(1, 2**297)))
    for place in range(rows.shape[1]):
        exact = sum(Fraction(float(x)) * by for x, by in zip(rows[:, place], times, strict=True))
        assert abs(Fraction(whole(one)[0][place]) * Fraction(2) ** UNIT - exact) <= tolerance


def test_only_bins_that_an_update_needs_take_memory() -> None:
    """Usual updates: 8 bytes for each element, or 16."""
    usual = (np.array([0.01, -0.3, 1e-9], np.float32), 50)
    assert list(added(3, [usual] * 3).bins) == [-44]
    assert sorted(added(3, [usual, (usual[0], 10**6)]).bins) == [-44, -8]
    assert sorted(added(3, [(np.array([1e9, 1, 1], np.float32), 5000)]).bins) == [-44, -8, 28]
    assert list(added(3, [(np.float32(1e-9) * usual[0], 1)]).bins) == [-80]
    zeros = added(3, [(np.zeros(3, np.float32), 1)])
    assert (list(zeros.bins), exact_mean.mean(zeros).tolist()) == ([-44], [0.0] * 3)
    many, rows = exact_mean.init(3), np.stack([usual[0], 0 * usual[0]])
    _, *others = columns([(row, 1) for row in rows])
    exact_mean.add_many(many, [rows], *others)
    assert sorted(many.bins) == [-44, -8]


def test_how_bins_share_a_sum_does_not_show_in_its_roundings() -> None:
    """Half of a coarser grid's step, which can be carried up or down, and digits below that need a
    rounding."""
    low = np.random.default_rng(0).integers(-(2**35), 2**35, 1000) * 2.0**-80
    found = []
    for first, second in [(0, 0.5), (1, -0.5), (-1, 1.5), (2, -1.5)]:
        bins = {-80: low.copy()}
        for exponent, steps in ((-8, first), (-44, second)):
            bins[exponent] = np.full(len(low), steps * 2.0**-8)
        found.append(exact_mean.add_up(Sum(len(low), bins)))
    assert len({each.tobytes() for each in found}) == 1
    exact = [Fraction(1, 2**9) + Fraction(value) for value in low]
    np.testing.assert_allclose(found[0], [float(each) for each in exact], rtol=2.0**-52)


def test_tiny_updates_are_not_lost_beside_the_grid_of_others() -> None:
    """A parameter in farads: its updates are 1e-13. On the grid of 2^-44 the mean would be off by a
    tenth."""
    x = np.array([1.23e-13, -4.5e-14], np.float32)
    mean = exact_mean.mean(added(2, [(x, 1), (3 * x, 1)]))
    np.testing.assert_allclose(mean, 2 * x.astype(np.float64), rtol=1e-7)


def test_one_in_ten_thousand_devices_in_large_units() -> None:
    """Air pressure in Pascal: 6e5 for each of 5,000 examples. It leaves the others' digits as they
    are."""
    large, small = np.array([6e5, 1e-3], np.float32), np.array([1.5, 1e-9], np.float32)
    mean = exact_mean.mean(added(2, [(large, 5000), *[(small, 3)] * 10]))
    exact = [mean_in_fractions([(large, 5000), *[(small, 3)] * 10], place) for place in range(2)]
    np.testing.assert_allclose(mean, [float(each) for each in exact], rtol=2.0**-52, atol=2.0**-45)


def test_a_restored_sum_goes_on_to_the_same_bits_and_shares_no_memory() -> None:
    updates = some_updates(BLOCK + 1, 10)
    total = added(BLOCK + 1, updates[:4])
    tensors = exact_mean.to_tensors(total)
    restored = exact_mean.from_tensors(tensors)
    assert bits(restored)[0] == bits(total)[0]
    assert whole(restored) == whole(total)
    for held in restored.bins.values():
        assert not any(np.shares_memory(held, each) for each in tensors.values())
    for vector, weight in updates[4:]:
        add_vector(restored, vector, weight)
    assert whole(restored) == whole(added(BLOCK + 1, updates))


@pytest.mark.parametrize("scale", [2.0**11, 2.0**-24, 2.0**-47, 2.0**-60, 2.0**-68, 2.0**-104])
def test_the_last_of_the_most_updates_is_added_exactly(scale: float) -> None:
    """The bounds of the module's docstring, reached: 2^17 updates near 2^64 and the largest parts
    for lower bins."""
    x = scale * np.array([2**24 - 1, -(2**24 - 2**17 + 1), 2**23 + 1], np.float32)
    weight = MAX_WEIGHT
    products = [Fraction(float(value)) * weight for value in x]
    if scale == 2.0**11:
        assert Fraction(2) ** 64 - Fraction(2) ** 41 < products[0] < Fraction(2) ** 64
        exact_mean.check(float(x[0]), weight)
    full = {exponent: 2.0 ** (exponent + 52) for exponent in GRIDS}  # no bin takes it whole
    one = Sum(3, whole=full)
    add_vector(one, x, weight)
    assert whole(one)[0] == [rounded([(x, weight)], place) for place in range(3)]

    most = MAX_UPDATES - 1
    bins = {exponent: held * most for exponent, held in one.bins.items()}
    many = Sum(3, bins, one.whole.copy(), weight * most, most)
    for count in (most, MAX_UPDATES):
        assert whole(many)[0] == [value * count for value in whole(one)[0]]
        for exponent, held in many.bins.items():
            single = one.bins[exponent]
            expected = [Fraction(value) * count for value in single]
            assert [Fraction(value) for value in held] == expected
            assert np.abs(held).max() <= 2.0 ** (exponent + 53)
        if many.count < MAX_UPDATES:
            add_vector(many, x, weight)
    exact = [float(Fraction(value) * Fraction(2) ** UNIT / weight) for value in whole(one)[0]]
    np.testing.assert_allclose(exact_mean.mean(many), exact, rtol=2.0**-52)

    before = bits(many)
    with pytest.raises(ProtocolError, match="can hold no more") as refused:
        add_vector(many, x, 1)
    assert refused.value.code is Code.OUT_OF_RANGE
    assert bits(many) == before


REFUSED = [
    (3.0, 0, Code.OUT_OF_RANGE, "weight 0"),
    (3.0, MAX_WEIGHT + 1, Code.OUT_OF_RANGE, "weight"),
    (4e10, 2, Code.OUT_OF_RANGE, r"takes up to 3\.43597e\+10, whatever the weight\. If the loss"),
    (1e38, 1, Code.OUT_OF_RANGE, "lower the learning rate.* scale inputs and targets"),
    (math.inf, 1, Code.NOT_FINITE, "largest element is inf; it must be finite"),
    (math.nan, 1, Code.NOT_FINITE, "nan"),
]


@pytest.mark.parametrize(("largest", "weight", "code", "text"), REFUSED)
def test_what_is_refused_leaves_the_sum_as_it_was(
    largest: float, weight: int, code: Code, text: str
) -> None:
    total = added(4, some_updates(4, 3))
    before = bits(total)
    with pytest.raises(ProtocolError, match=text) as refused:
        exact_mean.add(total, (np.array([0, 0, 0, largest], np.float32),), weight, largest)
    assert refused.value.code is code
    assert bits(total) == before
    assert not exact_mean.passes_check(np.array([largest]), np.array([weight])).any()


def test_the_limit_itself_is_allowed() -> None:
    allowed = [(MAX_ELEMENT, 1), (MAX_ELEMENT, MAX_WEIGHT), (6e5, 5000), (0.0, MAX_WEIGHT)]
    for largest, weight in allowed:
        exact_mean.check(largest, weight)
    assert exact_mean.passes_check(*map(np.array, zip(*allowed, strict=True))).all()
    with pytest.raises(ProtocolError):
        exact_mean.check(float(np.nextafter(np.float32(MAX_ELEMENT), np.float32(np.inf))), 1)


@pytest.mark.parametrize("cuts", [[], [1], [BLOCK], [7, BLOCK + 1, 2 * BLOCK]])
def test_an_update_in_parts_is_the_same_update(cuts: list[int]) -> None:
    size = 2 * BLOCK + 5
    updates = some_updates(size, 3)
    total = exact_mean.init(size)
    for vector, weight in updates:
        exact_mean.add(total, np.split(vector, cuts), weight, float(np.abs(vector).max()))
    assert bits(total) == bits(added(size, updates))


@pytest.mark.parametrize("size", [3, 4])
def test_parts_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"the update's parts have {size} elements; expected 5"):
        exact_mean.add(exact_mean.init(5), [np.ones(size, np.float32)], 1, 1.0)


@pytest.mark.parametrize(
    ("size", "count"), [(1, 2), (7, 40), (610, 100), (BLOCK // 3, 7), (BLOCK + 3, 5)]
)
def test_many_at_once_are_added_as_one_by_one(size: int, count: int) -> None:
    """However they are divided, and after others were added."""
    for updates in kinds(size, count):
        expected = added(size, updates)
        given = columns(updates)
        for cuts in ([], [1], [count // 2, count // 2 + 1], [0, 1, 1, count]):
            total = exact_mean.init(size)
            for part in zip(*(np.split(column, cuts) for column in given), strict=True):
                exact_mean.add_many(total, part[:1], *part[1:])
            assert whole(total) == whole(expected)
            assert exact_mean.mean(total).tobytes() == exact_mean.mean(expected).tobytes()
            total = exact_mean.init(size)
            exact_mean.add_many(total, np.split(given[0], cuts), *given[1:])
            assert whole(total) == whole(expected)
        total = added(size, updates[: count // 2])
        exact_mean.add_many(
            total, [given[0][count // 2 :]], *(column[count // 2 :] for column in given[1:])
        )
        assert whole(total) == whole(expected)
        for nothing in ([], [given[0][:0]], [given[0][:0], given[0][:0]]):
            exact_mean.add_many(total, nothing, *(column[:0] for column in given[1:]))
            assert whole(total) == whole(expected)


@pytest.mark.parametrize("block", [1, 4, 6, 7, 20, 21, 1000])
@pytest.mark.parametrize(("size", "count"), [(7, 11), (1, 9), (20, 3), (21, 1)])
def test_blocks_of_rows_and_of_elements_change_nothing(
    monkeypatch: pytest.MonkeyPatch, block: int, size: int, count: int
) -> None:
    """Whole ones and what is left over: of updates, and of an update's elements."""
    for updates in kinds(size, count):
        monkeypatch.undo()
        expected = added(size, updates)
        monkeypatch.setattr(exact_mean, "BLOCK", block)
        rows, *others = columns(updates)
        spread = np.repeat(rows, 2, axis=1)[:, ::2]
        for parts in ([rows], [rows[:1], rows[1:3], rows[3:]], [np.asfortranarray(rows)], [spread]):
            total = exact_mean.init(size)
            exact_mean.add_many(total, parts, *others)
            assert whole(total) == whole(expected)
        assert bits(added(size, updates)) == bits(expected)


def test_one_rounding_is_enough_up_to_its_bounds() -> None:
    """Products about 2^7 with bits below 2^-44, some halfway between its multiples; as many as
    reach 2^8 and more."""
    most = (2**24 - 1) * 2.0**-46
    for largest, weight in (
        (most, 2**29 - 1),
        (2 * most, 2**29 - 1),
        (most, 2**29 - 4),
        (2.0**-22, 2**29 - 1),
    ):
        x = np.array(
            [largest, -largest, 2.0**-45 / weight, 3 * 2.0**-74, 2.0**-73, 0.3 * largest],
            np.float32,
        )
        for count in (1, 2, 3, 5, 9, 20):
            updates = [(x, weight)] * count
            one, many = added(len(x), updates), exact_mean.init(len(x))
            rows, *others = columns(updates)
            exact_mean.add_many(many, [rows], *others)
            assert whole(one) == whole(many)
            assert whole(one)[0] == [rounded(updates, place) for place in range(len(x))]


def test_small_updates_leave_room_for_the_low_parts_of_all_others() -> None:
    """Those that are in the last bin whole come to just below 2^8; then as many others as a round
    may have."""
    small = np.array([127.99999, -127.99999, 2.0**-20], np.float32)
    others = np.array([(2**24 - 1) * 2.0**-25, 511 * 2.0**-9, 2.0**-9], np.float32)
    weight = 2**20 + 1
    total, one = added(3, [(small, 1), (small, 1)]), added(3, [(others, weight)])
    assert list(total.bins) == [-44]
    assert 255.9 < total.whole[-44] < 2**8
    rest = MAX_UPDATES - 3
    for exponent, held in one.bins.items():
        total.bin_of(exponent)[:] += held * rest
    total.weight, total.count = total.weight + weight * rest, total.count + rest
    add_vector(total, small, 1)  # there is no room for it in the last bin alone
    assert total.whole[-44] < 2**8
    assert np.abs(total.bins[-44]).max() <= 2**9
    updates = [(small, 1)] * 3 + [(others, weight)]
    expected = [
        rounded(updates[:3], place) + rest * rounded(updates[3:], place) for place in range(3)
    ]
    assert whole(total) == (expected, 3 + rest * weight, MAX_UPDATES)
    restored = exact_mean.from_tensors(exact_mean.to_tensors(total))
    assert restored.whole[-44] == np.abs(total.bins[-44]).max()


def test_many_at_once_at_the_bounds_are_exact() -> None:
    """Products near 2^64 whose sums in any order stay below 2^81; and one update too many is
    refused."""
    x = np.array([(2**24 - 1) * 2.0**11, -(2**24 - 2**17 + 1) * 2.0**11, 3 * 2.0**-38], np.float32)
    weight, count = MAX_WEIGHT, 4096
    one, many = added(3, [(x, weight)]), exact_mean.init(3)
    for _ in range(MAX_UPDATES // count):
        largest = np.full(count, float(np.abs(x).max()))
        weights = np.full(count, weight, np.int64)
        exact_mean.add_many(many, [np.tile(x, (count, 1))], weights, largest)
    assert many.bins.keys() == one.bins.keys()
    for exponent, held in many.bins.items():
        single = one.bins[exponent]
        expected = [Fraction(value) * MAX_UPDATES for value in single]
        assert [Fraction(value) for value in held] == expected
    assert (many.count, many.weight) == (MAX_UPDATES, MAX_UPDATES * weight)
    before = bits(many)
    text = f"has {MAX_UPDATES + 2} updates; its sum can hold {MAX_UPDATES}"
    with pytest.raises(ProtocolError, match=text) as refused:
        exact_mean.add_many(many, [x[None], x[None]], np.ones(2, np.int64), np.ones(2))
    assert refused.value.code is Code.OUT_OF_RANGE
    assert bits(many) == before


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no updates"):
        exact_mean.mean(exact_mean.init(3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bin 2^-44": np.zeros(3, np.float32)}, "64 bits"),
        ({"bin 2^-8": np.zeros(4)}, "do not fit together"),
        ({"bin 2^-9": np.zeros(3)}, "64 bits"),
        ({"hi": np.zeros(3)}, "64 bits"),
        ({"size": np.array([4], np.int64)}, "do not fit together"),
        ({"more": np.zeros(3)}, "64 bits"),
        ({"count": np.array([3], np.int64)}, "damaged"),
        ({"weight": np.array([-1], np.int64)}, "damaged"),
        ({"weight": np.array([1, 1], np.int64)}, "do not fit together"),
    ],
)
def test_a_damaged_saved_sum_is_refused(change: dict[str, np.ndarray], text: str) -> None:
    tensors = {**exact_mean.to_tensors(added(3, [(np.ones(3, np.float32), 2)])), **change}
    with pytest.raises(ValueError, match=text):
        exact_mean.from_tensors(tensors)
