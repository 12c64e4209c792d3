"""Steps along time as a Scan, whose body is traced and written as any graph is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import onnx
import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Value, Write, fixed_size
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.tracing.formulas.scan import SCAN, STEPS

INSIDE = "step."
"""The beginning of the names within a body. Those outside have another, and ONNX lets a body read
these."""
EXAMPLES = 3
"""Examples with which a body is traced."""


def scan(
    graph: Emitter,
    out: Sequence[Tensor],
    step: str,
    states: Sequence[Value],
    rows: Sequence[Value],
    fixed: Sequence[Value],
    backwards: bool,
) -> Sequence[str]:
    changing = (
        *(_described(part.traced) for part in states),
        *(_described(row.traced[0]) for row in rows),
    )
    constant = tuple(_described(value.traced) for value in fixed)
    body = onnx.GraphProto()
    body.CopyFrom(_body(graph.write, step, changing, len(states), constant, len(out)))
    outside = {f"{INSIDE}fixed{index}": value.name for index, value in enumerate(fixed)}
    for node in body.node:
        node.input[:] = [outside.get(name, name) for name in node.input]
    outputs = len(out) - len(states)
    return graph.nodes_outputs(
        "Scan",
        len(out),
        *states,
        *rows,
        body=body,
        num_scan_inputs=len(rows),
        scan_input_directions=[1] * len(rows) if backwards else None,
        scan_output_directions=[1] * outputs if backwards else None,
    )


Description = tuple[tuple[int, ...], int | None, torch.dtype]
"""Shape, the axis whose size is the number of examples if that is free, and dtype."""


def _described(traced: Tensor) -> Description:
    sizes = [fixed_size(size) for size in traced.shape]
    free = next((axis for axis, size in enumerate(sizes) if not isinstance(size, int)), None)
    shape = tuple(EXAMPLES if axis == free else int(size) for axis, size in enumerate(sizes))
    return shape, free, traced.dtype


@cache
def _body(
    write: Write,
    step: str,
    changing: tuple[Description, ...],
    states: int,
    fixed: tuple[Description, ...],
    outputs: int,
) -> onnx.GraphProto:
    """Return the graph of one step. changing: states and rows. It reads ``fixed`` from outside."""
    names = [f"{INSIDE}given{index}" for index in range(len(changing))]
    names += [f"{INSIDE}fixed{index}" for index in range(len(fixed))]
    results = [f"{INSIDE}out{index}" for index in range(outputs)]
    described = dict(zip(names, (*changing, *fixed), strict=True))
    arguments = {
        name: torch.zeros(shape, dtype=dtype) for name, (shape, _, dtype) in described.items()
    }

    def function(tensors: Tensors) -> Tensors:
        values, count = list(tensors.values()), len(changing)
        last, made = STEPS[step](values[:states], values[states:count], values[count:])
        return dict(zip(results, [*last, *made], strict=True))

    free = {name: axis for name, (_, axis, _) in described.items() if axis is not None}
    body = write(function, arguments, free, results)
    inputs = [input_ for input_ in body.input if not input_.name.startswith(f"{INSIDE}fixed")]
    own = {name for node in body.node for name in node.output} | {
        tensor.name for tensor in body.initializer
    }

    def inside(name: str) -> str:
        return INSIDE + name if name in own and not name.startswith(INSIDE) else name

    for node in body.node:
        node.input[:], node.output[:], node.name = (
            map(inside, node.input),
            map(inside, node.output),
            inside(node.name),
        )
    for row in body.initializer:
        row.name = inside(row.name)
    # The number of examples has no name within a body that would be the same outside.
    for value in (*inputs, *body.output):
        for size in value.type.tensor_type.shape.dim:
            size.ClearField("dim_param")
    return onnx.helper.make_graph(body.node, "step", inputs, body.output, body.initializer)


OPERATORS: dict[torch._ops.OpOverload, Handler] = {SCAN: scan}
