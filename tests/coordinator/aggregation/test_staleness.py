"""What staleness takes from an update: the papers' functions by hand, and a mean that stays
exact."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.aggregators import make
from fleetlearn_coordinator.aggregation.commit import TaskBase, next_model
from fleetlearn_coordinator.aggregation.exact_mean import WEIGHT_BITS, multiplier, multipliers
from fleetlearn_coordinator.aggregation.optimizers import make as make_optimizer
from fleetlearn_coordinator.aggregation.staleness import FUNCTIONS, StalenessConstants
from hypothesis import given, settings
from hypothesis import strategies as st

POLYNOMIAL = [1.0, 1 / sqrt(2), 1 / sqrt(3), 0.5, 1 / sqrt(5)]


def factor(function: str, tau: int, a: float = 0.0, b: float = 0.0) -> float:
    return FUNCTIONS[function].of(tau, StalenessConstants(a, b))


def test_the_papers_functions_by_hand() -> None:
    assert [factor("polynomial", tau, 0.5) for tau in range(5)] == pytest.approx(
        POLYNOMIAL, rel=1e-15
    )
    assert [factor("polynomial", tau, 2.0) for tau in range(3)] == pytest.approx(
        [1.0, 1 / 4, 1 / 9]
    )
    assert [factor("hinge", tau, 10.0, 4.0) for tau in (0, 4, 5, 6)] == pytest.approx(
        [1.0, 1.0, 1 / 11, 1 / 21]
    )
    assert [factor("constant", tau) for tau in (0, 7)] == [1.0, 1.0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_fresh_update_weighs_one(function: str) -> None:
    """Not s(1) = 1 / 2: the version is not counted up before the update is weighed."""
    hyper = StalenessConstants(**{"a": 0.0, "b": 0.0, **FUNCTIONS[function].defaults})
    assert FUNCTIONS[function].of(0, hyper) == 1.0
    assert multiplier(123, FUNCTIONS[function].of(0, hyper)) == 123


def test_a_multiplier_has_29_significant_bits() -> None:
    assert multiplier(1, 1 / sqrt(2)) == round(2**29 / sqrt(2)) / 2**29
    for weight, staleness in [(1, 1), (7, 2), (2**29 - 1, 3), (1000, 99), (1, 10**6)]:
        found = multiplier(weight, (1 + staleness) ** -0.5)
        whole, _ = Fraction(found).as_integer_ratio()
        assert whole.bit_length() - (len(bin(whole)) - len(bin(whole).rstrip("0"))) <= WEIGHT_BITS
        assert found == pytest.approx(weight * (1 + staleness) ** -0.5, rel=2**-WEIGHT_BITS)
    weights, factors = np.array([1, 7, 1000]), np.array([POLYNOMIAL[1], 1.0, POLYNOMIAL[4]])
    expected = [multiplier(*row) for row in zip(weights.tolist(), factors.tolist(), strict=True)]
    assert multipliers(weights, factors).tolist() == expected


def test_a_buffer_by_hand() -> None:
    """Nguyen et al., Algorithm 1, with K = 3: the model moves by 1/K sum s(tau_i) delta_i, whatever
    versions the updates are of. To average each version alone and add these means up would move it
    by 1 + 0.5 * (2 + 4) / 2."""
    mean = make("mean")
    buffer = mean.init(2)
    for update, staleness in (([1.0, 0.0], 0), ([2.0, 1.0], 3), ([4.0, -1.0], 3)):
        mean.add(
            buffer, (np.array(update, np.float32),), 1, 4.0, factor("polynomial", staleness, 0.5)
        )
    moved = next_model(
        mean, buffer, make_optimizer("sgd", lr=1.0), {}, np.zeros(2, np.float32)
    ).model
    np.testing.assert_array_equal(moved, np.array([(1 + 0.5 * 2 + 0.5 * 4) / 3, 0.0], np.float32))


def test_examples_weigh_and_staleness_takes_from_the_update_alone() -> None:
    """By hand: (30 * 1 + 0.5 * 10 * 5) / (30 + 10). The stale update does not make the fresh one
    weigh more."""
    mean = make("mean")
    state = mean.init(1)
    mean.add(state, (np.ones(1, np.float32),), 30, 1.0, 1.0)
    mean.add(state, (np.full(1, 5, np.float32),), 10, 5.0, 0.5)
    assert mean.result(state).delta.tolist() == [(30 + 0.5 * 10 * 5) / 40]


STALE = st.tuples(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
    st.integers(1, 10_000),
    st.integers(0, 1000),
    st.sampled_from(["polynomial", "hinge", "constant"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STALE, min_size=1, max_size=12), st.data())
def test_the_same_updates_give_the_same_bits_in_any_order(
    updates: list[tuple[list[float], int, int, str]], data: st.DataObject
) -> None:
    """One by one, together, and over a state that was saved in between; and it is the mean, to a
    rounding."""
    rows = [
        (np.array(values, np.float32), weight, factor(function, staleness, 0.7, 3.0))
        for values, weight, staleness, function in updates
    ]

    def add(total: exact_mean.Sum, row: tuple[np.ndarray, int, float]) -> None:
        exact_mean.add(total, (row[0],), row[1], float(np.abs(row[0]).max()), row[2])

    expected = exact_mean.init(3)
    for row in rows:
        add(expected, row)
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    total = exact_mean.init(3)
    for row in shuffled[:cut]:
        add(total, row)
    total = exact_mean.from_tensors(
        {name: each.copy() for name, each in exact_mean.to_tensors(total).items()}
    )
    rest = shuffled[cut:]
    if rest:
        vectors, weights, factors = zip(*rest, strict=True)
        largest = np.array([np.abs(vector).max() for vector in vectors], np.float64)
        exact_mean.add_many(
            total, [np.stack(vectors)], np.array(weights), largest, np.array(factors)
        )
    assert exact_mean.mean(total).tobytes() == exact_mean.mean(expected).tobytes()
    divisor = sum(weight for _, weight, _ in rows)
    for place, found in enumerate(exact_mean.mean(expected).tolist()):
        exactly = sum(
            Fraction(multiplier(weight, own)) * Fraction(float(vector[place]))
            for vector, weight, own in rows
        )
        assert found == pytest.approx(float(exactly / divisor), rel=1e-12, abs=1e-12)


def test_fedasync_mixes_models_by_hand() -> None:
    """Xie et al., Algorithm 1: x + alpha * s * (x_i - x), with alpha 0.6, s 0.5: from x = 4, a task
    that began from 1 and ended at 3, 4 + 0.3 * (3 - 4). By its update of 2 alone the model would
    move the other way."""
    mean, sgd = make("mean"), make_optimizer("sgd", lr=0.6)
    state = mean.init(1)
    mean.add(state, (np.full(1, 2, np.float32),), 1, 2.0, 0.5)
    model = np.full(1, 4, np.float32)
    mixed = next_model(mean, state, sgd, {}, model, TaskBase(np.ones(1, np.float32), 0.5, 0.6))
    assert mixed.model.tolist() == pytest.approx([3.7])
    assert next_model(mean, state, sgd, {}, model).model.tolist() == pytest.approx([4.6])
