"""Boosting over ten devices, on scikit-learn's tables: the model of all rows in one place,
scikit-learn's own, each device alone, devices that vanish, and edges of bins that each device finds
for itself.

Devices and coordinator are the functions of a real run, without sockets between them.
docs/studies/boosting.md says more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from fleetlearn_coordinator.aggregation.computations.registry import REGISTRY
from fleetlearn_device.computations.boosted_components import component_scores
from fleetlearn_device.computations.boosted_trees import bins_of, scores
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.boosting_settings import (
    BoostColumn,
    BoostedComponents,
    BoostedTrees,
)
from fleetlearn_protocol.computations.components_layout import components_state
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.computations.shared_edges import (
    boundaries_for,
    count_between,
    equal_edges,
    first_boundaries,
    refine,
)
from fleetlearn_protocol.computations.trees_layout import GROW, bin_table, trees_state
from fleetlearn_protocol.formats.whole import sums_to_bytes
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score

DEVICES, LOST = 10, 0.3
LOSSES = {
    "breast_cancer": "logistic",
    "digits": "softmax",
    "wine": "softmax",
    "diabetes": "squared",
}
MEASURES = {"logistic": "AUC", "softmax": "accuracy", "squared": "R^2"}
Rows = dict[str, NDArray[Any]]
Settings = BoostedTrees | BoostedComponents


class Table(NamedTuple):
    """A data set, cut into what devices have and what measures."""

    name: str
    loss: str
    train: Rows
    test: Rows

    @property
    def columns(self) -> tuple[BoostColumn, ...]:
        return tuple(BoostColumn(str(number)) for number in range(self.train["x"].shape[1]))

    def trees(self, rounds: int) -> BoostedTrees:
        classes = int(self.train["y"].max()) + 1 if self.loss == "softmax" else 0
        loss: Any = self.loss
        # More bins than a column has values, such as 17 greys of a pixel, would only cost bytes.
        bins = min(64, max(len(np.unique(column)) for column in self.train["x"].T))
        return BoostedTrees(
            columns=self.columns, loss=loss, classes=classes, rounds=rounds, bins=bins
        )


def load(name: str, seed: int) -> Table:
    """Return a data set of scikit-learn; a quarter of it, drawn by the seed, measures."""
    found, loss = getattr(datasets, f"load_{name}")(), LOSSES[name]
    x = found.data.astype(np.float32)
    y = found.target.astype(np.float32 if loss == "squared" else np.int64)
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = np.split(order, [len(x) // 4])
    return Table(name, loss, {"x": x[train], "y": y[train]}, {"x": x[test], "y": y[test]})


def divided(table: Table, by: str, seed: int) -> list[Rows]:
    """Return the rows of each device: drawn at random, or neighbours by the column that tells most
    of y, with some noise, so that the devices' columns differ."""
    rng = np.random.default_rng(seed)
    x, y = table.train["x"], table.train["y"]
    if by == "random":
        order = rng.permutation(len(x))
    else:
        with np.errstate(invalid="ignore"):
            linked = np.nan_to_num([abs(np.corrcoef(column, y)[0, 1]) for column in x.T])
        column = x[:, int(np.argmax(linked))]
        order = np.argsort(column + column.std() * rng.normal(size=len(x)) / 2)
    return [
        {name: values[part] for name, values in table.train.items()}
        for part in np.array_split(order, DEVICES)
    ]


class Grown(NamedTuple):
    """The end of a run."""

    state: Vector
    exchanges: int
    device_seconds: float
    """CPU time of a device in each exchange, on average."""
    coordinator_seconds: float
    """CPU time of the coordinator in each exchange, on average."""
    sent_bytes: float
    """What a device sent in each exchange, on average."""


def boosted(
    settings: Settings,
    parts: Sequence[Rows],
    lost: float = 0.0,
    seed: int = 0,
    own_states: Callable[[Vector, Rows], Vector] | None = None,
) -> Grown:
    """Run a computation to its end.

    lost: share of the devices that vanish in each exchange. own_states: what a device makes of the
    state before it computes.
    """
    kind, rng = kind_of(settings), np.random.default_rng(seed)
    state, exchanges = KINDS[kind].first(settings), 0
    computing = advancing = 0.0
    answers = sent = 0
    while not REGISTRY[kind].is_done(state, settings):
        there = [part for part in parts if rng.random() >= lost] or parts
        began = time.process_time()
        sums = [
            sum_up(own_states(state, part) if own_states else state, [part], settings)
            for part in there
        ]
        ended = time.process_time()
        state = REGISTRY[kind].advance(state, np.sum(sums, axis=0), len(there), settings)
        advancing += time.process_time() - ended
        sent += sum(len(sums_to_bytes(each)) for each in sums)
        computing, answers, exchanges = (
            computing + ended - began,
            answers + len(there),
            exchanges + 1,
        )
    return Grown(state, exchanges, computing / answers, advancing / exchanges, sent / answers)


def own_edges(part: Rows, settings: BoostedTrees) -> NDArray[np.float32]:
    """Return the edges that a device finds from its rows alone."""
    found = []
    for column in part["x"].T:
        boundaries = first_boundaries(boundaries_for(settings.bins))
        while (finer := refine(boundaries, counts := count_between(column, boundaries),
                               settings.bins)) is not None:  # fmt: skip
            boundaries = finer
        found.append(equal_edges(boundaries, counts, settings.bins))
    return np.array(found)


def with_own_edges(
    settings: BoostedTrees, parts: Sequence[Rows]
) -> Callable[[Vector, Rows], Vector]:
    """Each device puts its values into bins by its own quantiles, and sums of bins of the same
    number are added up: what horizontal modes without a shared sketch do."""
    edges = {id(part): own_edges(part, settings) for part in parts}
    layout = trees_state(settings)

    def changed(state: Vector, part: Rows) -> Vector:
        values = layout.unpack(state)
        if values["phase"] != GROW:
            return state
        return layout.pack({**values, "edges": edges[id(part)]})

    return changed


def measured(table: Table, settings: Settings, state: Vector) -> float:
    """Return AUC, accuracy or R^2 on the test rows."""
    x = table.test["x"]
    if isinstance(settings, BoostedTrees):
        values = trees_state(settings).unpack(state)
        bins = bins_of(x, values["edges"], bin_table(settings))
        return score(table, scores(values, bins, settings, int(values["kept"])))
    values = components_state(settings).unpack(state)
    return score(table, component_scores(values, x, settings)[:, None])


def score(table: Table, found: NDArray[np.float64]) -> float:
    y = table.test["y"]
    if table.loss == "logistic":
        return float(roc_auc_score(y, found[:, 0]))
    if table.loss == "softmax":
        return float(accuracy_score(y, found.argmax(axis=1)))
    return float(r2_score(y, found[:, 0]))


def peer(table: Table, settings: BoostedTrees, **changed: Any) -> float:
    """Return what scikit-learn's trees, grown of all rows in one place, give."""
    regression = table.loss == "squared"
    kind = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    model = kind(max_iter=settings.rounds, early_stopping=False, **changed)
    model.fit(table.train["x"], table.train["y"])
    if regression:
        return score(table, model.predict(table.test["x"])[:, None])
    if table.loss == "softmax":
        return score(table, model.predict_proba(table.test["x"]))
    return score(table, model.decision_function(table.test["x"])[:, None])


def alone(table: Table, settings: BoostedTrees, parts: Sequence[Rows]) -> float:
    """Return the devices' mean, each with its own rows alone."""
    return float(
        np.mean([measured(table, settings, boosted(settings, [part]).state) for part in parts])
    )


def figures_of(table: Table, by: str, rounds: int, seed: int) -> dict[str, float]:
    """Return each contender's figure for a data set, a division and a seed."""
    told, parts = table.trees(rounds), divided(table, by, seed)
    pooled, devices = boosted(told, [table.train]), boosted(told, parts)
    if not np.array_equal(pooled.state, devices.state):
        raise AssertionError(f"{table.name}: the trees of ten devices are not those of one place")
    local = with_own_edges(told, parts)
    found = {
        "trees, ten devices": measured(table, told, devices.state),
        "trees, 30 % vanish": measured(table, told, boosted(told, parts, LOST, seed).state),
        "trees, own edges": measured(table, told, boosted(told, parts, own_states=local).state),
        "trees, alone": alone(table, told, parts),
        "scikit-learn": peer(table, told),
        "scikit-learn, same depth": peer(
            table, told, max_depth=told.depth, max_leaf_nodes=None, l2_regularization=told.l2
        ),
    }
    if table.loss != "softmax":
        loss: Any = table.loss
        effects = BoostedComponents(columns=table.columns, loss=loss, iterations=2 * rounds)
        together = boosted(effects, parts)
        if not np.array_equal(boosted(effects, [table.train]).state, together.state):
            raise AssertionError(f"{table.name}: the coefficients are not those of one place")
        found["components, ten devices"] = measured(table, effects, together.state)
    return found


def costs(table: Table, rounds: int) -> dict[str, float]:
    """Return CPU time and bytes of a boosting round with ten devices."""
    told = table.trees(rounds)
    grown = boosted(told, divided(table, "random", 1))
    levels = grown.exchanges / rounds
    kind = KINDS[kind_of(told)]
    return {
        "exchanges": grown.exchanges,
        "device_ms": 1000 * grown.device_seconds * levels,
        "coordinator_ms": 1000 * grown.coordinator_seconds * levels,
        "up_bytes": grown.sent_bytes * levels,
        "down_bytes": 4 * kind.state(told).size * levels,
    }


def quality_table(results: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> str:
    names = list(dict.fromkeys(name for runs in results.values() for name in runs[0]))
    rows: list[Sequence[str]] = [("data", "divided", "measure", *names)]
    for (data, by), runs in results.items():
        cells = [
            f"{median(run[name] for run in runs):.4f}" if name in runs[0] else "" for name in names
        ]
        rows.append((data, by, MEASURES[LOSSES[data]], *cells))
    return measure.table(rows)


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rounds", type=int, default=100, help="boosting rounds")
    options.add_argument("--data", nargs="+", choices=[*LOSSES], default=[*LOSSES])
    chosen = options.parse_args()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for name in chosen.data:
        for by in ("random", "column"):
            for seed in range(1, chosen.seeds + 1):
                found = figures_of(load(name, seed), by, chosen.rounds, seed)
                results.setdefault((name, by), []).append(found)
    print(f"{quality_table(results)}\n")
    spent = {name: costs(load(name, 1), chosen.rounds) for name in chosen.data}
    rows = [("data", *next(iter(spent.values())))]
    rows += [(name, *(f"{value:.4g}" for value in cost.values())) for name, cost in spent.items()]
    print(measure.table(rows))
    cells = [{"data": name, "divided": by, "runs": runs} for (name, by), runs in results.items()]
    told = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, told, {"cells": cells, "costs": spent})


if __name__ == "__main__":
    main()
