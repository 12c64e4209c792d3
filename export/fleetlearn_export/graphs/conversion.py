"""Conversion of exported programs to ONNX graphs of standard operators, cleaned and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnx import TensorProto, helper, numpy_helper

from fleetlearn_export.emission.constants import Array, Constants, key_of
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.free_sizes import name_free_sizes
from fleetlearn_export.graphs.reading import subgraphs
from fleetlearn_export.graphs.rewrite import rewrite
from fleetlearn_export.model.source_locations import as_export_error, location_of_operator
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.silence import silenced_python
from fleetlearn_export.tracing.decompositions import Decompositions
from fleetlearn_export.tracing.fused_operators import CHEAPER_DECOMPOSITIONS, fuse_operators
from fleetlearn_export.tracing.trace import Program

OPSET = 18
IR_VERSION = 8
"""The IR version of opset 18: any ONNX Runtime since 1.14 reads it."""
MAX_BYTES = 2**31 - 1
"""The largest serialised graph; a limit of protobuf."""

_SYMBOL = re.compile(r"\bs\d+\b")
"""PyTorch's name for a free size, alone or in an expression. A graph has one free size, the number
of examples."""
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)'")


def to_onnx(program: Program, table: Decompositions) -> onnx.ModelProto:
    """Decompose the program with ``table`` and convert it. Raises ExportError on an operator that
    ONNX lacks."""
    exported = program.exported
    try:
        with (
            as_export_error(
                "the exported program cannot become an ONNX graph", torch.onnx.OnnxExporterError
            ),
            silenced_python(),
        ):
            if table:
                fuse_operators(exported.graph)
                exported = exported.run_decompositions({**table, **CHEAPER_DECOMPOSITIONS})
            result = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=OPSET,
                input_names=program.inputs,
                output_names=program.outputs,
                verbose=False,
                external_data=False,
            )
    except torch.onnx.OnnxExporterError as error:
        operator = _OPERATOR.search(str(error))
        if not operator:
            raise ExportError(f"PyTorch's ONNX exporter failed: {error}") from error
        name = ".".join(operator.groups())
        graphs = [program.located, *([program.located_step] if program.located_step else [])]
        where = next(filter(None, (location_of_operator(name, graph) for graph in graphs)), None)
        where = where or ", which a step of decomposition or of the backward pass made"
        raise ExportError(
            f"operator {name}{where} has no counterpart in ONNX. Write that part of the model with "
            "other operators"
        ) from error
    assert result is not None
    with as_export_error("the exported graph cannot be cleaned"):
        return clean(result.model, program.outputs)


def clean(model: ir.Model, outputs: list[str]) -> onnx.ModelProto:
    """Return the graph without what is double or not used, and rewritten for speed. Raises
    ExportError."""
    model.ir_version = IR_VERSION
    # PyTorch's exporter writes functions; what follows, and runtimes, know operators alone.
    passes.InlinePass()(model)
    rewrite(model.graph)
    for cleaning in (
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.IdentityEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.TopologicalSortPass(),
        passes.ClearMetadataAndDocStringPass(),
    ):
        cleaning(model)
    proto = ir.to_proto(model)
    for row, name in zip(proto.graph.output, outputs, strict=True):
        if row.name != name:  # two outputs had the same value, and the cleaning left one of them
            proto.graph.node.append(onnx.helper.make_node("Identity", [row.name], [name]))
            row.name = name
    for node in proto.graph.node:
        for body in subgraphs(node):
            _separate_outputs(body)
    # All free sizes get one name. ONNX Runtime's own shape inference gives each unknown size
    # another name; it then finds less memory to reuse, and takes ten times as long to look for it.
    for row in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for size in row.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = _SYMBOL.sub("n", size.dim_param)
    name_free_sizes(proto)
    check_standard(proto)
    return proto


def _separate_outputs(body: onnx.GraphProto) -> None:
    """Copy outputs of a Scan's body that are also inputs, or outputs at another place.

    The cleaning makes one value of equal outputs. Runtimes refuse both."""
    taken = {input_.name for input_ in body.input}
    for index, output in enumerate(body.output):
        if output.name in taken:
            name = f"{output.name}/{index}"
            body.node.append(helper.make_node("Identity", [output.name], [name], name=name))
            output.name = name
        taken.add(output.name)


def check_standard(model: onnx.ModelProto) -> None:
    """Raise ExportError unless every operator is a standard one, of an opset and IR version that
    runtimes read."""
    for node in _nodes(model.graph):
        if node.domain not in ("", "ai.onnx"):
            raise ExportError(
                f"operator {node.domain}::{node.op_type} came into the graph; only ONNX's own may"
            )
    if model.functions:
        raise ExportError(
            f"function {model.functions[0].domain}::{model.functions[0].name} was left in the graph"
        )
    for opset in model.opset_import:
        if opset.domain not in ("", "ai.onnx") or opset.version > OPSET:
            raise ExportError(
                f"the graph needs opset {opset.version} of {opset.domain or 'ONNX'}; at most "
                f"{OPSET} is written"
            )
    if model.ir_version > IR_VERSION:
        raise ExportError(
            f"the graph has IR version {model.ir_version}; at most {IR_VERSION} is written"
        )
    with as_export_error("the graph is not valid ONNX"):
        onnx.checker.check_model(model)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def serialised(model: onnx.ModelProto, constants: Constants | None = None) -> bytes:
    """Serialise the graph: the same graph gives the same bytes. ``constants``: gets the large ones.

    Raises ExportError above protobuf's limit.
    """
    if constants is not None:
        constants.take(model)
    if model.ByteSize() > MAX_BYTES:
        raise ExportError(f"a graph of {model.ByteSize()} bytes; ONNX files end at {MAX_BYTES}")
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def write_with_parameters(
    model: onnx.ModelProto, values: Tensors, constants: Constants | None, path: Path
) -> dict[str, int]:
    """Write the graph to a file, with its inputs ``param.NAME`` replaced by initializers that hold
    ``values`` as raw bytes. The file has all ``constants`` to which the graph refers.

    The bytes are protobuf's own, but they are written tensor by tensor, so that a large model is in
    memory once. Returns where each parameter's raw bytes begin in the file. Leaves out unused
    parameters.
    """
    graph = model.graph
    used = {name for node in _nodes(graph) for name in node.input}
    tensors: list[tuple[bytes, Array]] = []  # a tensor's message up to its raw bytes, and these
    for row in graph.initializer:
        key = key_of(row) if constants is not None else None
        array = (
            constants.arrays[key] if constants is not None and key else numpy_helper.to_array(row)
        )
        tensors.append(_message(row.name, array))
    names = [name for name in values if f"param.{name}" in used]
    tensors += [_message(f"param.{name}", values[name].numpy()) for name in names]
    shell = copied(model)
    shell.graph.ClearField("initializer")
    inputs = [input_ for input_ in graph.input if not input_.name.startswith("param.")]
    del shell.graph.input[:]
    shell.graph.input.extend(inputs)
    # protobuf writes fields in the order of their numbers. So what is serialised without the
    # initializers falls into a part before them and one behind them.
    before, after = _around(shell.graph, "initializer")
    sizes = [len(head) + array.nbytes for head, array in tensors]
    heads = [
        _key(graph, "initializer", size) + head
        for size, (head, _) in zip(sizes, tensors, strict=True)
    ]
    length = (
        len(before) + len(after) + sum(map(len, heads)) + sum(array.nbytes for _, array in tensors)
    )
    first, last = _around(shell, "graph")
    if len(first) + length + len(last) > MAX_BYTES:
        raise ExportError(f"a graph of {length} bytes; ONNX files end at {MAX_BYTES}")
    begins = []
    with path.open("wb") as stream:
        stream.write(first + _key(shell, "graph", length) + before)
        for head, (_, array) in zip(heads, tensors, strict=True):
            stream.write(head)
            begins.append(stream.tell())
            stream.write(array.data)
        stream.write(after + last)
    return dict(zip(names, begins[len(tensors) - len(names) :], strict=True))


def _message(name: str, array: Array) -> tuple[bytes, Array]:
    """Return an initializer's message up to its raw bytes, and the array in C order."""
    # ascontiguousarray gives a scalar an axis.
    array = np.ascontiguousarray(array).reshape(array.shape)
    row = TensorProto(
        name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape
    )
    return row.SerializeToString(deterministic=True) + _key(row, "raw_data", array.nbytes), array


def _around(message: Any, field: str) -> tuple[bytes, bytes]:
    """Return the serialised fields before a message's field, and those behind it."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    before, after = type(message)(), type(message)()
    before.CopyFrom(message)
    after.CopyFrom(message)
    for row in message.DESCRIPTOR.fields:
        if row.number >= number:
            before.ClearField(row.name)
        if row.number <= number:
            after.ClearField(row.name)
    return before.SerializeToString(deterministic=True), after.SerializeToString(deterministic=True)


def _key(message: Any, field: str, size: int) -> bytes:
    """Return protobuf's key of a field, and the length of what follows: numbers of seven bits a
    byte, lowest first."""
    varint = bytearray()
    # The lowest three bits are the wire type: 2, a length and then bytes.
    for number in (message.DESCRIPTOR.fields_by_name[field].number << 3 | 2, size):
        while number > 127:
            varint.append(number & 127 | 128)
            number >>= 7
        varint.append(number)
    return bytes(varint)
