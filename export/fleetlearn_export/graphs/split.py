"""Splits a training step's graph in three parts, for several steps in a row.

Only the ``core``, which computes the next step's inputs, has to run step after step. The part
``before`` needs only the batches, and the part ``after`` only measures. These two run once for all
steps, in fewer operators with more work each.
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
    aten._unsafe_view.default,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
"""Operators that are almost free inside the core. Moved before it, their results would be stored,
and may be larger."""

FILLED: dict[Any, float | None] = {
    aten.full_like.default: None,
    aten.ones_like.default: 1.0,
    aten.zeros_like.default: 0.0,
}
"""Operators that read only the shape of their input -> the number that all elements get; None: it
is an argument."""


class Subgraph(NamedTuple):
    """Some nodes of a graph, with the names of the nodes that they read from outside and of those
    that they provide."""

    graph: Graph
    inputs: list[str]
    outputs: list[str]


class Parts(NamedTuple):
    """``core`` computes the outputs for the next step, then what ``after`` reads. ``after``
    computes the others."""

    before: Subgraph
    core: Subgraph
    after: Subgraph


def remove_copies(module: GraphModule) -> None:
    """Remove copies and assertions from a graph in which nothing is changed in place.

    The 1 with which the backward pass begins is ones_like(loss); it becomes a constant, so that it
    does not depend on the loss.
    """
    for node in list(module.graph.nodes):
        if node.target in COPIES and not node.kwargs:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.op == "call_module" and not node.users:
            module.graph.erase_node(node)
        elif node.target in FILLED and all(
            isinstance(size, int) for size in node.meta["val"].shape
        ):
            value, number = node.meta["val"], FILLED[node.target]
            node.args = [*value.shape], (node.args[1] if number is None else number)
            node.target, node.kwargs = aten.full.default, {"dtype": value.dtype}


def result_bytes(module: GraphModule, values: Iterable[Tensor]) -> dict[Node, int]:
    """Return the bytes of each result that is a tensor, when the graph is called with these
    values."""
    sizes: dict[Node, int] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                sizes[n] = value.nbytes
            return value

    with torch.no_grad():
        Recorder(module).run(*values)
    return sizes


def split(
    graph: Graph,
    shared: Collection[str],
    batch: Collection[str],
    carried: int,
    size: Mapping[Node, int],
    room: int,
) -> Parts:
    """Return the parts of a step's graph.

    shared: inputs that are the same in all steps.
    batch: inputs that are others in each step. All other inputs come from the step before.
    carried: how many of the outputs, the first ones, are the next step's inputs.
    size: the bytes of each result.
    room: bytes that ``before`` and ``after`` may each read and make in a step. More stays in the
    core.

    Nodes that depend on shared inputs or on sizes alone are repeated in each part that needs them.
    """
    *nodes, last = graph.nodes
    outputs: list[Any] = list(last.args[0])
    inputs_of = {node: set(node.all_input_nodes) for node in nodes}
    inputs = {node for node in nodes if node.op == "placeholder"}
    rows = {node for node in inputs if node.name in batch}
    same, early, core, reserve = (
        set[Node](),
        set[Node](),
        set[Node](),
        _ByteBudget(size, room).reserve,
    )
    for node in nodes:
        if node in inputs:
            (same if node.name in shared else rows if node in rows else core).add(node)
        elif inputs_of[node] <= same or (
            _depends_on_sizes_only(node) and inputs_of[node] <= same | rows | early
        ):
            same.add(node)
        elif inputs_of[node].isdisjoint(core) and (
            node.target in VIEWS or reserve({node} | inputs_of[node] - same)
        ):
            early.add(node)
        else:
            core.add(node)

    late, reserve = (
        core - inputs - _with_ancestors(outputs[:carried]),
        _ByteBudget(size, room).reserve,
    )
    for node in nodes:
        taken = inputs_of[node] - late - same
        if node in late and not (taken <= size.keys() and reserve({node} | taken)):
            late -= _with_ancestors([node])
    core -= late
    again = set[Node]()
    for node in reversed(nodes):
        if (
            node in early
            and (node.target in VIEWS or node not in size)
            and not (core | again).isdisjoint(node.users)
        ):
            again.add(node)

    after = _part(graph, late | same, outputs[carried:])
    crossing = [node for node in nodes if node in core and node.name in after.inputs]
    middle = _part(graph, core | same | again, [*outputs[:carried], *crossing])
    provided = [
        node for node in nodes if node in early and node.name in {*middle.inputs, *after.inputs}
    ]
    return Parts(_part(graph, early | same, provided), middle, after)


def _depends_on_sizes_only(node: Node) -> bool:
    """Whether the node reads only the sizes of its inputs."""
    return node.target in FILLED or isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)


class _ByteBudget:
    """A limit on the bytes of results that are kept."""

    def __init__(self, size: Mapping[Node, int], left: int) -> None:
        self._size = size
        self._left = left
        self._held = set[Node]()

    def reserve(self, nodes: set[Node]) -> bool:
        """Keep these results too if they fit. Returns whether they do."""
        more = sum(self._size.get(node, 0) for node in nodes - self._held)
        if more > self._left:
            return False
        self._left -= more
        self._held |= nodes
        return True


def _with_ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and all that they are computed from. Results of one operator stay
    together."""
    needed, left = set[Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += [
                *node.all_input_nodes,
                *(user for user in node.users if user.target is getitem),
            ]
    return needed


def _part(graph: Graph, inside: Collection[Node], outputs: list[Node]) -> Subgraph:
    """Return the part of the nodes ``inside`` that computes the outputs."""
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
    return Subgraph(part, inputs, [node.name for node in outputs])
