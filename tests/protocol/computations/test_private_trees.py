"""What one row adds to the scaled sums of boosted trees, and which settings have no bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from computing import computed
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.private_sums import clip_sums, in_rows, unscale
from fleetlearn_protocol.computations.private_trees import (
    no_sense_in_trees,
    releases_of_trees,
    tree_groups,
)
from fleetlearn_protocol.computations.trees_layout import first_trees, trees_sums

COLUMNS = (
    BoostColumn("a", range=(-2.0, 2.0)),
    BoostColumn("b", range=(-2.0, 2.0)),
    BoostColumn("c", categories=3),
    BoostColumn("d", categories=2),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "logistic": {"loss": "logistic"},
    "softmax": {"loss": "softmax", "classes": 3},
    "few columns": {"loss": "logistic", "column_share": 0.25},
    "sampled rows": {"loss": "softmax", "classes": 2, "row_share": 0.5, "column_share": 0.5},
}


def asked(name: str) -> BoostedTrees:
    return BoostedTrees(columns=COLUMNS, rounds=3, depth=2, bins=8, **SETTINGS[name])


def table(rows: int, seed: int, classes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(0, 1, (rows, 4)).astype(np.float32)
    x[:, 2], x[:, 3] = random.integers(0, 4, rows), random.integers(0, 3, rows)
    x[random.random((rows, 4)) < 0.1] = np.nan
    y = (np.nan_to_num(x[:, 0]) > 0).astype(np.int64) + (x[:, 2] == 2) * (classes > 2)
    return {"x": x, "y": np.minimum(y, classes - 1)}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_moves_the_scaled_sums_by_at_most_one(name: str) -> None:
    """In each exchange of a run; where the bound is nearly reached, it is no larger than needed."""
    settings = asked(name)
    _, states = computed(settings, [table(400, 1, settings.y_classes)])
    longest = []
    for state in [first_trees(settings), *states[:-1]]:
        groups = tree_groups(settings, state)
        places = np.concatenate([group.places.reshape(-1) for group in groups])
        assert len({*places.tolist()}) == len(places)
        for seed in range(40):
            row = table(1, 100 + seed, settings.y_classes)
            sums = sum_up(state, [row], settings)
            # Nothing that a row adds is left out, but its losses and what says how many there are.
            sent = clip_sums(sums, groups, 4.0)
            assert not sent.clipped
            longest.append(float(np.linalg.norm(in_rows(sent.sums, 4.0))))
    assert max(longest) <= 1
    assert max(longest) > 0.5


def test_what_is_sent_is_the_histogram_of_the_columns_that_may_be_split() -> None:
    settings = asked("few columns")
    _, states = computed(settings, [table(400, 1, 2)])
    sums = sum_up(states[0], [table(300, 2, 2)], settings)
    groups = tree_groups(settings, states[0])
    sent = unscale(in_rows(clip_sums(sums, groups, 1000.0).sums, 1000.0), groups)
    there = sent != 0
    np.testing.assert_allclose(sent[there], sums[there], rtol=1e-5)
    layout = trees_sums(settings)
    body = layout.unpack(sent)["body"]
    assert 0 < np.count_nonzero(body) <= 2 * 9  # one column's bins, and the missing values
    assert not layout.unpack(sent)["losses"].any()


def test_settings_without_a_bound_are_told() -> None:
    assert no_sense_in_trees(asked("logistic")) is None
    assert releases_of_trees(asked("logistic")) == 7
    for changes, said in (
        ({"loss": "squared"}, "as far as it likes"),
        ({"loss": "logistic", "held_out": 0.2}, "Leave held_out out"),
        ({"loss": "logistic", "columns": (BoostColumn("a"),)}, "have no range"),
    ):
        found = no_sense_in_trees(BoostedTrees(**{"columns": COLUMNS, **changes}))  # type: ignore[arg-type]
        assert found is not None
        assert said in found
