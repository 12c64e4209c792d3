"""Conversion of exported programs to ONNX graphs of standard operators, cleaned and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import Tensor

from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.free_sizes import name_free_sizes
from fleetlearn_export.graphs.rewrite import rewrite
from fleetlearn_export.model.source_locations import as_export_error, location_of_operator
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
"""PyTorch's name for a free size, alone or in an expression. A graph has one free size, the number of examples."""
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)'")


def to_onnx(program: Program, table: Decompositions) -> onnx.ModelProto:
    """Decompose the program with ``table`` and convert it. Raises ExportError on an operator that ONNX lacks."""
    exported = program.exported
    try:
        with (
            as_export_error("the exported program cannot become an ONNX graph", torch.onnx.OnnxExporterError),
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
        found = _OPERATOR.search(str(error))
        if not found:
            raise ExportError(f"PyTorch's ONNX exporter failed: {error}") from error
        name = ".".join(found.groups())
        graphs = [program.located, *([program.located_step] if program.located_step else [])]
        place = next(filter(None, (location_of_operator(name, graph) for graph in graphs)), None)
        place = place or ", which a step of decomposition or of the backward pass made"
        raise ExportError(
            f"operator {name}{place} has no counterpart in ONNX. Write that part of the model with other operators"
        ) from error
    assert result is not None
    with as_export_error("the exported graph cannot be cleaned"):
        return clean(result.model, program.outputs)


def clean(model: ir.Model, outputs: list[str]) -> onnx.ModelProto:
    """Return the graph without what is double or not used, and rewritten for speed. Raises ExportError."""
    model.ir_version = IR_VERSION
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
    # All free sizes get one name. ONNX Runtime's own shape inference gives each unknown size another name; it then
    # finds less memory to reuse, and takes ten times as long to look for it.
    for row in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for size in row.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = _SYMBOL.sub("n", size.dim_param)
    name_free_sizes(proto)
    check_standard(proto)
    return proto


def check_standard(model: onnx.ModelProto) -> None:
    """Raise ExportError unless every operator is a standard one, of an opset and IR version that runtimes read."""
    for node in _nodes(model.graph):
        if node.domain not in ("", "ai.onnx"):
            raise ExportError(f"operator {node.domain}::{node.op_type} came into the graph; only ONNX's own may")
    if model.functions:
        raise ExportError(f"function {model.functions[0].domain}::{model.functions[0].name} was left in the graph")
    for row in model.opset_import:
        if row.domain not in ("", "ai.onnx") or row.version > OPSET:
            raise ExportError(
                f"the graph needs opset {row.version} of {row.domain or 'ONNX'}; at most {OPSET} is written"
            )
    if model.ir_version > IR_VERSION:
        raise ExportError(f"the graph has IR version {model.ir_version}; at most {IR_VERSION} is written")
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


def with_parameters(model: onnx.ModelProto, values: dict[str, Tensor]) -> bytes:
    """Serialise the graph with its inputs ``param.NAME`` replaced by initializers that hold ``values`` as raw bytes."""
    kept = [row for row in model.graph.input if not row.name.startswith("param.")]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    used = {name for node in _nodes(model.graph) for name in node.input}
    for name, value in values.items():
        if f"param.{name}" in used:
            model.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), f"param.{name}"))
    return serialised(model)


def parameter_offsets(content: bytes, values: dict[str, Tensor]) -> dict[str, int]:
    """Return where each parameter's raw bytes begin in the serialised graph. Leaves out unused parameters."""
    offsets = {}
    (graph,) = _fields(content, 0, len(content), _GRAPH)
    for place, end in _fields(content, *graph, _INITIALIZER):
        name = b"".join(content[slice(*row)] for row in _fields(content, place, end, _NAME)).decode()
        if name.startswith("param."):
            name = name.removeprefix("param.")
            ((begin, stop),) = _fields(content, place, end, _RAW_DATA)
            if content[begin:stop] != values[name].numpy().tobytes():
                raise ExportError(f"the serialised graph does not show where the bytes of parameter {name} are")
            offsets[name] = begin
    return offsets


_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_NAME = onnx.TensorProto.NAME_FIELD_NUMBER
_RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_FIXED_SIZES = {1: 8, 5: 4}
"""Protobuf's wire types of a fixed size, in bytes. The others are 0, a number, and 2, bytes behind their length."""


def _fields(content: bytes, place: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield where the bytes of a message's fields of this number begin and end. The message is in place:end."""
    while place < end:
        key, place = _varint(content, place)
        if key % 8 in _FIXED_SIZES:
            place += _FIXED_SIZES[key % 8]
            continue
        size, place = _varint(content, place)
        if key % 8 == 2:
            if key // 8 == number:
                yield place, place + size
            place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Read a number as protobuf has it: seven bits a byte, the lowest first, the high bit set on all but the last."""
    found = shift = 0
    while True:
        byte = content[place]
        found, shift, place = found | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return found, place
