"""train_many.onnx: the step of train.onnx for a block of devices at once, several steps in a call; for simulating."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from fleetlearn_protocol.manifest import Many
from numpy.typing import NDArray
from torch import Tensor
from torch.export import ExportedProgram
from torch.func import vmap

from fleetlearn_export.checks.graph_checks import Session, batches, compare, open_session, over_seeds, start
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.conversion import check_standard
from fleetlearn_export.graphs.split import Part, sizes, split, tidy
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import Source
from fleetlearn_export.silence import quiet
from fleetlearn_export.tracing import cross_entropy
from fleetlearn_export.tracing.decompositions import Decompositions, plain_decompositions
from fleetlearn_export.tracing.fused_operators import CHEAPER, simplify
from fleetlearn_export.tracing.trace import Program, export_traced, trace

aten = torch.ops.aten
SHARED = ("anchor", "hyper")
"""Inputs that all devices of a block have in common."""
KEPT = 2**26
"""Bytes of parameters and state, of all steps of a block together, up to which they are kept until the end of a call.
Then what each device has is picked once, instead of in each step."""
ROOM = 2**22
"""Bytes of all steps of a block together, up to which what need not be computed step after step is computed for all
steps at once, with as many examples as the example has. Beyond it more memory is gone through than operators saved."""


def gather(values: Tensor, axis: int, index: Tensor, **_: Any) -> Tensor:
    return torch.where(_places(values, axis) == index, values, 0.0).sum(axis, keepdim=True)


def scatter_value(values: Tensor, axis: int, index: Tensor, value: float) -> Tensor:
    return torch.where(_places(values, axis) == index, value, values)


def _places(values: Tensor, axis: int) -> Tensor:
    """The number of each element along the axis."""
    return torch.arange(values.shape[axis]).reshape(-1, *[1] * (values.dim() - 1 - axis % values.dim()))


VECTORIZABLE: Decompositions = {
    cross_entropy.BACKWARD: cross_entropy.backward_one_hot,
    aten.nll_loss_forward.default: cross_entropy.forward_one_hot,
    aten.nll_loss2d_forward.default: cross_entropy.forward_one_hot,
    aten.gather.default: gather,
    aten.scatter.value: scatter_value,
}
"""Forms that vmap leaves the number of examples free in."""


class Vectorizable(torch.fx.Interpreter):
    """Runs a graph whose number of examples vmap leaves free, where it can."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.sym_size.int:
            return args[0].shape[args[1]]
        return super().call_function(target, args, kwargs)


def check_block(many: Many | None) -> None:
    """Raise ExportError where it is no block of devices."""
    if many is not None and (not isinstance(many, Many) or many.devices < 2 or many.steps < 1 or many.batch == 0):
        raise ExportError(f"many={many!r}; expected Many(devices, steps) of at least 2 devices and 1 step")


def many_program(step: TrainStep, exported: ExportedProgram, many: Many, origin: torch.fx.Graph) -> Program:
    """The step's program over ``many.devices`` devices, ``many.steps`` times. Raises ExportError."""
    single = step.arguments()
    if many.batch is not None:
        # PyTorch takes a size of 1 for a constant; here it is one.
        rows = torch.arange(many.batch) % len(next(iter(step.batch.values())))
        single |= {name: value[rows] for name, value in single.items() if name.startswith("batch.")}

    def spread(name: str, value: Tensor) -> Tensor:
        if name.startswith(SHARED):
            return value
        axes = (many.devices, many.steps) if name.startswith("batch.") else (many.devices,)
        return value.expand(*axes, *value.shape).clone()

    arguments = {name: spread(name, value) for name, value in single.items()}
    arguments["steps"] = torch.full((many.devices,), many.steps)
    simplify(exported.graph)
    with quiet():
        plain = exported.run_decompositions(plain_decompositions() | CHEAPER | VECTORIZABLE).module()
    tidy(plain)
    names = step.outputs()
    places = {name: node.name for name, node in zip(single, plain.graph.find_nodes(op="placeholder"), strict=True)}
    shared = [place for name, place in places.items() if name.startswith(SHARED)]
    batch = [place for name, place in places.items() if name.startswith("batch.")]
    carried = {name: places[name.removeprefix("next.")] for name in names if name.startswith("next.")}
    size, room = sizes(plain, single.values()), ROOM // (many.devices * many.steps)
    before, core, after = split(plain.graph, shared, batch, len(carried), size, room)
    kept = (many.steps + 1) * sum(arguments[name.removeprefix("next.")].nbytes for name in carried) <= KEPT

    def run(part: Part, values: Tensors) -> list[Tensor]:
        """For so many devices, or steps of devices, as the values have."""
        if not part.outputs:
            return []
        over = tuple(None if place in shared else 0 for place in part.inputs)
        block = vmap(Vectorizable(plain, graph=part.graph).run, in_dims=over)
        return list(block(*(values[place] for place in part.inputs)))

    def function(given: Tensors) -> Tensors:
        now = {place: given[name] for name, place in places.items()}
        versions = {place: [now[place]] for place in carried.values()}
        # Of all steps together: the first step of all devices, then the second.
        whole = now | {place: now[place].transpose(0, 1).flatten(0, 1) for place in batch}
        made = dict(zip(before.outputs, run(before, whole), strict=True))
        slices = {place: torch.split(value, many.devices) for place, value in made.items()}
        slices |= {place: now[place].unbind(1) for place in batch}
        crossing = []
        for number in range(many.steps):
            now |= {place: values[number] for place, values in slices.items()}
            found = run(core, now)
            crossing.append(found[len(carried) :])
            done = given["steps"] > number
            for place, value in zip(carried.values(), found, strict=False):
                if not kept:
                    value = torch.where(done.reshape(-1, *[1] * (value.dim() - 1)), value, now[place])
                now[place] = value
                versions[place].append(value)
            if "seed" in places:
                now[places["seed"]] = now[places["seed"]] + 1
        joined = [torch.cat(values) for values in zip(*crossing, strict=True)]
        measured = run(after, whole | made | dict(zip(core.outputs[len(carried) :], joined, strict=True)))
        done = given["steps"] > torch.arange(many.steps)[:, None]
        values = [torch.where(done, value.view(many.steps, many.devices), 0.0).t() for value in measured]
        steps = given["steps"]
        last = {name: _own(versions[place], steps) if kept else now[place] for name, place in carried.items()}
        return last | dict(zip(names[len(carried) :], values, strict=True))

    free = {name: 2 for name in arguments if name.startswith("batch.") and many.batch is None}
    try:
        program = export_traced(trace(function, arguments, free), arguments, free)
    except ExportError as error:
        if many.batch is not None:
            raise
        raise ExportError(
            f"the step cannot be made for many devices and any number of examples ({error}). Fix the number: "
            f"Many({many.devices}, {many.steps}, batch=...)"
        ) from error
    return Program(program, list(arguments), names, origin)


def _own(versions: list[Tensor], steps: Tensor) -> Tensor:
    """Of values after 0, 1, 2, ... steps, each (devices, ...), each device's after its own number of them."""
    places = steps.clamp(0, len(versions) - 1) * len(steps) + torch.arange(len(steps))
    return torch.cat(versions).index_select(0, places)


def seldom_picked(model: onnx.ModelProto, many: Many) -> onnx.ModelProto:
    """The graph, in which what a device has is picked only where some do not all the steps. PyTorch's own branches do
    not come through what makes the graph."""
    graph, helper = model.graph, onnx.helper
    makers = {name: node for node in graph.node for name in node.output}
    most, least, all_do = (f"picked.{name}" for name in ("most", "least", "by_none"))
    branched = []
    for row in graph.output:
        pick = makers.get(row.name)
        versions = makers.get(pick.input[0]) if pick is not None and pick.op_type == "Gather" else None
        if pick is None or versions is None or versions.op_type != "Concat":
            continue
        last, picked = (onnx.ValueInfoProto.FromString(row.SerializeToString()) for _ in range(2))
        last.name, picked.name = f"{row.name}.last", f"{row.name}.picked"
        whole = helper.make_node("Identity", [versions.input[-1]], [last.name])
        parts = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (versions, pick)]
        parts[1].output[:] = [picked.name]
        branches = (
            helper.make_graph([whole], last.name, [], [last]),
            helper.make_graph(parts, picked.name, [], [picked]),
        )
        pick.CopyFrom(helper.make_node("If", [all_do], [row.name], then_branch=branches[0], else_branch=branches[1]))
        branched.append(versions)
    if branched:
        for node in branched:
            graph.node.remove(node)
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(many.steps, np.int64), most))
        graph.node.insert(0, helper.make_node("GreaterOrEqual", [least, most], [all_do]))
        graph.node.insert(0, helper.make_node("ReduceMin", ["steps"], [least], keepdims=0))
        check_standard(model)
    return model


def check_many(source: Source, step: TrainStep, content: bytes, many: Many) -> float:
    """The largest difference from the same steps in PyTorch, device after device. Raises ExportError."""
    session = open_session(content)
    return over_seeds(partial(_check, source, step, session, many))


def _check(source: Source, step: TrainStep, session: Session, many: Many, seed: int) -> float:
    hyper = {name: 0.05 if default is None else default for name, default in step.hyper.items()}
    given = start(step, hyper, seed)
    random = np.random.default_rng(seed)
    # All steps, some of them, one, none; the devices that are not looked at do none.
    watched = {0: many.steps, many.devices // 2: int(random.integers(many.steps + 1)), many.devices - 1: 1, 1: 0}
    steps = np.array([watched.get(device, 0) for device in range(many.devices)])
    rows = next(batches(source, seed))
    available = len(next(iter(rows.values())))
    order = random.integers(available, size=(many.devices, many.steps, many.batch or available + seed % 2))

    feed: dict[str, NDArray[Any]] = {"steps": steps}
    for name, value in given.items():
        if name.startswith("batch."):
            feed[name] = rows[name.removeprefix("batch.")].numpy()[order]
        elif name.startswith(SHARED):
            feed[name] = value.numpy()
        else:
            feed[name] = np.broadcast_to(value.numpy(), (many.devices, *value.shape)).copy()
    if step.random:
        feed["seed"] = np.arange(many.devices, dtype=np.int64) * 1000
    got, whole = session.run(feed), session.run(feed | {"steps": np.full_like(steps, many.steps)})

    worst = 0.0
    for device in watched:
        now = {name: value.clone() for name, value in given.items()}
        expected: Tensors = {}
        for number in range(int(steps[device])):
            now |= {name: torch.from_numpy(feed[name][device, number]) for name in feed if name.startswith("batch.")}
            if step.random:
                now["seed"] = torch.tensor(device * 1000 + number)
            found = step.function(now)
            now |= {name.removeprefix("next."): value for name, value in found.items() if name.startswith("next.")}
            expected |= {f"{name} of step {number}": v for name, v in found.items() if not name.startswith("next.")}
        pairs = {name: (got[name][device], now[name.removeprefix("next.")]) for name in got if name.startswith("next.")}
        for label, value in expected.items():
            name, _, place = label.partition(" of step ")
            pairs[label] = (got[name][device, int(place)], value)
        if device == 0:  # which does all the steps, here alone and there as all others do
            last = {name: value for name, (_, value) in pairs.items() if name.startswith("next.")}
            pairs |= {f"{name} where all do": (whole[name][device], value) for name, value in last.items()}
        worst = max(worst, compare(pairs, f"the block of devices, device {device},"))
    return worst
