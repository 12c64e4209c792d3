"""An operator that does one step after the other along time, and so is one Scan of ONNX, however
long the time is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""``step(states, rows, fixed)`` returns the next states, and the outputs of one time. rows: the
inputs of that time. fixed: inputs that are the same at all times. States and rows have the examples
on their first axis. A step counts axes from the last one: with ``vmap`` all have another axis in
front."""
STEPS: dict[str, Step] = {}
"""All steps by their names. A module that has some adds them."""
torch.library.define(
    "fleetlearn::scan",
    "(str step, Tensor[] states, Tensor[] rows, Tensor[] fixed, bool backwards) -> Tensor[]",
)
SCAN: Any = torch.ops.fleetlearn.scan.default
"""Returns the states after the last step, and each output of all steps, with the time on a new
first axis as the rows have it. backwards: the last time is the first step. At least one step."""


def scan(
    step: str,
    states: list[Tensor],
    rows: list[Tensor],
    fixed: list[Tensor],
    backwards: bool = False,
) -> list[Tensor]:
    """Do the steps one by one. The operator in PyTorch, and what it is where there is no Scan."""
    made = []
    times = range(rows[0].shape[0])
    for time in reversed(times) if backwards else times:
        states, outputs = STEPS[step](states, [row[time] for row in rows], fixed)
        made.append(outputs)
    if backwards:
        made.reverse()
    return [*states, *(torch.stack(column) for column in zip(*made, strict=True))]


def _shapes(
    step: str, states: list[Tensor], rows: list[Tensor], fixed: list[Tensor], _: bool
) -> list[Tensor]:
    last, outputs = STEPS[step](states, [row[0] for row in rows], fixed)
    return [*last, *(output.new_empty(rows[0].shape[0], *output.shape) for output in outputs)]


def _vectorized(
    mapped: Any,
    axes: tuple[Any, Sequence[int | None], Sequence[int | None], Sequence[int | None], Any],
    step: str,
    states: list[Tensor],
    rows: list[Tensor],
    fixed: list[Tensor],
    backwards: bool,
) -> tuple[list[Tensor], list[int]]:
    """Do the steps of all elements of a ``vmap`` in one scan. Its axis is in front of the examples.

    mapped: knows how many elements there are. axes: each tensor's axis of the elements; None if
    they share it. Returns the results, and the axis of the elements in each.
    """
    _, of_states, of_rows, of_fixed, _ = axes

    def of_each(value: Tensor, axis: int | None, place: int) -> Tensor:
        if axis is not None:
            return value.movedim(axis, place)
        sizes = [*value.shape[:place], mapped.batch_size, *value.shape[place:]]
        return value.unsqueeze(place).expand(sizes)

    def of_each_fixed(value: Tensor, axis: int | None) -> Tensor:
        if axis is None:
            return value
        value = value.movedim(axis, 0)
        # An axis for the examples, which a vector lacks.
        return value.unsqueeze(1) if value.dim() == 2 else value

    results = SCAN(
        step,
        [of_each(value, axis, 0) for value, axis in zip(states, of_states, strict=True)],
        [of_each(value, axis, 1) for value, axis in zip(rows, of_rows, strict=True)],
        [of_each_fixed(value, axis) for value, axis in zip(fixed, of_fixed, strict=True)],
        backwards,
    )
    return results, [0] * len(states) + [1] * (len(results) - len(states))


torch.library.impl("fleetlearn::scan", "CPU")(scan)
torch.library.register_fake("fleetlearn::scan")(_shapes)
torch.library.register_vmap("fleetlearn::scan", _vectorized)

DECOMPOSITIONS = {SCAN: scan}
