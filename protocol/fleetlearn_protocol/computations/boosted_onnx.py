"""What comes of boosting as ONNX files, which any ONNX Runtime runs.

The input is ``x``, float32, (n, columns), NaN where a value is missing. With squared loss the
output is ``output``, float32, (n,). Else the outputs are ``class``, int64, (n,), and
``probabilities``, float32, (n, classes).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.boosting_settings import BoostedComponents, BoostedTrees
from fleetlearn_protocol.computations.components_layout import (
    BaseLearner,
    base_learners,
    components_state,
)
from fleetlearn_protocol.computations.onnx_file import OnnxNode, OnnxValue, onnx_model
from fleetlearn_protocol.computations.trees_layout import (
    FIND_EDGES,
    bin_table,
    leaves_of,
    splits_of,
    trees_state,
)
from fleetlearn_protocol.vector import Vector

Constants = dict[str, NDArray[Any]]
CUBICS = np.array([[1, 4, 1, 0], [-3, 0, 3, 0], [3, -6, 3, 0], [-1, 3, -3, 1]]) / 6
"""Row p: the coefficients of t^p of the four B-splines that are not 0 between two knots."""


def trees_onnx(settings: BoostedTrees, state: Vector) -> bytes:
    """Return the finished boosting rounds as one TreeEnsembleRegressor of ai.onnx.ml."""
    values = trees_state(settings).unpack(state)
    kept = 0 if values["phase"] == FIND_EDGES else int(values["kept"])
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for tree in range(kept * settings.outputs):
        _add_tree(rows, tree, values, settings)
    if not kept:  # an ensemble has at least one tree
        _add_leaf(rows, 0, 0, 0, 0.0)
    ensemble = OnnxNode(
        "TreeEnsembleRegressor",
        ("x",),
        ("scores",),
        {
            **rows,
            "base_values": values["base"].tolist(),
            "n_targets": settings.outputs,
            "post_transform": "NONE",
        },
        "ai.onnx.ml",
    )
    constants: Constants = {}
    if settings.loss == "softmax":
        nodes = [
            ensemble,
            OnnxNode("Softmax", ("scores",), ("probabilities",), {"axis": 1}),
            OnnxNode("ArgMax", ("scores",), ("class",), {"axis": 1, "keepdims": 0}),
        ]
        return _model("boosted-trees", settings, nodes, constants, settings.classes)
    constants["last"] = np.array([1], np.int64)
    nodes = [ensemble, OnnxNode("Squeeze", ("scores", "last"), ("score",))]
    return _model("boosted-trees", settings, nodes, constants)


def components_onnx(settings: BoostedComponents, state: Vector) -> bytes:
    """Return the sum of the base learners in plain operators of ONNX, in doubles."""
    values = components_state(settings).unpack(state)
    own: defaultdict[str, list[BaseLearner]] = defaultdict(list)
    for learner in base_learners(settings):
        own[learner.kind].append(learner)
    constants: Constants = {
        "base": np.array(values["base"]),
        "one_axis": np.array([1], np.int64),
        "nothing": np.array(0.0),
    }
    nodes: list[OnnxNode] = []
    if own["linear"] or own["spline"]:
        nodes += _places(own["spline"] or own["linear"], values, constants)
    if own["linear"]:
        nodes += _lines(own["linear"], values, constants)
    if own["spline"]:
        nodes += _splines(own["spline"], values, constants, settings.knots)
    if own["category"]:
        nodes += _categories(own["category"], values, constants)
    total = "base"
    for kind in own:
        if own[kind]:
            nodes += [
                OnnxNode(
                    "ReduceSum", (f"{kind}.each", "one_axis"), (f"{kind}.all",), {"keepdims": 0}
                ),
                OnnxNode("Add", (total, f"{kind}.all"), (f"{kind}.total",)),
            ]
            total = f"{kind}.total"
    nodes.append(OnnxNode("Cast", (total,), ("score",), {"to": 1}))
    return _model("boosted-components", settings, nodes, constants)


def _model(
    name: str,
    settings: BoostedTrees | BoostedComponents,
    nodes: list[OnnxNode],
    constants: Constants,
    classes: int = 2,
) -> bytes:
    """Return the file; its nodes give ``score``, (n,), or with softmax the outputs themselves."""
    inputs = [OnnxValue("x", "float32", (len(settings.columns),))]
    if settings.loss == "squared":
        nodes = [*nodes, OnnxNode("Identity", ("score",), ("output",))]
        return onnx_model(name, inputs, [OnnxValue("output", "float32")], nodes, constants)
    outputs = [OnnxValue("class", "int64"), OnnxValue("probabilities", "float32", (classes,))]
    if settings.loss == "logistic":
        constants = {
            **constants,
            "zero": np.array(0, np.float32),
            "beside": np.array([1], np.int64),
        }
        nodes = [
            *nodes,
            OnnxNode("Greater", ("score", "zero"), ("is_one",)),
            OnnxNode("Cast", ("is_one",), ("class",), {"to": 7}),
            OnnxNode("Neg", ("score",), ("minus",)),
            OnnxNode("Sigmoid", ("minus",), ("of_zero",)),
            OnnxNode("Sigmoid", ("score",), ("of_one",)),
            OnnxNode("Unsqueeze", ("of_zero", "beside"), ("column_zero",)),
            OnnxNode("Unsqueeze", ("of_one", "beside"), ("column_one",)),
            OnnxNode("Concat", ("column_zero", "column_one"), ("probabilities",), {"axis": 1}),
        ]
    return onnx_model(name, inputs, outputs, nodes, constants)


def _add_tree(
    rows: defaultdict[str, list[Any]], tree: int, values: dict[str, Any], settings: BoostedTrees
) -> None:
    """Add a tree's nodes to the attributes of TreeEnsembleRegressor."""
    table, depth = bin_table(settings), settings.depth
    number, output = divmod(tree, settings.outputs)
    splits = splits_of(values["body"], settings)[number, output].astype(np.int64)
    leaves = leaves_of(values["body"], settings)[number, output]
    place_of_numeric = {int(column): place for place, column in enumerate(table.numeric)}
    waiting = [(0, 0)]
    numbers = {(0, 0): 0}
    while waiting:
        level, node = waiting.pop(0)
        own = numbers[level, node]
        code = int(splits[2**level - 1 + node]) if level < depth else 0
        if not code:
            _add_leaf(rows, tree, own, output, float(leaves[node << depth - level]))
            continue
        children = [(level + 1, 2 * node), (level + 1, 2 * node + 1)]
        for child in children:
            numbers[child] = len(numbers)
        waiting += children
        column = int(table.column_of[abs(code) - 1])
        bin_ = abs(code) - 1 - int(table.starts[column])
        is_category = bool(table.is_category[column])
        edge = bin_ if is_category else values["edges"][place_of_numeric[column], bin_]
        mode = "BRANCH_EQ" if is_category else "BRANCH_LT"
        _add_node(rows, tree, own, mode, column, float(edge), code < 0, numbers, children)


def _add_node(
    rows: defaultdict[str, list[Any]],
    tree: int,
    number: int,
    mode: str,
    column: int = 0,
    value: float = 0.0,
    missing_left: bool = False,
    numbers: dict[tuple[int, int], int] | None = None,
    children: list[tuple[int, int]] | None = None,
) -> None:
    left, right = (numbers[child] for child in children) if numbers and children else (0, 0)
    rows["nodes_treeids"].append(tree)
    rows["nodes_nodeids"].append(number)
    rows["nodes_featureids"].append(column)
    rows["nodes_modes"].append(mode)
    rows["nodes_values"].append(value)
    rows["nodes_truenodeids"].append(left)
    rows["nodes_falsenodeids"].append(right)
    rows["nodes_missing_value_tracks_true"].append(int(missing_left))


def _add_leaf(
    rows: defaultdict[str, list[Any]], tree: int, number: int, output: int, weight: float
) -> None:
    _add_node(rows, tree, number, "LEAF")
    rows["target_treeids"].append(tree)
    rows["target_nodeids"].append(number)
    rows["target_ids"].append(output)
    rows["target_weights"].append(weight)


def _places(
    learners: list[BaseLearner], values: dict[str, Any], constants: Constants
) -> list[OnnxNode]:
    """Return nodes that give ``places``, from 0 to 1, and ``missing``, (n, columns of numbers)."""
    ranges = values["ranges"].astype(np.float64)
    constants["numeric"] = np.array([learner.column for learner in learners], np.int64)
    constants["low"], constants["high"] = ranges.T.copy()
    span = ranges[:, 1] - ranges[:, 0]
    constants["span"] = np.where(span > 0, span, 1.0)
    return [
        OnnxNode("Gather", ("x", "numeric"), ("numbers",), {"axis": 1}),
        OnnxNode("IsNaN", ("numbers",), ("missing",)),
        OnnxNode("Cast", ("numbers",), ("wide",), {"to": 11}),
        OnnxNode("Where", ("missing", "low", "wide"), ("there",)),
        OnnxNode("Max", ("there", "low"), ("above",)),
        OnnxNode("Min", ("above", "high"), ("inside",)),
        OnnxNode("Sub", ("inside", "low"), ("from_low",)),
        OnnxNode("Div", ("from_low", "span"), ("places",)),
    ]


def _lines(
    learners: list[BaseLearner], values: dict[str, Any], constants: Constants
) -> list[OnnxNode]:
    own = np.array([values["coefficients"][learner.coefficients] for learner in learners])
    constants["intercepts"], constants["slopes"] = own.T.copy()
    return [
        OnnxNode("Mul", ("places", "slopes"), ("risen",)),
        OnnxNode("Add", ("risen", "intercepts"), ("lines",)),
        OnnxNode("Where", ("missing", "nothing", "lines"), ("linear.each",)),
    ]


def _splines(
    learners: list[BaseLearner], values: dict[str, Any], constants: Constants, knots: int
) -> list[OnnxNode]:
    """Between two knots a spline is a cubic: its four coefficients are looked up."""
    own = np.array([values["coefficients"][learner.coefficients] for learner in learners])
    windows = np.lib.stride_tricks.sliding_window_view(own, 4, axis=1)  # (columns, knots + 1, 4)
    cubics = (windows @ CUBICS.T).reshape(-1, 4)
    for power in range(4):
        constants[f"cubic{power}"] = cubics[:, power].copy()
    constants["parts"] = np.array(float(knots + 1))
    constants["last_part"] = np.array(float(knots))
    constants["starts"] = np.arange(len(learners), dtype=np.float64) * (knots + 1)
    nodes = [
        OnnxNode("Mul", ("places", "parts"), ("along",)),
        OnnxNode("Floor", ("along",), ("whole",)),
        OnnxNode("Min", ("whole", "last_part"), ("part",)),
        OnnxNode("Sub", ("along", "part"), ("t",)),
        OnnxNode("Add", ("part", "starts"), ("row",)),
        OnnxNode("Cast", ("row",), ("rows",), {"to": 7}),
        OnnxNode("Gather", ("cubic3", "rows"), ("sum3",), {"axis": 0}),
    ]
    for power in (2, 1, 0):
        nodes += [
            OnnxNode("Mul", (f"sum{power + 1}", "t"), (f"times{power}",)),
            OnnxNode("Gather", (f"cubic{power}", "rows"), (f"own{power}",), {"axis": 0}),
            OnnxNode("Add", (f"times{power}", f"own{power}"), (f"sum{power}",)),
        ]
    return [*nodes, OnnxNode("Where", ("missing", "nothing", "sum0"), ("spline.each",))]


def _categories(
    learners: list[BaseLearner], values: dict[str, Any], constants: Constants
) -> list[OnnxNode]:
    """A row's effect is looked up; behind all effects is a 0 for what is no code."""
    own = [values["coefficients"][learner.coefficients] for learner in learners]
    sizes = np.array([len(effects) for effects in own])
    constants["categories"] = np.array([learner.column for learner in learners], np.int64)
    constants["effects"] = np.concatenate([*own, [0.0]])
    constants["first_code"] = np.array(-0.5, np.float32)
    constants["counts"] = sizes.astype(np.float32)
    constants["firsts"] = (np.cumsum(sizes) - sizes).astype(np.float32)
    constants["none"] = np.array(sizes.sum(), np.float32)
    return [
        OnnxNode("Gather", ("x", "categories"), ("codes",), {"axis": 1}),
        OnnxNode("Floor", ("codes",), ("floors",)),
        OnnxNode("Equal", ("codes", "floors"), ("are_whole",)),
        OnnxNode("Greater", ("codes", "first_code"), ("are_positive",)),
        OnnxNode("Less", ("codes", "counts"), ("are_below",)),
        OnnxNode("And", ("are_whole", "are_positive"), ("both",)),
        OnnxNode("And", ("both", "are_below"), ("known",)),
        OnnxNode("Add", ("codes", "firsts"), ("effect_rows",)),
        OnnxNode("Where", ("known", "effect_rows", "none"), ("known_rows",)),
        OnnxNode("Cast", ("known_rows",), ("effect_index",), {"to": 7}),
        OnnxNode("Gather", ("effects", "effect_index"), ("category.each",), {"axis": 0}),
    ]
