"""The weighted mean: exact, so independent of order, and refusing what it could not add exactly."""

import math
from fractions import Fraction

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.exact_mean import BLOCK, MAX_PRODUCT, MAX_UPDATES, MAX_WEIGHT, Sum
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

Updates = list[tuple[Vector, int]]


def some_updates(size: int, count: int, seed: int = 0) -> Updates:
    """Elements of magnitudes 1e-30 to 1e6, both signs, some zeros; weights from 1 to the most that each allows."""
    random = np.random.default_rng(seed)
    updates: Updates = []
    for index in range(count):
        top = 6 if index % 2 else 0
        vector = 10.0 ** random.uniform(-30, top, size) * random.choice([-1.0, 0.0, 1.0], size, p=[0.45, 0.1, 0.45])
        vector = vector.astype(np.float32)
        most = min(MAX_WEIGHT, int(MAX_PRODUCT / float(np.abs(vector).max())))
        updates.append((vector, int(most ** random.uniform(0, 1))))
    return updates


def add_vector(total: Sum, vector: Vector, weight: int) -> None:
    exact_mean.add(total, (vector,), weight, float(np.abs(vector).max()))


def added(size: int, updates: Updates) -> Sum:
    total = exact_mean.init(size)
    for vector, weight in updates:
        add_vector(total, vector, weight)
    return total


def bits(total: Sum) -> tuple[bytes, bytes, int, int]:
    return total.hi.tobytes(), total.lo.tobytes(), total.weight, total.count


def whole(total: Sum) -> tuple[list[int], int, int]:
    """The sum in units of 2^-44, however ``hi`` and ``lo`` share it: exact, as they are multiples of 2^-8, 2^-44."""
    parts = zip((total.hi * 2.0**8).tolist(), (total.lo * 2.0**44).tolist(), strict=True)
    return [(int(hi) << 36) + int(lo) for hi, lo in parts], total.weight, total.count


def rounded(updates: Updates, element: int) -> int:
    """The sum of the products, each rounded to units of 2^-44, halves to even: in whole numbers."""
    return sum(round(Fraction(float(vector[element])) * weight * 2**44) for vector, weight in updates)


def columns(updates: Updates) -> tuple[Vector, np.ndarray, np.ndarray]:
    """Updates, weights, largest elements."""
    rows = np.stack([vector for vector, _ in updates])
    weights = np.array([weight for _, weight in updates], np.int64)
    return rows, weights, np.abs(rows).max(axis=1).astype(np.float64)


def kinds(size: int, count: int) -> list[Updates]:
    """Updates that need both grids, updates for which one rounding is enough, and updates at the border of the two."""
    far = some_updates(size, count)
    near = [(vector * np.float32(2.0**-20 / max(np.abs(vector).max(), 1.0)), 1 + weight % 50) for vector, weight in far]
    edge = [(np.clip(vector, -2, 2), (64, 63, 65, 1, 9)[place % 5]) for place, (vector, _) in enumerate(far)]
    return [far, near, edge, [*near[: count // 2], *far[count // 2 :]]]


def mean_in_fractions(updates: Updates, element: int) -> Fraction:
    weighted = sum((Fraction(float(vector[element])) * weight for vector, weight in updates), Fraction())
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
        assert abs(Fraction(float(mean[element])) - exact) <= Fraction(1, 2**45) + abs(exact) * Fraction(1, 2**51)


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
        exact = math.fsum(float(v[element]) * w for v, w in zip(vectors, weights, strict=True)) / sum(weights)
        assert math.isclose(mean[element], exact, rel_tol=1e-15, abs_tol=2.0**-45)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_updates_in_any_order_and_over_a_restart(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    element = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**20), max_value=2.0**20)
    update = st.tuples(
        st.lists(element, min_size=size, max_size=size),
        st.integers(1, 2**28),
        st.integers(0, 48).map(lambda by: 2.0**-by),
    )
    drawn = data.draw(st.lists(update, min_size=1, max_size=12))
    updates = []
    for values, weight, scale in drawn:
        vector = np.array(values, np.float32) * np.float32(scale)
        updates.append((vector, min(weight, int(MAX_PRODUCT / max(1.0, float(np.abs(vector).max()))))))
    expected = added(size, updates)
    assert whole(expected)[0] == [rounded(updates, place) for place in range(size)]
    many = exact_mean.init(size)
    rows, *others = columns(updates)
    exact_mean.add_many(many, [rows], *others)
    assert whole(many) == whole(expected)

    shuffled = data.draw(st.permutations(updates))
    cut = data.draw(st.integers(0, len(shuffled)))
    saved = save(exact_mean.to_tensors(added(size, shuffled[:cut])))
    total = exact_mean.from_tensors(load(saved))
    for vector, weight in shuffled[cut:]:
        add_vector(total, vector, weight)

    assert whole(total) == whole(expected)
    assert exact_mean.mean(total).tobytes() == exact_mean.mean(expected).tobytes()
    for place, value in enumerate(exact_mean.mean(total)):
        exact = mean_in_fractions(updates, place)
        assert abs(Fraction(float(value)) - exact) <= Fraction(1, 2**45) + abs(exact) * Fraction(1, 2**51)


def test_a_restored_sum_goes_on_to_the_same_bits_and_shares_no_memory() -> None:
    updates = some_updates(BLOCK + 1, 10)
    total = added(BLOCK + 1, updates[:4])
    tensors = exact_mean.to_tensors(total)
    restored = exact_mean.from_tensors(tensors)
    assert bits(restored) == bits(total)
    assert not np.shares_memory(restored.hi, tensors["hi"])
    for vector, weight in updates[4:]:
        add_vector(restored, vector, weight)
    assert whole(restored) == whole(added(BLOCK + 1, updates))


def test_the_last_of_the_most_updates_of_the_greatest_magnitude_is_added_exactly() -> None:
    """The bounds of the module's docstring, reached: all 2^17 updates near 2^28, and the largest low parts."""
    x = np.array([(2**24 - 1) * 2.0**-25, -(2**24 - 2**17 + 1) * 2.0**-25, 3 * 2.0**-38], np.float32)
    weight = 2**29 - 1
    products = [Fraction(float(value)) * weight for value in x]
    assert products[0] == Fraction((2**24 - 1) * (2**29 - 1), 2**25)  # 53 significant bits, the largest below 2^28
    one = added(3, [(x, weight)])
    assert [Fraction(high) + Fraction(low) for high, low in zip(one.hi, one.lo, strict=True)] == products
    assert one.hi[1] * 2**8 % 2 == 1  # an odd multiple of the grid: no trailing zeros to spare
    assert all(one.lo)

    many = Sum(one.hi * (MAX_UPDATES - 1), one.lo * (MAX_UPDATES - 1), weight * (MAX_UPDATES - 1), MAX_UPDATES - 1)
    for count in (MAX_UPDATES - 1, MAX_UPDATES):
        for part, single in ((many.hi, one.hi), (many.lo, one.lo)):
            assert [Fraction(value) for value in part] == [Fraction(value) * count for value in single]
        if many.count < MAX_UPDATES:
            add_vector(many, x, weight)
    assert exact_mean.mean(many).tolist() == [float(value) for value in x]

    before = bits(many)
    with pytest.raises(ProtocolError, match="can hold no more") as refused:
        add_vector(many, x, 1)
    assert refused.value.code is Code.OUT_OF_RANGE
    assert bits(many) == before


REFUSED = [
    (3.0, 0, Code.OUT_OF_RANGE, "weight 0"),
    (3.0, MAX_WEIGHT + 1, Code.OUT_OF_RANGE, "weight"),
    (2e8, 2, Code.OUT_OF_RANGE, "largest element is 2e\\+08"),
    (6e5, 5000, Code.OUT_OF_RANGE, r"takes up to 53687\.1\. If the loss grows.* scale inputs and targets.*max_weight"),
    (1.0, 2**28 + 1, Code.OUT_OF_RANGE, "lower the learning rate"),
    (math.inf, 1, Code.NOT_FINITE, "largest element is inf; it must be finite"),
    (math.nan, 1, Code.NOT_FINITE, "nan"),
]


@pytest.mark.parametrize(("largest", "weight", "code", "text"), REFUSED)
def test_what_is_refused_leaves_the_sum_as_it_was(largest: float, weight: int, code: Code, text: str) -> None:
    total = added(4, some_updates(4, 3))
    before = bits(total)
    with pytest.raises(ProtocolError, match=text) as refused:
        exact_mean.add(total, (np.array([0, 0, 0, largest], np.float32),), weight, largest)
    assert refused.value.code is code
    assert bits(total) == before
    assert not exact_mean.passes_check(np.array([largest]), np.array([weight])).any()


def test_the_limit_itself_is_allowed() -> None:
    allowed = [(MAX_PRODUCT, 1), (1.0, 2**28), (0.0, MAX_WEIGHT)]
    for largest, weight in allowed:
        exact_mean.check(largest, weight)
    assert exact_mean.passes_check(*map(np.array, zip(*allowed, strict=True))).all()
    with pytest.raises(ProtocolError):
        exact_mean.check(float(np.nextafter(np.float32(1), np.float32(2))), 2**28)


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


@pytest.mark.parametrize(("size", "count"), [(1, 2), (7, 40), (610, 100), (BLOCK // 3, 7), (BLOCK + 3, 5)])
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
        exact_mean.add_many(total, [given[0][count // 2 :]], *(column[count // 2 :] for column in given[1:]))
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
    """Products about 2^7 with bits below 2^-44, some halfway between its multiples; as many as reach 2^8 and more."""
    most = (2**24 - 1) * 2.0**-46
    for largest, weight in ((most, 2**29 - 1), (2 * most, 2**29 - 1), (most, 2**29 - 4), (2.0**-22, 2**29 - 1)):
        x = np.array([largest, -largest, 2.0**-45 / weight, 3 * 2.0**-74, 2.0**-73, 0.3 * largest], np.float32)
        for count in (1, 2, 3, 5, 9, 20):
            updates = [(x, weight)] * count
            one, many = added(len(x), updates), exact_mean.init(len(x))
            rows, *others = columns(updates)
            exact_mean.add_many(many, [rows], *others)
            assert whole(one) == whole(many)
            assert whole(one)[0] == [rounded(updates, place) for place in range(len(x))]


def test_small_updates_leave_room_for_the_low_parts_of_all_others() -> None:
    """Those that are in the second sum whole come to just below 2^8; then as many others as a round may have."""
    small = np.array([127.99999, -127.99999, 2.0**-20], np.float32)
    others = np.array([(2**24 - 1) * 2.0**-25, 511 * 2.0**-9, 2.0**-9], np.float32)
    weight = 2**20 + 1
    total, one = added(3, [(small, 1), (small, 1)]), added(3, [(others, weight)])
    assert not total.hi.any()
    assert 255.9 < total.lo_bound < 2**8
    rest = MAX_UPDATES - 3
    total.hi += one.hi * rest
    total.lo += one.lo * rest
    total.weight, total.count = total.weight + weight * rest, total.count + rest
    add_vector(total, small, 1)  # there is no room for it in the second sum alone
    assert total.lo_bound < 2**8
    assert np.abs(total.lo).max() <= 2**9
    updates = [(small, 1)] * 3 + [(others, weight)]
    expected = [rounded(updates[:3], place) + rest * rounded(updates[3:], place) for place in range(3)]
    assert whole(total) == (expected, 3 + rest * weight, MAX_UPDATES)
    restored = exact_mean.from_tensors(exact_mean.to_tensors(total))
    assert restored.lo_bound == np.abs(total.lo).max()


def test_many_at_once_at_the_bounds_are_exact() -> None:
    """Products near 2^28 whose sums in any order stay below 2^45; and one update too many is refused."""
    x = np.array([(2**24 - 1) * 2.0**-25, -(2**24 - 2**17 + 1) * 2.0**-25, 3 * 2.0**-38], np.float32)
    weight, count = 2**29 - 1, 4096
    one, many = added(3, [(x, weight)]), exact_mean.init(3)
    for _ in range(MAX_UPDATES // count):
        exact_mean.add_many(many, [np.tile(x, (count, 1))], np.full(count, weight, np.int64), np.full(count, 0.5))
    for part, single in ((many.hi, one.hi), (many.lo, one.lo)):
        assert [Fraction(value) for value in part] == [Fraction(value) * MAX_UPDATES for value in single]
    assert (many.count, many.weight) == (MAX_UPDATES, MAX_UPDATES * weight)
    before = bits(many)
    with pytest.raises(
        ProtocolError, match=f"has {MAX_UPDATES + 2} updates; its sum can hold {MAX_UPDATES}"
    ) as refused:
        exact_mean.add_many(many, [x[None], x[None]], np.ones(2, np.int64), np.ones(2))
    assert refused.value.code is Code.OUT_OF_RANGE
    assert bits(many) == before


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no updates"):
        exact_mean.mean(exact_mean.init(3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hi": np.zeros(3, np.float32)}, "64 bits"),
        ({"hi": np.zeros(4)}, "do not fit together"),
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
