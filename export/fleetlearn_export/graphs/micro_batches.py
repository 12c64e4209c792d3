"""A training step that takes its batch in parts, one after the other, and adds up their gradients.

A loss that is a mean over the examples has the same gradient either way: the mean over the parts,
each weighted by its number of examples. A Loop of ONNX computes one part (a micro-batch) at a time,
so that only a part's results of the forward pass are in memory. What follows (proximal term,
clipping, optimizer) works on the sums, behind the Loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.reading import ancestors, reads, rename, rename_reads
from fleetlearn_export.model.train_step import MEAN

SEED = "seed"
SEED_STEP = 0x9E3779B97F4B
"""Added to the seed for each further micro-batch. Devices count the seeds of their steps up by
1."""
LOOP = "loop."
"""The beginning of the names of what divides the batch and adds up."""
INNER = "loop/"
"""The beginning of the names of what the step computes of a micro-batch."""
NAME = "micro_batches"
"""The Loop's name."""
SIZE = f"{LOOP}size"
"""The constant with the number of examples in a micro-batch."""


def split_batch(model: onnx.ModelProto, size: int) -> onnx.ModelProto:
    """Return the step that computes its means over ``size`` examples at a time.

    model: a step whose last outputs are its means, named ``mean.*``. The result has no such
    outputs. Raises ExportError if the step computes something else of the whole batch.
    """
    graph = model.graph
    means = {output.name: output for output in graph.output if output.name.startswith(MEAN)}
    outputs = [output for output in graph.output if output.name not in means]
    batch = [input_.name for input_ in graph.input if input_.name.startswith("batch.")]
    sources = _sources(graph.node, means)
    summed: dict[str, str] = {}
    """Result of the operators on the batch -> the Loop's output with its mean over the
    micro-batches."""
    for name, source in sources.items():
        summed.setdefault(source, name)
    renamed = summed | {name: summed[source] for name, source in sources.items()}
    within = ancestors(graph.node, summed)
    behind = ancestors(graph.node, [output.name for output in outputs], stop=renamed)
    _refuse_other_results(behind, batch)

    split = onnx.ModelProto()
    split.CopyFrom(model)
    for rows in (split.graph.node, split.graph.output, split.graph.value_info):
        del rows[:]
    split.graph.output.extend(outputs)
    made = {name for node in behind for name in node.output}
    split.graph.value_info.extend(
        described for described in graph.value_info if described.name in made
    )
    split.graph.initializer.append(numpy_helper.from_array(np.array([size]), SIZE))
    random = any(input_.name == SEED for input_ in graph.input)
    split.graph.node.extend(
        _loop(within, batch, {name: source for source, name in summed.items()}, random)
    )
    for node in behind:
        split.graph.node.add().CopyFrom(node)
        rename_reads(split.graph.node[-1], renamed)
    for row in outputs:
        if row.name in renamed:
            split.graph.node.append(helper.make_node("Identity", [renamed[row.name]], [row.name]))
    return split


class Joined(NamedTuple):
    """A step with micro-batches, as it was before ``split_batch``."""

    model: onnx.ModelProto
    size: int
    """The number of examples in a micro-batch."""


def joined(model: onnx.ModelProto) -> Joined | None:
    """Return what ``split_batch`` was given, except for the shapes of results. None: no
    micro-batches."""
    loop = next((node for node in model.graph.node if node.name == NAME), None)
    if loop is None:
        return None
    body = loop.attribute[0].g
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for rows in (whole.graph.node, whole.graph.initializer):
        del rows[:]
    sizes = [tensor for tensor in model.graph.initializer if tensor.name == SIZE]
    whole.graph.initializer.extend(
        tensor for tensor in model.graph.initializer if tensor.name != SIZE
    )
    for node in body.node:
        if not any(name.startswith(LOOP) for name in (*node.input, *node.output)):
            row = whole.graph.node.add()
            row.CopyFrom(node)
            row.name = node.name.removeprefix(INNER)
            rename(row, {name: name.removeprefix(INNER) for name in (*reads(node), *node.output)})
    weighted = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Mul"}
    for name in loop.output:
        source = weighted[f"{LOOP}{name}.weighted"].removeprefix(INNER)
        if source != name:
            whole.graph.node.append(helper.make_node("Identity", [source], [name]))
    behind = [
        node for node in model.graph.node if not any(name.startswith(LOOP) for name in node.output)
    ]
    whole.graph.node.extend(node for node in behind if node.name != NAME)
    shapes = {
        input_.name: [axis.dim_value for axis in input_.type.tensor_type.shape.dim]
        for input_ in model.graph.input
    }
    for name in loop.output:  # a gradient has its parameter's shape; losses and metrics are scalars
        shape = shapes.get(name.replace(f"{MEAN}gradient.", "param."), [])
        whole.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return Joined(whole, int(numpy_helper.to_array(sizes[0])[0]))


def part_size(model: onnx.ModelProto) -> int | None:
    """Return the number of examples in a micro-batch. None: the step has none."""
    return next(
        (
            int(numpy_helper.to_array(tensor)[0])
            for tensor in model.graph.initializer
            if tensor.name == SIZE
        ),
        None,
    )


def _sources(nodes: Iterable[NodeProto], means: Collection[str]) -> dict[str, str]:
    """Return each mean with the result that it is. The rest of the step may read this under either
    name."""
    named = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Identity"}
    return {name: named.get(name, name) for name in means}


def _refuse_other_results(behind: Iterable[NodeProto], batch: Sequence[str]) -> None:
    for node in behind:
        wrong = [name for name in reads(node) if name in batch]
        if wrong and node.op_type != "Shape":
            raise ExportError(
                f"besides loss, metrics and gradients, {node.op_type} reads all of {wrong[0]}"
            )


def _loop(
    nodes: Sequence[NodeProto], batch: Sequence[str], sources: Mapping[str, str], random: bool
) -> Iterator[NodeProto]:
    """Yield the Loop, and what it needs. sources: name of a mean -> the result of ``nodes`` that is
    added up."""
    yield helper.make_node("Shape", [batch[0]], [f"{LOOP}rows"], start=0, end=1)
    yield helper.make_node("Squeeze", [f"{LOOP}rows"], [f"{LOOP}row_count"])
    yield helper.make_node("Cast", [f"{LOOP}row_count"], [f"{LOOP}examples"], to=TensorProto.FLOAT)
    yield helper.make_node("Div", [f"{LOOP}rows", SIZE], [f"{LOOP}whole"])
    yield helper.make_node("Mod", [f"{LOOP}rows", SIZE], [f"{LOOP}left"])
    yield helper.make_node("Sign", [f"{LOOP}left"], [f"{LOOP}last"])
    yield helper.make_node("Add", [f"{LOOP}whole", f"{LOOP}last"], [f"{LOOP}count"])
    yield _constant(f"{LOOP}zero", np.float32(0))
    own = {name for node in nodes for name in node.output if name} | {
        *batch,
        *([SEED] if random else []),
    }

    def inner(name: str) -> str:
        return INNER + name if name in own else name

    body = [*_micro_batch(batch, random)]
    for node in nodes:
        body.append(NodeProto())
        body[-1].CopyFrom(node)
        body[-1].name = INNER + node.name if node.name else ""
        rename(body[-1], {name: INNER + name for name in own})
    for name, source in sources.items():
        body.append(
            helper.make_node("Mul", [inner(source), f"{LOOP}weight"], [f"{LOOP}{name}.weighted"])
        )
        body.append(
            helper.make_node(
                "Add", [f"{LOOP}{name}", f"{LOOP}{name}.weighted"], [f"{LOOP}{name}.next"]
            )
        )
    # Sums without a shape: they begin with the number 0, since a constant of each sum's size would
    # stay in memory.
    given = [
        helper.make_tensor_value_info(f"{LOOP}number", TensorProto.INT64, []),
        helper.make_tensor_value_info(f"{LOOP}more", TensorProto.BOOL, []),
        *(
            helper.make_tensor_value_info(f"{LOOP}{name}", TensorProto.FLOAT, None)
            for name in sources
        ),
    ]
    returned = [
        helper.make_tensor_value_info(f"{LOOP}go_on", TensorProto.BOOL, []),
        *(
            helper.make_tensor_value_info(f"{LOOP}{name}.next", TensorProto.FLOAT, None)
            for name in sources
        ),
    ]
    inputs = [f"{LOOP}count", "", *(f"{LOOP}zero" for _ in sources)]
    yield helper.make_node(
        "Loop",
        inputs,
        list(sources),
        name=NAME,
        body=helper.make_graph(body, "micro_batch", given, returned),
    )


def _micro_batch(batch: Sequence[str], random: bool) -> Iterator[NodeProto]:
    """Yield the nodes that cut the examples of one micro-batch out, and compute its weight and its
    seed."""
    yield helper.make_node("Identity", [f"{LOOP}more"], [f"{LOOP}go_on"])
    yield helper.make_node("Mul", [f"{LOOP}number", SIZE], [f"{LOOP}begin"])
    yield helper.make_node("Add", [f"{LOOP}begin", SIZE], [f"{LOOP}end"])
    yield _constant(f"{LOOP}axis", np.array([0]))
    for name in batch:
        yield helper.make_node(
            "Slice", [name, f"{LOOP}begin", f"{LOOP}end", f"{LOOP}axis"], [INNER + name]
        )
    yield helper.make_node("Shape", [INNER + batch[0]], [f"{LOOP}taken"], start=0, end=1)
    yield helper.make_node("Squeeze", [f"{LOOP}taken"], [f"{LOOP}taken_count"])
    yield helper.make_node(
        "Cast", [f"{LOOP}taken_count"], [f"{LOOP}taken_examples"], to=TensorProto.FLOAT
    )
    yield helper.make_node("Div", [f"{LOOP}taken_examples", f"{LOOP}examples"], [f"{LOOP}weight"])
    if random:
        yield _constant(f"{LOOP}seed_step", np.int64(SEED_STEP))
        yield helper.make_node("Mul", [f"{LOOP}number", f"{LOOP}seed_step"], [f"{LOOP}moved"])
        yield helper.make_node("Add", [SEED, f"{LOOP}moved"], [INNER + SEED])


def _constant(name: str, value: Any) -> NodeProto:
    return helper.make_node(
        "Constant", [], [name], value=numpy_helper.from_array(np.asarray(value), name)
    )
