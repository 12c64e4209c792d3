"""The aggregator "modular sum": masked updates, of which the coordinator learns the sum alone.

An update is P + 1 words, the last one its weight (``secure/fixed_point.py`` of the protocol), with
a mask on each; a computation's sums are three words each (``secure/whole_words.py``). They are
added modulo 2^32, which is the same in every order; where elements are so short that sums are
modulo 2^24, the lower 24 bits of that are their sum. When the round is closed, ``unmask`` or
``unmask_sums`` takes the sum of their masks off, and only then there are numbers. [secure] of a
plan asks for this aggregator; no plan names it by itself. Where devices add noise before they mask,
the words are others (``secure/distributed_noise.py``), and are added in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.private_sums import LENGTH
from fleetlearn_protocol.secure.distributed_noise import has_room, noisy_sum
from fleetlearn_protocol.secure.fixed_point import (
    PART_BITS,
    WeightedSum,
    Words,
    modulus_bits,
    most_updates,
    weighted_sum,
)
from fleetlearn_protocol.secure.whole_words import WORDS, largest_sum, words_to_sums
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.aggregators import Aggregator, Column, Tensors
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Result, Update, Values, words_of

NAME = "modular sum"


class FixedPoint(NamedTuple):
    """How all updates of a run are written."""

    bound: float
    """C: the L2 norm to which each device clips its update, and the largest that an element is."""
    bits: int
    """Of an element."""
    equal: bool
    """Whether all updates weigh the same."""
    noise: float = 0.0
    """Standard deviation of the noise that each device adds to its words; 0: none does."""

    @property
    def most_updates(self) -> int:
        """How many updates can be added modulo 2^32, or 2^24."""
        most = most_updates(self.bits)
        if not self.noise:
            return most
        few = 0  # what has room is a beginning of 1 ... most
        while few < most:
            middle = (few + most + 1) // 2
            if has_room(middle, self.bits, self.noise):
                few = middle
            else:
                most = middle - 1
        return few

    def words(self, size: int) -> int:
        """Return how many words an update of a model of ``size`` elements has."""
        return size + 1  # the weight is the last one


class SumWords(NamedTuple):
    """How all sums of a run that computes are written."""

    size: int
    """S: sums of a device."""
    reports: int
    """The most that a round has."""
    clipped: bool = False
    """Whether devices clip their sums (private_sums.py): none is further from 0 than 2^30."""

    @property
    def largest(self) -> int:
        """How far from 0 each sum of a device may be."""
        return LENGTH if self.clipped else largest_sum(self.reports)

    @property
    def bits(self) -> int:
        """Of the lower words."""
        return PART_BITS

    @property
    def noise(self) -> float:
        """Devices add none."""
        return 0.0

    @property
    def most_updates(self) -> int:
        """How many devices' sums can be added."""
        return most_updates(PART_BITS)

    def words(self, size: int) -> int:
        """Return how many words a device's sums have. ``size``: elements of the state."""
        return WORDS * self.size


MaskedNumbers: TypeAlias = FixedPoint | SumWords
"""How what a run masks is written."""


@dataclass(slots=True, eq=False)
class MaskedSum:
    """The aggregator's state: the sum of updates with their masks."""

    words: Words
    """Modulo 2^32, shape (P + 1,), or (3 S,) of sums."""
    updates: int = 0
    """How many are in it."""


class UnmaskError(ValueError):
    """What was to be the sum of a round's masks is not. The text says why."""


def unmask(state: MaskedSum, masks: Words, numbers: FixedPoint) -> WeightedSum:
    """Return what a round's updates add up to. The state stays as it is, with its masks.

    ``masks``: the sum of exactly these updates' masks modulo 2^32, shape (P + 1,). Raises
    UnmaskError where the result can be no sum of this many updates: the masks are of others, or a
    device did not clip its update.
    """
    words = _without(state, masks)
    try:
        if numbers.noise:
            return noisy_sum(words, state.updates, numbers.bound, numbers.bits, numbers.noise)
        return weighted_sum(words, state.updates, numbers.bound, numbers.bits, equal=numbers.equal)
    except ValueError as error:
        raise UnmaskError(str(error)) from None


def unmask_sums(state: MaskedSum, masks: Words, numbers: SumWords) -> Sums:
    """Return the total of a round's sums: int64, shape (S,), exactly what it is without masks. The
    state stays as it is.

    masks: the sum of exactly these devices' masks modulo 2^32, shape (3 S,). Raises UnmaskError
    where the result can be no total of this many devices.
    """
    if state.updates > numbers.reports:
        raise UnmaskError(f"{state.updates} devices are added; a round has {numbers.reports}")
    try:
        return words_to_sums(_without(state, masks), state.updates, numbers.largest)
    except ValueError as error:
        raise UnmaskError(str(error)) from None


def _without(state: MaskedSum, masks: Words) -> Words:
    """Return the sum without its masks. Raises UnmaskError where they are of another size."""
    if masks.shape != state.words.shape or masks.dtype != np.uint32:
        raise UnmaskError(
            f"masks of shape {masks.shape} and type {masks.dtype} were given; the sum is of shape "
            f"{state.words.shape} and type uint32"
        )
    words: Words = state.words - masks  # modulo 2^32
    return words


def subtract(state: MaskedSum, update: Update) -> None:
    """Take an update, which is in the sum, off again. Raises ValueError where it is of another
    size: the sum is then as it was."""
    if not state.updates:
        raise ValueError("the sum of no updates was given; none can be taken off")
    state.words -= _words_of(update, len(state.words))
    state.updates -= 1


def modular_sum(numbers: MaskedNumbers) -> Aggregator[Any]:
    """Return the aggregator. Its ``result`` takes what ``unmask`` returns, as masked words have no
    mean."""
    return Aggregator(
        name=NAME,
        init=lambda size: MaskedSum(np.zeros(numbers.words(size), np.uint32)),
        # Nobody knows how large an update is, or what it weighs: any words are accepted.
        check=lambda largest, weight: None,
        passes_check=lambda largest, weights: np.ones(len(weights), np.bool_),
        add=partial(_add, numbers),
        add_many=partial(_add_many, numbers),
        merge=partial(_merge, numbers),
        result=_result,
        to_tensors=partial(_to_tensors, numbers),
        from_tensors=partial(_from_tensors, numbers),
        keeps_updates=False,
    )


def _add(
    numbers: MaskedNumbers,
    state: MaskedSum,
    update: Update,
    weight: int,
    largest: float,
    factor: float = 1.0,
    values: Values = NO_VALUES,
) -> None:
    if factor != 1:
        raise ValueError(
            f"a factor of {factor:g} was given for a masked update; its device multiplies it "
            "before it masks"
        )
    _check_room(numbers, state, 1)
    # All of it is read first: nothing is added where it cannot be.
    state.words += _words_of(update, len(state.words))
    state.updates += 1


def _words_of(update: Update, wanted: int) -> Words:
    """Return an update's words, (wanted,). Raises ValueError where it has more or fewer."""
    words, size = np.empty(wanted, np.uint32), 0
    for part in words_of(update):  # each may use the memory of the one before
        if size + len(part) <= wanted:
            words[size : size + len(part)] = part
        size += len(part)
    if size != wanted:
        raise ValueError(f"an update of {size} words was given; the sum has {wanted}")
    return words


def _add_many(
    numbers: MaskedNumbers,
    state: MaskedSum,
    parts: Sequence[NDArray[Any]],
    weights: NDArray[np.int64],
    largest: Column,
    factors: Column | None = None,
    values: Values = NO_VALUES,
) -> None:
    if factors is not None and (factors != 1).any():
        raise ValueError(
            "factors were given for masked updates; their devices multiply them before they mask"
        )
    for rows in parts:
        if rows.dtype != np.uint32 or rows.shape[1:] != state.words.shape:
            raise ValueError(
                f"updates of shape {rows.shape[1:]} and type {rows.dtype} were given; the sum is "
                f"of shape {state.words.shape} and type uint32"
            )
    _check_room(numbers, state, sum(map(len, parts)))
    for rows in parts:
        for row in rows:  # numpy's sum along an axis takes no less
            state.words += row
        state.updates += len(rows)


def _merge(numbers: MaskedNumbers, state: MaskedSum, other: MaskedSum) -> None:
    if other.words.shape != state.words.shape:
        raise ValueError(
            f"sums of {state.words.size} and of {other.words.size} words cannot be merged"
        )
    _check_room(numbers, state, other.updates)
    state.words += other.words
    state.updates += other.updates


def _check_room(numbers: MaskedNumbers, state: MaskedSum, more: int) -> None:
    if state.updates + more > numbers.most_updates:
        noisy = f" with noise of {numbers.noise:g} words" if numbers.noise else ""
        raise ValueError(
            f"{state.updates + more} updates of {numbers.bits} bits{noisy} were given; "
            f"{numbers.most_updates} can be added modulo 2^{modulus_bits(numbers.bits)}"
        )


def _result(total: WeightedSum | MaskedSum, present: Vector = NO_VALUES.present) -> Result:
    if isinstance(total, MaskedSum):
        raise ValueError("the mean of masked updates was asked for; take their masks off first")
    return Result(total.total / total.weight, np.zeros(0))


_NAMES = {
    FixedPoint: "bound, the bits, the equal weights and the noise",
    SumWords: "number of sums, the most reports of a round, and whether sums are clipped",
}
"""What is saved with a sum, so that no other numbers are added to it."""


def _to_tensors(numbers: MaskedNumbers, state: MaskedSum) -> dict[str, NDArray[np.generic]]:
    return {
        "words": state.words,
        "updates": np.array([state.updates], np.int64),
        "numbers": np.array(numbers, np.float64),
    }


def _from_tensors(numbers: MaskedNumbers, tensors: Tensors) -> MaskedSum:
    if tensors.keys() != {"words", "updates", "numbers"}:
        found = ", ".join(tensors) or "nothing"
        raise ValueError(f"the saved sum has {found}: it is no masked sum")
    written = tensors["numbers"].tolist()
    if written != [*map(float, numbers)]:
        raise ValueError(
            f"the saved masked sum is of updates with the {_NAMES[type(numbers)]} {written}; the "
            f"plan says {[*map(float, numbers)]} now"
        )
    words, count = tensors["words"], tensors["updates"]
    if words.dtype != np.uint32 or words.ndim != 1 or words.size < 2:
        raise ValueError(f"the saved masked sum has words of type {words.dtype}: it is damaged")
    if count.shape != (1,) or count.dtype != np.int64:
        raise ValueError("the saved masked sum does not say how many updates it has")
    updates = int(count[0])
    if not 0 <= updates <= numbers.most_updates:
        raise ValueError(
            f"the saved masked sum says {updates} updates; at most {numbers.most_updates} of "
            f"{numbers.bits} bits can be added: it is damaged"
        )
    return MaskedSum(words.astype(np.uint32), updates)
