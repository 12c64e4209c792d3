"""Exported programs as ONNX graphs of standard operators, cleaned and checked."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import Tensor

from fleetlearn_export.operators import Decompositions
from fleetlearn_export.trace import Program

OPSET = 18
IR_VERSION = 8
"""What opset 18 came with: any ONNX Runtime since 1.14 reads it."""


def to_onnx(program: Program, table: Decompositions | None = None) -> onnx.ModelProto:
    exported = program.exported
    if table:
        exported = exported.run_decompositions(table)
    result = torch.onnx.export(
        exported,
        dynamo=True,
        opset_version=OPSET,
        input_names=program.inputs,
        output_names=program.outputs,
        verbose=False,
        external_data=False,
    )
    assert result is not None
    return clean(result.model)


def clean(model: ir.Model) -> onnx.ModelProto:
    model.ir_version = IR_VERSION
    for item in (
        passes.CommonSubexpressionEliminationPass(),
        passes.DeduplicateInitializersPass(),
        passes.IdentityEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.TopologicalSortPass(),
        passes.ClearMetadataAndDocStringPass(),
    ):
        item(model)
    return ir.to_proto(model)


def with_parameters(model: onnx.ModelProto, values: dict[str, Tensor]) -> bytes:
    """The graph with its ``param.NAME`` inputs turned into initializers NAME that hold ``values`` as raw bytes."""
    kept = [row for row in model.graph.input if not row.name.startswith("param.")]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    used = {name for node in model.graph.node for name in node.input}
    for name, value in values.items():
        if f"param.{name}" in used:
            tensor = onnx.numpy_helper.from_array(value.numpy(), f"param.{name}")
            model.graph.initializer.append(tensor)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def parameter_offsets(content: bytes, values: dict[str, Tensor]) -> dict[str, int]:
    """Where each parameter's raw bytes begin in the serialised model: those that it uses.

    A TensorProto is written field by field in the order of their numbers: dims, data_type, name (8), raw_data (9).
    """
    offsets = {}
    for name, value in values.items():
        raw = value.numpy().tobytes()
        label = f"param.{name}".encode()
        head = b"\x42" + _varint(len(label)) + label + b"\x4a" + _varint(len(raw))
        place = content.find(head)
        if place < 0:
            continue
        if content.find(head, place + 1) >= 0 or content[place + len(head) :][: len(raw)] != raw:
            raise AssertionError(f"the bytes of parameter {name} were not found in the serialised graph")
        offsets[name] = place + len(head)
    return offsets


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number % 128 + 128])
        number //= 128
    return out + bytes([number])
