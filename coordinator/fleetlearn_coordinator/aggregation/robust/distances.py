"""Robust aggregators whose result is a combination of the updates: sum of c_i x_i.

What they need to know of the updates are the inner products between them, n * n numbers, which take
one pass over the updates. Everything else is computed from these, and a second pass makes the
result.

``krum``, ``multi_krum``: Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with
Adversaries: Byzantine Tolerant Gradient Descent" (2017), arXiv 1703.02757, section 4 and section 5
(Multi-Krum).
``bulyan``: El Mhamdi, Guerraoui and Rouault, "The Hidden Vulnerability of Distributed Learning in
Byzantium" (2018), arXiv 1802.07927, Algorithm 2; the selection. Its second half is
``coordinatewise.mean_around_median``. ``geometric_median`` is RFA: Pillutla, Kakade and Harchaoui,
"Robust Aggregation for Federated Learning" (2019), arXiv 1912.13445, Algorithm 2: the smoothed
Weiszfeld algorithm.
``centred_clipping``: Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust
Optimization" (2021), arXiv 2012.10333, Algorithm 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.robust.kept_updates import MOST_OF_MEDIAN, KeptUpdates

Floats = NDArray[np.float64]
SMOOTHING = 1e-6
"""RFA's nu: distances count as at least this much."""
PASSES = 1000
"""Most steps of Weiszfeld's algorithm. It stops when the mean distance falls by less than one part
in 10^12."""
CLIPPING_PASSES = 10
"""Centred clipping's L. The paper takes few, and begins where the last round ended. These begin at
zero, and each pass costs only n * n multiplications."""


def inner_products(kept: KeptUpdates) -> Floats:
    """Return the inner product of each pair of updates, shape (n, n)."""
    found = np.zeros((len(kept), len(kept)))
    for _, values in kept.blocks():
        found += values @ values.T
    return found


def combine(kept: KeptUpdates, shares: Floats) -> Floats:
    """Return the sum of the updates, each times its share (n,): shape (P,)."""
    result = np.empty(kept.size)
    for place, values in kept.blocks():
        result[place] = shares @ values
    return result


def squared_distances(products: Floats) -> Floats:
    """Return the squared distance of each pair: shape (n, n)."""
    squares = np.diag(products)
    return np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0)


def krum_scores(distances: Floats, hostile: int) -> Floats:
    """Return, for each of n updates, the sum of squared distances to its n - hostile - 2 closest
    others: shape (n,).

    With too few updates for that (n < hostile + 3), to its closest other."""
    others = distances + np.diag(np.full(len(distances), np.inf))
    result: Floats = np.sort(others, axis=1)[:, : max(1, len(distances) - hostile - 2)].sum(axis=1)
    return result


def multi_krum(distances: Floats, hostile: int, count: int) -> Floats:
    """Return the shares of the ``count`` updates with the smallest scores: 1 / count each, shape
    (n,). ``count`` 1 is Krum."""
    best = np.argsort(krum_scores(distances, hostile), kind="stable")[:count]
    shares = np.zeros(len(distances))
    shares[best] = 1 / count
    return shares


def bulyan_selection(distances: Floats, hostile: int) -> list[int]:
    """Return which n - 2 * hostile updates Bulyan takes, one by one the best by Krum among those
    left, in order."""
    left, chosen = list(range(len(distances))), list[int]()
    while len(chosen) < len(distances) - 2 * hostile:
        best = (
            int(np.argmin(krum_scores(distances[np.ix_(left, left)], hostile)))
            if len(left) > 1
            else 0
        )
        chosen.append(left.pop(best))
    return sorted(chosen)


def distances_from(shares: Floats, products: Floats) -> Floats:
    """Return the distance of each update from the combination with these shares (n,): shape
    (n,)."""
    ahead = products @ shares
    return np.sqrt(np.maximum(shares @ ahead - 2 * ahead + np.diag(products), 0.0))


def geometric_median(products: Floats, weights: Floats) -> Floats:
    """Return the shares (n,) of the updates in the point with the smallest weighted mean distance
    from them.

    weights: shape (n,), above 0. Updates longer than MOST_OF_MEDIAN times their median length count
    as
    if they were as long: a hostile one of 10^10 would take the others' digits from the
    distances."""
    lengths = np.sqrt(np.diag(products))
    most = MOST_OF_MEDIAN * float(np.median(lengths))
    cut = most / np.maximum(lengths, most) if most else np.ones(len(lengths))
    products = products * cut[:, None] * cut
    weights = weights / weights.sum()
    shares, before = weights, np.inf
    for _ in range(PASSES):
        found = distances_from(shares, products)
        objective = float(weights @ found)
        if not objective < before * (1 - 1e-12):
            break
        before = objective
        pull = weights / np.maximum(found, SMOOTHING)
        shares = pull / pull.sum()
    return shares * cut


def centred_clipping(products: Floats, radius: float | None) -> Floats:
    """Return the shares (n,) of the updates in a centre that begins at zero and moves
    CLIPPING_PASSES times by the mean of the updates' differences from it, each no longer than
    ``radius``; None: than their median length."""
    count = len(products)
    shares = np.zeros(count)
    for _ in range(CLIPPING_PASSES):
        lengths = distances_from(shares, products)
        longest = float(np.median(lengths)) if radius is None else radius
        moves = np.minimum(1.0, longest / np.maximum(lengths, 1e-300)) / count
        shares = (1 - moves.sum()) * shares + moves
    return shares
