"""Which device has which of the user's examples.

Examples are divided: each is on one device at most, by a permutation that is made once. Or they are
drawn: each device draws its own when it is asked, with replacement and independently of the others,
so that there can be any number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.own_algorithms import call_own

Indices: TypeAlias = NDArray[np.int64]
Random: TypeAlias = np.random.Generator
Partition: TypeAlias = Callable[[NDArray[np.int64], int, Random], "Sequence[Indices]"]
"""An own partition. It is called with the labels of the examples to train on (int64, shape
(examples,)), the number of devices and a generator, its only source of randomness. It returns for
each device the places of its examples, in the order of the labels."""


class Groups(NamedTuple):
    """Indices of examples in groups. Group g has ``order[starts[g] : starts[g + 1]]``."""

    order: Indices
    """int64 (examples,)."""
    starts: Indices
    """int64 (groups + 1,), not decreasing, from 0."""

    @property
    def sizes(self) -> Indices:
        """int64 (groups,)."""
        return np.diff(self.starts)

    def of(self, group: int) -> Indices:
        """Return the indices of a group."""
        return self.order[self.starts[group] : self.starts[group + 1]]


def equal(examples: int, devices: int) -> Indices:
    """Return the starts of parts whose sizes differ by 1 at most."""
    return np.arange(devices + 1, dtype=np.int64) * examples // devices


def power_starts(random: Random, examples: int, devices: int, power: float) -> Indices:
    """Return the starts of parts with power-law sizes, in a random order. Each has at least 1
    example, and all together have ``examples``. Apart from this 1, the sizes are quantiles of a
    Pareto distribution: the share x^-power of the devices have more than x times the smallest size.
    """
    shares = ((np.arange(devices) + 0.5) / devices) ** (-1 / power)
    exact = shares / shares.sum() * (examples - devices)
    sizes = 1 + np.floor(exact).astype(np.int64)
    sizes[np.argsort(np.floor(exact) - exact, kind="stable")[: examples - int(sizes.sum())]] += 1
    return starts_of(random.permutation(sizes))


def starts_of(sizes: Indices) -> Indices:
    """Return where each part begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def group(values: NDArray[np.int64]) -> Groups:
    """Group the indices of values, int64 (examples,), that are equal. The groups are in the values'
    order."""
    order = np.argsort(values, kind="stable")
    _, first = np.unique(values[order], return_index=True)
    return Groups(order, np.append(first, len(values)).astype(np.int64))


def iid(random: Random, starts: Indices) -> Groups:
    """Cut a random permutation at ``starts``."""
    return Groups(random.permutation(starts[-1]), starts)


def dirichlet(random: Random, labels: NDArray[np.int64], starts: Indices, alpha: float) -> Groups:
    """Divide examples so that each device's shares of the labels are drawn from a Dirichlet
    distribution (Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution, arXiv
    1909.06335, section 3). Sizes are given.

    Device k's shares are q_k ~ Dir(alpha * C * p), where p are the shares in the data and C is the
    number of labels. If all labels are equally frequent this is Dir(alpha, ..., alpha), as the
    field writes it (the paper's own alpha is C times this one). The device draws the labels of its
    examples from q_k, without replacement; when a label has run out, from the others, in proportion
    to q_k. Devices draw one after the other, in a random order. ``starts[-1]`` is at most the
    number of examples.
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
        taken = [
            shuffled[label][left[label] : left[label] + counts[label]]
            for label in np.flatnonzero(counts)
        ]
        order[starts[device] : starts[device + 1]] = np.concatenate(taken)
    return Groups(order, starts)


def prior(labels: NDArray[np.int64], alpha: float) -> NDArray[np.float64]:
    """Return the parameters of the Dirichlet distribution, alpha * C * p: float64 (C,)."""
    sizes = group(labels).sizes
    return np.asarray(alpha * len(sizes) * sizes / len(labels))


def shards(random: Random, labels: NDArray[np.int64], devices: int, pieces: int) -> Groups:
    """Sort the examples by label, cut them into devices * pieces shards, and give each device
    ``pieces`` random shards (McMahan et al., Communication-Efficient Learning of Deep Networks,
    arXiv 1602.05629, section 3).

    The sizes of shards differ by 1 at most. Examples with the same label are in a random order.
    """
    mixed = random.permutation(len(labels))
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    cut = equal(len(labels), devices * pieces)
    dealt = random.permutation(devices * pieces)
    sizes = np.diff(cut)[dealt].reshape(devices, pieces).sum(axis=1)
    return Groups(
        np.concatenate([order[cut[shard] : cut[shard + 1]] for shard in dealt]), starts_of(sizes)
    )


def own_groups(
    name: str, partition: Partition, labels: NDArray[np.int64], devices: int, random: Random
) -> Groups:
    """Divide examples by an own partition. Raises SimulatorError where it raises, or gives an
    example twice or one that is not there. ``name``: what the scenario calls it."""
    where = f'data.partition = "{name}"'
    parts = call_own(
        where, lambda: [np.asarray(part) for part in partition(labels.copy(), devices, random)]
    )
    if len(parts) != devices:
        raise SimulatorError(f"{where} returned {len(parts)} parts for {devices} devices")
    for device, part in enumerate(parts):
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise SimulatorError(
                f"{where} gave device {device} {part.dtype} of shape {part.shape}; expected the "
                "places of its examples: integers of shape (k,)"
            )
    order = np.concatenate([part.astype(np.int64) for part in parts])
    outside = (order < 0) | (order >= len(labels))
    if outside.any():
        raise SimulatorError(
            f"{where} gave the place {order[outside][0]}; there are {len(labels)} examples to "
            f"train on: places are 0 to {len(labels) - 1}"
        )
    places, counts = np.unique(order, return_counts=True)
    if (counts > 1).any():
        raise SimulatorError(
            f"{where} gave the example at {places[counts > 1][0]} to several devices, or twice; "
            "each is on one device at most"
        )
    return Groups(order, starts_of(np.array([part.size for part in parts], np.int64)))


def drawn_dirichlet(
    random: Random, classes: Groups, concentration: NDArray[np.float64], size: int
) -> Indices:
    """Draw the examples of one device: labels by its own shares, as in ``dirichlet``; of each
    label any examples."""
    counts = random.multinomial(size, random.dirichlet(concentration))
    inside = random.random(size) * np.repeat(classes.sizes, counts)
    return classes.order[np.repeat(classes.starts[:-1], counts) + inside.astype(np.int64)]


def drawn_shards(random: Random, order: Indices, pieces: int, size: int) -> Indices:
    """Draw the examples of one device: ``pieces`` stretches of the examples sorted by label, which
    begin anywhere. The first example follows the last."""
    sizes = np.diff(equal(size, min(pieces, size)))
    begins = random.integers(len(order), size=len(sizes))
    return np.concatenate(
        [
            order[(begin + np.arange(length)) % len(order)]
            for begin, length in zip(begins, sizes, strict=True)
        ]
    )
