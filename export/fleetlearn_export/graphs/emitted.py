"""Graphs that are written straight from the traced graph. ``conversion.to_onnx`` is the way of all
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from fleetlearn_export.emission.complex_numbers import without_complex_numbers
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.emission.emit import Emission, emit
from fleetlearn_export.emission.emitter import EmissionError
from fleetlearn_export.emission.functional import without_writes
from fleetlearn_export.emission.table import decompositions
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.conversion import IR_VERSION, OPSET, clean, copied
from fleetlearn_export.graphs.reading import ancestors
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


def emitted(
    trace: Callable[[Decompositions], Traced], constants: Constants | None = None
) -> Emitted:
    """Trace with the table's decompositions, and write the graph.

    trace: a function of decompositions, such as ``trace_step`` of a step. constants: gets the large
    constants. Raises EmissionError if the table lacks an operator, or PyTorch cannot trace with
    these decompositions.
    """
    module, emission, outputs = written(trace, constants)
    return Emitted(_cleaned(ir.from_proto(emission.model), outputs), module, emission)


def written(
    trace: Callable[[Decompositions], Traced], constants: Constants | None = None
) -> tuple[torch.fx.GraphModule, Emission, list[str]]:
    """Do the same without the cleaning. Returns the traced graph, what it became, and its
    outputs."""
    try:
        traced = trace(decompositions())
    except ExportError as error:
        raise EmissionError(str(error)) from error
    fuse_operators(traced.module.graph)
    module = without_complex_numbers(without_writes(traced.module))
    module.graph.eliminate_dead_code()
    examples, axis = next(iter(traced.rows.items()), ("", 0))
    emission = emit(module, list(traced.arguments), traced.outputs, examples, axis, constants)
    emission.model.ir_version = IR_VERSION
    emission.model.opset_import[0].version = OPSET
    return module, emission, traced.outputs


def part(emission: Emission, inputs: Mapping[str, str], outputs: Sequence[str]) -> onnx.ModelProto:
    """Return a graph of some of the outputs, after cleaning.

    inputs: names of inputs -> their names in this graph. It has no other inputs unless it needs
    them.
    """
    whole, needed = emission.model.graph, copied(emission.model)
    for rows in (needed.graph.node, needed.graph.output):
        del rows[:]
    needed.graph.node.extend(ancestors(whole.node, outputs))
    described = {output.name: output for output in whole.output}
    needed.graph.output.extend(described[name] for name in outputs)
    model = ir.from_proto(needed)
    graph = model.graph
    passes.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        name = inputs.get(value.name or "")
        if name is not None:
            value.name = name
        elif not value.uses():
            graph.inputs.remove(value)
    return _cleaned(model, list(outputs))


def drop_unused(graph: onnx.ModelProto, names: Sequence[str]) -> None:
    """Take those of these inputs out of the graph that no node reads: labels of which no output of
    the model depends."""
    read = {name for node in graph.graph.node for name in node.input}
    kept = [row for row in graph.graph.input if row.name in read or row.name not in names]
    del graph.graph.input[:]
    graph.graph.input.extend(kept)


def _cleaned(model: ir.Model, outputs: list[str]) -> onnx.ModelProto:
    with as_export_error("the emitted graph cannot be cleaned"):
        return clean(model, outputs)
