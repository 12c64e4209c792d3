"""Replaces operators that write into a tensor by operators that return a new one."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from fleetlearn_export.emission.emitter import EmissionError

aten = torch.ops.aten
SAME_ELEMENTS = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
"""Views that have all elements of their argument in the same shape."""
FUNCTIONAL_NAMES = {
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten.copy_.default: aten.copy.default,
}
"""Where the functional operator is not the one without the underscore. Its further results are the new values of the
arguments that it would have written into."""


def without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Return the traced graph with each operator that writes into a tensor replaced, ``add_`` by ``add`` for example.

    What reads the tensor later reads the new one. Raises EmissionError if a view of such a tensor, or the tensor that
    it is a view of, is read afterwards: that needs PyTorch's own functionalization.
    """
    graph = fx.Graph()
    now: dict[fx.Node, fx.Node] = {}  # the traced graph's node -> the node with its present value
    bases: dict[fx.Node, fx.Node] = {}  # a tensor -> the tensor whose memory it shares
    views: dict[fx.Node, list[fx.Node]] = {}  # a tensor -> itself and all that share its memory
    same: dict[fx.Node, bool] = {}  # whether it has all elements of its base
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    last_read = {node: max((order[user] for user in node.users), default=-1) for node in module.graph.nodes}

    for node in module.graph.nodes:
        operator = node.target if isinstance(node.target, torch._ops.OpOverload) else None
        if operator is None or not operator._schema.is_mutable:
            now[node] = graph.node_copy(node, now.__getitem__)
            source = _viewed(node, operator)
            base = bases.get(source, source) if source is not None else node
            bases[node], same[node] = base, source is None or (operator in SAME_ELEMENTS and same[source])
            views.setdefault(base, []).append(node)
            continue
        written = [row.name for row in operator._schema.arguments if row.is_write]
        replaced = _functional(operator)
        made = graph.node_copy(node, now.__getitem__)
        made.target = replaced
        names = [row.name for row in operator._schema.arguments]
        targets = [node.kwargs[name] if name in node.kwargs else node.args[names.index(name)] for name in written]
        results = _results(graph, made, node, targets)
        for target, result in zip(targets, results, strict=True):
            for other in views[bases[target]]:
                whole = same[target] and same[other]
                if not whole and max(order[node], last_read[other]) > order[node]:
                    raise EmissionError(f"{operator} writes into a tensor of which another view is read afterwards")
                if whole:
                    now[other] = result
        if node.meta.get("val") is not None and isinstance(node.meta["val"], Tensor):
            now[node] = results[0]
            first = node.args[0]
            bases[node], same[node] = bases[first], same[first]
            views[bases[first]].append(node)
        else:
            now[node] = made
            bases[node], same[node] = node, True
            views[node] = [node]
    return fx.GraphModule(module, graph)


def _viewed(node: fx.Node, operator: torch._ops.OpOverload | None) -> fx.Node | None:
    """Return the tensor whose memory the node's result may share."""
    if node.target is getitem:
        source: Any = node.args[0]
        inner = source.target
        if isinstance(inner, torch._ops.OpOverload) and any(row.alias_info for row in inner._schema.returns):
            return source.args[0] if isinstance(source.args[0], fx.Node) else None
        return None
    # reshape and contiguous return their argument where they need not copy it.
    maybe = operator in (aten.reshape.default, aten.contiguous.default, aten._to_copy.default)
    if operator is None or not (maybe or any(row.alias_info for row in operator._schema.returns)):
        return None
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _functional(operator: torch._ops.OpOverload) -> torch._ops.OpOverload:
    if operator in FUNCTIONAL_NAMES:
        return FUNCTIONAL_NAMES[operator]
    name = operator._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = operator._overloadname
    if packet is None or overload not in packet.overloads():
        raise EmissionError(f"{operator}, which writes into a tensor")
    found: torch._ops.OpOverload = getattr(packet, overload)
    return found


def _results(graph: fx.Graph, made: fx.Node, node: fx.Node, targets: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes of the new values of ``targets``, which the operator would have written into."""
    if isinstance(node.meta["val"], Tensor):
        return [made]
    count = len(node.meta["val"])
    results = [graph.call_function(getitem, (made, count + place)) for place in range(len(targets))]
    for result, target in zip(results, targets, strict=True):
        result.meta["val"] = target.meta["val"]
    made.meta = dict(made.meta, val=(*node.meta["val"], *(target.meta["val"] for target in targets)))
    return results
