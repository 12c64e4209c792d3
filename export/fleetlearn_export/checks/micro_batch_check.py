"""Comparison of a step that takes its batch in parts with the same step that takes the batch at
once."""

from __future__ import annotations

import numpy as np
import onnx
import torch

from fleetlearn_export.checks.comparison import Array, GraphSession, first_passing, open_session
from fleetlearn_export.checks.emission_check import operator_inputs
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.conversion import serialised
from fleetlearn_export.graphs.micro_batches import SEED, SEED_STEP, split_batch
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import MEAN, TrainStep

TOLERANCE = 1e-3
"""Allowed difference, relative to a tensor's largest element: the two add up in another order."""
SMALLEST = 1e-6
"""A tensor whose elements are all smaller than this counts as that large."""


def check_micro_batches(
    step: TrainStep, model: onnx.ModelProto, constants: Constants | None = None
) -> None:
    """Compare loss, metrics and gradients of micro-batches with their means over the parts, and
    over the whole batch.

    model: the step with its means as outputs. constants: those that it has kept apart. With random
    numbers of its own in each part, a step is compared with the parts alone. Raises ExportError;
    the text names what is no mean over the examples.
    """
    size = max(1, len(next(iter(step.batch.values()))) // 2)
    divided = split_batch(model, size)
    # Of equal means, such as the gradients of two biases that are added, the Loop has one.
    made = {name for node in divided.graph.node for name in node.output}
    divided.graph.output.extend(
        output
        for output in model.graph.output
        if output.name in made and output.name.startswith(MEAN)
    )
    whole, looped = (open_session(serialised(row), constants=constants) for row in (model, divided))

    def check(seed: int) -> None:
        given = operator_inputs(step, _with_one_more(step.batch), seed)
        outputs, parts = _run(looped, given), _mean_over_parts(whole, given, size)
        _compare(
            outputs,
            parts,
            "the sums over the micro-batches differ from those over the parts of the batch",
        )
        if not step.random:
            _compare(outputs, _run(whole, given), "the step is no mean over its examples")

    first_passing(check)


def _with_one_more(batch: Tensors) -> Tensors:
    """Return the batch with its first example again at its end: the last part is then smaller than
    the others."""
    return {name: torch.cat([value, value[:1]]) for name, value in batch.items()}


def _run(session: GraphSession, given: Tensors) -> dict[str, Array]:
    return session.run({name: value.numpy() for name, value in given.items()})


def _mean_over_parts(whole: GraphSession, given: Tensors, size: int) -> dict[str, Array]:
    batch = {name: value for name, value in given.items() if name.startswith("batch.")}
    rows = len(next(iter(batch.values())))
    means: dict[str, Array] = {}
    for number, begin in enumerate(range(0, rows, size)):
        part = given | {name: value[begin : begin + size] for name, value in batch.items()}
        if SEED in given:
            part[SEED] = given[SEED] + number * SEED_STEP
        taken = min(size, rows - begin)
        for name, value in _run(whole, part).items():
            if name.startswith(MEAN):
                means[name] = means.get(name, np.float64(0)) + value * np.float64(taken / rows)
    return means


def _compare(outputs: dict[str, Array], expected: dict[str, Array], what: str) -> None:
    for name in (name for name in outputs if name.startswith(MEAN)):
        allowed = TOLERANCE * max(SMALLEST, float(np.abs(expected[name]).max(initial=0.0)))
        difference = float(np.abs(outputs[name] - expected[name]).max(initial=0.0))
        if not difference <= allowed:
            label = name.removeprefix(MEAN)
            raise ExportError(
                f"{what}: {label} differs by {difference:.3g}, where {allowed:.0e} is allowed"
            )
