"""Fits a training step to a device's memory: the budget that the user gives, and the graph that
keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import onnx
from torch import Tensor

from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.micro_batches import split_batch
from fleetlearn_export.graphs.recompute import AGAIN, LATER, Sizes, fit
from fleetlearn_export.inspection import graph_costs
from fleetlearn_export.inspection.graph_costs import Values
from fleetlearn_export.inspection.step_memory import MIB, estimate_graph, with_micro_batches
from fleetlearn_export.model.train_step import TrainStep

UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class Budget(NamedTuple):
    """What a device's process may take at the peak of a step."""

    bytes: int
    batch: int
    """Examples in the step's batch."""


def memory_budget(memory: str | None, batch: int | None) -> Budget | None:
    """Return the budget, or None where there is none. Raises ExportError on a text that is not an
    amount of memory."""
    if memory is None:
        if batch is not None:
            raise ExportError(
                "batch is the number of examples for which memory holds; give memory too, or "
                "neither"
            )
        return None
    amount = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b)\s*", memory, re.IGNORECASE)
    if not amount:
        raise ExportError(
            f"memory {memory!r}; expected a number and a unit, such as '200 MiB' or '1.5 GB'"
        )
    if batch is None or batch < 1:
        raise ExportError(f"memory needs batch, the number of examples in a step; it is {batch}")
    return Budget(int(float(amount[1]) * UNITS[amount[2].lower()]), batch)


def train_elements(step: TrainStep) -> int:
    """Return the number of elements of all vectors that a device holds for the step: as
    ``step_memory.estimate``."""

    def elements(values: Iterable[Tensor]) -> int:
        return sum(value.numel() for value in values)

    travelling = elements(step.values[name] for name in step.travelling)
    references = {"anchor", *step.references}
    return (
        2 * elements(step.values.values())
        + len(references) * travelling
        + 2 * elements(step.state.values())
    )


def within_budget(
    model: onnx.ModelProto,
    with_means: Callable[[], onnx.ModelProto],
    elements: int,
    budget: Budget,
    progress: Callable[[str], None],
    smallest: int = 1,
) -> onnx.ModelProto:
    """Return the graph as it is if it keeps the budget; else with the largest micro-batches that
    do; else with the smallest, and with as little computed twice as the budget allows.

    with_means: makes the same step as ``split_batch`` takes it, or raises ExportError if it has no
    micro-batches. elements: of all vectors that the device holds. smallest: the least number of
    examples in a micro-batch. Raises ExportError, with the least peak, if nothing fits.
    """
    size, values = budget.batch, graph_costs.values(model, budget.batch)

    def peak(graph: onnx.ModelProto, sizes: Sizes) -> int:
        all_values = _with_recomputed(graph, values)
        return with_micro_batches(
            estimate_graph(graph, all_values, elements), graph, all_values, budget.batch
        ).total

    if peak(model, {}) <= budget.bytes:
        progress("the step fits as it is")
        return model
    reason = ""
    try:
        model = with_means()
        while size > smallest:
            size = max(smallest, -(-size // 2))
            values = graph_costs.values(model, size)
            if (needed := peak(model, {})) <= budget.bytes:
                progress(
                    f"about {_mib(needed)} at the peak, in micro-batches of {size} of "
                    f"{budget.batch} examples"
                )
                return split_batch(model, size)
    except ExportError as error:
        reason = f", and without micro-batches, since {error}"
    fitted = fit(model, {name: value.bytes for name, value in values.items()}, peak, budget.bytes)
    if fitted.peak > budget.bytes:
        raise ExportError(
            f"a step with a batch of {budget.batch} does not fit into {_mib(budget.bytes)}: it "
            f"needs about {_mib(fitted.peak)} where everything is computed again that cheap "
            f"operators make{reason}. Give more memory or a smaller batch"
        )
    divided = (
        f", in micro-batches of {size} of {budget.batch} examples" if size < budget.batch else ""
    )
    again = fitted.again * -(-budget.batch // size)
    progress(
        f"about {_mib(fitted.peak)} at the peak{divided}; each step computes {_mib(again)} of "
        "results again"
    )
    return split_batch(fitted.model, size) if size < budget.batch else fitted.model


def _with_recomputed(graph: onnx.ModelProto, values: Values) -> Values:
    """Return the values, and again the ones that are computed twice, which are like the first."""
    names = [name for node in graph.graph.node for name in node.output if name.endswith(AGAIN)]
    found = {**values, **{name: values[name.removesuffix(AGAIN)] for name in names}}
    later = [node for node in graph.graph.node if node.output[0].endswith(LATER)]
    return {**found, **{node.output[0]: found[node.input[0]] for node in later}}


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
