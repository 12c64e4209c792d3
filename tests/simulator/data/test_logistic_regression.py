import numpy as np
import pytest
from fleetlearn_simulator.data.generators import Arrays, Hospitals, Ids
from fleetlearn_simulator.data.logistic_regression import pooled_mle
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from sklearn.linear_model import LogisticRegression


class Held(Source):
    """Two arrays for each device."""

    def __init__(self, *parts: Arrays) -> None:
        self._parts = parts

    def examples(self, ids: Ids) -> Ids:
        return np.array([len(self._parts[device][0]) for device in ids])

    def arrays(self, device: int) -> Arrays:
        return self._parts[device]

    def test(self) -> None:
        return None


def hospitals(setup: str, features: int = 2) -> Held:
    generator = Hospitals(5, setup, 4, features)  # type: ignore[arg-type]
    return Held(*(generator.make(device) for device in range(4)))


@pytest.mark.parametrize("setup", ["balanced", "damaged", "unbalanced", "non-iid"])
@pytest.mark.parametrize("intercept", [True, False])
def test_against_scikit_learn(setup: str, intercept: bool) -> None:
    source = hospitals(setup, 3)
    weights, bias = pooled_mle(source, range(4), intercept=intercept)
    x = np.concatenate([source.arrays(device)[0] for device in range(4)]).astype(np.float64)
    y = np.concatenate([source.arrays(device)[1] for device in range(4)])
    theirs = LogisticRegression(
        C=np.inf, fit_intercept=intercept, solver="newton-cholesky", tol=1e-12
    ).fit(x, y)
    np.testing.assert_allclose(weights, theirs.coef_[0], rtol=0, atol=1e-8)
    assert bias == pytest.approx(theirs.intercept_[0] if intercept else 0, abs=1e-8)
    residual = 1 / (1 + np.exp(-(x @ weights + bias))) - y
    gradient = np.append(x.T @ residual, residual.sum() if intercept else 0) / len(y)
    assert np.linalg.norm(gradient) < 1e-13


def test_by_hand() -> None:
    """One indicator: the estimates are the groups' log odds. Of x = 0, 1 in 4 is positive; of x =
    1, 2 in 3."""
    x = np.array([[0], [0], [0], [0], [1], [1], [1]], np.float32)
    y = np.array([1, 0, 0, 0, 1, 1, 0])
    weights, bias = pooled_mle(Held((x[:3], y[:3]), (x[3:], y[3:])), (0, 1))
    assert bias == pytest.approx(np.log(1 / 3), abs=1e-12)
    assert weights[0] == pytest.approx(np.log(2) - np.log(1 / 3), abs=1e-12)


def test_the_true_model_is_found_from_many_examples() -> None:
    generator = Hospitals(5, "balanced", 1, size=200_000)
    weights, bias = pooled_mle(Held(generator.make(0)), [0])
    np.testing.assert_allclose([*weights, bias], [*generator.weights, 0], atol=0.05)


@pytest.mark.parametrize("seed", [3, 43, 133, 171])
def test_steps_that_go_too_far_are_halved(seed: int) -> None:
    """Newton's method alone diverges on these, whose inputs are of very different lengths."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((30, 2)) * np.exp(3 * rng.standard_normal((30, 1)))
    y = (rng.random(30) < 1 / (1 + np.exp(-np.clip(x @ [2, -1], -2, 2)))).astype(np.int64)
    weights, _ = pooled_mle(Held((x, y)), [0], intercept=False)
    residual = 0.5 * (1 + np.tanh(x @ weights / 2)) - y
    assert np.linalg.norm(x.T @ residual) / 30 < 1e-10


LINE = np.linspace(-1, 1, 20)[:, None]


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (LINE, LINE[:, 0] > 0, "a plane separates the labels of the 20 pooled examples"),
        # Both labels at 0, and there alone: the maximum is infinitely far away too.
        (np.r_[LINE, [[0]], [[0]]], np.r_[LINE[:, 0] > 0, 0, 1], "a plane separates"),
        (np.hstack([LINE, 2 * LINE]), np.arange(20) % 2, "depend on each other"),
        (LINE, np.arange(20) % 3, r"the labels are \[0\.0, 1\.0, 2\.0\]"),
    ],
)
def test_no_maximum(x: np.ndarray, y: np.ndarray, why: str) -> None:
    with pytest.raises(SimulatorError, match=why):
        pooled_mle(Held((x, y.astype(np.int64))), [0])


def test_other_data() -> None:
    with pytest.raises(
        SimulatorError, match="the data of 0 devices were given; expected inputs and labels"
    ):
        pooled_mle(hospitals("balanced"), [])
    with pytest.raises(SimulatorError, match="expected inputs and labels"):
        pooled_mle(Held((LINE,)), [0])
