"""What an attack's right and wrong guesses prove of epsilon: lower bounds, each at a stated
confidence. All of them are from exact binomial probabilities."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, log1p

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
LARGEST_EPSILON = 100.0
"""No bound is larger than this: e^-100 is far below what any number of guesses could show."""
STEPS = 60
"""Halvings of an interval: more than float64 can tell apart."""


def one_run_bound(
    bits: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the epsilon below which so many correct guesses are too improbable, at least 0.

    Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023), arXiv
    2305.08846, Theorem 5.2. ``bits``: secret coins, tossed independently, each of which decided
    about one device. ``guesses``: how many of them the attack guessed; it may choose which.
    ``correct``: how many guesses were right. The guesses of one run may depend on each other.

    Raises ValueError if the counts do not fit together.
    """
    if not 0 <= correct <= guesses <= bits:
        raise ValueError(
            f"{correct} correct of {guesses} guesses of {bits} bits: expected 0 <= correct <= "
            "guesses <= bits"
        )

    def is_refuted(epsilon: float) -> bool:
        return chance_of_guesses(bits, guesses, correct, epsilon, delta) <= 1 - confidence

    return _largest(is_refuted, LARGEST_EPSILON)


def chance_of_guesses(bits: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the most that the probability of at least this many correct guesses can be where the
    mechanism is (epsilon, delta)-private: Theorem 5.2 of the same paper, at most 1.

    With W ~ Binomial(guesses, e^epsilon / (1 + e^epsilon)) it is
    P[W >= correct] + 2 bits delta max_i P[correct > W >= correct - i] / i.
    """
    if not guesses:
        return 1.0
    right = 1 / (1 + exp(-epsilon))
    probabilities = _binomial(guesses, right)
    at_least = float(probabilities[correct:].sum())
    below = np.cumsum(probabilities[:correct][::-1])
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, at_least + 2 * bits * delta * worst)


def rates_bound(
    hits: int,
    members: int,
    false_alarms: int,
    others: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """Return the lower bound on epsilon by an attack's true and false positive rates, at least 0.

    An (epsilon, delta)-private mechanism has TPR <= e^epsilon FPR + delta, and the same of the
    rates of what is not accused: Kairouz, Oh and Viswanath, "The Composition Theorem for
    Differential Privacy" (2015), arXiv 1311.0776. Both rates are replaced by the ends of their
    intervals (``share_below``, ``share_above``), each at half of the probability of error.

    ``hits`` of ``members`` devices that took part were accused, and ``false_alarms`` of ``others``
    that did not. The trials must be independent, and the attack fixed before they were seen.
    """
    each = 1 - (1 - confidence) / 2
    found = 0.0
    for few, of_few, many, of_many in (
        (false_alarms, others, hits, members),
        (members - hits, members, others - false_alarms, others),
    ):
        most, least = share_above(few, of_few, each), share_below(many, of_many, each)
        if least > delta and most > 0:
            found = max(found, log((least - delta) / most))
    return found


def share_below(count: int, trials: int, confidence: float) -> float:
    """Return the lower end of the one-sided interval of a probability of which ``count`` of
    ``trials`` were seen: Clopper and Pearson, Biometrika 26 (1934), pages 404-413. 0 of no
    trials."""
    return 1.0 - share_above(trials - count, trials, confidence)


def share_above(count: int, trials: int, confidence: float) -> float:
    """Return the upper end of the same interval. 1 of no trials."""
    if count == trials:
        return 1.0

    def is_possible(share: float) -> bool:
        return float(_binomial(trials, share)[: count + 1].sum()) > 1 - confidence

    return _largest(is_possible, 1.0)


def _largest(holds: Callable[[float], bool], most: float) -> float:
    """Return the largest number from 0 to ``most`` for which this holds, which holds below a
    number and not above it. 0 if it holds nowhere."""
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _binomial(trials: int, share: float) -> NDArray[np.float64]:
    """Return the probabilities of 0 to ``trials`` successes, (trials + 1,)."""
    counts = np.arange(trials + 1)
    if share in (0.0, 1.0):
        sure: NDArray[np.float64] = (counts == share * trials).astype(np.float64)
        return sure
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    choose = logs[-1] - logs - logs[::-1]
    found: NDArray[np.float64] = np.exp(
        choose + counts * log(share) + (trials - counts) * log1p(-share)
    )
    return found
