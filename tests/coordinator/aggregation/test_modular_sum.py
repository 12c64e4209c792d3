"""The modular sum: the masks' sum and it give the plain fixed-point sum exactly, in every order,
and after a restart; whatever is no masked update, or no such mask, is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.modular_sum import (
    FixedPoint,
    MaskedSum,
    modular_sum,
    unmask,
)
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate, MaskedArray
from fleetlearn_protocol.encodings import MASKED
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.formats.masked import words_from_bytes, words_to_bytes
from fleetlearn_protocol.secure.distributed_noise import has_room, noisy_sum, noisy_words
from fleetlearn_protocol.secure.fixed_point import (
    Words,
    most_updates,
    weighted_sum,
    weighted_words,
)

NUMBERS = FixedPoint(bound=1.0, bits=20, equal=False)
MODULAR = modular_sum(NUMBERS)
SIZE = 5


def drawn(count: int, seed: int = 1) -> tuple[list[Words], list[Words], Words]:
    """Return updates as words, the same masked, and the sum of the masks."""
    draw = np.random.default_rng(seed)
    plain = [
        weighted_words(
            draw.uniform(-0.4, 0.4, SIZE).astype(np.float32), 0.5, 1.0, 20, draw.random(SIZE + 1)
        )
        for _ in range(count)
    ]
    masks = draw.integers(0, 2**32, (count, SIZE + 1), np.uint32)
    return (
        plain,
        [word + mask for word, mask in zip(plain, masks, strict=True)],
        masks.sum(axis=0, dtype=np.uint32),
    )


def added(masked: list[Words]) -> MaskedSum:
    state: MaskedSum = MODULAR.init(SIZE)
    for words in masked:
        MODULAR.add(state, MaskedArray(words), 1, 0.0, 1.0, None)
    return state


def test_the_unmasked_sum_is_the_plain_fixed_point_sum_exactly() -> None:
    plain, masked, masks = drawn(50)
    state = added(masked)
    found = unmask(state, masks, NUMBERS)
    exact = sum(words.astype(object) for words in plain)  # Python's integers: no modulus
    most = 2**20 - 1
    assert found.total.tolist() == [(2 * word - 50 * most) * (1 / most) for word in exact[:-1]]
    assert found.weight == exact[-1] / most
    assert state.words.tolist() == added(masked).words.tolist(), "the state keeps its masks"
    result = MODULAR.result(found, np.zeros(0, np.float32))
    np.testing.assert_array_equal(result.delta, found.total / found.weight)
    assert result.buffers.shape == (0,)


SHORT = FixedPoint(bound=1.0, bits=12, equal=False)


def short_sum(draw: np.random.Generator, count: int) -> tuple[MaskedSum, Words, Words]:
    """Return the sum of updates of 12 bits as they come, modulo 2^24 each, the sum of their masks
    of 32 bits, and the plain sum."""
    adding, plain = modular_sum(SHORT), np.zeros(SIZE + 1, np.uint32)
    state: MaskedSum = adding.init(SIZE)
    masks = draw.integers(0, 2**32, (count, SIZE + 1), np.uint32)
    for mask in masks:
        update = draw.uniform(-0.4, 0.4, SIZE).astype(np.float32)
        words = weighted_words(update, 0.5, 1.0, 12, draw.random(SIZE + 1))
        content = words_to_bytes(words + mask, 3)
        adding.add(state, MaskedArray(words_from_bytes(content, 3)), 1, 0.0, 1.0, None)
        plain += words
    return state, masks.sum(axis=0, dtype=np.uint32), plain


@pytest.mark.parametrize("count", [1, 50, 4097])
def test_the_sum_of_short_words_is_the_plain_fixed_point_sum_exactly(count: int) -> None:
    state, masks, plain = short_sum(np.random.default_rng(count), count)
    again = modular_sum(SHORT).from_tensors(modular_sum(SHORT).to_tensors(state))
    for each in (state, again):
        found, expected = unmask(each, masks, SHORT), weighted_sum(plain, count, 1.0, 12)
        assert found.total.tolist() == expected.total.tolist()
        assert found.weight == expected.weight
    if count > 1:
        with pytest.raises(ValueError, match="A mask was not taken off"):
            unmask(state, masks + np.uint32(2**23), SHORT)
    with pytest.raises(ValueError, match="the plan says"):
        modular_sum(NUMBERS).from_tensors(modular_sum(SHORT).to_tensors(state))


def test_more_short_updates_than_2_to_the_24_has_room_for_are_refused() -> None:
    state = MaskedSum(np.zeros(SIZE + 1, np.uint32), updates=4097)
    with pytest.raises(ValueError, match=r"4098 updates of 12 bits were given; 4097 can .* 2\^24"):
        modular_sum(SHORT).add(state, MaskedArray(np.ones(SIZE + 1, np.uint32)), 1, 0.0, 1.0, None)


def test_every_order_and_every_grouping_gives_the_same_words() -> None:
    _, masked, _ = drawn(4)
    expected = added(masked).words.tolist()
    for order in permutations(masked):
        assert added(list(order)).words.tolist() == expected
    state: MaskedSum = MODULAR.init(SIZE)
    ones = np.ones(4, np.int64)
    MODULAR.add_many(
        state, [np.array(masked[:3]), np.array(masked[3:])], ones, np.zeros(4), None, None
    )
    assert (state.words.tolist(), state.updates) == (expected, 4)


class ReadInPlace(MaskedArray):
    """As a spool file is read: each part takes the memory of the one before."""

    def words(self) -> Iterator[Words]:
        memory = np.empty(2, np.uint32)
        for start in range(0, len(self.content), 2):
            part = self.content[start : start + 2]
            memory[: len(part)] = part
            yield memory[: len(part)]


def test_an_update_that_is_read_part_by_part_into_one_memory_is_added_right() -> None:
    _, masked, _ = drawn(3)
    state: MaskedSum = MODULAR.init(SIZE)
    for words in masked:
        MODULAR.add(state, ReadInPlace(words), 1, 0.0, 1.0, None)
    assert state.words.tolist() == added(masked).words.tolist()


def test_masks_that_are_not_of_these_updates_are_refused() -> None:
    """One device's mask less, or another's instead: the sum is out of range."""
    _, masked, masks = drawn(3)
    for others in (np.zeros_like(masks), drawn(2)[2], drawn(3, seed=2)[2]):
        with pytest.raises(ValueError, match="A mask was not taken off"):
            unmask(added(masked), others, NUMBERS)
    for wrong in (masks[:-1], masks.astype(np.int64)):
        with pytest.raises(ValueError, match="masks of shape"):
            unmask(added(masked), wrong, NUMBERS)


def test_there_is_no_mean_before_the_masks_are_off() -> None:
    with pytest.raises(ValueError, match="take their masks off first"):
        MODULAR.result(added(drawn(2)[1]), np.zeros(0, np.float32))
    with pytest.raises(ValueError, match="the sum of no updates"):
        unmask(MODULAR.init(SIZE), np.zeros(SIZE + 1, np.uint32), NUMBERS)


def test_what_is_no_masked_update_is_refused_and_changes_nothing() -> None:
    state = added(drawn(2)[1])
    before = state.words.tolist(), state.updates
    with pytest.raises(ProtocolError, match="an update of floats was given"):
        MODULAR.add(state, ArrayUpdate(np.ones(SIZE + 1, np.float32)), 1, 0.0, 1.0, None)
    for size in (SIZE, SIZE + 2):
        with pytest.raises(ValueError, match=f"an update of {size} words"):
            MODULAR.add(state, MaskedArray(np.ones(size, np.uint32)), 1, 0.0, 1.0, None)
    with pytest.raises(ValueError, match=r"a factor of 0\.5"):
        MODULAR.add(state, MaskedArray(np.ones(SIZE + 1, np.uint32)), 1, 0.0, 0.5, None)
    for rows in (np.ones((2, SIZE + 1), np.float32), np.ones((2, SIZE), np.uint32)):
        with pytest.raises(ValueError, match="updates of shape"):
            MODULAR.add_many(state, [rows], np.ones(2, np.int64), np.zeros(2), None, None)
    rows = np.ones((2, SIZE + 1), np.uint32)
    with pytest.raises(ValueError, match="factors were given"):
        MODULAR.add_many(state, [rows], np.ones(2, np.int64), np.zeros(2), np.array([1, 0.5]), None)
    assert (state.words.tolist(), state.updates) == before


def test_more_updates_than_the_modulus_has_room_for_are_refused() -> None:
    """4,096 updates of 20 bits: one more could wrap, and nobody would see it."""
    state = MaskedSum(np.zeros(SIZE + 1, np.uint32), updates=4096)
    with pytest.raises(ValueError, match="4097 updates of 20 bits were given; 4096 can be"):
        MODULAR.add(state, MaskedArray(np.ones(SIZE + 1, np.uint32)), 1, 0.0, 1.0, None)


def test_the_state_survives_a_restart_to_the_last_bit() -> None:
    state = added(drawn(3)[1])
    again = MODULAR.from_tensors(MODULAR.to_tensors(state))
    assert (again.words.tolist(), again.updates) == (state.words.tolist(), 3)
    assert not np.shares_memory(again.words, state.words)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"words": np.zeros(4, np.float32)}, "words of type float32"),
        ({"words": np.zeros((2, 2), np.uint32)}, "it is damaged"),
        ({"updates": np.array([4097], np.int64)}, "4097 updates; at most 4096"),
        ({"updates": np.array([-1], np.int64)}, "-1 updates"),
        ({"updates": np.zeros(2, np.int64)}, "does not say how many"),
        ({"more": np.zeros(1)}, "no masked sum"),
    ],
)
def test_tensors_of_no_such_state_are_refused(change: dict[str, np.ndarray], said: str) -> None:
    tensors = {**MODULAR.to_tensors(added(drawn(2)[1])), **change}
    with pytest.raises(ValueError, match=said):
        MODULAR.from_tensors(tensors)


@pytest.mark.parametrize(
    "other",
    [
        FixedPoint(2.0, 20, False),
        FixedPoint(1.0, 18, False),
        FixedPoint(1.0, 20, True),
        FixedPoint(1.0, 20, False, 9.0),
    ],
)
def test_a_sum_that_was_written_by_another_plan_is_refused(other: FixedPoint) -> None:
    """Words say nothing of what they mean: read by other rules they would be other numbers."""
    tensors = MODULAR.to_tensors(added(drawn(2)[1]))
    with pytest.raises(ValueError, match="the plan says"):
        modular_sum(other).from_tensors(tensors)


def test_a_masked_update_is_not_read_as_floats() -> None:
    update = MaskedArray(np.ones(3, np.uint32))
    with pytest.raises(ProtocolError, match="a masked update was given"):
        update.read(0, 3)
    with pytest.raises(ProtocolError, match="a masked update was given"):
        list(update)
    assert MODULAR.check(MASKED.check(bytes(12)), 10**9) is None, "any words pass"


def test_updates_with_noise_are_added_in_the_same_way_and_have_less_room() -> None:
    numbers = FixedPoint(1.0, 20, True, 5e5)
    adding, draw = modular_sum(numbers), np.random.default_rng(5)
    plain = [noisy_words(np.zeros(3, np.float32), 1.0, 20, 5e5, draw.bytes(32)) for _ in range(9)]
    masks = draw.integers(0, 2**32, (9, 4), np.uint32)
    state: MaskedSum = adding.init(3)
    for words, mask in zip(plain, masks, strict=True):
        adding.add(state, MaskedArray(words + mask), 1, 0.0, 1.0, None)
    found = unmask(state, masks.sum(axis=0, dtype=np.uint32), numbers)
    # By hand: each word's low 32 bits are a number with its sign.
    steps = np.sum([words[:-1].view(np.int32).astype(np.int64) for words in plain], axis=0)
    assert found.total.tolist() == (steps / (2**19 - 1)).tolist()
    assert found.weight == 9
    by_noisy_sum = noisy_sum(np.sum(plain, axis=0, dtype=np.uint32), 9, 1.0, 20, 5e5)
    assert found.total.tolist() == by_noisy_sum.total.tolist()
    most = numbers.most_updates
    assert has_room(most, 20, 5e5)
    assert not has_room(most + 1, 20, 5e5)
    assert FixedPoint(1.0, 20, True).most_updates == most_updates(20) > most > 3000
    state.updates = most
    with pytest.raises(ValueError, match=f"with noise of 500000 words were given; {most} can be"):
        adding.add(state, MaskedArray(plain[0]), 1, 0.0, 1.0, None)
