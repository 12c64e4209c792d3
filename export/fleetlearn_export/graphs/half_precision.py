"""A training step whose products take float16: convolutions and matrix products, of the forward and
backward pass.

Everything else stays float32, as the parameters and the optimizer's state do: normalisation,
softmax, losses, sums. A row times a column is a sum, too. PyTorch's autocast for CUDA has the same
two lists (``AT_FORALL_LOWER_PRECISION_FP`` and ``AT_FORALL_FP32`` in ``ATen/autocast_mode.h``);
what is on neither list runs there in its inputs' type, and here in float32.

A runtime without a float16 kernel for a product computes it in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import onnx
from fleetlearn_protocol.manifest import LocalStep
from onnx import NodeProto, TensorProto, helper

from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.reading import reads
from fleetlearn_export.graphs.recompute import words
from fleetlearn_export.model.steps import Function

Compute = Literal["float32", "float16"]
"""The type that products take."""

PRODUCTS = words("Conv ConvTranspose Gemm MatMul")
MOVES = words("Concat Expand Flatten Identity Reshape Slice Squeeze Transpose Unsqueeze")
"""Operators that only move elements: between two products they move float16."""
HALF = "/half"
"""The end of the names of float16 tensors; without it the name is the float32 tensor's."""


def check_compute(compute: str, step: LocalStep | Function | None, others: Sequence[str]) -> None:
    """Raise ExportError unless ``compute`` is float16, and can be with the step and the other
    arguments given."""
    if compute == "bfloat16":
        raise ExportError(
            "compute='bfloat16': ONNX Runtime's CPU provider has no bfloat16 kernels and would not "
            "load the graph, and ONNX has no bfloat16 convolution in the opset that is written; "
            "compute='float16' runs everywhere"
        )
    if compute != "float16":
        raise ExportError(f"compute={compute!r}; expected 'float32' or 'float16'")
    if step is not None and not isinstance(step, LocalStep):
        raise ExportError(
            "compute='float16' is for a LocalStep, whose loss it scales, not for a step of your own"
        )
    reasons = {
        "many": "the simulator's blocks of devices train in float32",
        "memory": "how much memory float16 takes depends on the device's kernels",
        "cache_features": "graphs of features compute in float32",
    }
    for name in others:
        raise ExportError(f"compute='float16' cannot be combined with {name}: {reasons[name]}")


def with_half_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with float16 products, and with as few casts around them as possible."""
    half = _products_and_their_moves(model)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:]
    written = changed.graph.node
    narrow, wide = (
        set[str](),
        {described.name for described in (*model.graph.input, *model.graph.initializer)},
    )
    """The tensors that are there in float16, and in float32."""
    for index, node in enumerate(model.graph.node):
        given = _tensors(node)
        row = NodeProto()
        row.CopyFrom(node)
        if index in half or (
            node.op_type in MOVES and all(name in narrow and name not in wide for name in given)
        ):
            for name in given:
                if name not in narrow:
                    written.append(_cast(name, name + HALF, TensorProto.FLOAT16))
                    narrow.add(name)
            row.input[:] = [name + HALF if name in given else name for name in node.input]
            row.output[0] += HALF
            narrow.add(node.output[0])
        else:
            wide |= set(node.output)
        written.append(row)
    _widen(changed.graph, wide)
    made = {name for node in written for name in node.output}
    described = [value for value in model.graph.value_info if value.name in made]
    del changed.graph.value_info[:]
    changed.graph.value_info.extend(described)
    return changed


def _products_and_their_moves(model: onnx.ModelProto) -> set[int]:
    """Return the places of the products, and of the moves whose results nothing but a product
    reads: an operand is cast before it is moved."""
    kinds, sums = _types_and_sums(model)
    outputs = {output.name for output in model.graph.output}
    readers: dict[str, list[tuple[int, bool]]] = {}
    """Tensor -> places of the operators that read it, and whether they read its elements."""
    for index, node in enumerate(model.graph.node):
        for name in reads(node):
            readers.setdefault(name, []).append((index, name in _tensors(node)))
    chosen = set[int]()
    for index, node in reversed(list(enumerate(model.graph.node))):
        if any(kinds.get(name) != TensorProto.FLOAT for name in _tensors(node)):
            continue
        made = node.output[0]
        read = readers.get(made, [])
        moves = node.op_type in MOVES and made not in outputs and read
        product = node.op_type in PRODUCTS and made not in sums
        if product or (moves and all(row in chosen and elements for row, elements in read)):
            chosen.add(index)
    return chosen


def _types_and_sums(model: onnx.ModelProto) -> tuple[dict[str, int], set[str]]:
    """Return the tensors' element types, and the names of those whose last two axes have one
    element each: the product of a row and a column is such a tensor."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.initializer[:]
    for row in model.graph.initializer:
        light.graph.input.append(helper.make_tensor_value_info(row.name, row.data_type, row.dims))
    inferred = onnx.shape_inference.infer_shapes(light).graph
    types = {
        described.name: described.type.tensor_type
        for described in (*inferred.input, *inferred.value_info, *inferred.output)
    }
    sums = {
        name
        for name, kind in types.items()
        if [size.dim_value for size in kind.shape.dim[-2:]] == [1, 1]
    }
    return {name: kind.elem_type for name, kind in types.items()}, sums


def _widen(graph: onnx.GraphProto, wide: set[str]) -> None:
    """Add a cast behind each float16 result that something reads as float32."""
    read = {name for node in graph.node for name in reads(node)} | {
        output.name for output in graph.output
    }
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        name = node.output[0].removesuffix(HALF)
        if node.output[0].endswith(HALF) and name not in wide and name in read:
            graph.node.append(_cast(name + HALF, name, TensorProto.FLOAT))


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the same graph with float32 in the place of float16."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for node in changed.graph.node:
        if node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT16:
            node.attribute[0].i = TensorProto.FLOAT
    return changed


def with_every_rounding(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph for an unoptimised session, which then rounds to float16 what a float16
    kernel rounds.

    Without such kernels ONNX Runtime takes away a cast to float16 and the cast back beside it.
    Between the two there is an Identity here.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    nodes = list(changed.graph.node)
    del changed.graph.node[:]
    for node in nodes:
        changed.graph.node.append(node)
        made = node.output[0]
        if made.endswith(HALF):
            changed.graph.node[-1].output[0] = f"{made}/made"
            changed.graph.node.append(
                helper.make_node("Identity", [f"{made}/made"], [made], name=f"{made}/kept")
            )
    return changed


def _cast(name: str, to: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [name], [to], name=f"{to}/cast", to=kind)


def _tensors(node: NodeProto) -> list[str]:
    """Return the inputs that hold elements, rather than sizes or axes."""
    return [
        name
        for name in (node.input[:1] if node.op_type in MOVES - {"Concat"} else node.input)
        if name
    ]
