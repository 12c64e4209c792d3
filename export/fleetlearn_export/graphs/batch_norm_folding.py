"""BatchNorm of a frozen module, folded into the convolution before it.

In evaluation mode BatchNorm multiplies each channel by a constant and adds one; the convolution's
weights and bias can do the same. ONNX Runtime folds too, but not weights that are stored in fewer
bits, and into a copy in its own memory.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.graphs.reading import reads


def fold_batch_norms(model: onnx.ModelProto, apart: Constants | None = None) -> onnx.ModelProto:
    """Fold where a convolution with constant weights has a constant BatchNorm as its only reader.

    apart: the constants that the graph has kept apart. Changes the graph in place, and returns it.
    Constants that are no longer used are removed.
    """
    values_of = apart.array if apart else numpy_helper.to_array
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in reads(node):
            readers.setdefault(name, []).append(node)
    outputs = {output.name for output in graph.output}
    folded = set()
    for convolution in list(graph.node):
        if convolution.op_type != "Conv" or convolution.output[0] in outputs:
            continue
        after = readers.get(convolution.output[0], [])
        if (
            len(after) != 1
            or after[0].op_type != "BatchNormalization"
            or after[0].input[0] != convolution.output[0]
        ):
            continue
        norm = after[0]
        needed = [*convolution.input[1:], *norm.input[1:]]
        training = any(
            attribute.name == "training_mode" and attribute.i for attribute in norm.attribute
        )
        if (
            training
            or len([name for name in norm.output if name]) > 1
            or not constants.keys() >= set(needed)
        ):
            continue
        _fold(graph, convolution, norm, {name: values_of(constants[name]) for name in needed})
        graph.node.remove(norm)
        folded |= set(needed)
    used = {name for node in graph.node for name in reads(node)} | outputs
    for row in [tensor for tensor in graph.initializer if tensor.name in folded - used]:
        graph.initializer.remove(row)
    return model


def _fold(
    graph: onnx.GraphProto,
    convolution: onnx.NodeProto,
    norm: onnx.NodeProto,
    values: dict[str, np.ndarray],
) -> None:
    """Make the convolution do the BatchNorm's work too, in the BatchNorm's name."""
    epsilon = next(
        (attribute.f for attribute in norm.attribute if attribute.name == "epsilon"), 1e-5
    )
    scale, shift, mean, variance = (values[name].astype(np.float64) for name in norm.input[1:])
    factor = scale / np.sqrt(variance + epsilon)
    weights = values[convolution.input[1]]
    bias = values[convolution.input[2]].astype(np.float64) if len(convolution.input) > 2 else 0.0
    made = {
        f"{norm.output[0]}.weight": weights * factor.reshape(-1, *[1] * (weights.ndim - 1)),
        f"{norm.output[0]}.bias": (bias - mean) * factor + shift,
    }
    graph.initializer.extend(
        numpy_helper.from_array(value.astype(weights.dtype), name) for name, value in made.items()
    )
    attributes = list(convolution.attribute)
    fresh = helper.make_node(
        "Conv", [convolution.input[0], *made], [norm.output[0]], convolution.name
    )
    fresh.attribute.extend(attributes)
    convolution.CopyFrom(fresh)
