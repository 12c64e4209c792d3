"""Whether a matrix mixes at all, and how fast: the peers that it reaches, and its spectral gap."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.peers.mixing import MixingMatrix, mix_all

_SMALL = 512
"""Peers up to which numpy finds all eigenvalues in less than a second."""
_MOST_STEPS = 400
_TOLERANCE = 1e-10


def reached_from_first(matrix: MixingMatrix) -> NDArray[np.bool_]:
    """Return which peers' models hold something of peer 0's after an even and after an odd number
    of mixings: shape (n, 2). W's powers become 11^T/n exactly if all of this is True."""
    reached = np.zeros((len(matrix), 2), bool)
    reached[0, 0] = True
    newest, parity = np.array([0]), 0
    counts = np.diff(matrix.starts)
    while len(newest):
        many = counts[newest]
        ends = np.cumsum(many)
        places = np.repeat(matrix.starts[newest] - (ends - many), many) + np.arange(ends[-1])
        found = np.concatenate([matrix.neighbours[places], newest[matrix.own[newest] > 0]])
        parity = 1 - parity
        newest = np.unique(found[~reached[found, parity]])
        reached[newest, parity] = True
    return reached


def spectral_gap(matrices: Sequence[MixingMatrix]) -> float:
    """Return 1 - max(abs(lambda_2), abs(lambda_n)) of W: each mixing multiplies the distance of the
    models from their mean, in the Euclidean norm, by at most 1 less this gap. The complete graph
    has the gap 1; with a gap of 0 models never become alike.

    Of several matrices by turns it is 1 - (second singular value of their product)^(1 / number of
    matrices): the same for the mean mixing of a turn.

    The eigenvalues are those of W - 11^T/n. Where each row is the one before it, moved by one place
    (rings), they are the discrete Fourier transform of the first row. Otherwise they are numpy's
    for up to 512 peers, and those that Lanczos finds for more.
    """
    if len(matrices) > 1:
        # The product's singular values are the roots of the eigenvalues of P^T P.
        turn = [*matrices, *reversed(matrices)]
        return float(1 - _largest(turn) ** (1 / len(turn)))
    if (first := _first_row_of_a_ring(matrices[0])) is not None:
        return float(1 - np.abs(np.fft.fft(first).real[1:]).max(initial=0.0))
    return 1 - _largest(matrices)


def _largest(matrices: Sequence[MixingMatrix]) -> float:
    """Return the largest magnitude of an eigenvalue, after the mean's, of a symmetric product: the
    first matrix is applied first."""
    peers = len(matrices[0])
    found = _lanczos(matrices) if peers > _SMALL else None
    if found is None:
        product = reduce(np.matmul, [matrix.dense() for matrix in reversed(matrices)])
        found = float(np.abs(np.linalg.eigvalsh(product - 1 / peers)).max())
    # Rounding leaves 1e-17 of the product 11^T/n, and the root of that is not small.
    return min(found, 1.0) if found > _TOLERANCE**2 else 0.0


def _first_row_of_a_ring(matrix: MixingMatrix) -> NDArray[np.float64] | None:
    """Return row 0 if each row is the one before it, moved by one place."""
    peers, counts = len(matrix), np.diff(matrix.starts)
    if (counts != counts[0]).any() or (matrix.own != matrix.own[0]).any():
        return None
    distances = (matrix.neighbours - matrix.rows()) % peers
    order = np.lexsort((distances, matrix.rows()))
    distances = distances[order].reshape(peers, -1)
    weights = matrix.weights[order].reshape(peers, -1)
    if (distances != distances[0]).any() or (weights != weights[0]).any():
        return None
    row = np.zeros(peers)
    row[0], row[distances[0]] = matrix.own[0], weights[0]
    return row


def _lanczos(matrices: Sequence[MixingMatrix]) -> float | None:
    """Do what ``_largest`` does. Returns None if 400 steps are too few to know it to 1e-10.

    Lanczos, "An iteration method for the solution of the eigenvalue problem", 1950, made orthogonal
    in full. The error of a Ritz value is at most the magnitude of its residual's last element.
    """
    peers = len(matrices[0])
    vector = np.random.Generator(np.random.PCG64(0)).standard_normal(peers)
    vector -= vector.mean()
    basis: list[NDArray[np.float64]] = [np.asarray(vector / np.linalg.norm(vector))]
    diagonal, beside = [], []
    for step in range(_MOST_STEPS):
        column = basis[-1].reshape(-1, 1)
        for matrix in matrices:
            column = mix_all(column, matrix)
        vector = column.reshape(-1)
        diagonal.append(float(vector @ basis[-1]))
        for _ in range(2):  # once leaves what rounding brings back
            vector -= vector.mean()
            known = np.array(basis)
            vector -= known.T @ (known @ vector)
        beside.append(float(np.linalg.norm(vector)))
        if step % 20 == 19 or beside[-1] < _TOLERANCE:
            values, vectors = np.linalg.eigh(
                np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
            )
            largest = int(np.abs(values).argmax())
            if beside[-1] * abs(vectors[-1, largest]) < _TOLERANCE:
                return float(abs(values[largest]))
        basis.append(vector / beside[-1])
    return None
