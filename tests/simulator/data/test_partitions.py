import numpy as np
import pytest
from fleetlearn_simulator.data import partitions
from fleetlearn_simulator.data.partitions import Groups
from scipy import stats

LABELS = np.repeat(np.arange(10), 600)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_equal() -> None:
    assert partitions.equal(10, 4).tolist() == [0, 2, 5, 7, 10]
    assert np.diff(partitions.equal(1000, 37)).min() == 27


def test_group() -> None:
    groups = partitions.group(np.array([5, 2, 5, 9, 2]))
    assert [groups.of(group).tolist() for group in range(3)] == [[1, 4], [0, 2], [3]]
    assert groups.sizes.tolist() == [2, 2, 1]


def shares(groups: Groups, labels: np.ndarray, classes: int = 10) -> np.ndarray:
    counts = [
        np.bincount(labels[groups.of(device)], minlength=classes)
        for device in range(len(groups.sizes))
    ]
    return np.array(counts) / groups.sizes[:, None]


@pytest.mark.parametrize(
    "groups",
    [
        partitions.iid(random(), partitions.equal(6000, 70)),
        partitions.dirichlet(random(), LABELS, partitions.equal(6000, 70), 0.1),
        partitions.dirichlet(random(), LABELS, partitions.equal(6000, 6000), 1e-3),
        partitions.dirichlet(
            random(), LABELS, partitions.power_starts(random(1), 6000, 70, 1.2), 100.0
        ),
        partitions.shards(random(), LABELS, 70, 2),
    ],
)
def test_every_example_is_on_one_device(groups: Groups) -> None:
    assert np.array_equal(np.sort(groups.order), np.arange(6000))
    assert groups.starts[-1] == 6000
    assert groups.sizes.min() >= 1


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_dirichlet_shares_have_the_distributions_moments(alpha: float) -> None:
    """Mean p_c = 1/C, and of counts of n: variance p (1 - p) (1/n + (1 - 1/n) / (C alpha + 1))."""
    many = np.repeat(np.arange(10), 20_000)  # enough that no label runs out
    groups = partitions.dirichlet(random(3), many, np.arange(2001) * 20, alpha)
    found = shares(groups, many)
    assert groups.sizes.tolist() == [20] * 2000
    expected = 0.09 * (1 / 20 + (1 - 1 / 20) / (10 * alpha + 1))
    np.testing.assert_allclose(found.mean(axis=0), 0.1, atol=5 * np.sqrt(expected / 2000))
    assert found.var(axis=0).mean() == pytest.approx(expected, rel=0.05)


def test_dirichlet_follows_the_datas_own_shares() -> None:
    labels = np.repeat([0, 1, 2], [60_000, 30_000, 10_000])
    np.testing.assert_allclose(partitions.prior(labels, 0.5), [0.9, 0.45, 0.15])
    found = shares(partitions.dirichlet(random(4), labels, np.arange(1001) * 10, 0.5), labels, 3)
    np.testing.assert_allclose(found.mean(axis=0), [0.6, 0.3, 0.1], atol=0.05)


def test_dirichlet_with_small_alpha_has_one_label_on_a_device_and_large_all() -> None:
    def distinct(alpha: float) -> float:
        groups = partitions.dirichlet(random(), LABELS, np.arange(21) * 100, alpha)
        return float((shares(groups, LABELS) > 0).sum(axis=1).mean())

    assert distinct(1e-6) < 1.5
    assert distinct(1e6) > 9.9


def test_shards_give_two_labels_at_most() -> None:
    """McMahan et al.: 100 devices, 200 shards of 30 examples each; 600 of each label are 20 whole
    shards."""
    groups = partitions.shards(random(), LABELS, 100, 2)
    assert groups.sizes.tolist() == [60] * 100
    labels = (shares(groups, LABELS) > 0).sum(axis=1)
    assert set(labels.tolist()) == {1, 2}
    # A device's second shard is of its first one's label with probability 19/199.
    assert (labels == 1).sum() == pytest.approx(100 * 19 / 199, abs=10)


def test_power_starts_are_the_quantiles_of_a_power_law() -> None:
    sizes = np.diff(partitions.power_starts(random(), 10**6, 1000, 2.0))
    assert sizes.sum() == 10**6
    smallest = np.sort(sizes)[0]
    for times in (2, 4, 8):
        assert (sizes > times * smallest).mean() == pytest.approx(times**-2.0, rel=0.05)
    assert not np.array_equal(np.sort(sizes), sizes)
    assert not np.array_equal(np.sort(sizes)[::-1], sizes)
    assert np.diff(partitions.power_starts(random(), 1000, 1000, 0.5)).tolist() == [1] * 1000


def test_drawn_dirichlet_has_the_same_moments() -> None:
    classes = partitions.group(random(9).permutation(LABELS))
    labels = np.empty(6000, np.int64)
    labels[classes.order] = np.repeat(np.arange(10), classes.sizes)
    found = []
    for device in range(2000):
        places = partitions.drawn_dirichlet(
            random(device), classes, partitions.prior(labels, 0.5), 20
        )
        assert len(places) == 20
        found.append(np.bincount(labels[places], minlength=10) / 20)
    expected = 0.09 * (1 / 20 + (1 - 1 / 20) / 6)
    assert np.var(found, axis=0).mean() == pytest.approx(expected, rel=0.05)
    np.testing.assert_allclose(np.mean(found, axis=0), 0.1, atol=5 * np.sqrt(expected / 2000))


def test_drawn_dirichlet_takes_every_example_of_a_label() -> None:
    classes = partitions.group(np.zeros(50, np.int64))
    places = partitions.drawn_dirichlet(random(), classes, np.ones(1), 20_000)
    assert stats.chisquare(np.bincount(places, minlength=50)).pvalue > 1e-4


def test_drawn_shards_are_runs_of_the_sorted_examples() -> None:
    order = np.argsort(LABELS, kind="stable")
    for device in range(50):
        places = partitions.drawn_shards(random(device), order, 2, 61)
        first, second = places[:30], places[30:]
        assert len(second) == 31
        for run in (first, second):
            assert set(np.diff(run).tolist()) <= {1, -5999}
    assert len(partitions.drawn_shards(random(), order, 5, 3)) == 3
