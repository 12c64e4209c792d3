"""What follows from a mixing matrix alone, for peers.py: gaps, and consensus errors."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
from fleetlearn_device.peers.mixing import MixingMatrix, mix_all
from numpy.typing import NDArray

ENOUGH = 1e-12


def gap_in_closed_form(topology: str, peers: int) -> float:
    """Return the spectral gap by its formula; NaN: there is none (random graphs).

    The eigenvalues of the circulant graphs are sums of cosines: 1 - (1 + 2 cos(2 pi / n)) / 3 for
    the ring. The torus is a square one.
    """
    turn = 2 * np.pi / peers
    match topology:
        case "ring":
            return float(2 / 3 * (1 - np.cos(turn)))
        case "torus":
            return float(2 / 5 * (1 - np.cos(2 * np.pi / isqrt(peers))))
        case "exponential":
            ahead = {2**power for power in range((peers - 1).bit_length())}
            distances = np.array(sorted(ahead | {peers - distance for distance in ahead}))
            waves = np.cos(turn * np.arange(1, peers)[:, None] * distances)
            values = (1 + waves.sum(axis=1)) / (1 + len(distances))
            return float(1 - np.abs(values).max())
        case "one-peer-exponential" | "complete":
            return 1.0  # a power of two of peers: all have the mean after a turn
    return float("nan")


def contraction(matrices: Sequence[MixingMatrix]) -> float:
    """Measure by how much a mixing multiplies the disagreement of models that learn nothing, when
    the slowest one is all that is left of it."""
    peers = len(matrices[0])
    models = np.random.default_rng(0).normal(size=(peers, 1))
    before = after = 0.0
    for turn in range(2000):
        models -= models.mean()
        before = float(np.linalg.norm(models))
        for matrix in matrices:
            models = mix_all(models, matrix)
        after = float(np.linalg.norm(models - models.mean()))
        if after <= ENOUGH or turn == 1999:
            break
        models /= after  # so that nothing is lost to rounding
    return 0.0 if after <= ENOUGH else (after / before) ** (1 / len(matrices))


def expected_error(matrices: Sequence[MixingMatrix]) -> tuple[float, float]:
    """Return the consensus error over the pull of a step, after many steps, if what peers learn is
    new in each step (noise), and if it is always the same (steady).

    With x <- W (x + u) the disagreement is the sum over s of (W^s - 11^T/n) u. For noise the
    squares add up: sqrt(mean of lambda^2 / (1 - lambda^2)) over all eigenvalues but the mean's; for
    the same u the sums do: sqrt(mean of (lambda / (1 - lambda))^2). Matrices by turns: the mean
    over a turn, from the products themselves.
    """
    peers = len(matrices[0])
    if len(matrices) == 1:
        values = np.linalg.eigvalsh(matrices[0].dense())[:-1]  # the last is the mean's, 1
        noise = np.mean(values**2 / (1 - values**2))
        return float(np.sqrt(noise)), float(np.sqrt(np.mean((values / (1 - values)) ** 2)))
    both = np.array([_of_a_phase(matrices, phase) for phase in range(len(matrices))])
    noise, steady = np.sqrt(both.mean(axis=0) / (peers - 1))
    return float(noise), float(steady)


def measured_error(matrices: Sequence[MixingMatrix], elements: int = 256) -> tuple[float, float]:
    """Measure what ``expected_error`` says, as the mean over the second half of the steps: on
    models that normal numbers pull, and on one in which each element pulls one peer."""
    random = np.random.default_rng(1)
    peers = len(matrices[0])
    same = _scaled(np.eye(peers))
    drawn, steady = np.zeros((peers, elements)), np.zeros((peers, peers))
    errors = []
    for step in range(6000):
        matrix = matrices[step % len(matrices)]
        drawn = mix_all(drawn + _scaled(random.normal(size=(peers, elements))), matrix)
        steady = mix_all(steady + same, matrix)
        errors.append((np.square(drawn).mean(), np.square(steady).mean()))
    noise, constant = np.sqrt(np.mean(errors[3000:], axis=0))
    return float(noise), float(constant)


def _scaled(pull: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the pull without its mean, scaled to a mean square of 1."""
    apart = pull - pull.mean(axis=0)
    return np.asarray(apart / np.sqrt(np.square(apart).mean()))


def _of_a_phase(matrices: Sequence[MixingMatrix], phase: int) -> tuple[float, float]:
    """Return the squares of both after the mixing ``phase``."""
    peers, turn = len(matrices[0]), len(matrices)
    product: NDArray[np.float64] = np.eye(peers)
    total, squares, age = np.zeros((peers, peers)), 0.0, 0
    while True:
        product = product @ matrices[(phase - age) % turn].dense()
        left = product - 1 / peers
        if (size := float(np.square(left).sum())) < ENOUGH:
            return squares, float(np.square(total).sum())
        total, squares, age = total + left, squares + size, age + 1
