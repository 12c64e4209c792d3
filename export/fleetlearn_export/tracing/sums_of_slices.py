"""One sum of whole tensors in place of a sum for each slice of them.

In a dense network (DenseNet, Huang et al. 2016, arXiv 1608.06993) each layer reads the concatenation of all results
before it. Autograd cuts the gradient of each concatenation into slices, one for each result, and adds those of a result
up: k * (k - 1) / 2 slices and sums for k layers. Neighbouring slices are added in the same order, so k sums of larger
slices give the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

aten = torch.ops.aten


class Part(NamedTuple):
    """The place of a slice with fixed bounds."""

    source: fx.Node
    axis: int
    start: int
    end: int


def sum_before_slicing(graph: fx.Graph) -> None:
    """Change a graph that writes into no tensor: add tensors up before they are cut, where that gives the same sums."""
    replaced: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node not in replaced and (parts := _summed(node)):
            replaced |= _replace(graph, *parts)


def _replace(graph: fx.Graph, first: Part, second: Part) -> set[fx.Node]:
    """Replace all sums of slices of two tensors, if together they cover the whole second one. Returns the old sums."""
    rows: list[tuple[int, fx.Node, Part, Part]] = []
    for cut in second.source.users:
        for node in cut.users:
            parts = _summed(node)
            if parts and parts[1].source is second.source and (parts[0].source, parts[0].axis) == first[:2]:
                rows.append((parts[1].start, node, *parts))
    rows = sorted(dict.fromkeys(rows), key=lambda row: row[0])
    shape, axis = second.source.meta["val"].shape, second.axis
    ends = [0, *(own.end for *_, own in rows)]
    offsets = {other.start - own.start for *_, other, own in rows}
    if len(rows) < 2 or len(offsets) > 1 or [row[0] for row in rows] != ends[:-1] or ends[-1] != shape[axis]:
        return set()
    (offset,) = offsets
    old = [node for _, node, *_ in rows]
    earliest = next(node for node in graph.nodes if node in old)
    with graph.inserting_before(earliest):
        piece = graph.call_function(aten.slice.Tensor, (first.source, axis, offset, offset + ends[-1]))
        whole = graph.call_function(aten.add.Tensor, (piece, second.source))
        for made in (piece, whole):
            made.meta = dict(earliest.meta, val=second.source.meta["val"])
        for _, node, _, own in rows:
            cut = graph.call_function(aten.slice.Tensor, (whole, axis, own.start, own.end))
            cut.meta = dict(node.meta)
            node.replace_all_uses_with(cut)
    for node in old:
        graph.erase_node(node)
    return set(old)


def _summed(node: fx.Node) -> tuple[Part, Part] | None:
    """Return the slices, along the same axis, whose sum the node is, if it is one."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    first, second = (_part(row) for row in node.args)
    if first is None or second is None or first.axis != second.axis or first.source is second.source:
        return None
    same = all(row.source.meta["val"].dtype == node.meta["val"].dtype for row in (first, second))
    shapes = {str(row.meta["val"].shape) for row in (*node.all_input_nodes, node)}  # sizes may be symbols
    return (first, second) if same and len(shapes) == 1 else None


def _part(node: object) -> Part | None:
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs:
        return None
    source, *bounds = node.args
    axis, start, end = (row if isinstance(row, int) else -1 for row in bounds)
    if not isinstance(source, fx.Node) or min(axis, start, end) < 0:
        return None
    size = source.meta["val"].shape[axis]
    return Part(source, axis, start, end) if isinstance(size, int) and end <= size else None
