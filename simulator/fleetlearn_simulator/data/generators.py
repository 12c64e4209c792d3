"""Generated data. What device 7 has depends on the seed and on its number, and on nothing else.

A generator knows how many examples a device has before it makes them. Inputs are float32 (n,
features), labels int64 (n,).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random

Arrays: TypeAlias = tuple[NDArray[Any], ...]
Ids: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Setup: TypeAlias = Literal["balanced", "damaged", "unbalanced", "non-iid"]
MAX_TEST_DEVICES = 1000
"""The test set of a larger population is made for this many devices."""


class Generator(Protocol):
    """Makes devices' data from their numbers."""

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        """Return the numbers of training examples, each at least 1: int64, in the shape of
        ``ids``."""

    def make(self, device: int) -> Arrays:
        """Make a device's training examples."""

    def test(self) -> Arrays | None:
        """Make examples that no device trains on. None: there are none."""


def power_law(seed: int, ids: Ids, smallest: int, power: float, largest: int) -> NDArray[np.int64]:
    """Draw sizes from a Pareto distribution: a size is more than x with probability (smallest /
    x)^power. They are rounded down, and at most ``largest``. int64, in the shape of ``ids``.
    """
    size = smallest * (1 - keyed_random.uniform(seed, "data.power", ids)) ** (-1 / power)
    return np.minimum(size, largest).astype(np.int64)


def held_out(examples: int, share: float) -> int:
    """Return how many examples to add to ``examples``, to be the ``share`` of all; rounded up: 6 to
    50 for a tenth."""
    return ceil(examples * share / (1 - share) - 1e-9)


@dataclass(frozen=True)
class Synthetic:
    """synthetic(alpha, beta) of Li et al., Federated Optimization in Heterogeneous Networks, arXiv
    1812.06127, sections 5.1 and C.1, as the authors' program makes it.

    Device k draws u_k ~ N(0, alpha) and B_k ~ N(0, beta), its model's weights W_k (features,
    classes) and b_k (classes,) from N(u_k, 1), the mean v_k of its inputs from N(B_k, 1), and the
    inputs from N(v_k, diag(j^-1.2)), j = 1, 2, ...; an example's label is argmax(x W_k + b_k).
    alpha and beta are *standard deviations*, as in the authors' program; the paper's text reads as
    variances, which for 0 and 1 is the same. u_k moves the logits of all classes by the same
    amount. So alpha does not influence the labels: only beta makes data sets differ. With ``iid``
    all devices have one model, with W and b from N(0, 1), and the inputs' mean is 0; alpha and beta
    have no effect.

    A device has floor(LogNormal(4, 2)) + 50 examples, at most ``largest`` (default: no limit; of
    10^6 devices some have hundreds of thousands). It trains on the share 1 - ``test_share`` of
    them, rounded down; the rest is held out. With ``size`` it trains on this many examples; with
    ``size`` and ``power``, on a number from a power law that begins at ``size``. Held-out examples
    are drawn in addition then.
    """

    seed: int
    alpha: float
    beta: float
    population: int
    iid: bool = False
    features: int = 60
    classes: int = 10
    size: int | None = None
    power: float | None = None
    largest: int | None = None
    test_share: float = 0.1

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        if self.size is None:
            trained: Floats = np.floor((1 - self.test_share) * self._all(ids) + 1e-9)
            return np.maximum(trained, 1).astype(np.int64)
        if self.power is None:
            return np.full(np.shape(ids), self.size, np.int64)
        return power_law(self.seed, ids, self.size, self.power, self.largest or 100 * self.size)

    def make(self, device: int) -> Arrays:
        x, y, trained = self._draw(device)
        return x[:trained], y[:trained]

    def test(self) -> Arrays | None:
        """Return what the devices hold out, device after device; of at most the first
        ``MAX_TEST_DEVICES``."""
        if not self.test_share:
            return None
        parts = [self._draw(device) for device in range(min(self.population, MAX_TEST_DEVICES))]
        return (
            np.concatenate([x[trained:] for x, _, trained in parts]),
            np.concatenate([y[trained:] for _, y, trained in parts]),
        )

    def _all(self, ids: Ids) -> NDArray[np.int64]:
        drawn: Floats = np.floor(
            np.exp(4 + 2 * keyed_random.normal(self.seed, "data.examples", ids))
        )
        return np.minimum(drawn + 50, self.largest or np.inf).astype(np.int64)

    def _draw(self, device: int) -> tuple[NDArray[np.float32], NDArray[np.int64], int]:
        id_ = np.array([device], np.int64)
        trained = int(self.examples(id_)[0])
        count = (
            int(self._all(id_)[0])
            if self.size is None
            else trained + held_out(trained, self.test_share)
        )
        random = keyed_random.generator(self.seed, "data.synthetic", device)
        if self.iid:
            (weights, bias), mean = self._shared, np.zeros(self.features)
        else:
            level, middle = random.standard_normal(2) * (self.alpha, self.beta)
            mean = random.normal(middle, 1, self.features)
            weights = random.normal(level, 1, (self.features, self.classes))
            bias = random.normal(level, 1, self.classes)
        x = (mean + random.standard_normal((count, self.features)) * self._deviations).astype(
            np.float32
        )
        return x, np.argmax(x.astype(np.float64) @ weights + bias, axis=1), trained

    @cached_property
    def _shared(self) -> tuple[Floats, Floats]:
        random = keyed_random.generator(self.seed, "data.synthetic.shared")
        return random.standard_normal((self.features, self.classes)), random.standard_normal(
            self.classes
        )

    @cached_property
    def _deviations(self) -> Floats:
        return np.asarray(np.arange(1, self.features + 1) ** -0.6, np.float64)


@dataclass(frozen=True)
class Hospitals:
    """Data for logistic regression over hospitals, in four set-ups of D. Schalk's lecture programs
    on federated learning (fed_logreg.R).

    Always, x ~ N(0, R) with R_ij = r^\\|i-j\\| and \\|r\\| ~ Beta(1, 2), of either sign; weights ~
    U(-2, 2), bias 0; y = 1 with probability sigmoid(x @ weights). The lecture adds a standard
    normal number to the logit; here the model is exactly a logistic one.

    balanced: each hospital has ``size`` examples. damaged: as balanced, but the third hospital's
    sensor of the second feature reads 4 too much. unbalanced: hospitals have 0.8, 0.4, 2.4 and 0.4
    times ``size`` examples, and so on in turns (the lecture's shares 0.2, 0.1, 0.6 and 0.1 of four
    hospitals' examples). non-iid: as unbalanced, and each hospital's sensors have errors of their
    own: from N(0, 1) for the first feature, the third and so on, and from N(0, 2^2) for the others.
    The errors are added after the labels are drawn. The test set has no errors.
    """

    seed: int
    setup: Setup
    population: int = 4
    features: int = 2
    size: int = 1000
    test_share: float = 0.1

    @cached_property
    def weights(self) -> Floats:
        """The true weights: float64 (features,). The bias is 0."""
        return keyed_random.generator(self.seed, "data.hospitals.weights").uniform(
            -2, 2, self.features
        )

    @cached_property
    def correlation(self) -> float:
        """r, the correlation of neighbouring features."""
        random = keyed_random.generator(self.seed, "data.hospitals.correlation")
        return float(random.choice([-1, 1]) * random.beta(1, 2))

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        even = self.setup in ("balanced", "damaged")
        shares = np.ones(4) if even else np.array([0.8, 0.4, 2.4, 0.4])
        sizes: Floats = np.rint(shares[np.asarray(ids) % 4] * self.size)
        return np.maximum(sizes, 1).astype(np.int64)

    def shift(self, device: int) -> Floats:
        """Return the errors of the hospital's sensors: float64 (features,)."""
        wrong = np.zeros(self.features)
        if self.setup == "damaged" and device == min(2, self.population - 1):
            wrong[min(1, self.features - 1)] = 4
        if self.setup == "non-iid":
            deviations = 1 + np.arange(self.features) % 2
            wrong = (
                keyed_random.generator(self.seed, "data.hospitals.shift", device).standard_normal(
                    self.features
                )
                * deviations
            )
        return wrong

    def make(self, device: int) -> Arrays:
        count = int(self.examples(np.array([device], np.int64))[0])
        x, y = self._draw(keyed_random.generator(self.seed, "data.hospitals", device), count)
        return (x + self.shift(device)).astype(np.float32), y

    def test(self) -> Arrays | None:
        count = held_out(
            int(
                self.examples(
                    np.arange(min(self.population, MAX_TEST_DEVICES), dtype=np.int64)
                ).sum()
            ),
            self.test_share,
        )
        x, y = self._draw(keyed_random.generator(self.seed, "data.hospitals.test"), count)
        return (x.astype(np.float32), y) if count else None

    def _draw(self, random: np.random.Generator, count: int) -> tuple[Floats, NDArray[np.int64]]:
        features = np.arange(self.features)
        root = np.linalg.cholesky(self.correlation ** np.abs(features[:, None] - features))
        x = random.standard_normal((count, self.features)) @ root.T
        return x, (random.random(count) < 1 / (1 + np.exp(-x @ self.weights))).astype(np.int64)


@dataclass(frozen=True)
class Cube:
    """FCUBE of Li et al., Federated Learning on Non-IID Data Silos, arXiv 2102.02079, section 4.2,
    as in NIID-Bench.

    Points of the cube [-1, 1]^3, with label 0 where x1 > 0 and 1 where x1 < 0. Each of four parties
    owns two octants that mirror each other in the origin, with equally many points (by default
    1,000 each, and 4,000 together). Device i owns the octants of party i modulo 4. The test set is
    uniform in the cube.
    """

    seed: int
    population: int = 4
    size: int = 1000
    test_share: float = 0.2

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        return np.full(np.shape(ids), self.size, np.int64)

    def make(self, device: int) -> Arrays:
        x = 1 - keyed_random.generator(self.seed, "data.fcube", device).random(
            (self.size, 3)
        )  # in (0, 1]: no label is in doubt
        x *= (1, 1 - 2 * (device // 2 % 2), 1 - 2 * (device % 2))
        x[1::2] *= -1
        return x.astype(np.float32), np.arange(self.size, dtype=np.int64) % 2

    def test(self) -> Arrays | None:
        count = held_out(self.size * min(self.population, MAX_TEST_DEVICES), self.test_share)
        x = (
            keyed_random.generator(self.seed, "data.fcube.test")
            .uniform(-1, 1, (count, 3))
            .astype(np.float32)
        )
        return (x, (x[:, 0] < 0).astype(np.int64)) if count else None
