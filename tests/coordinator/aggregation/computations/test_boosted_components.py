"""Component-wise boosting over devices gives the coefficients of all rows in one place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from computing import computed
from fleetlearn_coordinator.aggregation.computations.boosted_components import advance, is_done
from fleetlearn_coordinator.aggregation.computations.component_fits import (
    directions_of,
    gram_of,
    penalty_for,
    penalty_of,
)
from fleetlearn_coordinator.aggregation.computations.registry import BadTotalError, RunComputation
from fleetlearn_device.computations.boosted_components import component_scores, compute
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedComponents
from fleetlearn_protocol.computations.components_layout import (
    base_learners,
    components_state,
    components_sums,
    first_components,
    spline_basis,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import BSpline
from scipy.linalg import eigh
from scipy.optimize import brentq

COLUMNS = (BoostColumn("a"), BoostColumn("kind", categories=5), BoostColumn("b"))


def rows(count: int, loss: str, seed: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = np.column_stack(
        [50 + 8 * rng.normal(size=count), rng.integers(0, 5, count), rng.exponential(size=count)]
    ).astype(np.float32)
    effects = np.array([0, 1, -1, 0.5, 3])[x[:, 1].astype(int)]
    signal = np.sin(x[:, 0] / 5) + effects + 0.6 * x[:, 2] + 0.3 * rng.normal(size=count)
    if loss == "squared":
        return {"x": x, "y": (40 * signal).astype(np.float32)}
    return {"x": x, "y": (signal > 1.2).astype(np.int64)}


def components(loss: str, **changed: Any) -> BoostedComponents:
    columns = changed.pop("columns", COLUMNS)
    return BoostedComponents(columns=columns, loss=loss, **{"knots": 8, **changed})


class Learner(NamedTuple):
    """A base learner of rows in one place: its design matrix, and (X^T X + lambda P)^-1."""

    design: np.ndarray
    inverse: np.ndarray
    directions: np.ndarray


def pooled(table: dict[str, np.ndarray], told: BoostedComponents) -> tuple[list[np.ndarray], float]:
    """Component-wise boosting as the paper writes it (section 2.3, algorithm 1), of rows in one
    place, in doubles: another basis, another search for lambda, sums of squared errors of rows.

    Returns each base learner's coefficients, and the intercept.
    """
    x, y = table["x"].astype(np.float64), table["y"].astype(np.float64)
    learners = []
    for number, column in enumerate(told.columns):
        own = x[:, number]
        if column.categories:
            hot = (own[:, None] == np.arange(column.categories)).astype(float)
            every = np.eye(column.categories)
            learners.append(penalised(hot, every, told.degrees_of_freedom, every))
            continue
        line = np.column_stack([np.ones(len(own)), own])
        learners.append(Learner(line, np.linalg.inv(line.T @ line), np.eye(2)))
        low, high = own.min(), own.max()
        step = (high - low) / (told.knots + 1)
        knots = low + step * np.arange(-3, told.knots + 5)
        inside = np.clip(own, knots[3], np.nextafter(knots[-4], low))
        basis = BSpline.design_matrix(inside, knots, 3).toarray()
        second = np.diff(np.eye(basis.shape[1]), n=2, axis=0)
        # Without a straight line: the coefficients are pinv(D) c, and their penalty is c^T c.
        bends = np.linalg.pinv(second)
        learners.append(
            penalised(basis @ bends, np.eye(bends.shape[1]), told.degrees_of_freedom, bends)
        )
    coefficients = [np.zeros(len(learner.directions)) for learner in learners]
    mean = y.mean()
    base = mean if told.loss == "squared" else np.log(mean / (1 - mean))
    score = np.full(len(y), base)
    for _ in range(told.iterations):
        gradient = y - (score if told.loss == "squared" else 1 / (1 + np.exp(-score)))
        fits = [learner.inverse @ learner.design.T @ gradient for learner in learners]
        errors = [
            ((gradient - learner.design @ fit) ** 2).sum()
            for learner, fit in zip(learners, fits, strict=True)
        ]
        best = int(np.argmin(errors))
        coefficients[best] += told.learning_rate * learners[best].directions @ fits[best]
        score += told.learning_rate * learners[best].design @ fits[best]
    return coefficients, float(base)


def penalised(
    design: np.ndarray, penalty: np.ndarray, wanted: float, directions: np.ndarray
) -> Learner:
    """Find lambda by the eigenvalues of P against X^T X (Demmler and Reinsch)."""
    gram = design.T @ design
    sizes = np.clip(eigh(penalty, gram, eigvals_only=True), 0, None)

    def excess(log: float) -> float:
        kept = 1 / (1 + np.exp(log) * sizes)
        return float((2 * kept - kept**2).sum() - wanted)

    found = np.exp(brentq(excess, -40, 40, xtol=1e-14, rtol=1e-15))
    return Learner(design, np.linalg.inv(gram + found * penalty), directions)


def own_coefficients(values: dict[str, Any], told: BoostedComponents) -> list[np.ndarray]:
    """Return each base learner's coefficients as ``pooled`` has them: lines of the column as it
    is."""
    found = []
    for learner in base_learners(told):
        own = values["coefficients"][learner.coefficients]
        if learner.kind == "linear":
            low, high = values["ranges"][learner.numeric].astype(float)
            slope = own[1] / (high - low)
            own = np.array([own[0] - slope * low, slope])
        found.append(own)
    return found


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_coefficients_are_the_pooled_ones_to_1e_10(loss: str) -> None:
    table, told = rows(400, loss), components(loss, iterations=100)
    parts = [{name: values[k::3] for name, values in table.items()} for k in range(3)]
    _, states = computed(told, parts)
    values = components_state(told).unpack(states[-1])
    expected, base = pooled(table, told)
    assert values["base"] == pytest.approx(base, rel=1e-12)
    found = own_coefficients(values, told)
    chosen = [k.kind for k, own in zip(base_learners(told), found, strict=True) if own.any()]
    assert {*chosen} == {"linear", "spline", "category"}
    size = max(np.abs(own).max() for own in expected)
    for own, theirs in zip(found, expected, strict=True):
        assert np.abs(own - theirs).max() < 1e-10 * size


@settings(max_examples=4)
@given(st.data())
def test_any_division_of_the_rows_gives_the_same_state(data: st.DataObject) -> None:
    table, told = rows(90, "logistic"), components("logistic", iterations=6)
    table["x"][::9] = np.nan
    _, whole = computed(told, [table])
    owners = np.array(data.draw(st.lists(st.integers(0, 4), min_size=90, max_size=90)))
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(90)
    tables = [
        {name: values[order][owners == owner] for name, values in table.items()}
        for owner in range(5)
    ]
    _, divided = computed(told, tables, rows=29)
    assert len(whole) == len(divided)
    assert all(map(np.array_equal, whole, divided))


def test_the_spline_s_basis_is_scipy_s() -> None:
    places = np.linspace(0, 1, 101)
    first, values = spline_basis(places, 4)
    found = np.zeros((101, 8))
    found[np.arange(101)[:, None], first[:, None] + np.arange(4)] = values
    knots = np.arange(-3, 9) / 5
    expected = BSpline.design_matrix(np.clip(places, 0, 1 - 1e-16), knots, 3).toarray()
    assert found == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    ("wanted", "learners"), [(2.0, ("linear", "spline")), (4.5, ("spline",)), (7.0, ("spline",))]
)
def test_penalties_give_the_degrees_of_freedom(wanted: float, learners: tuple[Any, ...]) -> None:
    told = components("squared", degrees_of_freedom=wanted, learners=learners, iterations=1)
    _, states = computed(told, [rows(300, "squared")])
    values = components_state(told).unpack(states[-1])
    for learner, penalty in zip(base_learners(told), values["penalties"], strict=True):
        free = directions_of(learner, told)
        gram = gram_of(learner, values["gram"])
        penalised_gram = free.T @ (gram + penalty * penalty_of(learner)) @ free
        hat = np.linalg.solve(penalised_gram, free.T @ gram @ free)
        found = np.trace(2 * hat - hat @ hat)
        expected = 2 if learner.kind == "linear" else min(wanted, learner.size)
        assert found == pytest.approx(expected, abs=1e-9), learner
        assert penalty_for(learner, gram, told) == penalty


def test_result_tells_the_effects() -> None:
    table = rows(600, "squared")
    told = components("squared", iterations=150)
    outcome, states = computed(told, [table])
    effects = {(effect["column"], effect["kind"]): effect for effect in outcome["effects"]}
    shares = [effect["share_of_gain"] for effect in outcome["effects"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert sum(effect["iterations"] for effect in outcome["effects"]) == 150
    category = effects["kind", "category"]["effects"]
    assert int(np.argmax(category)) == 4
    # What is told of each effect adds up to the score of a row.
    values = components_state(told).unpack(states[-1])
    at = np.array([[table["x"][:, 0].min(), 2, table["x"][:, 2].max()]], np.float32)
    total = outcome["base"]
    for (column, kind), effect in effects.items():
        place = {"a": 0, "kind": 1, "b": 2}[column]
        if kind == "linear":
            total += effect["intercept"] + effect["slope"] * float(at[0, place])
        elif kind == "spline":
            total += effect["points"][0 if place == 0 else -1][1]
        else:
            total += effect["effects"][2]
    assert component_scores(values, at, told)[0] == pytest.approx(total, rel=1e-12)


def test_a_missing_value_adds_nothing_and_one_outside_counts_as_the_end() -> None:
    told = components("squared", iterations=60)
    _, states = computed(told, [rows(400, "squared")])
    values = components_state(told).unpack(states[-1])
    low, high = values["ranges"][0]
    at = np.array([[low, 1, 1], [low - 9, 1, 1], [np.nan, np.nan, np.nan], [high, 7, 1]])
    scores = component_scores(values, at.astype(np.float32), told)
    assert scores[0] == scores[1]
    assert scores[2] == values["base"]


def test_a_column_of_one_value_and_one_that_is_empty_are_never_chosen() -> None:
    table = rows(200, "squared")
    table["x"][:, 0] = 7
    table["x"][:, 2] = np.nan
    told = components("squared", iterations=20)
    outcome, _ = computed(told, [table])
    assert {effect["column"] for effect in outcome["effects"]} == {"kind"}
    constant = {"x": table["x"], "y": np.full(200, 5, np.float32)}
    outcome, _ = computed(told, [constant])
    assert outcome["iterations"] == 0  # nothing is left to fit: the run ends
    assert outcome["base"] == 5


def test_devices_that_vanish_leave_a_model_of_the_others() -> None:
    table, told = rows(300, "squared"), components("squared", iterations=50)
    parts = [{name: values[k::5] for name, values in table.items()} for k in range(5)]
    state, rng = first_components(told), np.random.default_rng(3)
    while not is_done(state, told):
        there = [part for part in parts if rng.random() < 0.7] or parts
        total = sum(compute(state, part, told) for part in there)
        state = advance(state, total, 4, told)
    values = components_state(told).unpack(state)
    _, states = computed(told, [table])
    whole = component_scores(components_state(told).unpack(states[-1]), table["x"], told)
    found = component_scores(values, table["x"], told)
    assert np.corrcoef(found, table["y"])[0, 1] > np.corrcoef(whole, table["y"])[0, 1] - 0.02


def made_up(told: BoostedComponents, name: str, value: int, body: int) -> np.ndarray:
    """Return a total of ten rows in which all of the body is the same number."""
    layout = components_sums(told)
    sums = {field: np.zeros(shape, np.int64) for field, shape in layout.shapes.items()}
    sums["rows"] += 10
    sums[name][...] = value
    sums["body"] += body
    return layout.pack(sums)


def test_made_up_sums_are_refused_where_an_effect_would_be_infinite() -> None:
    """The column has no values, so that its range is one point; and yet it has X^T X and X^T r."""
    told = components("logistic", columns=(BoostColumn("a"),), iterations=3)
    computation = RunComputation("boosted-components", told)
    state = computation.advance(first_components(told), made_up(told, "label", 0, 0), 2)
    layout = components_sums(told)
    design = {field: np.zeros(shape, np.int64) for field, shape in layout.shapes.items()}
    design["rows"] += 10
    design["body"][:3] = 2**45, 1, 2**45  # of the straight line, which all learners begin with
    state = computation.advance(state, layout.pack(design), 2)
    with pytest.raises(BadTotalError, match="gives column a an effect that is not finite"):
        computation.advance(state, made_up(told, "label", 0, 2**50), 2)
