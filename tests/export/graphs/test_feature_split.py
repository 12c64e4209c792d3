"""Where a step's graph is split, and that the parts together give what the graph gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from fleetlearn_export.checks.comparison import open_session
from fleetlearn_export.graphs.feature_split import (
    Rows,
    arrays_read,
    candidates,
    computed_from,
    cut,
    dependencies,
    features_part,
    frozen_values,
    rest_of_step,
)
from fleetlearn_protocol.manifest import Input
from graphs import graph
from onnx import NodeProto, TensorProto, helper

node = helper.make_node
RANDOM = np.random.default_rng(0)
CONSTANTS: dict[str, np.ndarray[Any, Any]] = {
    "w": RANDOM.normal(size=(4, 8)).astype(np.float32),
    "v": RANDOM.normal(size=(8, 6)).astype(np.float32),
    "u": RANDOM.normal(size=(8, 8)).astype(np.float32),
    "ten": np.array([1, 10]),
    "pairs": np.array([-1, 2]),
    "whole": np.array([-1, 6]),
}
Y = Input("y", "float32", (2,))


def step(*frozen: NodeProto, features: str, width: int) -> onnx.ModelProto:
    """A step over ``features`` of this width: a product with a trained matrix, and a mean over the
    batch."""
    nodes = [
        *frozen,
        node("MatMul", [features, "param.p"], ["scores"]),
        node("Sub", ["scores", "batch.y"], ["errors"]),
        node("ReduceSum", ["errors"], ["total"], keepdims=0),
        node("Shape", ["batch.x"], ["count"], start=0, end=1),
        node("Cast", ["count"], ["size"], to=TensorProto.FLOAT),
        node("Div", ["total", "size"], ["loss"]),
    ]
    inputs: dict[str, tuple[int, list[Any]]] = {
        "param.p": (TensorProto.FLOAT, [width, 2]),
        "batch.x": (TensorProto.FLOAT, ["n", 4]),
        "batch.y": (TensorProto.FLOAT, ["n", 2]),
    }
    read = {name for row in nodes for name in row.input}
    constants = {name: value for name, value in CONSTANTS.items() if name in read}
    return graph(nodes, inputs, ["loss"], constants)


PRODUCT = node("MatMul", ["batch.x", "w"], ["product"])
RELU = node("Relu", ["product"], ["relu"])


def rows(**widths: int) -> Rows:
    return {name: Input(name, "float32", (width,)) for name, width in widths.items()}


def test_what_depends_on_the_batch_alone_is_frozen() -> None:
    made = step(PRODUCT, RELU, features="relu", width=8)
    assert frozen_values(made) == ["product", "relu"]
    found = dependencies(made)
    assert found["scores"] == {"batch", "trained"}
    assert found["count"] == frozenset(), "any array of the batch tells the number of examples"


def test_only_what_lies_behind_the_last_product_may_be_kept() -> None:
    skip = node("Add", ["relu", "again"], ["sum"])
    square = node("MatMul", ["relu", "u"], ["again"])
    made = step(PRODUCT, RELU, square, skip, node("Exp", ["sum"], ["exp"]), features="exp", width=8)
    assert candidates(made) == ["product", "relu", "again", "sum", "exp"], (
        "through the sum, which passes the product by"
    )
    made = step(PRODUCT, RELU, square, node("Exp", ["again"], ["exp"]), features="exp", width=8)
    assert candidates(made) == ["again", "exp"]


def test_of_equal_cuts_the_last_one_is_taken() -> None:
    assert cut(step(PRODUCT, RELU, features="relu", width=8), rows(product=8, relu=8)) == ["relu"]


def test_what_is_cheap_and_large_is_left_to_the_step() -> None:
    tiled = node("Tile", ["relu", "ten"], ["tiled"])
    made = step(PRODUCT, RELU, tiled, features="tiled", width=80)
    assert cut(made, rows(product=8, relu=8, tiled=80)) == ["relu"]


def test_no_product_is_left_to_the_step_to_save_bytes() -> None:
    narrow, wide = (
        node("MatMul", ["batch.x", "w"], ["wide"]),
        node("MatMul", ["wide", "v"], ["narrow"]),
    )
    made = step(
        narrow, wide, node("Tile", ["narrow", "ten"], ["tiled"]), features="tiled", width=60
    )
    assert cut(made, rows(wide=1, narrow=6, tiled=60)) == ["narrow"]


def test_a_value_without_a_row_for_each_example_is_not_kept() -> None:
    reshaped = [
        node("Reshape", ["relu", "pairs"], ["reshaped"]),
        node("Exp", ["reshaped"], ["exp"]),
    ]
    made = step(
        PRODUCT,
        RELU,
        *reshaped,
        node("Reshape", ["exp", "whole"], ["features"]),
        features="features",
        width=6,
    )
    assert cut(made, rows(product=8, relu=8)) == ["relu"]


def test_where_nothing_expensive_is_frozen_the_step_keeps_its_batch() -> None:
    made = step(node("Tile", ["batch.x", "ten"], ["tiled"]), features="tiled", width=40)
    assert cut(made, rows(tiled=40)) == []


@pytest.mark.parametrize("features", ["relu", "product"])
def test_the_parts_together_give_what_the_graph_gives(features: str) -> None:
    made = step(PRODUCT, RELU, features="relu", width=8)
    values = {features: "feature0"}
    assert arrays_read(made, values) == {"y"}
    table = (Input("feature0", "float32", (8,)), Y)
    first, rest = features_part(made, table, values), rest_of_step(made, table, values)
    assert [row.name for row in first.graph.input] == ["batch.x", "batch.y"]
    assert [row.name for row in rest.graph.input] == ["param.p", "batch.feature0", "batch.y"]
    assert not rest.graph.initializer
    feed = {
        row: RANDOM.normal(size=(3, width)).astype(np.float32)
        for row, width in (("batch.x", 4), ("batch.y", 2))
    }
    feed["param.p"] = RANDOM.normal(size=(8, 2)).astype(np.float32)
    expected = open_session(made.SerializeToString()).run(feed)["loss"]
    found = open_session(rest.SerializeToString(), before=first.SerializeToString()).run(feed)[
        "loss"
    ]
    assert found == pytest.approx(expected, rel=1e-6)


def test_computed_from() -> None:
    made = step(PRODUCT, RELU, features="relu", width=8)
    assert computed_from(made, ["relu"]) == {"relu", "product", "batch.x", "w"}
