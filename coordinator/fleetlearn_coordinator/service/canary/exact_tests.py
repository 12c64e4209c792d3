"""Statistics of two groups of tasks, exact also where there are few. Without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, lgamma, log, sqrt
from statistics import NormalDist


def share_rises(bad: int, all_: int, bad_before: int, all_before: int) -> float:
    """Return how probable it is to find at least ``bad`` of ``all_`` tasks bad, where the two
    groups do not differ: the one-sided p-value of Fisher's exact test (R. A. Fisher, The design of
    experiments, 1935, section 11). 1 where a group is empty."""
    if not all_ or not all_before:
        return 1.0
    every, every_bad = all_ + all_before, bad + bad_before
    whole = _log_choose(every, all_)

    def probability(count: int) -> float:
        ways = _log_choose(every_bad, count) + _log_choose(every - every_bad, all_ - count)
        return exp(ways - whole)

    # From the expected count on, the terms fall on both sides: the shorter side is added up.
    if bad * every > all_ * every_bad:
        return min(1.0, _sum_of_falling(map(probability, range(bad, min(all_, every_bad) + 1))))
    fewest = max(0, all_ - (every - every_bad))
    rest = _sum_of_falling(map(probability, range(bad - 1, fewest - 1, -1)))
    return max(0.0, 1.0 - rest)


def _sum_of_falling(terms: Iterable[float]) -> float:
    """Return the sum of terms that become smaller and smaller, as exactly as it can be held."""
    found = 0.0
    for term in terms:
        found += term
        if term <= 1e-17 * found:
            break
    return found


def most_are_above(above: int, all_: int) -> float:
    """Return how probable it is to find at least ``above`` of ``all_`` values above a bound that a
    value exceeds with probability 1/2: the one-sided p-value of the sign test. 1 of no values."""
    half = all_ * log(2)
    terms = (exp(_log_choose(all_, count) - half) for count in range(above, all_ + 1))
    return min(1.0, sum(terms)) if all_ else 1.0


def least_share(bad: int, all_: int, certainty: float) -> float:
    """Return the lower end of the one-sided Wilson interval of a share (E. B. Wilson, Journal of
    the American Statistical Association 22, 1927, pages 209-212). 0 of no tasks."""
    if not all_:
        return 0.0
    z = NormalDist().inv_cdf(certainty)
    share = bad / all_
    middle = share + z * z / (2 * all_)
    width = z * sqrt(share * (1 - share) / all_ + z * z / (4 * all_ * all_))
    return max(0.0, (middle - width) / (1 + z * z / all_))


def _log_choose(many: int, few: int) -> float:
    """Return the logarithm of the binomial coefficient."""
    return lgamma(many + 1) - lgamma(few + 1) - lgamma(many - few + 1)
