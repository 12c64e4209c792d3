"""Noise that devices add to their words before they mask them: distributed differential privacy.

Nobody sees an update, or a sum without noise: each device adds whole numbers rint(Y_i) to its
words, Y_i normal with standard deviation sigma (``discrete_gaussian.sample``), and the sum of the
updates of n devices has the sum of n such numbers in each element. The idea is that of Kairouz, Liu
and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation" (2021), arXiv 2102.06387, and of Agarwal, Kairouz and Liu, "The Skellam Mechanism for
Differentially Private Federated Learning" (2021), arXiv 2110.04995. The law is another one, because
its sum has the epsilon of the Gaussian mechanism itself, and not a bound above it:

1. With E_i = Y_i - rint(Y_i), from -1/2 to 1/2, and Z = Y_1 + ... + Y_n, which is normal with
   standard deviation sqrt(n) sigma:

       rint(Y_1) + ... + rint(Y_n) = rint(Z - E_1 - ... - E_(n-1)),

   as Y_n is Z less the other Y_i, and each of these is a whole number plus E_i.
2. If E_1 ... E_(n-1) were independent of Z, then for whole numbers v the sum v + rint(Z - E) =
   rint((v + Z) - E) would be what the Gaussian mechanism releases, v + Z, with random numbers added
   that have nothing to do with data, and rounded. So it would tell no more than v + Z does.
3. They nearly are. Given Z, the Y_i before the last are normal with the covariance
   sigma^2 (I - J / n), J all ones. The density of their E_i on a torus is a Fourier series with the
   coefficients exp(-2 pi^2 sigma^2 q(k)) in magnitude, k whole numbers that are not all 0,
   q(k) = |k|^2 - sum(k)^2 / n. With k_n = 0 added, q stays the same where all n numbers grow by 1,
   so that sum(k) may be taken from -n/2 to n/2. Then sum(k)^2 / n <= |sum(k)| / 2 <= |k|^2 / 2, and
   q(k) >= |k|^2 / 2. So the density is between 1 - r and 1 + r for every Z, where

       r = (1 + 2.001 exp(-pi^2 sigma^2))^n - 1, or less,

   for sigma of 1 or more. Each probability of one element changes by a factor between these, and
   of P elements by a factor between their P-th powers: see ``departure``.

A device's integers are signed: a word is v + noise modulo 2^32. All-zero updates are all-zero
integers. v has an L2 norm of at most ``largest_step(bits)``, exactly, whatever the rounding did:
this is what ``clip`` is, and the noise multiplier is in units of it. What a sum beyond 2^31 would
do costs no privacy, as it is the remainder of the whole sum; it is the model that it would harm
(``TAIL``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import ceil, exp, expm1, log1p, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.discrete_gaussian import MOST, sample
from fleetlearn_protocol.secure.fixed_point import MODULUS_BITS, WeightedSum, Words
from fleetlearn_protocol.vector import Vector

Steps = NDArray[np.int32]
"""Elements as whole numbers, (P,)."""

MOST_STEPS = 2 ** (MODULUS_BITS - 1) - 1
"""Largest magnitude of an element of a sum."""
LEAST_NOISE = 4.0
"""Least standard deviation of one device's noise, in words. With it, ``departure`` is below 1e-54
for 65,536 devices and 2^28 elements."""
TAIL = 16.0
"""Standard deviations of a sum's noise that there is room for. An element of the sum needs more
with a probability below 2 exp(-128), which is below 2^-183: one of 2^28 elements below 2^-155."""
_SLAB = 2**18
_ATTEMPTS = 64
_RAISED = 1 + 2.0**-40
"""What the noise is raised by, so that no rounding of a square root makes it less than promised."""


def largest_step(bits: int) -> int:
    """Return the longest L2 norm, in words, of an update of ``bits`` bits before noise: the clip
    norm is this many words."""
    return int(2 ** (bits - 1) - 1)


def honest_of(minimum: int, colluding: float = 0.0) -> int:
    """Return how many of the fewest survivors of a sum keep their noise to themselves.

    minimum: the fewest devices of a sum. colluding: the share of a sum's devices, from 0 to below
    1, that may tell their noise to whoever wants to take it off. At least 1.
    """
    if not 0 <= colluding < 1:
        raise ValueError(f"a share of {colluding} was given; expected 0 to below 1")
    # 30 % of 10 devices are 3, and 0.3 * 10 is a little more in floating point.
    return max(1, ceil(minimum * (1 - colluding) - 1e-9))


def noise_of_device(multiplier: float, bits: int, minimum: int, colluding: float = 0.0) -> float:
    """Return the standard deviation of each device's noise, in words, with which the sum of
    ``minimum`` devices has noise of ``multiplier`` clip norms: those that may collude left out.

    It is for the fewest devices of a sum: where more survive, the sum has more noise. Raises
    ValueError where it is out of the range that is proved, in words for people.
    """
    noise = multiplier * largest_step(bits) / sqrt(honest_of(minimum, colluding)) * _RAISED
    if not LEAST_NOISE <= noise <= MOST:
        raise ValueError(
            f"each device's noise would have a standard deviation of {noise:.3g} words, of which "
            f"{largest_step(bits)} are the clip norm; expected {LEAST_NOISE:g} to {MOST:g}"
        )
    return noise


def multiplier_of(noise: float, bits: int, minimum: int, colluding: float = 0.0) -> float:
    """Return the noise multiplier that the sum of ``minimum`` devices has at least, each with noise
    of this standard deviation in words: what epsilon is computed of."""
    return noise * sqrt(honest_of(minimum, colluding)) / largest_step(bits)


def departure(noise: float, updates: int, size: int) -> float:
    """Return by how much epsilon may be above the Gaussian mechanism's, for one sum: probabilities
    change by a factor between exp(-d) and exp(d), so that what is (epsilon, delta)-private with
    ideal noise is (epsilon + 2 d, exp(d) delta)-private.

    noise: of a device, in words, ``LEAST_NOISE`` or more. updates: of the sum. size: elements.
    """
    of_element = expm1(updates * log1p(2.001 * exp(-((pi * noise) ** 2))))
    return -size * log1p(-of_element)


def has_room(updates: int, bits: int, noise: float) -> bool:
    """Return whether this many updates with their noise can be added modulo 2^32."""
    return bool(largest_sum(updates, bits, noise) <= MOST_STEPS)


def largest_sum(updates: int, bits: int, noise: float) -> float:
    """Return the largest magnitude of an element of a sum, in words: of updates that are as long as
    they may be, with noise that is ``TAIL`` standard deviations, rounded for each update."""
    return updates * (largest_step(bits) + 0.5) + TAIL * noise * sqrt(updates)


def rounded_update(update: Vector, bound: float, bits: int, secret: bytes) -> Steps:
    """Return an update as whole numbers of an L2 norm of at most ``largest_step(bits)``: int32,
    (P,).

    update: float32, (P,), of an L2 norm of at most ``bound``. secret: decides which elements are
    rounded up, so that each is exact on average. Rounding makes a vector longer: one that comes out
    too long is made a little shorter and rounded once more. The noise does not depend on any of
    this, so that it costs no privacy. Raises ValueError: an update that is longer than ``bound``.
    """
    most = largest_step(bits)
    length = sqrt(sum(_square(part.astype(np.float64)) for part in _slabs(update)))
    if not length <= bound * (1 + 1e-5):
        raise ValueError(f"an update of norm {length:g} was given; the bound is {bound:g}")
    scale = most / bound
    rounding = np.random.Generator(np.random.PCG64(int.from_bytes(secret, "big")))
    steps: Steps = np.empty(len(update), np.int32)
    for _ in range(_ATTEMPTS):
        for part, found in zip(_slabs(update), _slabs(steps), strict=True):
            found[:] = np.floor(part.astype(np.float64) * scale + rounding.random(len(part)))
        excess = _length2(steps) - most**2
        if excess <= 0:
            return steps
        # The square of a rounded vector's length varies by about 2 ``most`` from draw to draw.
        kept = 1 - (excess + 2 * most) / (scale * length) ** 2
        scale *= sqrt(max(kept, 0.25))
    # Towards zero no element grows. This is for bounds of a few words and many elements.
    for part, found in zip(_slabs(update), _slabs(steps), strict=True):
        found[:] = np.trunc(part.astype(np.float64) * scale)
    assert _length2(steps) <= most**2, "an update whose elements were made shorter is longer"
    return steps


def noisy_words(update: Vector, bound: float, bits: int, noise: float, secret: bytes) -> Words:
    """Return an update with its noise as words, and, last, the word that counts it: uint32,
    (P + 1,).

    update: float32, (P,), as it counts: clipped to the L2 norm ``bound``, then times its share of
    the largest weight, and what its staleness leaves of it. noise: standard deviation, in words.
    secret: 32 random bytes that nobody else knows, and that are used once; who knows them can take
    the noise off. The last word has no noise and is the same for every update, as the mean of a
    private round is divided by what the plan states. Raises ValueError: an update that is longer
    than ``bound``, noise out of the sampler's range.
    """
    words = np.empty(len(update) + 1, np.uint32)
    words[:-1] = rounded_update(update, bound, bits, _derived(secret, "rounding")).view(np.uint32)
    words[-1] = 1
    for number, part in enumerate(_slabs(words[:-1])):
        drawn = sample(noise, len(part), _derived(secret, f"noise {number}"))
        part += drawn.astype(np.uint32)  # modulo 2^32
    return words


def noisy_sum(words: Words, updates: int, bound: float, bits: int, noise: float) -> WeightedSum:
    """Return what ``updates`` updates with noise add up to, from the sum of their ``noisy_words``
    modulo 2^32, (P + 1,). Its weight is their number.

    Raises ValueError where the words can be no such sum: most wrong masks end here.
    """
    if updates < 1:
        raise ValueError("the sum of no updates was asked for; add one first")
    if int(words[-1]) != updates:
        raise ValueError(
            f"the sum is of {int(words[-1])} updates by its last word; {updates} were added. A "
            "mask was not taken off"
        )
    steps = words[:-1].view(np.int32).astype(np.float64)  # exact
    largest, allowed = float(np.abs(steps).max(initial=0.0)), largest_sum(updates, bits, noise)
    if largest > allowed:
        raise ValueError(
            f"an element of the sum is {largest:.0f} words; {updates} updates of {bits} bits with "
            f"noise of {noise:g} words each add up to at most {allowed:.0f}. A mask was not taken "
            "off, or a device did not clip its update"
        )
    steps *= bound / largest_step(bits)
    return WeightedSum(steps, float(updates))


def _slabs(vector: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield a vector in parts, so that the memory for their noise stays small."""
    for start in range(0, len(vector), _SLAB):
        yield vector[start : start + _SLAB]


def _square(part: NDArray[np.float64]) -> float:
    return float(part @ part)


def _length2(steps: Steps) -> int:
    """Return the square of the L2 norm, exactly."""
    wide = (part.astype(np.int64) for part in _slabs(steps))
    return sum(int(part @ part) for part in wide)


def _derived(secret: bytes, purpose: str) -> bytes:
    return hashlib.sha256(f"fleetlearn distributed {purpose}: ".encode() + secret).digest()
