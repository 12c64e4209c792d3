"""Splits a training step's graph where the frozen part of the model ends.

What the frozen part makes of an example, its features, is the same in each step. One graph computes
the features, and another does the rest of the step from them. The split is a minimum cut: no
product of the frozen part, such as a convolution, is left in the rest, and the features have as few
bytes as that allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import networkx
import numpy as np
import onnx
from fleetlearn_protocol.manifest import Input
from onnx import NodeProto, helper

from fleetlearn_export.graphs.reading import ancestors, reads, rename
from fleetlearn_export.graphs.recompute import words

PRODUCTS = words("Conv ConvTranspose ConvInteger Einsum Gemm GRU LSTM MatMul MatMulInteger RNN")
"""Operators that are worth keeping a result for. All others are cheap, and may run in each step to
save bytes."""
LEFT_OUT = 2**48
"""What a product in the rest costs in the minimum cut, in bytes for each example: more than all
features together."""
BATCH, SEED, TRAINED = "batch", "seed", "trained"

Rows = Mapping[str, Input]
"""Value of the graph -> dtype and shape of its row for one example, if the row depends on that
example alone."""


def dependencies(model: onnx.ModelProto) -> dict[str, frozenset[str]]:
    """Return on which kinds of inputs each value depends: BATCH, SEED and TRAINED, which is all
    others.

    The number of examples is no dependency: any array that has the examples on its first axis tells
    it.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs_behind = {
        input_.name: frozenset([_kind(input_.name)])
        for input_ in model.graph.input
        if input_.name not in constants
    }
    for node in model.graph.node:
        read = (
            []
            if counts_examples(node)
            else [inputs_behind.get(name, frozenset()) for name in reads(node)]
        )
        inputs_behind |= dict.fromkeys(filter(None, node.output), frozenset[str]().union(*read))
    return inputs_behind


def frozen_values(model: onnx.ModelProto) -> list[str]:
    """Return the results that depend on the batch and on constants alone, in the graph's order."""
    kinds = dependencies(model)
    return [
        name for node in model.graph.node for name in node.output if name and kinds[name] == {BATCH}
    ]


def candidates(model: onnx.ModelProto) -> list[str]:
    """Return the frozen values that may become features: no product lies between them and
    the step."""
    frozen, read = frozen_values(model), set[str]()
    inside = set(frozen)
    for node in reversed(model.graph.node):
        results = inside & set(node.output)
        if not results or (node.op_type not in PRODUCTS and results & read):
            read.update(reads(node))
    return [name for name in frozen if name in read]


def cut(model: onnx.ModelProto, rows: Rows) -> list[str]:
    """Return the values to keep as features, in the graph's order. ``rows``: of ``candidates``."""
    frozen = frozen_values(model)
    inside, kinds = set(frozen), dependencies(model)
    graph = networkx.DiGraph()
    graph.add_node("frozen")
    graph.add_node("step")
    for node in model.graph.node:
        for name in set(node.output) & inside:
            size = bytes_of(rows[name]) if name in rows else None
            _add(graph, (name, "made"), (name, "read"), size)
            if node.op_type in PRODUCTS:
                _add(graph, "frozen", (name, "made"), LEFT_OUT)
        for source in reads(node):
            if kinds.get(source, frozenset()) != {BATCH}:
                continue
            if source not in inside:  # an array of the batch, which is there in any case
                _add(graph, "frozen", (source, "read"), 0)
            readers: list[object] = [(name, "made") for name in node.output if name in inside]
            for reader in readers or ["step"]:
                _add(graph, (source, "read"), reader, None)
    # Of equal cuts networkx finds the last: the one that leaves the least to the step.
    behind = networkx.minimum_cut(graph, "frozen", "step")[1][1]
    return [name for name in frozen if (name, "read") in behind and (name, "made") not in behind]


def _add(graph: networkx.DiGraph, source: object, target: object, size: int | None) -> None:
    """Add an edge; without a size it cannot be cut."""
    graph.add_edge(source, target, **({} if size is None else {"capacity": size}))


def features_part(
    model: onnx.ModelProto, table: Sequence[Input], values: Mapping[str, str]
) -> onnx.ModelProto:
    """Return the graph that computes the features from the batch.

    table: the features, and arrays of the batch. values: value of the step's graph -> the feature's
    name.
    """
    names = _new_names(values)
    described = {f"batch.{entry.name}": _value_info(entry) for entry in table}
    batch = [input_ for input_ in model.graph.input if _kind(input_.name) == BATCH]
    return _part(model, batch, [described[name] for name in names.values()], names, None)


def rest_of_step(
    model: onnx.ModelProto, table: Sequence[Input], values: Mapping[str, str]
) -> onnx.ModelProto:
    """Return the graph with ``table`` as its batch, where the model's graph has the batch.

    values: as for ``features_part``; values of an evaluation's graph are given in the same way.
    """
    inputs = [input_ for input_ in model.graph.input if _kind(input_.name) != BATCH]
    described = [_value_info(entry) for entry in table]
    return _part(
        model, [*inputs, *described], model.graph.output, _new_names(values), described[0].name
    )


def _new_names(values: Mapping[str, str]) -> dict[str, str]:
    return {value: f"batch.{feature}" for value, feature in values.items()}


def computed_from(model: onnx.ModelProto, values: Iterable[str]) -> set[str]:
    """Return these values, and all that they are computed from."""
    found = set(values)
    return found.union(*map(reads, ancestors(model.graph.node, found)))


def values_part(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a graph of these values, which depend on the batch and on constants alone."""
    batch = [input_ for input_ in model.graph.input if _kind(input_.name) == BATCH]
    return _part(model, batch, [onnx.ValueInfoProto(name=name) for name in names], {}, None)


def arrays_read(model: onnx.ModelProto, given: Iterable[str]) -> set[str]:
    """Return the batch's arrays that the graph reads where it is given these values."""
    needed = ancestors(
        model.graph.node, (output.name for output in model.graph.output), stop=set(given)
    )
    nodes = [node for node in needed if not counts_examples(node)]
    read = {name for node in nodes for name in reads(node) if _kind(name) == BATCH}
    return {name.removeprefix("batch.") for name in read}


def _part(
    model: onnx.ModelProto,
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    names: Mapping[str, str],
    examples: str | None,
) -> onnx.ModelProto:
    """Return the part of the graph between inputs and outputs, with values renamed to ``names``.

    examples: the input that tells the number of examples; None where the batch's own arrays do.
    """
    part = onnx.ModelProto(ir_version=model.ir_version)
    part.opset_import.extend(model.opset_import)
    part.graph.name = model.graph.name
    part.graph.input.extend(inputs)
    part.graph.output.extend(outputs)
    back = {new: old for old, new in names.items()}
    wanted, given = (
        {back.get(row.name, row.name) for row in rows}
        for rows in (part.graph.output, part.graph.input)
    )
    for node in ancestors(model.graph.node, wanted, stop=given):
        row = part.graph.node.add()
        row.CopyFrom(node)
        if examples is not None and counts_examples(node):
            row.input[0] = examples
        row.output[:] = ["" if name in given else name for name in row.output]
        rename(row, names)
    made = {name for node in part.graph.node for name in node.output} - {
        output.name for output in part.graph.output
    }
    part.graph.value_info.extend(
        described for described in model.graph.value_info if described.name in made
    )
    read = {name for node in part.graph.node for name in reads(node)}
    part.graph.initializer.extend(
        tensor for tensor in model.graph.initializer if tensor.name in read
    )
    return part


def _kind(name: str) -> str:
    return BATCH if name.startswith("batch.") else SEED if name == "seed" else TRAINED


def counts_examples(node: NodeProto) -> bool:
    """Whether the node's result is the number of examples, from an array of the batch."""
    axes = {attribute.name: attribute.i for attribute in node.attribute}
    whole = (axes.get("start", 0), axes.get("end")) == (0, 1)
    return node.op_type == "Shape" and whole and _kind(node.input[0]) == BATCH


def bytes_of(row: Input) -> int:
    return prod(row.shape) * np.dtype(row.dtype).itemsize


def _value_info(row: Input) -> onnx.ValueInfoProto:
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(row.dtype))
    return helper.make_tensor_value_info(f"batch.{row.name}", dtype, ["n", *row.shape])
