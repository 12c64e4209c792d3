import numpy as np
import pytest
from fleetlearn_simulator.data.generators import (
    Cube,
    Generator,
    Hospitals,
    Synthetic,
    held_out,
    power_law,
)
from scipy import stats

ALL: list[Generator] = [
    Synthetic(3, 1, 1, 30),
    Synthetic(3, 0.5, 0.5, 30, size=50),
    Synthetic(3, 0, 0, 30, iid=True, size=20, power=1.5, largest=100, features=7, classes=3),
    Hospitals(3, "non-iid"),
    Cube(3),
]


def ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


@pytest.mark.parametrize("generator", ALL, ids=lambda generator: type(generator).__name__)
def test_what_a_device_has_depends_on_its_number_alone(generator: Generator) -> None:
    first = {device: generator.make(device) for device in (0, 1, 2, 3)}
    sizes = generator.examples(ids(4))
    for device in (3, 1, 0, 2):
        x, y = generator.make(device)
        np.testing.assert_array_equal(x, first[device][0])
        np.testing.assert_array_equal(y, first[device][1])
        assert (x.dtype, y.dtype) == (np.float32, np.int64)
        assert len(x) == len(y) == sizes[device] == generator.examples(np.array([[device]]))[0, 0]
    assert not np.array_equal(first[0][0][:20], first[1][0][:20])
    test = generator.test()
    assert test is not None
    assert test[0].shape[1:] == first[0][0].shape[1:]
    assert not set(test[0][:, 0].tolist()) & set(first[0][0][:, 0].tolist())


def test_synthetic_has_the_papers_sizes() -> None:
    """n_k = floor(LogNormal(4, 2)) + 50, of which 9 in 10 are trained on."""
    sizes = Synthetic(1, 1, 1, 10**6).examples(ids(10**6))
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        whole = np.floor(np.exp(4 + 2 * stats.norm.ppf(quantile))) + 50
        assert np.quantile(sizes, quantile) == pytest.approx(0.9 * whole, rel=0.02)
    assert sizes.min() == 45
    assert sizes.max() > 100_000
    assert Synthetic(1, 1, 1, 10**6, largest=200).examples(ids(10**6)).max() == 180


def test_synthetic_holds_out_what_is_left() -> None:
    whole, split = Synthetic(1, 1, 1, 3, test_share=0), Synthetic(1, 1, 1, 3)
    assert whole.test() is None
    test = split.test()
    assert test is not None
    together = [whole.make(device)[0] for device in range(3)]
    assert sum(map(len, together)) == len(test[0]) + split.examples(ids(3)).sum()
    held = [rows[int(0.9 * len(rows)) :] for rows in together]
    np.testing.assert_array_equal(np.concatenate(held), test[0])
    np.testing.assert_array_equal(split.make(1)[0], together[1][: int(0.9 * len(together[1]))])


def test_synthetics_inputs_and_labels_have_the_papers_distribution() -> None:
    """B_k's deviation is beta, v_k's around it 1, that of x_j around v_kj j^-0.6."""
    generator = Synthetic(5, 0, 3, 400, size=400, test_share=0)
    made = [generator.make(device) for device in range(400)]
    means = np.array([x.mean(axis=0) for x, _ in made])
    assert means.mean(axis=1).std() == pytest.approx(np.sqrt(9 + 1 / 60), rel=0.1)
    assert (means - means.mean(axis=1, keepdims=True)).std() == pytest.approx(1, rel=0.03)
    spread = np.array([x.std(axis=0) for x, _ in made]).mean(axis=0)
    np.testing.assert_allclose(spread, np.arange(1, 61) ** -0.6, rtol=0.02)
    # N(u_k, 1) weights with alpha = 0: of ten classes the most frequent is any of them.
    majority = [np.bincount(y, minlength=10).argmax() for _, y in made]
    assert stats.chisquare(np.bincount(majority, minlength=10)).pvalue > 1e-4


def test_iid_synthetic_has_one_model_and_centred_inputs() -> None:
    generator = Synthetic(5, 1, 1, 50, iid=True, size=200, test_share=0)
    x, y = (
        np.concatenate(column)
        for column in zip(*(generator.make(device) for device in range(50)), strict=True)
    )
    assert np.abs(x.mean(axis=0)).max() < 5 / np.sqrt(len(x))
    weights, bias = generator._shared
    np.testing.assert_array_equal(y, np.argmax(x.astype(np.float64) @ weights + bias, axis=1))


def authors(random: np.random.RandomState, alpha: float, beta: float, count: int) -> np.ndarray:
    """A device's labels, by the steps of litian96/FedProx's
    data/synthetic_1_1/generate_synthetic.py, in its order."""
    mean_w = random.normal(0, alpha)
    mean_x = random.normal(random.normal(0, beta), 1, 60)
    w, b = random.normal(mean_w, 1, (60, 10)), random.normal(mean_w, 1, 10)
    x = random.multivariate_normal(
        mean_x, np.diag([float(j + 1) ** -1.2 for j in range(60)]), count
    )
    return np.array([np.argmax(np.exp(row @ w + b) / np.exp(row @ w + b).sum()) for row in x])


def test_alpha_changes_nothing() -> None:
    """u_k moves the logits of all classes by u_k (1 + sum of x), so that the labels stay; in the
    authors' steps too."""
    for device in range(30):
        (x, y), (other, labels) = (
            Synthetic(4, alpha, 0.5, 30).make(device) for alpha in (0.0, 100.0)
        )
        np.testing.assert_array_equal(x, other)
        np.testing.assert_array_equal(y, labels)
    first, second = (authors(np.random.RandomState(4), alpha, 0.5, 1000) for alpha in (0.0, 100.0))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("both", [0, 1])
def test_synthetics_labels_against_the_authors_steps(both: float) -> None:
    """The share of a device's most frequent class, of 300 devices each."""
    generator, random = Synthetic(6, both, both, 300, size=100), np.random.RandomState(6)
    ours = [np.bincount(generator.make(device)[1]).max() for device in range(300)]
    theirs = [np.bincount(authors(random, both, both, 100)).max() for _ in range(300)]
    assert stats.ks_2samp(ours, theirs).pvalue > 0.001


@pytest.mark.parametrize(
    ("both", "iid", "share", "classes"),
    [
        (0, True, 0.452, 5.07),
        (0, False, 0.803, 2.1),
        (0.5, False, 0.759, 2.23),
        (1, False, 0.787, 2.0),
    ],
)
def test_synthetics_devices_are_as_uneven_as_the_published_ones(
    both: float, iid: bool, share: float, classes: float
) -> None:
    """Over the 30 devices of the test sets in litian96/FedProx, each one draw of an unknown seed:
    the mean share of a device's most frequent class, and the mean number of its classes."""
    shares, numbers = [], []
    for seed in range(20):
        generator = Synthetic(seed, both, both, 30, iid=iid, largest=5000)
        held = [y[trained:] for _, y, trained in map(generator._draw, range(30))]
        shares.append(np.mean([np.bincount(y).max() / len(y) for y in held]))
        numbers.append(np.mean([len(set(y.tolist())) for y in held]))
    assert abs(np.mean(shares) - share) < 3.5 * np.std(shares)
    assert abs(np.mean(numbers) - classes) < 3.5 * np.std(numbers)


def test_power_law() -> None:
    """P(n > x) = (smallest / x)^power."""
    sizes = power_law(2, ids(200_000), 10, 1.5, 5000)
    assert sizes.min() == 10
    assert sizes.max() == 5000
    for x in (20, 100, 1000):
        assert (sizes >= x).mean() == pytest.approx((10 / x) ** 1.5, rel=0.15)


@pytest.mark.parametrize(
    ("examples", "share", "expected"),
    [(50, 0.1, 6), (9, 0.1, 1), (10, 0.1, 2), (40, 0.2, 10), (5, 0, 0)],
)
def test_held_out(examples: int, share: float, expected: int) -> None:
    """Of all of them, 1 - share rounded down is then what is trained on."""
    assert held_out(examples, share) == expected
    assert int((1 - share) * (examples + expected) + 1e-9) == examples


def test_hospitals_setups_differ_as_they_should() -> None:
    setups = {name: Hospitals(7, name) for name in ("balanced", "damaged", "unbalanced", "non-iid")}
    assert setups["balanced"].examples(ids(4)).tolist() == [1000] * 4
    assert setups["damaged"].examples(ids(4)).tolist() == [1000] * 4
    assert setups["unbalanced"].examples(ids(6)).tolist() == [800, 400, 2400, 400, 800, 400]
    assert setups["non-iid"].examples(ids(4)).tolist() == [800, 400, 2400, 400]
    for device in range(4):
        clean, broken = setups["balanced"].make(device), setups["damaged"].make(device)
        np.testing.assert_array_equal(clean[1], broken[1])
        wrong = broken[0] - clean[0]
        np.testing.assert_allclose(
            wrong, np.broadcast_to((0, 4 if device == 2 else 0), wrong.shape), atol=1e-5
        )
        clean, broken = setups["unbalanced"].make(device), setups["non-iid"].make(device)
        np.testing.assert_array_equal(clean[1], broken[1])
        shift = setups["non-iid"].shift(device)
        np.testing.assert_allclose(
            broken[0] - clean[0], np.broadcast_to(shift, clean[0].shape), atol=1e-5
        )
        assert (shift != 0).all()


def test_hospitals_sensors_err_with_the_lectures_deviations() -> None:
    shifts = np.array([Hospitals(7, "non-iid", 5000).shift(device) for device in range(5000)])
    np.testing.assert_allclose(shifts.mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(shifts.std(axis=0), [1, 2], rtol=0.05)


def test_hospitals_labels_follow_the_true_model() -> None:
    """Mean score at the true weights is 0 within its standard error; correlations are r^|i-j|."""
    generator = Hospitals(11, "balanced", 1, features=3, size=200_000)
    x, y = generator.make(0)
    p = 1 / (1 + np.exp(-x.astype(np.float64) @ generator.weights))
    error = np.sqrt((x.astype(np.float64) ** 2 * (p * (1 - p))[:, None]).mean(axis=0) / len(y))
    assert np.abs((x * (y - p)[:, None]).mean(axis=0) / error).max() < 4
    r = generator.correlation
    np.testing.assert_allclose(np.corrcoef(x.T), [[1, r, r**2], [r, 1, r], [r**2, r, 1]], atol=0.01)
    assert 0 < abs(r) < 1
    assert np.abs(generator.weights).max() <= 2


def test_cube_parties_own_two_octants_that_mirror_each_other() -> None:
    generator = Cube(1)
    owned = []
    for device in range(4):
        x, y = generator.make(device)
        np.testing.assert_array_equal(y, x[:, 0] < 0)
        octants = {tuple(row) for row in np.sign(x).astype(int).tolist()}
        assert len(octants) == 2
        assert {tuple(-value for value in octant) for octant in octants} == octants
        assert y.sum() == 500
        np.testing.assert_allclose(np.abs(x).mean(axis=0), 0.5, atol=0.05)
        assert np.abs(x).max() <= 1
        owned += octants
    assert len(set(owned)) == 8
    test = generator.test()
    assert test is not None
    assert len(test[0]) == 1000  # a fifth, of 5,000 with the parties' 4,000
    counts = np.unique(np.sign(test[0]), axis=0, return_counts=True)[1]
    assert len(counts) == 8
    assert stats.chisquare(counts).pvalue > 1e-4
