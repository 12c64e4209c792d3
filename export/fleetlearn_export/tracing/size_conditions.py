"""Conditions on the number of examples in a user's code.

A graph is recorded with one number of examples, and with what the conditions are for that number.
So the code is recorded again for others, until there is a graph for each case. Whoever asks for
these graphs compares their results: diffusers' networks, for one, make a tensor contiguous from 64
examples on, which changes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.steps import Tensors

SIZES = [
    *range(2, 18),
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    512,
    513,
    1024,
    10**6 + 1,
]
"""The numbers of examples for which a graph must be known."""
MOST_ELEMENTS = 2**28
"""A number of examples is left out if an array of the batch would have more elements."""
MOST_CASES = 4
"""The number of graphs that are recorded at most, the first one too."""


class Recorded(NamedTuple):
    """What tracing recorded."""

    graph: fx.GraphModule
    shapes: ShapeEnv
    """Where its sizes are."""

    def covers(self, size: int) -> bool:
        """Whether tracing with this number of examples would record the same."""
        conditions = [guard.expr for guard in self.shapes.guards]
        found = [
            condition.subs(dict.fromkeys(condition.free_symbols, size)) for condition in conditions
        ]
        return all(value == True for value in found)  # noqa: E712  # sympy's own True


class Cases:
    """What was recorded of a function for other numbers of examples."""

    def __init__(self, export: Callable[[], object]) -> None:
        """export: exports the function with PyTorch, whose errors say best what cannot be
        exported."""
        self.graphs: list[fx.GraphModule] = []
        self._export = export

    def take(self, found: list[fx.GraphModule] | None) -> None:
        """Keep the result of ``other_cases``. Raises ExportError if that has too many cases."""
        if found is None:
            self._export()
        self.graphs = found or []

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around the comparison of all cases: its errors become those of the export, if that has
        any."""
        try:
            yield
        except ExportError:
            self._export()
            raise


def other_cases(
    first: Recorded,
    arguments: Tensors,
    rows: Mapping[str, int],
    record: Callable[[Tensors], Recorded],
) -> list[fx.GraphModule] | None:
    """Return what is recorded for other numbers of examples, one graph for each case; None if there
    are too many cases.

    first: what ``record`` has recorded with the arguments. rows: argument -> the axis of the
    examples.
    """
    known = [first]
    arrays = [
        value.numel() / value.shape[rows[name]] for name, value in arguments.items() if name in rows
    ]
    sizes = [size for size in SIZES if size * max(arrays, default=0) <= MOST_ELEMENTS]
    while size := next(
        (size for size in sizes if not any(recorded.covers(size) for recorded in known)), None
    ):
        if len(known) == MOST_CASES:
            return None
        try:
            known.append(record(_resized(arguments, rows, size)))
        except ExportError:
            return None
        if not known[-1].covers(size):
            return None
    return [recorded.graph for recorded in known[1:]]


def _resized(arguments: Tensors, rows: Mapping[str, int], size: int) -> Tensors:
    """Return the arguments with another number of examples. Nobody touches their values, so they
    take no memory."""

    def resized(value: Tensor, axis: int) -> Tensor:
        return value.new_empty([*value.shape[:axis], size, *value.shape[axis + 1 :]])

    return {
        name: resized(value, rows[name]) if name in rows else value
        for name, value in arguments.items()
    }
