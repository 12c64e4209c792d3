"""train_many.onnx: the step of train.onnx for a block of devices at once, several steps in a call; for simulating."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from fleetlearn_protocol.manifest import Many
from numpy.typing import NDArray
from torch import Tensor
from torch.export import ExportedProgram
from torch.func import vmap

from fleetlearn_export import cross_entropy
from fleetlearn_export.cheaper import CHEAPER, simplify
from fleetlearn_export.check import Session, batches, compare, open_session, over_seeds, start
from fleetlearn_export.errors import ExportError
from fleetlearn_export.operators import Decompositions, plain_decompositions
from fleetlearn_export.quiet import quiet
from fleetlearn_export.source import Source
from fleetlearn_export.steps import Tensors
from fleetlearn_export.trace import Program, export_traced, trace
from fleetlearn_export.train_step import TrainStep

aten = torch.ops.aten
SHARED = ("anchor", "hyper")
"""Inputs that all devices of a block have in common."""
ONE_HOT: Decompositions = {
    cross_entropy.BACKWARD: cross_entropy.backward_one_hot,
    aten.nll_loss_forward.default: cross_entropy.forward_one_hot,
    aten.nll_loss2d_forward.default: cross_entropy.forward_one_hot,
}
KEPT = 2**26
"""Bytes of parameters and state, of all steps of a block together, up to which they are kept until the end of a call.
Then what each device has is picked once, instead of in each step."""


class Vectorizable(torch.fx.Interpreter):
    """Runs a graph of plain operators in a form that vmap leaves the number of examples free in, where it can."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.sym_size.int:
            return args[0].shape[args[1]]
        if target in ONE_HOT:
            return ONE_HOT[target](*args)
        if target is aten.gather.default:
            values, axis, index = args
            return torch.where(_places(values, axis) == index, values, 0.0).sum(axis, keepdim=True)
        if target is aten.scatter.value:
            values, axis, index, value = args
            return torch.where(_places(values, axis) == index, value, values)
        return super().call_function(target, args, kwargs)


def _places(values: Tensor, axis: int) -> Tensor:
    """The number of each element along the axis."""
    return torch.arange(values.shape[axis]).reshape(-1, *[1] * (values.dim() - 1 - axis % values.dim()))


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
    over = tuple(None if name.startswith(SHARED) else 0 for name in single)
    simplify(exported.graph)
    table = {operator: as_ for operator, as_ in (plain_decompositions() | CHEAPER).items() if operator not in ONE_HOT}
    with quiet():
        plain = Vectorizable(exported.run_decompositions(table).module())
    block = vmap(lambda *values: tuple(plain.run(*values)), in_dims=over)
    names = step.outputs()
    measured = [name for name in names if not name.startswith("next.")]
    carried = {name: name.removeprefix("next.") for name in names if name.startswith("next.")}
    kept = (many.steps + 1) * sum(arguments[name].nbytes for name in carried.values()) <= KEPT

    def function(given: Tensors) -> Tensors:
        now, rows = dict(given), []
        versions = {name: [given[name]] for name in carried.values()}
        for number in range(many.steps):
            inputs = {name: now[name] for name in single}
            inputs |= {name: now[name][:, number] for name in single if name.startswith("batch.")}
            found = dict(zip(names, block(*inputs.values()), strict=True))
            done = given["steps"] > number
            for name, before in carried.items():
                value = found[name]
                if not kept:
                    value = torch.where(done.reshape(-1, *[1] * (value.dim() - 1)), value, now[before])
                now[before] = value
                versions[before].append(value)
            rows.append([found[name] for name in measured])
            if "seed" in now:
                now["seed"] = now["seed"] + 1
        after = {
            name: _own(versions[before], given["steps"]) if kept else now[before] for name, before in carried.items()
        }
        values = {name: torch.stack(row, 1) for name, row in zip(measured, zip(*rows, strict=True), strict=True)}
        done = given["steps"][:, None] > torch.arange(many.steps)
        return after | {name: torch.where(done, value, 0.0) for name, value in values.items()}

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
    got = session.run(feed)

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
        worst = max(worst, compare(pairs, f"the block of devices, device {device},"))
    return worst
