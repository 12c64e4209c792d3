"""Boosted trees of sums with noise: with next to none they are those of exact sums, and with much
they are still trees."""

from __future__ import annotations

import numpy as np
import pytest
from computing import computed
from fleetlearn_coordinator.aggregation.computations.boosted_trees import (
    advance_noisy,
    is_done,
    progress,
    result,
)
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.private_sums import clip_sums, in_rows, unscale
from fleetlearn_protocol.computations.private_trees import tree_groups
from fleetlearn_protocol.computations.trees_layout import (
    first_trees,
    leaves_of,
    splits_of,
    trees_state,
    trees_sums,
)
from fleetlearn_protocol.vector import Vector

COLUMNS = (
    BoostColumn("a", range=(0.0, 1.0)),
    BoostColumn("b", range=(0.0, 1.0)),
    BoostColumn("c", categories=3),
)
ASKED = BoostedTrees(columns=COLUMNS, loss="logistic", rounds=4, depth=2, bins=8)


def table(rows: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.random((rows, 3)).astype(np.float32)
    x[:, 2] = random.integers(0, 3, rows)
    y = random.random(rows) < 1 / (1 + np.exp(6 * (0.4 - x[:, 0]) - (x[:, 2] == 1)))
    return {"x": x, "y": y.astype(np.int64)}


def grown(settings: BoostedTrees, rows: dict[str, np.ndarray], noise: float, seed: int) -> Vector:
    """Return the state at the end, with noise on each scaled sum of each exchange, in rows."""
    state, random = first_trees(settings), np.random.default_rng(seed)
    while not is_done(state, settings):
        groups = tree_groups(settings, state)
        sent = clip_sums(sum_up(state, [rows], settings), groups, float(len(rows["x"]))).sums
        scaled = in_rows(sent, float(len(rows["x"])))
        total = unscale(scaled + random.normal(0, noise, len(scaled)), groups)
        state = advance_noisy(state, total, 1, settings, noise)
    return state


def test_with_next_to_no_noise_they_are_the_trees_of_exact_sums() -> None:
    rows = table(2000, 1)
    _, states = computed(ASKED, [rows])
    exact = trees_state(ASKED).unpack(states[-1])
    found = trees_state(ASKED).unpack(grown(ASKED, rows, 1e-3, 2))
    np.testing.assert_array_equal(found["edges"], exact["edges"])
    assert found["base"] == pytest.approx(exact["base"], abs=1e-3)
    splits = splits_of(exact["body"], ASKED)
    # Nobody is missing: on which side they are noise decides.
    np.testing.assert_array_equal(np.abs(splits_of(found["body"], ASKED)), np.abs(splits))
    leaves = leaves_of(exact["body"], ASKED)
    np.testing.assert_allclose(leaves_of(found["body"], ASKED), leaves, atol=1e-3)
    np.testing.assert_array_equal(exact["edges"][0], np.arange(1, 8, dtype=np.float32) / 8)


@pytest.mark.parametrize("noise", [1.0, 30.0, 1e6])
def test_with_much_noise_leaves_stay_small(noise: float) -> None:
    """Sums of second derivatives that are below 0 divide nothing."""
    for seed in range(5):
        state = grown(ASKED, table(200, seed), noise, seed)
        values = trees_state(ASKED).unpack(state)
        assert np.isfinite(values["body"]).all()
        assert np.abs(leaves_of(values["body"], ASKED)).max() < 2.5 * ASKED.learning_rate
        found = result(state, ASKED)
        assert found["loss"] is None
        assert found["rows"] >= 0
        assert progress(state, ASKED) == "4 boosting rounds, with noise"


def test_totals_that_no_rows_have_make_trees() -> None:
    random, state = np.random.default_rng(3), first_trees(ASKED)
    for _ in range(9):
        total = random.integers(-(2**40), 2**40, trees_sums(ASKED).size)
        state = advance_noisy(state, total, 3, ASKED, 50.0)
    assert is_done(state, ASKED)
    assert np.isfinite(state).all()
    assert KINDS["boosted-trees"].infer is not None
    assert KINDS["boosted-trees"].infer(ASKED, state)


def test_noise_on_few_columns_is_less() -> None:
    """One of three columns in each round: trees find the one that matters under more noise."""
    rows, right = table(20_000, 5), []
    for share in (1.0, 0.3):
        settings = BoostedTrees(
            columns=COLUMNS, loss="logistic", rounds=9, depth=1, bins=8, column_share=share
        )
        found = result(grown(settings, rows, 250.0, 1), settings)["columns"]
        right.append(found.get("a", 0.0))
    assert right[1] > 0.5
