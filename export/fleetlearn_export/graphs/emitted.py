"""Graphs that are written straight from the traced graph. ``conversion.to_onnx`` is the way of all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from fleetlearn_export.emission.emit import Emission, emit
from fleetlearn_export.emission.emitter import EmissionError
from fleetlearn_export.emission.functional import without_writes
from fleetlearn_export.emission.table import decompositions
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.conversion import IR_VERSION, OPSET, clean
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.tracing.decompositions import Decompositions
from fleetlearn_export.tracing.fused_operators import fuse_operators
from fleetlearn_export.tracing.trace import Traced


class Emitted(NamedTuple):
    """A graph that was written straight from the traced graph."""

    model: onnx.ModelProto
    """The graph as it is published, after cleaning."""
    traced: torch.fx.GraphModule
    """The traced graph that was written: it writes into no tensor."""
    emission: Emission
    """The graph before cleaning, and what each operator became."""


def emitted(trace: Callable[[Decompositions], Traced]) -> Emitted:
    """Trace with the table's decompositions, and write the graph.

    trace: a function of decompositions, such as ``trace_step`` of a step. Raises EmissionError if the table lacks an
    operator, or PyTorch cannot trace with these decompositions.
    """
    module, emission, outputs = _written(trace)
    return Emitted(_cleaned(ir.from_proto(emission.model), outputs), module, emission)


def emitted_parts(
    trace: Callable[[Decompositions], Traced], parts: Sequence[tuple[Mapping[str, str], list[str]]]
) -> tuple[list[onnx.ModelProto], torch.fx.GraphModule, Emission]:
    """Trace once, and write several graphs, each of some of the outputs. Returns them after cleaning.

    parts: of each graph, names of traced inputs -> their names in the graph, and the outputs. It has no other inputs
    unless it needs them. Raises EmissionError as ``emitted`` does.
    """
    module, emission, _ = _written(trace)
    return [_part(emission, *row) for row in parts], module, emission


def _written(trace: Callable[[Decompositions], Traced]) -> tuple[torch.fx.GraphModule, Emission, list[str]]:
    try:
        traced = trace(decompositions())
    except ExportError as error:
        raise EmissionError(str(error)) from error
    fuse_operators(traced.module.graph)
    module = without_writes(traced.module)
    module.graph.eliminate_dead_code()
    examples, axis = next(iter(traced.rows.items()), ("", 0))
    emission = emit(module, list(traced.arguments), traced.outputs, examples, axis)
    emission.model.ir_version = IR_VERSION
    emission.model.opset_import[0].version = OPSET
    return module, emission, traced.outputs


def _part(emission: Emission, inputs: Mapping[str, str], outputs: list[str]) -> onnx.ModelProto:
    model = ir.from_proto(emission.model)
    graph = model.graph
    kept = {value.name: value for value in graph.outputs}
    graph.outputs.clear()
    graph.outputs.extend(kept[name] for name in outputs)
    passes.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        name = inputs.get(value.name or "")
        if name is not None:
            value.name = name
        elif not value.uses():
            graph.inputs.remove(value)
    return _cleaned(model, outputs)


def _cleaned(model: ir.Model, outputs: list[str]) -> onnx.ModelProto:
    with as_export_error("the emitted graph cannot be cleaned"):
        return clean(model, outputs)
