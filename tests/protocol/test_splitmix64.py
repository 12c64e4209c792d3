from __future__ import annotations

import numpy as np
from fleetlearn_protocol.splitmix64 import GAMMA, Fractions, mix

GAMMA_INT, BITS = 0x9E3779B97F4A7C15, 2**64 - 1


def mix_by_hand(state: int) -> int:
    """Java's SplittableRandom: the paper's figure 16, mix64variant13."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & BITS
    state = (state ^ state >> 27) * 0x94D049BB133111EB & BITS
    return state ^ state >> 31


def test_the_numbers_that_everybody_has() -> None:
    """The first outputs for the state 1234567, as in Rosetta Code's task "Pseudo-random
    numbers/Splitmix64"."""
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * GAMMA
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert mix(states).tolist() == expected
    assert mix_by_hand(1234567 + GAMMA_INT & BITS) == expected[0]


def test_fractions_are_halves_of_the_stream_s_numbers() -> None:
    state = mix_by_hand(mix_by_hand(2**53 - 1) + 2**32 & BITS)
    numbers = [mix_by_hand(state + place * GAMMA_INT & BITS) for place in range(1, 6)]
    halves = [half for number in numbers for half in (number & 2**32 - 1, number >> 32)]
    fractions = Fractions(2**53 - 1)
    drawn = [fractions.next(count).tolist() for count in (3, 0, 4, 2)]
    assert [len(some) for some in drawn] == [3, 0, 4, 2]
    assert [fraction for some in drawn for fraction in some] == [
        half / 2**32 for half in halves[:9]
    ]
