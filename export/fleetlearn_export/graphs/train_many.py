"""The program of train_many.onnx: several steps of train.onnx for a block of devices in one call,
for simulating."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
import torch
from fleetlearn_protocol.manifest import TrainMany
from torch import Tensor
from torch.export import ExportedProgram
from torch.func import vmap
from torch.fx import GraphModule

from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.conversion import check_standard
from fleetlearn_export.graphs.split import Parts, Subgraph, remove_copies, result_bytes, split
from fleetlearn_export.graphs.vectorizable import VECTORIZABLE, Vectorizable
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.silence import silenced_python
from fleetlearn_export.tracing.decompositions import (
    Decompositions,
    pytorch_decompositions,
    tracing_decompositions,
)
from fleetlearn_export.tracing.formulas import scan
from fleetlearn_export.tracing.fused_operators import CHEAPER_DECOMPOSITIONS, fuse_operators
from fleetlearn_export.tracing.trace import Program, Traced, export_traced, trace

SHARED = ("anchor", "hyper")
"""Inputs that are the same for all devices of a block: names begin with these."""
RATE = "hyper.lr"
"""The input that ``TrainMany.lr_by_step`` makes another in each step of each device."""
MAX_KEPT_BYTES = 2**26
"""Up to this many bytes, the parameters and state after every step of a block are kept until the
end of a call. Each device's own are then selected once, instead of in each step."""
MAX_TOGETHER_BYTES = 2**22
"""Up to this many bytes (with as many rows as the example has), what need not run step after step
runs once for all steps of a block. With more bytes the passes over memory cost more than the saved
operators."""


def is_of_steps(name: str, many: TrainMany) -> bool:
    """Return whether an input is another one in each step of each device."""
    return name.startswith("batch.") or (name == RATE and many.lr_by_step is True)


def is_shared(name: str, many: TrainMany) -> bool:
    """Return whether an input is the same for all devices of a block, and all their steps."""
    return name.startswith(SHARED) and not is_of_steps(name, many)


def check_many_settings(many: TrainMany | None) -> None:
    """Raise ExportError unless ``many`` describes a block of devices, or is None."""
    if many is not None and (
        not isinstance(many, TrainMany) or many.devices < 2 or many.steps < 1 or many.batch == 0
    ):
        raise ExportError(
            f"many={many!r}; expected TrainMany(devices, steps) of at least 2 devices and 1 step"
        )


class _Block(NamedTuple):
    """One step of one device, in parts, and how they are run for a block of devices."""

    step: GraphModule
    """The step, whose nodes the parts have."""
    many: TrainMany
    inputs: dict[str, str]
    """Input of the step -> its node."""
    shared: list[str]
    """Nodes of the inputs that are the same for all devices."""
    batch: list[str]
    """Nodes of the inputs that are others in each step of each device."""
    outputs: list[str]
    """Names of the step's outputs: first those that the next step takes, then what is measured."""
    carried: dict[str, str]
    """Output that the next step takes -> the node of the input that it becomes."""
    parts: Parts
    keeps_versions: bool
    """Whether what all steps made stays in memory until the end, where it fits: then a device that
    has fewer steps takes an earlier version. Else each step leaves such a device's values as they
    are."""

    def run(self, part: Subgraph, values: Tensors) -> list[Tensor]:
        """Run the part for all devices, or all steps of all devices, that are on the values' first
        axis."""
        if not part.outputs:
            return []
        over = tuple(None if node in self.shared else 0 for node in part.inputs)
        block = vmap(Vectorizable(self.step, graph=part.graph).run, in_dims=over)
        return list(block(*(values[node] for node in part.inputs)))

    def train(self, inputs: Tensors) -> Tensors:
        """Return the results of all steps of all devices. This is what is traced."""
        now = {node: inputs[name] for name, node in self.inputs.items()}
        versions = {node: [now[node]] for node in self.carried.values()}
        before, core, after = self.parts
        # Batches of all steps on one axis: the first step of all devices, then the second, and so
        # on.
        whole = now | {node: now[node].transpose(0, 1).flatten(0, 1) for node in self.batch}
        made = dict(zip(before.outputs, self.run(before, whole), strict=True))
        slices = {node: torch.split(value, self.many.devices) for node, value in made.items()}
        slices |= {node: now[node].unbind(1) for node in self.batch}
        crossing = []  # for each step, the values that ``after`` reads
        for number in range(self.many.steps):
            now |= {node: values[number] for node, values in slices.items()}
            results = self.run(core, now)
            crossing.append(results[len(self.carried) :])
            self._carry(now, versions, results, inputs["steps"] > number)
        joined = [torch.cat(values) for values in zip(*crossing, strict=True)]
        read = dict(zip(core.outputs[len(self.carried) :], joined, strict=True))
        measured = self._measured(self.run(after, whole | made | read), inputs["steps"])
        last = {
            name: _version_after(versions[node], inputs["steps"])
            if self.keeps_versions
            else now[node]
            for name, node in self.carried.items()
        }
        return last | measured

    def _carry(
        self, now: Tensors, versions: dict[str, list[Tensor]], results: list[Tensor], takes: Tensor
    ) -> None:
        """Put what a step made in the places of the next step's inputs. takes: whether each device
        has this step."""
        for node, value in zip(self.carried.values(), results, strict=False):
            if not self.keeps_versions:
                value = torch.where(takes.reshape(-1, *[1] * (value.dim() - 1)), value, now[node])
            now[node] = value
            versions[node].append(value)
        if "seed" in self.inputs:
            now[self.inputs["seed"]] = now[self.inputs["seed"]] + 1

    def _measured(self, values: list[Tensor], steps: Tensor) -> Tensors:
        """Return what each step measured, shape (devices, steps), 0 where a device had no such
        step."""
        shape = (self.many.steps, self.many.devices)
        done = steps > torch.arange(self.many.steps)[:, None]
        rows = [torch.where(done, value.view(shape), 0.0).t() for value in values]
        return dict(zip(self.outputs[len(self.carried) :], rows, strict=True))


def trace_many(
    step: TrainStep, single: GraphModule, many: TrainMany, table: Decompositions
) -> Traced:
    """Trace ``many.steps`` steps of ``many.devices`` devices. ``table`` as for ``trace``. Raises
    ExportError.

    single: a traced step that writes into no tensor. Its operators must run in PyTorch.
    """
    given = step.arguments()
    if many.lr_by_step is True and RATE not in given:
        names = ", ".join(step.hyper) or "none"
        raise ExportError(
            f"many={many!r}: the step has no hyper-parameter lr; it has {names}. Leave lr_by_step "
            "out"
        )
    if many.batch is not None:
        # Here the number of examples is fixed, so it may be 1, which PyTorch treats as a constant.
        rows = torch.arange(many.batch) % len(next(iter(step.batch.values())))
        given |= {name: value[rows] for name, value in given.items() if name.startswith("batch.")}
    free = (
        {} if many.batch is not None else {name: 0 for name in given if name.startswith("batch.")}
    )
    plain = trace(
        lambda row: dict(zip(step.outputs(), Vectorizable(single).run(*row.values()), strict=True)),
        given,
        free,
        table,
    )
    remove_copies(plain)
    arguments = {name: _for_all(name, value, many) for name, value in given.items()}
    arguments["steps"] = torch.full((many.devices,), many.steps)
    block = _block(step, plain, many, given, arguments)
    free = dict.fromkeys(free, 2)
    try:
        return Traced(trace(block.train, arguments, free, table), arguments, free, block.outputs)
    except ExportError as error:
        if many.batch is not None:
            raise
        raise ExportError(
            f"the step cannot be made for many devices and any number of examples ({error}). Fix "
            f"the number: TrainMany({many.devices}, {many.steps}, batch=...)"
        ) from error


def _for_all(name: str, value: Tensor, many: TrainMany) -> Tensor:
    """Return an input of one step of one device as one of all devices, or of all their steps."""
    if is_shared(name, many):
        return value
    axes = (many.devices, many.steps) if is_of_steps(name, many) else (many.devices,)
    return value.expand(*axes, *value.shape).clone()


def _block(
    step: TrainStep, plain: GraphModule, many: TrainMany, given: Tensors, arguments: Tensors
) -> _Block:
    """Split one step. given: its inputs. arguments: those of all devices, whose sizes say what may
    be kept."""
    nodes = plain.graph.find_nodes(op="placeholder")
    inputs = {name: node.name for name, node in zip(given, nodes, strict=True)}
    shared = [node for name, node in inputs.items() if is_shared(name, many)]
    batch = [node for name, node in inputs.items() if is_of_steps(name, many)]
    outputs = step.outputs()
    carried = {
        name: inputs[name.removeprefix("next.")] for name in outputs if name.startswith("next.")
    }
    size = result_bytes(plain, given.values())
    room = MAX_TOGETHER_BYTES // (many.devices * many.steps)
    parts = split(plain.graph, shared, batch, len(carried), size, room)
    versions = (many.steps + 1) * sum(
        arguments[name.removeprefix("next.")].nbytes for name in carried
    )
    return _Block(
        plain, many, inputs, shared, batch, outputs, carried, parts, versions <= MAX_KEPT_BYTES
    )


def many_program(
    step: TrainStep, exported: ExportedProgram, many: TrainMany, located: torch.fx.Graph
) -> Program:
    """Return the same as a program, for PyTorch's ONNX exporter. Raises ExportError.

    exported: the program of one step.
    """
    fuse_operators(exported.graph)
    with silenced_python():
        single = exported.run_decompositions(
            pytorch_decompositions() | CHEAPER_DECOMPOSITIONS | VECTORIZABLE | scan.DECOMPOSITIONS
        ).module()
    traced = trace_many(step, single, many, tracing_decompositions())
    program = export_traced(traced.module, traced.arguments, traced.rows)
    return Program(program, list(traced.arguments), traced.outputs, located)


def _version_after(versions: list[Tensor], steps: Tensor) -> Tensor:
    """Select each device's value after its number of ``steps``.

    versions: the values after 0, 1, 2, ... steps, each (devices, ...).
    """
    rows = steps.clamp(0, len(versions) - 1) * len(steps) + torch.arange(len(steps))
    return torch.cat(versions).index_select(0, rows)


def skip_selection_when_all_steps_done(model: onnx.ModelProto, many: TrainMany) -> onnx.ModelProto:
    """Skip the selection of each device's version, with an If, when all devices do all steps.

    This edits the ONNX graph because vmap and the exporter do not keep PyTorch's own branches.
    """
    graph, helper = model.graph, onnx.helper
    makers = {name: node for node in graph.node for name in node.output}
    most, least, all_do = (f"picked.{name}" for name in ("most", "least", "by_none"))
    branched = []
    for output in graph.output:
        pick = makers.get(output.name)
        versions = (
            makers.get(pick.input[0]) if pick is not None and pick.op_type == "Gather" else None
        )
        if pick is None or versions is None or versions.op_type != "Concat":
            continue
        last, picked = (
            onnx.ValueInfoProto.FromString(output.SerializeToString()) for _ in range(2)
        )
        last.name, picked.name = f"{output.name}.last", f"{output.name}.picked"
        whole = helper.make_node("Identity", [versions.input[-1]], [last.name])
        parts = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (versions, pick)]
        parts[1].output[:] = [picked.name]
        branches = (
            helper.make_graph([whole], last.name, [], [last]),
            helper.make_graph(parts, picked.name, [], [picked]),
        )
        pick.CopyFrom(
            helper.make_node(
                "If", [all_do], [output.name], then_branch=branches[0], else_branch=branches[1]
            )
        )
        branched.append(versions)
    if branched:
        for node in branched:
            graph.node.remove(node)
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(many.steps, np.int64), most))
        graph.node.insert(0, helper.make_node("GreaterOrEqual", [least, most], [all_do]))
        graph.node.insert(0, helper.make_node("ReduceMin", ["steps"], [least], keepdims=0))
        check_standard(model)
    return model
