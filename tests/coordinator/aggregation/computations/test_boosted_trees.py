"""Trees of many devices are those of all rows in one place, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from computing import computed
from fleetlearn_coordinator.aggregation.computations.boosted_trees import (
    advance,
    is_done,
    progress,
    result,
)
from fleetlearn_device.computations.boosted_trees import bins_of, compute, scores
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.shared_edges import UNUSED
from fleetlearn_protocol.computations.trees_layout import (
    GROW,
    bin_table,
    first_trees,
    histogram_of,
    leaves_of,
    splits_of,
    trees_state,
    trees_sums,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

COLUMNS = (BoostColumn("a"), BoostColumn("kind", categories=4), BoostColumn("b"))


def rows(count: int, loss: str, seed: int = 3, missing: float = 0.1) -> dict[str, np.ndarray]:
    """Return a table with two columns of numbers and one of categories, and what is to learn."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    x[:, 1] = rng.integers(0, 5, count)  # 4 is no category that is known
    signal = 2 * x[:, 0] + np.where(x[:, 1] == 2, 1.5, 0) + np.sin(3 * x[:, 2])
    x[rng.random(x.shape) < missing] = np.nan
    if loss == "squared":
        return {"x": x, "y": (100 * signal).astype(np.float32)}
    if loss == "logistic":
        return {"x": x, "y": (signal > rng.normal(size=count)).astype(np.int64)}
    return {"x": x, "y": np.digitize(signal, [-1, 1]).astype(np.int64)}


def trees(loss: str, **changed: Any) -> BoostedTrees:
    classes = 3 if loss == "softmax" else 0
    given_ = {"loss": loss, "classes": classes, "rounds": 3, "depth": 3, "bins": 8, **changed}
    return BoostedTrees(columns=given_.pop("columns", COLUMNS), **given_)


def grown(table: dict[str, np.ndarray], settings: BoostedTrees) -> dict[str, Any]:
    _, states = computed(settings, [table])
    return trees_state(settings).unpack(states[-1])


def predicted(values: dict[str, Any], x: np.ndarray, settings: BoostedTrees) -> np.ndarray:
    bins = bins_of(x, values["edges"], bin_table(settings))
    return scores(values, bins, settings, int(values["kept"]))


SAMPLED = {"row_share": 0.7, "column_share": 0.6, "held_out": 0.2, "patience": 2, "seed": 5}


@pytest.mark.parametrize(
    ("loss", "changed"),
    [("squared", {}), ("logistic", SAMPLED), ("softmax", {"row_share": 0.8})],
    ids=["squared", "logistic, sampled", "softmax"],
)
@settings(max_examples=5)
@given(st.data())
def test_any_division_of_the_rows_gives_the_same_state(
    loss: str, changed: dict[str, Any], data: st.DataObject
) -> None:
    table, told = rows(120, loss), trees(loss, rounds=2, **changed)
    _, pooled = computed(told, [table])
    owners = np.array(data.draw(st.lists(st.integers(0, 5), min_size=120, max_size=120)))
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(120)
    # A device may have no rows at all, and those of the others come in another order.
    tables = [
        {name: values[order][owners == owner] for name, values in table.items()}
        for owner in range(6)
    ]
    _, divided = computed(told, tables, rows=17)
    assert len(pooled) == len(divided)
    assert all(map(np.array_equal, pooled, divided))


@dataclass
class Node:
    """A node of a tree that was grown row by row."""

    split: tuple[int, int, bool] | None = None
    """Column, bin, whether missing values go left."""
    value: float = 0.0
    left: Node | None = None
    right: Node | None = None


class GrownByHand:
    """Gradient boosting from the formulas, in Python's whole numbers and doubles, row by row."""

    def __init__(self, table: dict[str, np.ndarray], edges: np.ndarray, base: float) -> None:
        self.y, self.base = table["y"].tolist(), base
        self.rows = []
        for row in table["x"].astype(float).tolist():
            own: list[int | None] = []
            for column, value in enumerate(row):
                if value != value:
                    own.append(None)
                elif column == 1:
                    own.append(int(value) if 0 <= value < 4 else 4)
                else:
                    used = [e for e in edges[column // 2].tolist() if e < float(UNUSED)]
                    own.append(sum(value >= edge for edge in used))
            self.rows.append(own)
        self.used = [(edges[k] < UNUSED).sum() for k in (0, 1)]
        self.trees: list[Node] = []

    def goes_left(self, row: int, split: tuple[int, int, bool]) -> bool:
        column, bin_, missing_left = split
        own = self.rows[row][column]
        if own is None:
            return missing_left
        return own == bin_ if column == 1 else own <= bin_

    def score(self, row: int) -> float:
        total = self.base
        for tree in self.trees:
            node = tree
            while node.split is not None:
                side = node.left if self.goes_left(row, node.split) else node.right
                assert side is not None
                node = side
            total += node.value
        return total

    def grow(self, told: BoostedTrees, scale: int) -> None:
        sums = [
            (
                round((self.score(row) - self.y[row]) * 2.0 ** (24 - scale)),
                2**24,
            )
            for row in range(len(self.y))
        ]
        self.trees.append(self.node(list(range(len(self.y))), sums, told.depth, told, scale))

    def node(
        self, rows: list[int], sums: list[tuple[int, int]], depth: int, told: Any, scale: int
    ) -> Node:
        g, h = self.total(rows, sums, scale)
        node = Node(value=float(np.float32(-told.learning_rate * g / (h + told.l2))))
        if depth == 0:
            return node
        best = 0.0
        for column in range(3):
            candidates = range(4) if column == 1 else range(self.used[column // 2])
            nobody = all(self.rows[row][column] is not None for row in rows)
            for bin_ in candidates:
                for missing_left in (False, True):
                    split = column, bin_, missing_left
                    left = [row for row in rows if self.goes_left(row, split)]
                    right = [row for row in rows if not self.goes_left(row, split)]
                    (gl, hl), (gr, hr) = (self.total(s, sums, scale) for s in (left, right))
                    if min(hl, hr) < told.min_child_weight or not left or not right:
                        continue
                    parts = gl * gl / (hl + told.l2) + gr * gr / (hr + told.l2)
                    gain = (parts - g * g / (h + told.l2)) / 2 - told.min_gain
                    if gain > best:
                        best = gain
                        if nobody:
                            split = column, bin_, 2 * hl >= h
                        node.split = split
        if node.split is not None:
            sides = [
                [row for row in rows if self.goes_left(row, node.split) == left]
                for left in (True, False)
            ]
            node.left, node.right = (
                self.node(side, sums, depth - 1, told, scale) for side in sides
            )
        return node

    @staticmethod
    def total(rows: list[int], sums: list[tuple[int, int]], scale: int) -> tuple[float, float]:
        g, h = (sum(sums[row][k] for row in rows) for k in (0, 1))
        return g * 2.0 ** (scale - 24), h * 2.0**-24


def as_node(splits: Any, leaves: Any, place: int, level: int, depth: int) -> Node:
    """Return a tree of a state as nodes."""
    code = int(splits[2**level - 1 + place]) if level < depth else 0
    if not code:
        return Node(value=float(leaves[place << depth - level]))
    bin_ = abs(code) - 1
    table = bin_table(trees("squared"))
    column = int(table.column_of[bin_])
    return Node(
        split=(column, int(bin_ - table.starts[column]), code < 0),
        left=as_node(splits, leaves, 2 * place, level + 1, depth),
        right=as_node(splits, leaves, 2 * place + 1, level + 1, depth),
    )


def same(found: Node | None, expected: Node | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.split is None or expected.split is None:
        return found.split == expected.split and found.value == expected.value
    return (
        found.split == expected.split
        and same(found.left, expected.left)
        and same(found.right, expected.right)
    )


@pytest.mark.parametrize("missing", [0.15, 0.0])
def test_trees_are_those_of_the_formulas(missing: float) -> None:
    table = rows(150, "squared", missing=missing)
    told = trees("squared", min_child_weight=3.0, min_gain=10.0, l2=0.5)
    values = grown(table, told)
    by_hand = GrownByHand(table, values["edges"], float(values["base"][0]))
    splits, leaves = splits_of(values["body"], told), leaves_of(values["body"], told)
    assert values["base"][0] == pytest.approx(table["y"].mean(), rel=1e-6)
    for number in range(3):
        by_hand.grow(told, int(values["scale"]))
        found = as_node(splits[number, 0], leaves[number, 0], 0, 0, 3)
        assert same(found, by_hand.trees[number]), number
    used = np.abs(splits[splits != 0]).astype(int) - 1
    assert {*bin_table(told).column_of[used].tolist()} == {0, 1, 2}  # all kinds of splits


def plain(loss: str) -> tuple[dict[str, np.ndarray], BoostedTrees]:
    """Return rows of two columns of few numbers, and settings that scikit-learn has too."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 12, (400, 2)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    signal = np.nan_to_num(x[:, 0], nan=7) - 0.5 * np.nan_to_num(x[:, 1], nan=-3)
    y = signal + rng.normal(size=400)
    columns = BoostColumn("a"), BoostColumn("b")
    told = trees(loss, columns=columns, rounds=8, bins=32, l2=0.3, min_child_weight=0.0)
    if loss == "squared":
        return {"x": x, "y": y.astype(np.float32)}, told
    cuts = [2.0] if loss == "logistic" else [0.0, 5.0]
    return {"x": x, "y": np.digitize(y, cuts).astype(np.int64)}, told


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_scores_are_scikit_learn_s(loss: str) -> None:
    """With as many bins as values both try the same splits, and so grow the same trees."""
    table, told = plain(loss)
    kind = HistGradientBoostingRegressor if loss == "squared" else HistGradientBoostingClassifier
    peer = kind(
        max_iter=told.rounds,
        learning_rate=told.learning_rate,
        max_depth=told.depth,
        max_leaf_nodes=None,
        min_samples_leaf=1,
        l2_regularization=told.l2,
        early_stopping=False,
    ).fit(table["x"], table["y"])
    found = predicted(grown(table, told), table["x"], told)[:, 0]
    expected = peer.predict(table["x"]) if loss == "squared" else peer.decision_function(table["x"])
    # Those begin with the log odds without half a row more of each class.
    assert found == pytest.approx(expected, abs=2e-3)


def test_classes_are_learned() -> None:
    table, told = plain("softmax")
    found = predicted(grown(table, told), table["x"], told)
    assert found.shape == (400, 3)
    assert (found.argmax(axis=1) == table["y"]).mean() > 0.8


def test_a_split_worked_by_hand() -> None:
    """y is 0 0 4 8: the mean is 3, the derivatives 3 3 -1 -5. With lambda 0 the split after the
    second row gains (36/2 + 36/2 - 0) / 2 = 18, the others 6 and 16.67."""
    table = {
        "x": np.array([[1], [2], [3], [4]], np.float32),
        "y": np.array([0, 0, 4, 8], np.float32),
    }
    told = BoostedTrees(
        columns=(BoostColumn("a"),), rounds=1, depth=1, l2=0.0, learning_rate=0.5, bins=8
    )
    outcome, states = computed(told, [table])
    values = trees_state(told).unpack(states[-1])
    assert values["gains"].tolist() == [18.0]
    assert values["base"].tolist() == [3.0]
    assert leaves_of(values["body"], told)[0, 0].tolist() == [-1.5, 1.5]
    assert values["edges"][0][:3].tolist() == [1.5, 2.5, 3.5]
    assert predicted(values, table["x"], told)[:, 0].tolist() == [1.5, 1.5, 4.5, 4.5]
    assert outcome["columns"] == {"a": 1.0}
    assert outcome["rows"] == 4


def test_rules_of_ties_and_of_missing_values() -> None:
    x = np.array([[0, 0], [0, 0], [1, 1], [1, 1], [np.nan, 1], [1, 0]], np.float32)
    y = np.array([0, 0, 4, 4, 4, 4], np.float32)
    columns = BoostColumn("a"), BoostColumn("b")
    told = BoostedTrees(columns=columns, rounds=1, depth=1, l2=0.0, bins=4)
    values = grown({"x": x, "y": y}, told)
    # Missing values gain more on the right. Where there are none, they go to the heavier side.
    assert splits_of(values["body"], told)[0, 0].tolist() == [1.0]
    swapped = grown({"x": x[:5, ::-1].copy(), "y": y[:5]}, told)
    # Both columns gain the same on five rows: the first one is taken; its right side is heavier.
    assert splits_of(swapped["body"], told)[0, 0].tolist() == [1.0]
    lone = grown({"x": 1 - x[:4], "y": y[:4]}, told)
    assert splits_of(lone["body"], told)[0, 0].tolist() == [-1.0]  # equally heavy: to the left


def test_a_round_looks_at_its_share_of_rows_and_columns() -> None:
    table = rows(2000, "squared", missing=0)
    told = trees("squared", rounds=12, depth=1, row_share=0.25, column_share=0.3)
    values = grown(table, told)
    used = np.abs(splits_of(values["body"], told)[:, 0, 0]).astype(int) - 1
    found = {int(column) for column in bin_table(told).column_of[used]}
    assert found == {0, 1, 2}  # a column alone each time, drawn again each time
    state = trees_state(told).pack({**values, "phase": GROW, "kept": 0, "level": 0})
    sums = compute(state, table, told)
    root = histogram_of(trees_sums(told).unpack(sums)["body"], 0, told)[0, 0]
    seen = root[: told.bins + 1, 1].sum() / 2**24  # the second derivative of each row is 1
    assert 420 < seen < 580


def test_progress_says_no_loss_before_one_was_measured() -> None:
    told = trees("squared", rounds=2, depth=2)
    table = {"x": np.arange(12.0, dtype=np.float32).reshape(4, 3), "y": np.arange(4.0)}
    _, states = computed(told, [table])
    lines = [progress(state, told) for state in states]
    assert lines[-5] == "boosting round 1 of 2, level 1 of 2"
    assert lines[-4].startswith("boosting round 1 of 2, level 2 of 2; loss ")
    assert not lines[-4].endswith("loss 0")
    assert lines[-1] == "2 boosting rounds"


def test_held_out_rows_end_the_training() -> None:
    rng = np.random.default_rng(8)
    noise = {"x": rng.normal(size=(300, 3)).astype(np.float32)}
    noise["x"][:, 1] = 0
    noise["y"] = rng.integers(0, 2, 300)
    told = trees("logistic", rounds=60, learning_rate=0.5, held_out=0.3, patience=3)
    outcome, states = computed(told, [noise])
    values = trees_state(told).unpack(states[-1])
    kept = int(values["kept"])
    assert kept == int(values["best"]) < 20  # there is nothing to learn
    assert not splits_of(values["body"], told)[kept:].any()
    assert outcome["rounds"] == kept
    assert values["losses"][1] > values["best_loss"] > 0.6


def test_devices_that_vanish_leave_a_model_of_the_others() -> None:
    """A round's sums are of the devices that reported. Each level is split by those."""
    table = rows(600, "logistic", missing=0)
    told, rng = trees("logistic", rounds=10), np.random.default_rng(2)
    parts = [{name: values[k::10] for name, values in table.items()} for k in range(10)]
    state = first_trees(told)
    while not is_done(state, told):
        there = [part for part in parts if rng.random() < 0.7] or parts
        total = sum(compute(state, part, told) for part in there)
        state = advance(state, total, 7, told)
    values = trees_state(told).unpack(state)
    found = predicted(values, table["x"], told)[:, 0]
    whole = predicted(grown(table, told), table["x"], told)[:, 0]
    assert ((found > 0) == table["y"]).mean() > ((whole > 0) == table["y"]).mean() - 0.05


def test_an_empty_round_and_a_wrong_y() -> None:
    told = trees("squared")
    nobody = {"x": np.empty((0, 3), np.float32), "y": np.empty(0, np.float32)}
    outcome, _ = computed(told, [nobody])
    assert outcome["rows"] == 0
    assert outcome["splits"] == 0
    wrong = {"x": np.zeros((2, 3), np.float32), "y": np.array([1, np.nan], np.float32)}
    with pytest.raises(ValueError, match=r"y of row 1 .* is nan; expected a finite number"):
        compute(first_trees(told), wrong, told)
    assert result(first_trees(told), told)["trees"] == 0
