"""Mixing: each peer replaces its model by a weighted mean of its own and its neighbours' models.

Xiangru Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
2017 (arXiv 1705.09056), algorithm 1, in the adapt-then-combine form: first every peer does its own
steps, then it mixes what came of them,

    x_i <- sum_j W_ij (x_j - lr grad F_j(x_j)).

W is symmetric and doubly stochastic: no weight is negative, and each row and each column adds up
to 1. Each column's sum of 1 keeps the mean of all models; each row's sum of 1 keeps a common model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = TypeVar("Floats", NDArray[np.float32], NDArray[np.float64])

MOST_WEIGHTS = 2**25
"""The most weights between peers that a matrix may have: 512 MiB."""
_ROUNDING = 1e-12
_CACHED = 2**17
"""Elements of the rows that are mixed together."""
_MANY_NEIGHBOURS = 64
"""From this mean number of neighbours on, one product of dense matrices is quicker."""


@dataclass(frozen=True, eq=False)
class MixingMatrix:
    """A symmetric, doubly stochastic matrix W of n peers, by its rows.

    Row i has the neighbours ``neighbours[starts[i] : starts[i + 1]]``, in ascending order, with
    ``weights`` at the same places. What a peer gives to its own model is in ``own``.
    """

    own: NDArray[np.float64]
    """W's diagonal, shape (n,)."""
    starts: NDArray[np.int64]
    """Where each row begins; the last element is where the last row ends. Shape (n + 1,)."""
    neighbours: NDArray[np.int64]
    """Shape (m,)."""
    weights: NDArray[np.float64]
    """Shape (m,)."""

    def __len__(self) -> int:
        return len(self.own)

    def row(self, peer: int) -> dict[int, float]:
        """Return a peer's neighbours with their weights. The rest up to 1 is for its own model."""
        part = slice(self.starts[peer], self.starts[peer + 1])
        weights = self.weights[part].tolist()
        return dict(zip(self.neighbours[part].tolist(), weights, strict=True))

    def rows(self) -> NDArray[np.int64]:
        """Return the row of each weight: shape (m,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def dense(self) -> NDArray[np.float64]:
        """Return W itself, shape (n, n)."""
        matrix = np.diag(self.own)
        matrix[self.rows(), self.neighbours] = self.weights
        return matrix


def from_weights(
    peers: int,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> MixingMatrix:
    """Make a matrix of the weights between different peers, in any order. The diagonal gets what a
    row's sum lacks of 1."""
    order = np.lexsort((columns, rows))
    starts = np.zeros(peers + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=peers), out=starts[1:])
    own = np.asarray(1.0 - np.bincount(rows, weights, minlength=peers), np.float64)
    # Rounding may leave 1e-17, or less than nothing, where the neighbours have it all.
    own[own < _ROUNDING] = 0.0
    return MixingMatrix(own, starts, columns[order], weights[order])


def metropolis(peers: int, pairs: NDArray[np.int64]) -> MixingMatrix:
    """Make a matrix of a graph: the pair (i, j) has the weight 1 / (1 + max(d_i, d_j)), where d_i
    is how many neighbours i has. Where all have d neighbours, each weight is 1 / (d + 1).

    Lin Xiao and Stephen Boyd, "Fast linear iterations for distributed averaging", 2004, section 4.2
    (Metropolis and Hastings). A peer needs to know its own and its neighbours' numbers alone.

    ``pairs``: int64, shape (m, 2), of different peers. A pair counts once, however often and in
    whichever order it is there.
    """
    first, second = pairs.min(axis=1), pairs.max(axis=1)
    keys = np.unique((first * peers + second)[first != second])
    if 2 * len(keys) > MOST_WEIGHTS:
        raise ValueError(
            f"{peers} peers with {len(keys)} pairs of neighbours; at most {MOST_WEIGHTS // 2} "
            "pairs are possible. Choose a topology in which peers have fewer neighbours"
        )
    first, second = np.divmod(keys, peers)
    degree = np.bincount(first, minlength=peers) + np.bincount(second, minlength=peers)
    weights = 1.0 / (1 + np.maximum(degree[first], degree[second]))
    return from_weights(
        peers,
        np.concatenate([first, second]),
        np.concatenate([second, first]),
        np.concatenate([weights, weights]),
    )


def mix(own: Floats, received: Mapping[int, Floats], weights: Mapping[int, float]) -> Floats:
    """Return a peer's next model: x_i + sum_j W_ij (x_j - x_i), over the neighbours j whose models
    are here.

    ``own``: the peer's model, shape (P,); ``received``: neighbours' models; ``weights``: the row of
    W (``MixingMatrix.row``). The weight of a neighbour whose model is missing goes to the peer's
    own model, as ``without`` says. Neighbours are added in ascending order, so that any process
    that has the same models gets the same bits.
    """
    mixed = own.copy()
    for neighbour in sorted(weights):
        if neighbour in received:
            mixed += weights[neighbour] * (received[neighbour] - own)
    return mixed


def average(first: Floats, second: Floats) -> Floats:
    """Return what both peers of a pair have after they met (gossip): the mean, with the same bits
    on both sides, so that the sum of their models stays as it is.

    Stephen Boyd et al., "Randomized gossip algorithms", 2006; with training between the meetings,
    Xiangru Lian et al., "Asynchronous decentralized parallel stochastic gradient descent", ICML
    2018 (arXiv 1710.06952), algorithm 1.
    """
    return np.asarray((first + second) / 2, first.dtype)


def mix_all(models: Floats, matrix: MixingMatrix) -> Floats:
    """Return all peers' next models, W x: shape (n, P), as ``models``.

    Each row has the result of ``mix``, to the last bit; with more than 64 neighbours
    for each peer, one product of matrices, which may differ in the last bits, is quicker.
    """
    counts = np.diff(matrix.starts)
    if len(matrix.weights) > _MANY_NEIGHBOURS * len(matrix):
        return np.asarray(matrix.dense().astype(models.dtype) @ models)
    mixed = models.copy()
    # As many rows at a time as stay in the processor's cache.
    height = max(1, _CACHED // max(1, models.shape[1]))
    for begin in range(0, len(matrix), height):
        own, block = counts[begin : begin + height], mixed[begin : begin + height]
        for place in range(int(own.max())):
            rows = np.flatnonzero(own > place)
            at = matrix.starts[begin + rows] + place
            weights = matrix.weights[at].astype(models.dtype)[:, None]
            block[rows] += weights * (models[matrix.neighbours[at]] - models[begin + rows])
    return mixed


def without(matrix: MixingMatrix, gone: Collection[int]) -> MixingMatrix:
    """Return the matrix while some peers are gone: the weight of a missing neighbour goes to the
    peer's own model, and those that are gone keep theirs.

    The result V is symmetric and doubly stochastic again, and **the mean of the models of those
    that are there stays as it is**. Let S be those that are there. For i in S,

        V_ij = W_ij  (j in S, j != i),      V_ii = W_ii + sum over k not in S of W_ik.

    V is symmetric, because W is. Each row of V within S adds up to W's whole row, which is 1; by
    symmetry so does each column. So the sum of the next models over S is

        sum_{i in S} sum_{j in S} V_ij x_j = sum_{j in S} x_j (sum_{i in S} V_ij)
                                           = sum_{j in S} x_j.

    This needs both ends to agree: if i misses j, j must leave i out too.
    """
    lost = np.zeros(len(matrix), bool)
    lost[list(gone)] = True
    rows = matrix.rows()
    kept = ~(lost[rows] | lost[matrix.neighbours])
    return from_weights(len(matrix), rows[kept], matrix.neighbours[kept], matrix.weights[kept])
