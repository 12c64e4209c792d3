"""Rewrites of ONNX graphs that save passes over memory. ONNX Runtime does not do them itself."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

BROADCASTING = {
    *("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Max", "Min", "Where"),
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or"),
}
"""Operators whose operands broadcast."""
FOR_EACH_ELEMENT = {
    *(
        "Abs",
        "Cast",
        "Clip",
        "Exp",
        "HardSigmoid",
        "LeakyRelu",
        "Log",
        "Neg",
        "Not",
        "Reciprocal",
        "Relu",
    ),
    *("Sigmoid", "Sqrt", "Tanh", "ThresholdedRelu"),
}
"""Operators whose result has the shape of their only tensor."""
LARGE = 2**16
"""Elements of a kernel for which a pass less is worth an operator more."""
Shape = list[object]


def rewrite(graph: ir.Graph) -> None:
    """Change the graph in place. Nodes that are no longer used stay in it."""
    for node in graph:
        if node.op_type == "Slice":
            _merge_slices(graph, node)
        elif node.op_type == "Transpose":
            _remove_transpose_back(graph, node)
        elif node.op_type == "Sub":
            _update_within_product(graph, node)
        elif node.op_type == "MatMul":
            _multiply_without_copies(node)
    inner: dict[ir.Value, Shape] = {}
    for node in graph:
        if node.op_type in BROADCASTING | FOR_EACH_ELEMENT:
            _widen_numbers(graph, node, inner)


def _widen_numbers(graph: ir.Graph, node: ir.Node, inner: dict[ir.Value, Shape]) -> None:
    """Give a number as many axes as the tensor that it meets, where the tensor's last axis has one
    element.

    There ONNX Runtime 1.31 would call its kernel for each element: a product of (1280, 320, 1, 1)
    and a number takes 3.0 ms, with the number as (1, 1, 1, 1) 0.08.

    inner: shapes of values that the graph does not tell; the shapes of this node's results are
        added.
    """
    shapes = [
        inner.get(value) if value in inner else _shape(value)
        for value in node.inputs
        if value is not None
    ]
    wide = [shape for shape in shapes if shape]
    result = node.outputs[0]
    if any(shape is None for shape in shapes) or not wide:
        return
    if result.shape is None and len(wide) == 1:
        inner[result] = wide[0]
    if any(shape[-1] != 1 for shape in wide) or node.op_type not in BROADCASTING:
        return
    ones = np.ones(max(map(len, wide)), np.int64)
    for index, (value, shape) in enumerate(zip(node.inputs, shapes, strict=True)):
        if shape == [] and value is not None:
            name = f"{result.name}/number{index}"
            if value.const_value is not None:
                wider = _constant(graph, name, value.const_value.numpy().reshape(ones))
            else:
                wider = _insert(graph, node, "Reshape", [value, _constant(graph, name, ones)], None)
            node.replace_input_with(index, wider)


def _constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Add an initializer."""
    tensor = ir.tensor(array)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype))
    value.shape = ir.Shape(array.shape)
    graph.register_initializer(value)
    return value


def _merge_slices(graph: ir.Graph, node: ir.Node) -> None:
    """Merge a slice of a slice along other axes into one slice. PyTorch slices one axis at a
    time."""
    source = _producer(node.inputs[0], "Slice")
    if source is None:
        return
    inner, outer = _bounds(source), _bounds(node)
    if inner is None or outer is None or {*inner[2].tolist()} & {*outer[2].tolist()}:
        return
    node.replace_input_with(0, source.inputs[0])
    for number, (first, second) in enumerate(zip(inner, outer, strict=True), 1):
        both = np.concatenate([first, second])
        node.replace_input_with(number, _constant(graph, f"{node.outputs[0].name}/{number}", both))


def _bounds(node: ir.Node) -> list[NDArray[np.int64]] | None:
    """Return starts, ends, axes and steps; None unless all are constants and no axis is counted
    from the end."""
    values = [value.const_value if value is not None else None for value in node.inputs[1:]]
    arrays = [value.numpy().astype(np.int64) for value in values if value is not None]
    return arrays if len(arrays) == 4 and min(arrays[2]) >= 0 else None


def _remove_transpose_back(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a transpose that restores the order of axes before another one. PyTorch turns the
    gradient of a linear layer's weights twice."""
    first = _producer(node.inputs[0], "Transpose")
    source = first.inputs[0] if first is not None else None
    if first is None or source is None or node.outputs[0].is_graph_output():
        return
    orders = [row.attributes.get_ints("perm", []) for row in (first, node)]
    if not orders[0] or [orders[0][axis] for axis in orders[1]] != sorted(orders[0]):
        return
    ir.convenience.replace_all_uses_with(node.outputs[0], source)
    for row in (node, first):
        if not row.outputs[0].uses() and not row.outputs[0].is_graph_output():
            graph.remove(row, safe=True)


def _multiply_without_copies(node: ir.Node) -> None:
    """Multiply with a matrix itself where PyTorch multiplies with a copy for each matrix of
    the other operand.

    In evaluation a linear layer on a transposed sequence would copy its weights for each token: 1.4
    GB in eval.onnx of torchvision's vit_b_16 with 17 tokens, all of them before the first layer
    runs.
    """
    for index, value in enumerate(node.inputs):
        expand = _producer(value, "Expand")
        shapes = (
            [_shape(row) for row in (expand.inputs[0], value, node.inputs[1 - index])]
            if expand
            else []
        )
        if expand is None or any(shape is None or len(shape) < 2 for shape in shapes):
            continue
        source, copies, other = (list[Any](shape or ()) for shape in shapes)
        known = all(isinstance(size, int) or size.value is not None for size in other[:-2])
        if known and source[-2:] == copies[-2:] and copies[:-2] == other[:-2]:
            node.replace_input_with(index, expand.inputs[0])


def _update_within_product(graph: ir.Graph, node: ir.Node) -> None:
    """Turn w - lr * (a @ b) into w - (lr * a) @ b, and into one Gemm if the matrices have two axes.

    That saves one or two passes over the weights.
    """
    weights, step = node.inputs
    scaling = _producer(step, "Mul")
    if scaling is None or not _has_one_reader(step):
        return
    rates = [value for value in scaling.inputs if _shape(value) == []]
    gradients = [value for value in scaling.inputs if value not in rates]
    if len(rates) != 1 or len(gradients) != 1:
        return
    reshape = _producer(gradients[0], "Reshape")
    if reshape is not None and _has_one_reader(gradients[0]):
        _scale_factor(graph, node, reshape, rates[0])
        return
    product = _producer(gradients[0], "MatMul")
    sizes = _shape(weights) or []
    # Gemm would silently repeat the rows of a smaller w.
    if (
        product is None
        or not _has_one_reader(gradients[0])
        or len(sizes) < 2
        or sizes != _shape(gradients[0])
    ):
        return
    if any(len(_shape(value) or []) != len(sizes) for value in product.inputs):
        return
    transposes = [_producer(value, "Transpose") for value in product.inputs]
    factors = [
        transpose.inputs[0] if transpose else value
        for transpose, value in zip(transposes, product.inputs, strict=True)
    ]
    rows, columns = sizes[-2:]
    smaller = int(isinstance(rows, int) and isinstance(columns, int) and rows > columns)
    factors[smaller] = _insert(graph, node, "Mul", [factors[smaller], rates[0]], factors[smaller])
    if len(sizes) == 2:
        _as_gemm(node, weights, factors, [int(transpose is not None) for transpose in transposes])
        return
    transpose = transposes[smaller]
    if transpose is not None:
        factors[smaller] = _insert(
            graph,
            node,
            "Transpose",
            [factors[smaller]],
            transpose.outputs[0],
            transpose.attributes.values(),
        )
    product.replace_input_with(smaller, factors[smaller])
    graph.remove(product)
    graph.insert_before(node, product)
    node.replace_input_with(1, product.outputs[0])


def _scale_factor(graph: ir.Graph, node: ir.Node, reshape: ir.Node, rate: ir.Value | None) -> None:
    """Turn w - lr * reshape(a @ b), a convolution's update, into w - reshape((lr * a) @ b).

    That saves a pass over the weights.
    """
    product = _producer(reshape.inputs[0], "MatMul")
    sizes = [size if isinstance(size, int) else 0 for size in _shape(node.inputs[0]) or [0]]
    if product is None or not _has_one_reader(reshape.inputs[0]) or prod(sizes) < LARGE:
        return
    smaller = int(sizes[0] > prod(sizes[1:]))
    factor = product.inputs[smaller]
    transpose = _producer(factor, "Transpose")
    source = factor if transpose is None else transpose.inputs[0]
    scaled = _insert(graph, product, "Mul", [source, rate], source)
    # ONNX Runtime multiplies with what is transposed, if nothing is in between
    if transpose is not None:
        scaled = _insert(
            graph, product, "Transpose", [scaled], factor, transpose.attributes.values()
        )
    product.replace_input_with(smaller, scaled)
    node.replace_input_with(1, reshape.outputs[0])


def _as_gemm(
    node: ir.Node, weights: ir.Value | None, factors: list[ir.Value | None], transposed: list[int]
) -> None:
    node.op_type = "Gemm"
    node.resize_inputs(3)
    for index, factor in enumerate((*factors, weights)):
        node.replace_input_with(index, factor)
    node.attributes["transA"] = ir.AttrInt64("transA", transposed[0])
    node.attributes["transB"] = ir.AttrInt64("transB", transposed[1])
    node.attributes["alpha"] = ir.AttrFloat32("alpha", -1.0)


def _insert(
    graph: ir.Graph,
    before: ir.Node,
    operator: str,
    inputs: list[ir.Value | None],
    like: ir.Value | None,
    attributes: Iterable[ir.Attr] = (),
) -> ir.Value:
    """Insert a node before ``before``. Returns its output, which gets the shape and type of
    ``like``."""
    made = ir.node(operator, inputs, attributes={row.name: row for row in attributes})
    value = made.outputs[0]
    value.name = f"{before.outputs[0].name}/{operator}"
    made.name = value.name
    if like is not None:
        value.shape, value.type = like.shape, like.type
    graph.insert_before(before, made)
    return value


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    """Return the node that makes the value if it is of this operator, else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _shape(value: ir.Value | None) -> Shape | None:
    """Return the shape, in which a free size is a name; None if it is unknown."""
    return list(value.shape) if value is not None and value.shape is not None else None


def _has_one_reader(value: ir.Value | None) -> bool:
    """Whether exactly one node reads the value."""
    return value is not None and len(value.uses()) == 1 and not value.is_graph_output()
