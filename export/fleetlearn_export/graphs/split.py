"""A training step's graph in three parts, for several steps in a row: only what makes the next step's inputs has to be
computed step after step.

What comes ``before`` needs no more than the batches, and what comes ``after`` is only measured: each can be computed
for all steps together, by fewer operators with more work for each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

aten = torch.ops.aten
COPIES = {aten.alias.default, aten.clone.default, aten.detach.default}
VIEWS = {
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
}
"""Hardly any work where they are. Done before, their results would have to be made, and may be larger."""


class Part(NamedTuple):
    """Some nodes of a graph, and the names there of the nodes that it takes and gives."""

    graph: Graph
    inputs: list[str]
    outputs: list[str]


class Parts(NamedTuple):
    """``core`` gives the outputs for the next step, then what ``after`` takes of it; ``after`` the other outputs."""

    before: Part
    core: Part
    after: Part


def tidy(module: GraphModule) -> None:
    """Take out of a graph that changes nothing in place what is the same as its input or only checks. The 1 that the
    backward pass begins with has the loss's shape; that it is not made of the loss is said."""
    for node in list(module.graph.nodes):
        if node.target in COPIES and not node.kwargs:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.op == "call_module" and not node.users:
            module.graph.erase_node(node)
        elif node.target is aten.full_like.default and all(isinstance(size, int) for size in node.meta["val"].shape):
            value = node.meta["val"]
            node.target, node.args = aten.full.default, ([*value.shape], node.args[1])
            node.kwargs = {"dtype": value.dtype}


def sizes(module: GraphModule, values: Iterable[Tensor]) -> dict[Node, int]:
    """The bytes of each result that is a tensor, where the graph is called with these values."""
    found: dict[Node, int] = {}

    class Noting(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                found[n] = value.nbytes
            return value

    with torch.no_grad():
        Noting(module).run(*values)
    return found


def split(
    graph: Graph, shared: Collection[str], batch: Collection[str], handed: int, size: Mapping[Node, int], room: int
) -> Parts:
    """The parts of a graph whose inputs ``shared`` are the same in all steps, and whose inputs ``batch`` are each
    step's own; the others come from the step before. The first ``handed`` outputs are for the next step.

    ``before`` and ``after`` each take and make at most ``room`` bytes for a step; what is larger is in the core. What
    is made of shared values or sizes alone is in each part that needs it.
    """
    *nodes, last = graph.nodes
    outputs: list[Any] = list(last.args[0])
    given = {node: set(node.all_input_nodes) for node in nodes}
    inputs = {node for node in nodes if node.op == "placeholder"}
    rows = {node for node in inputs if node.name in batch}
    same, early, core, fits = set[Node](), set[Node](), set[Node](), _Room(size, room).take
    for node in nodes:
        if node in inputs:
            (same if node.name in shared else rows if node in rows else core).add(node)
        elif given[node] <= same or (_of_sizes(node) and given[node] <= same | rows | early):
            same.add(node)
        elif given[node].isdisjoint(core) and (node.target in VIEWS or fits({node} | given[node] - same)):
            early.add(node)
        else:
            core.add(node)

    late, fits = core - inputs - _needed(outputs[:handed]), _Room(size, room).take
    for node in nodes:
        taken = given[node] - late - same
        if node in late and not (taken <= size.keys() and fits({node} | taken)):
            late -= _needed([node])
    core -= late
    again = set[Node]()
    for node in reversed(nodes):
        if node in early and (node.target in VIEWS or node not in size) and not (core | again).isdisjoint(node.users):
            again.add(node)

    after = _part(graph, late | same, outputs[handed:])
    crossing = [node for node in nodes if node in core and node.name in after.inputs]
    middle = _part(graph, core | same | again, [*outputs[:handed], *crossing])
    spread = [node for node in nodes if node in early and node.name in {*middle.inputs, *after.inputs}]
    return Parts(_part(graph, early | same, spread), middle, after)


def _of_sizes(node: Node) -> bool:
    """Whether it needs no more of values than their sizes."""
    return node.target is aten.full_like.default or isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)


class _Room:
    """Room for so many bytes of results."""

    def __init__(self, size: Mapping[Node, int], left: int) -> None:
        self._size = size
        self._left = left
        self._held = set[Node]()

    def take(self, nodes: set[Node]) -> bool:
        """Hold these results too, if they fit in."""
        more = sum(self._size.get(node, 0) for node in nodes - self._held)
        if more > self._left:
            return False
        self._left -= more
        self._held |= nodes
        return True


def _needed(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and what they are made of. What one operator makes is not parted."""
    found, left = set[Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [*node.all_input_nodes, *(user for user in node.users if user.target is getitem)]
    return found


def _part(graph: Graph, inside: Collection[Node], outputs: list[Node]) -> Part:
    """What makes the outputs, as far as it is inside."""
    needed = set(outputs)
    for node in reversed(graph.nodes):
        if node in needed and node in inside:
            needed.update(node.all_input_nodes)
    part, copies, inputs = Graph(), dict[Node, Node](), list[str]()
    for node in graph.nodes:
        if node in needed and node in inside and node.op != "placeholder":
            copies[node] = part.node_copy(node, copies.__getitem__)
        elif node in needed:
            copies[node] = part.placeholder(node.name)
            inputs.append(node.name)
    part.output(tuple(copies[node] for node in outputs))
    return Part(part, inputs, [node.name for node in outputs])
