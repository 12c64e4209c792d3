"""Who is whose neighbour: rings, tori, random regular graphs, exponential and complete graphs.

Each peer makes the whole matrix by itself, from the same few settings, and takes its row. So
nothing here depends on the platform or on numpy's version.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.peers.matrix_file import from_file
from fleetlearn_device.peers.mixing import MixingMatrix, metropolis
from fleetlearn_device.peers.spectrum import reached_from_first
from fleetlearn_device.training.shuffling import permutation

Kind = Literal[
    "ring", "torus", "random-regular", "exponential", "complete", "one-peer-exponential", "file"
]

_ATTEMPTS = 100


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topology as settings name it."""

    kind: Kind = "ring"
    degree: int = 4
    """Neighbours of each peer of ``random-regular``."""
    rows: int | None = None
    """Rows of a ``torus``. None: the division of the peers that is nearest to a square."""
    seed: int = 0
    """Of ``random-regular``."""
    file: str | None = None
    """The matrix of ``file``: CSV or .npy."""

    def matrices(self, peers: int) -> tuple[MixingMatrix, ...]:
        """Return the matrices that mixings take by turns: mixing k, from 0 on, takes
        ``matrices[k % len(matrices)]``. Raises ValueError if the topology is impossible with so
        many peers."""
        if self.kind == "file":
            if self.file is None:
                raise ValueError('the topology "file" has no file; name a CSV or .npy in "file"')
            matrix = from_file(Path(self.file))
            if len(matrix) != peers:
                raise ValueError(f"{self.file} is of {len(matrix)} peers; there are {peers}")
            return (matrix,)
        if self.kind == "torus":
            rows = self.rows or max(row for row in range(1, isqrt(peers) + 1) if peers % row == 0)
            if peers % rows:
                raise ValueError(f"{peers} peers cannot stand in {rows} rows of equal length")
            return (torus(rows, peers // rows),)
        if self.kind == "random-regular":
            return (random_regular(peers, self.degree, self.seed),)
        if self.kind == "one-peer-exponential":
            return one_peer_exponential(peers)
        return ({"ring": ring, "exponential": exponential, "complete": complete}[self.kind](peers),)


def ring(peers: int) -> MixingMatrix:
    """Return the ring: each peer and its two neighbours count a third each.

    Its eigenvalues are (1 + 2 cos(2 pi k / n)) / 3, k = 0 ... n - 1.
    """
    return _circulant(peers, [1])


def torus(rows: int, columns: int) -> MixingMatrix:
    """Return the torus: peer r * columns + c has the neighbours above, below, left and right, and
    opposite edges are joined. With 3 rows and 3 columns or more each of the five counts a fifth.

    Its eigenvalues are (1 + 2 cos(2 pi k / rows) + 2 cos(2 pi l / columns)) / 5.
    """
    if min(rows, columns) < 1:
        raise ValueError(f"a torus of {rows} rows and {columns} columns; at least 1 of each")
    here = np.arange(rows * columns).reshape(rows, columns)
    pairs = [np.stack([here, np.roll(here, -1, axis)], axis=-1).reshape(-1, 2) for axis in (0, 1)]
    return metropolis(rows * columns, np.concatenate(pairs))


def exponential(peers: int) -> MixingMatrix:
    """Return the exponential graph: peers at distances 1, 2, 4, 8, ... (below n) around a ring,
    both ways, are neighbours. All weights are equal.

    Bicheng Ying et al., "Exponential graph is provably efficient for decentralized deep training",
    NeurIPS 2021 (arXiv 2110.13363), section 3, whose graph has one way only. Here both ways are
    there, so that W is symmetric: a peer that vanishes then leaves the mean of the others as it is.
    The eigenvalues are those of a circulant matrix: w (1 + sum_d cos(2 pi k d / n)), over the
    distances d of the neighbours, both ways; w is 1 / (1 + number of neighbours).
    """
    return _circulant(peers, [2**power for power in range((peers - 1).bit_length())])


def one_peer_exponential(peers: int) -> tuple[MixingMatrix, ...]:
    """Return the exponential graph one distance at a time: in mixing k each peer averages with one
    other, whose number differs from its own in the bit k mod ceil(log2 n). A peer without such a
    partner keeps its model.

    If n is a power of two, then after log2 n mixings all have exactly the mean. Ying et al. (see
    ``exponential``), section 4; the pairs here are those of a hypercube, so that each W is
    symmetric.
    """
    here = np.arange(peers)
    matrices = []
    for power in range(max((peers - 1).bit_length(), 1)):
        pairs = np.stack([here, here ^ 2**power], axis=-1)
        matrices.append(metropolis(peers, pairs[pairs[:, 1] < peers]))
    return tuple(matrices)


def complete(peers: int) -> MixingMatrix:
    """Return the complete graph, W = 11^T/n: after one mixing all peers have the mean."""
    first, second = np.triu_indices(peers, 1)
    return metropolis(peers, np.stack([first, second], axis=-1))


def random_regular(peers: int, degree: int, seed: int) -> MixingMatrix:
    """Return a random connected graph in which each peer has ``degree`` neighbours. All weights are
    equal.

    All ends of edges are paired at random (Bollobás's configuration model, 1980). A pair of a peer
    with itself or a second pair of the same two is swapped with random others.
    Raises ValueError if there is no such graph.
    """
    if not 2 <= degree < peers and not (peers == 2 and degree == 1):
        raise ValueError(f"{peers} peers with {degree} neighbours each; expected 2 to {peers - 1}")
    if peers * degree % 2:
        raise ValueError(
            f"{peers} peers with {degree} neighbours each: the number of ends, {peers * degree}, "
            "must be even. Take one neighbour more or less"
        )
    for attempt in range(_ATTEMPTS):
        pairs = _random_pairs(peers, degree, seed, attempt)
        if pairs is not None:
            matrix = metropolis(peers, pairs)
            if reached_from_first(matrix).all():
                return matrix
    raise ValueError(
        f"found no connected graph of {peers} peers with {degree} neighbours each in {_ATTEMPTS} "
        "attempts; take another degree"
    )


def _circulant(peers: int, distances: list[int]) -> MixingMatrix:
    here = np.arange(peers)
    pairs = [np.stack([here, (here + distance) % peers], axis=-1) for distance in distances]
    return metropolis(peers, np.concatenate([np.empty((0, 2), np.int64), *pairs]))


def _random_pairs(peers: int, degree: int, seed: int, attempt: int) -> NDArray[np.int64] | None:
    """Return the edges, shape (n * degree / 2, 2), or None if swaps did not mend the pairing."""
    if 2 * degree >= peers:  # the others are fewer: those that are no neighbours
        if degree == peers - 1:
            return np.stack(np.triu_indices(peers, 1), axis=-1)
        others = _random_pairs(peers, peers - 1 - degree, seed, attempt)
        if others is None:
            return None
        absent = np.ones((peers, peers), bool)
        absent[others[:, 0], others[:, 1]] = absent[others[:, 1], others[:, 0]] = False
        return np.stack(np.nonzero(np.triu(absent, 1)), axis=-1)
    ends = permutation(peers * degree, seed, 2 * attempt) % peers
    pairs = [(first, second) for first, second in ends.reshape(-1, 2).tolist()]
    # Each candidate for a swap is drawn at most once in a turn.
    candidates = permutation(len(pairs), seed, 2 * attempt + 1).tolist()
    known: set[tuple[int, int]] = set()
    wrong = []
    for place, (first, second) in enumerate(pairs):
        edge = (min(first, second), max(first, second))
        if first == second or edge in known:
            wrong.append(place)
        else:
            known.add(edge)
    turn, unusable = 0, set(wrong)
    for place in wrong:
        for _ in range(len(candidates)):
            other = candidates[turn % len(candidates)]
            turn += 1
            if other in unusable:
                continue
            (a, b), (c, d) = pairs[place], pairs[other]
            one, two = (min(a, c), max(a, c)), (min(b, d), max(b, d))
            if a != c and b != d and one != two and not {one, two} & known:
                known.discard((min(c, d), max(c, d)))
                known |= {one, two}
                pairs[place], pairs[other] = one, two
                break
        else:
            return None
    return np.array(pairs)
