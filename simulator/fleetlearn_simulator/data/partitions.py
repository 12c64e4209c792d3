"""Who has which of a user's examples: an order of their places and where in it each device's begin.

Divided: every example is on one device at most; one permutation, made once. Drawn: a device draws its own places when
it is asked, with replacement and whatever the others have, so that the same arrays serve any number of devices.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Places: TypeAlias = NDArray[np.int64]
Random: TypeAlias = np.random.Generator


class Groups(NamedTuple):
    """Places in groups: group g's are ``order[starts[g] : starts[g + 1]]``."""

    order: Places
    """int64 (examples,)."""
    starts: Places
    """int64 (groups + 1,), not decreasing, from 0."""

    @property
    def sizes(self) -> Places:
        """int64 (groups,)."""
        return np.diff(self.starts)

    def of(self, group: int) -> Places:
        """A group's places."""
        return self.order[self.starts[group] : self.starts[group + 1]]


def equal(examples: int, devices: int) -> Places:
    """Starts of sizes that differ by 1 at most."""
    return np.arange(devices + 1, dtype=np.int64) * examples // devices


def power_starts(random: Random, examples: int, devices: int, power: float) -> Places:
    """Starts of power-law sizes, at least 1 and ``examples`` in all, in a random order: beyond the first one, sizes are
    as the quantiles of a Pareto distribution, so that more than x times the smallest have x^-power of the devices.
    """
    shares = ((np.arange(devices) + 0.5) / devices) ** (-1 / power)
    exact = shares / shares.sum() * (examples - devices)
    sizes = 1 + np.floor(exact).astype(np.int64)
    sizes[np.argsort(np.floor(exact) - exact, kind="stable")[: examples - int(sizes.sum())]] += 1
    return starts_of(random.permutation(sizes))


def starts_of(sizes: Places) -> Places:
    """Sizes -> where each begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def group(values: NDArray[np.int64]) -> Groups:
    """Places with the same value together, one group for each distinct value, in their order; int64 (examples,)."""
    order = np.argsort(values, kind="stable")
    _, first = np.unique(values[order], return_index=True)
    return Groups(order, np.append(first, len(values)).astype(np.int64))


def iid(random: Random, starts: Places) -> Groups:
    """A random permutation, cut at ``starts``."""
    return Groups(random.permutation(starts[-1]), starts)


def dirichlet(random: Random, labels: NDArray[np.int64], starts: Places, alpha: float) -> Groups:
    """Devices whose shares of the labels are drawn from a Dirichlet distribution (Hsu, Qi and Brown, Measuring the
    Effects of Non-Identical Data Distribution, arXiv 1909.06335, section 3), with sizes that are given.

    Device k's shares are q_k ~ Dir(alpha * C * p), with p the shares in the data and C the number of labels: Dir(alpha,
    ..., alpha) where all labels are equally frequent, as the field writes it (the paper's own alpha is C times that).
    It draws the labels of its examples from q_k, without replacement; where a label has run out, from the others, in
    proportion to q_k. Devices take their turns in a random order. ``starts[-1]`` is at most the number of labels.
    """
    classes = group(labels)
    left, order = classes.sizes.copy(), np.empty(starts[-1], np.int64)
    shuffled = [random.permutation(classes.of(label)) for label in range(len(left))]
    sizes, concentration = np.diff(starts), prior(labels, alpha)
    shares = random.dirichlet(concentration, len(sizes))
    for device in random.permutation(len(sizes)):
        counts = np.zeros_like(left)
        while short := int(sizes[device] - counts.sum()):
            wanted = np.where(left > counts, shares[device], 0)
            if not wanted.sum() > 0:
                wanted = (left - counts).astype(np.float64)
            counts = np.minimum(counts + random.multinomial(short, wanted / wanted.sum()), left)
        left -= counts
        taken = [shuffled[label][left[label] : left[label] + counts[label]] for label in np.flatnonzero(counts)]
        order[starts[device] : starts[device + 1]] = np.concatenate(taken)
    return Groups(order, starts)


def prior(labels: NDArray[np.int64], alpha: float) -> NDArray[np.float64]:
    """The Dirichlet distribution's parameters, alpha * C * p: float64 (C,)."""
    sizes = group(labels).sizes
    return np.asarray(alpha * len(sizes) * sizes / len(labels))


def shards(random: Random, labels: NDArray[np.int64], devices: int, pieces: int) -> Groups:
    """Examples sorted by label, cut into devices * pieces shards, of which each device gets ``pieces`` at random
    (McMahan et al., Communication-Efficient Learning of Deep Networks, arXiv 1602.05629, section 3).

    Shards' sizes differ by 1 at most. Examples of a label are in a random order.
    """
    mixed = random.permutation(len(labels))
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    cut = equal(len(labels), devices * pieces)
    dealt = random.permutation(devices * pieces)
    sizes = np.diff(cut)[dealt].reshape(devices, pieces).sum(axis=1)
    return Groups(np.concatenate([order[cut[shard] : cut[shard + 1]] for shard in dealt]), starts_of(sizes))


def drawn_dirichlet(random: Random, classes: Groups, concentration: NDArray[np.float64], size: int) -> Places:
    """One device's places: labels from shares of its own, as in ``dirichlet``, and of each label any examples."""
    counts = random.multinomial(size, random.dirichlet(concentration))
    inside = random.random(size) * np.repeat(classes.sizes, counts)
    return classes.order[np.repeat(classes.starts[:-1], counts) + inside.astype(np.int64)]


def drawn_shards(random: Random, order: Places, pieces: int, size: int) -> Places:
    """One device's places: ``pieces`` runs, which begin anywhere in the circle of the examples sorted by label."""
    sizes = np.diff(equal(size, min(pieces, size)))
    begins = random.integers(len(order), size=len(sizes))
    return np.concatenate(
        [order[(begin + np.arange(length)) % len(order)] for begin, length in zip(begins, sizes, strict=True)]
    )
