"""A computation's sums as words that are added modulo 2^32, and their total as whole numbers again.

A sum is a whole number of 64 bits, v modulo 2^64. It is cut into three words, lowest first: its
bits 0 to 15, its bits 16 to 31, and its upper half, bits 32 to 63. The lower two are below 2^16, so
that 65,537 of each add up without a carry being lost; a carry out of the upper one is one of 2^64,
which is 0 there. So the words' sums modulo 2^32 give the total modulo 2^64, to the last bit, and
masks are the same as those of updates: words modulo 2^32. No number is clipped or rounded, and none
has a weight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.fixed_point import MOST
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.secure.fixed_point import PART_BITS, Words

WORDS = 3
"""Of a whole number."""
_PART = 2**PART_BITS - 1


def largest_sum(reports: int) -> int:
    """Return how far from 0 each sum of a device may be where a round has at most this many
    reports, so that a total is at most 2^62."""
    return MOST // reports


def sums_to_words(sums: Sums) -> Words:
    """Return a device's sums, int64, shape (S,), or those of n devices, (n, S), as words without a
    mask: uint32, shape (3 S,) or (n, 3 S); the three of a sum stand together."""
    bits = sums.view(np.uint64) if sums.flags.c_contiguous else sums.copy().view(np.uint64)
    words = np.empty((*sums.shape, WORDS), np.uint32)
    words[..., 0] = bits & np.uint64(_PART)
    words[..., 1] = (bits >> np.uint64(PART_BITS)) & np.uint64(_PART)
    words[..., 2] = bits >> np.uint64(2 * PART_BITS)
    return words.reshape(*sums.shape[:-1], WORDS * sums.shape[-1])


def words_to_sums(words: Words, updates: int, largest: int) -> Sums:
    """Return the total of ``updates`` devices' sums, int64, shape (S,), from the sum of their words
    modulo 2^32, uint32, (3 S,). ``largest``: how far from 0 a sum of a device may be.

    Raises ValueError where the words can be no such sum: most wrong masks end here, and a device
    whose sums were beyond what they may be may end here.
    """
    parts = words.reshape(-1, WORDS).astype(np.uint64)
    low = int(parts[:, :2].max(initial=0))
    if low > updates * _PART:
        raise ValueError(
            f"a word of the sum of {updates} devices is {low}; at most {updates * _PART} was "
            "expected. A mask was not taken off"
        )
    bits: NDArray[np.uint64] = parts[:, 0] + (parts[:, 1] << np.uint64(PART_BITS))
    bits += parts[:, 2] << np.uint64(2 * PART_BITS)  # modulo 2^64
    total: Sums = bits.view(np.int64)
    most = updates * largest
    if total.size and not -most <= int(total.min()) <= int(total.max()) <= most:
        worst = max(int(total.max()), -int(total.min()))
        raise ValueError(
            f"a total of {updates} devices' sums has the magnitude {worst}; at most {most} was "
            "expected. A mask was not taken off, or a device added up what it may not"
        )
    return total
