"""An operator that does one step after the other along time, and so is one Scan of ONNX, however
long the time is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""``step(states, rows, fixed)`` returns the next states, and the outputs of one time. rows: the
inputs of that time. fixed: inputs that are the same at all times. States and rows have the examples
on their first axis."""
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


torch.library.impl("fleetlearn::scan", "CPU")(scan)
torch.library.register_fake("fleetlearn::scan")(_shapes)

DECOMPOSITIONS = {SCAN: scan}
