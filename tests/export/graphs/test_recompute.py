from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from fleetlearn_export.graphs.recompute import AGAIN, Sizes, fit, in_order_of_execution, recomputed
from fleetlearn_export.inspection import graph_costs
from fleetlearn_export.inspection.step_memory import peak_of_intermediates
from graphs import graph
from onnx import TensorProto, helper

node = helper.make_node
FLOAT = TensorProto.FLOAT
ROWS = 64
LAYERS = 4


def chain(wide: bool = False) -> onnx.ModelProto:
    """Layers of a product, a shift and two activations, and the backward pass, which reads all of
    their results.

    wide: each layer of the backward pass also makes something of four times the gradient's size.
    """
    nodes, x = [], "x"
    for layer in range(LAYERS):
        nodes += [
            node("MatMul", [x, "w"], [f"p{layer}"], f"p{layer}"),
            node("Add", [f"p{layer}", "b"], [f"s{layer}"], f"s{layer}"),
            node("Tanh", [f"s{layer}"], [f"t{layer}"], f"t{layer}"),
            node("Sigmoid", [f"t{layer}"], [f"a{layer}"], f"a{layer}"),
        ]
        x = f"a{layer}"
    g = x
    for layer in reversed(range(LAYERS)):
        if wide:
            nodes.append(node("MatMul", [g, "m"], [f"wide{layer}"], f"wide{layer}"))
            nodes.append(
                node("ReduceMax", [f"wide{layer}"], [f"max{layer}"], f"max{layer}", keepdims=0)
            )
        for step, read in enumerate("ats"):
            nodes.append(node("Mul", [g, f"{read}{layer}"], [f"g{layer}{step}"], f"g{layer}{step}"))
            g = f"g{layer}{step}"
        if wide:
            nodes.append(node("Add", [g, f"max{layer}"], [f"g{layer}"], f"g{layer}"))
            g = f"g{layer}"
    nodes.append(node("ReduceSum", [g], ["out"], "out", keepdims=0))
    constants = {"w": np.eye(256, dtype=np.float32) / 2, "b": np.full(256, 0.1, np.float32)}
    constants |= {"m": np.ones((256, 1024), np.float32)} if wide else {}
    return graph(nodes, {"x": (FLOAT, ["n", 256])}, ["out"], constants)


def peak_and_sizes(model: onnx.ModelProto) -> tuple[int, Sizes]:
    values = graph_costs.values(model, ROWS)
    return peak_of_intermediates(model, values), {
        name: value.bytes for name, value in values.items()
    }


def peak(model: onnx.ModelProto, sizes: Sizes) -> int:
    assert {
        name for node in model.graph.node for name in node.output if name.endswith(AGAIN)
    } <= sizes.keys()
    return peak_and_sizes(model)[0]


def run(model: onnx.ModelProto, optimised: Path, shape: tuple[int, ...] = (ROWS, 256)) -> float:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(optimised)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return float(session.run(None, {"x": x})[0])


def test_the_same_result_with_less_memory_and_onnx_runtime_does_compute_it_twice(
    tmp_path: Path,
) -> None:
    model = chain()
    before, sizes = peak_and_sizes(model)
    found = fit(model, sizes, peak, 0)
    unit = 4 * ROWS * 256
    # what the backward pass reads of all layers, and the first gradient
    assert before == (3 * LAYERS + 1) * unit
    # one for each layer, and those of the layer at work
    assert found.peak <= before - 2 * (LAYERS - 2) * unit
    assert run(found.model, tmp_path / "again.onnx") == run(model, tmp_path / "once.onnx")
    left = {node.name for node in onnx.load(tmp_path / "again.onnx").graph.node}
    assert {node.name for node in found.model.graph.node if node.name.endswith(AGAIN)} <= left
    assert found.again == sum(
        sizes[name.removesuffix(AGAIN)] for name in left if name.endswith(AGAIN)
    )


def test_what_runs_again_runs_behind_the_gradient_that_it_waits_for() -> None:
    model = chain()
    found = fit(model, peak_and_sizes(model)[1], peak, 0)
    places = {node.name: place for place, node in enumerate(in_order_of_execution(found.model))}
    again = [place for name, place in places.items() if name.endswith(AGAIN)]
    assert again
    assert min(again) > max(places[f"p{layer}"] for layer in range(LAYERS))


def test_nothing_larger_is_made_before_what_runs_again() -> None:
    """Each layer's backward pass also makes a wide result of the gradient, which the file has
    first. What runs again meets the gradient itself, and does not wait for the wide one."""
    model = chain(wide=True)
    found = fit(model, peak_and_sizes(model)[1], peak, 0)
    places = {node.name: place for place, node in enumerate(in_order_of_execution(found.model))}
    for layer in range(1, LAYERS - 1):
        assert places[f"a{layer}{AGAIN}"] < places[f"wide{layer}"]


def widening() -> onnx.ModelProto:
    """Blocks of a convolution from 4 to 16 channels, an activation, and a convolution back; and the
    backward pass."""
    nodes, x = [], "x"
    for layer in range(LAYERS):
        nodes += [
            node("Conv", [x, "up"], [f"w{layer}"], f"w{layer}"),
            node("Tanh", [f"w{layer}"], [f"t{layer}"], f"t{layer}"),
            node("Conv", [f"t{layer}", "down"], [f"n{layer}"], f"n{layer}"),
        ]
        x = f"n{layer}"
    g = x
    for layer in reversed(range(LAYERS)):
        nodes += [
            node("ConvTranspose", [g, "down"], [f"g{layer}t"], f"g{layer}t"),
            node("Mul", [f"g{layer}t", f"t{layer}"], [f"g{layer}w"], f"g{layer}w"),
            node("Mul", [f"g{layer}w", f"w{layer}"], [f"g{layer}x"], f"g{layer}x"),
            node("ConvTranspose", [f"g{layer}x", "up"], [f"g{layer}"], f"g{layer}"),
        ]
        g = f"g{layer}"
    nodes.append(node("ReduceSum", [g], ["out"], "out", keepdims=0))
    random = np.random.default_rng(0)
    up, down = (
        random.standard_normal(sizes).astype(np.float32) / 4
        for sizes in ((16, 4, 1, 1), (4, 16, 1, 1))
    )
    return graph(nodes, {"x": (FLOAT, ["n", 4, 8, 8])}, ["out"], {"up": up, "down": down})


def test_convolutions_that_widen_run_twice_if_nothing_else_saves_enough(tmp_path: Path) -> None:
    model = widening()
    before, sizes = peak_and_sizes(model)
    cheap = recomputed(model, sizes, peak, 0)
    assert cheap.peak < before
    found = fit(model, sizes, peak, 0)
    assert found.peak < cheap.peak
    again = {row.op_type for row in found.model.graph.node if row.name.endswith(AGAIN)}
    assert again == {"Conv", "Tanh"}
    assert not [
        row
        for row in found.model.graph.node
        if row.name.startswith("n") and row.name.endswith(AGAIN)
    ]
    shape = (ROWS, 4, 8, 8)
    assert run(found.model, tmp_path / "again.onnx", shape) == run(
        model, tmp_path / "once.onnx", shape
    )
    # The first convolution reads the graph's input: ONNX Runtime must not find both computations of
    # it equal.
    written, left = (
        [row.op_type for row in made.graph.node].count("Conv")
        for made in (found.model, onnx.load(tmp_path / "again.onnx"))
    )
    # the last layer's is read before there is a gradient to wait for
    assert written == left == 3 * LAYERS - 1
    assert {
        row.op_type
        for row in fit(model, sizes, peak, cheap.peak).model.graph.node
        if row.name.endswith(AGAIN)
    } == {"Tanh"}


def test_no_more_than_the_budget_needs() -> None:
    model = chain()
    before, sizes = peak_and_sizes(model)
    assert fit(model, sizes, peak, before) == (model, before, 0)


def test_the_order_of_execution_is_onnx_runtimes() -> None:
    model = graph(
        [
            node("Neg", ["x"], ["a"], "a"),
            node("Abs", ["x"], ["b"], "b"),
            node("Sub", ["b", "a"], ["c"], "c"),  # b, the later in the file, is made first
            node("Exp", ["x"], ["d"], "d"),  # the last without readers begins
        ],
        {"x": (FLOAT, ["n"])},
        ["c", "d"],
    )
    assert [row.name for row in in_order_of_execution(model)] == ["d", "b", "a", "c"]
