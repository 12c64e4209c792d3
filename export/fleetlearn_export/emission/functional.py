"""Replaces operators that write into a tensor by operators that return a new one."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from fleetlearn_export.emission.emitter import EmissionError, is_reshape

aten = torch.ops.aten
FUNCTIONAL_NAMES = {
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.transpose_.default: aten.transpose.int,
}
"""Where the functional operator is not the one without the underscore. Its further results are the
new values of the arguments that it would have written into."""

SCATTERS: dict[Any, torch._ops.OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
"""What makes a view -> what puts the view's elements back in their places."""


def without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Return the traced graph with each operator that writes into a tensor replaced, ``add_`` by
    ``add`` for example.

    What reads the tensor later reads the new one. A write into a view becomes a new value of the
    tensor that it is a view of; other views of that tensor are taken again where they are read.
    Raises EmissionError for a view whose elements cannot be placed back.
    """
    rewriting = _Rewriting()
    for node in module.graph.nodes:
        rewriting.add(node)
    return fx.GraphModule(module, rewriting.graph)


class _Rewriting:
    """The new graph, and where the traced graph's tensors are in it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._now: dict[fx.Node, fx.Node] = {}
        """The traced graph's node -> the node with its present value."""
        self._source: dict[fx.Node, fx.Node] = {}
        """A view -> the tensor that it was made from."""
        self._family: dict[fx.Node, list[fx.Node]] = {}
        """A tensor that is no view -> its views, and theirs."""
        self._old: set[fx.Node] = set()
        """Views of tensors that were written into since the view was last taken."""
        self._reshaped: set[fx.Node] = set()
        """Tensors whose shape an operator changed, and what shares their memory."""

    def add(self, node: fx.Node) -> None:
        operator = node.target if isinstance(node.target, torch._ops.OpOverload) else None
        if operator is not None and operator._schema.is_mutable:
            self._write(node, operator)
            return
        # A view keeps its place in the graph; it is taken again only where it is read after a
        # write.
        self._now[node] = self.graph.node_copy(node, self._present)
        source = _viewed(node, operator)
        if source is not None:
            self._add_view(node, source)

    def _present(self, node: fx.Node) -> fx.Node:
        if node in self._old:
            self._old.remove(node)
            written = _writes_into_first(node)
            source = self._source[node]
            self._now[node] = (
                self._present(source) if written else self.graph.node_copy(node, self._present)
            )
        return self._now[node]

    def _add_view(self, node: fx.Node, source: fx.Node) -> None:
        self._source[node] = source
        self._family.setdefault(self._root(node), []).append(node)

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._source:
            node = self._source[node]
        return node

    def _write(self, node: fx.Node, operator: torch._ops.OpOverload) -> None:
        names = [argument.name for argument in operator._schema.arguments]
        arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        targets: list[Any] = [
            arguments[argument.name] for argument in operator._schema.arguments if argument.is_write
        ]
        made = self.graph.node_copy(node, self._present)
        made.target = _functional(operator)
        # Average pooling in channels-last order uses as_strided_ on a new tensor, and keeps its
        # shape.
        if torch.Tag.inplace_view in operator.tags and operator is not aten.as_strided_.default:
            self._reshape(node, targets[0], made)
            return
        accepted = {name for name, _ in _inputs(made.target)}
        made.kwargs = {name: value for name, value in made.kwargs.items() if name in accepted}
        for target, result in zip(targets, _results(self.graph, made, node, targets), strict=True):
            self._set(target, result)
        self._now[node] = made
        if _writes_into_first(node):
            self._add_view(node, targets[0])

    def _reshape(self, node: fx.Node, target: fx.Node, made: fx.Node) -> None:
        """Give a tensor another shape, as ``squeeze_`` does. What shares its memory keeps its own.

        Nobody may write into any of them later.
        """
        self._add_view(node, target)
        root = self._root(target)
        family = [root, *self._family[root]]
        for row in family:
            if row is not node:
                # views are taken again while what they are a view of has the shape for that
                self._present(row)
        itself = [view for view in family if self._tensor(view) is self._tensor(target)]
        self._now |= dict.fromkeys(itself, made)
        self._reshaped.update(family)

    def _tensor(self, node: fx.Node) -> fx.Node:
        """Return the node that made the tensor which ``add_`` and its like returned."""
        while _writes_into_first(node):
            node = self._source[node]
        return node

    def _set(self, target: fx.Node, result: fx.Node) -> None:
        """Give a tensor a new value; so do those that it is a view of, and other views of them get
        old."""
        self._old.update(self._family.get(self._root(target), []))
        while True:
            if target in self._reshaped:
                raise EmissionError("a write into a tensor whose shape an operator changed")
            self._old.discard(target)
            self._now[target] = result
            if target not in self._source:
                return
            source = self._source[target]
            result = self._placed_back(target, source, result)
            target = source

    def _placed_back(self, view: fx.Node, source: fx.Node, value: fx.Node) -> fx.Node:
        """Return the new value of ``source`` whose view has a new value."""
        whole = source.meta["val"]
        arguments, operator = view.args[1:], view.target
        offset: Any = view.args[3] if len(view.args) > 3 else None
        if _writes_into_first(view) or operator in (aten.detach.default, aten.alias.default):
            return value
        if operator in SCATTERS:
            parts: tuple[Any, ...] = (
                SCATTERS[operator],
                self._present(source),
                value,
                *self._read(arguments),
            )
        elif operator in (aten.permute.default, aten.transpose.int, aten.t.default):
            if operator is aten.permute.default:
                order = [axis % whole.dim() for axis in view.args[1]]  # type: ignore[union-attr]
                arguments = ([order.index(axis) for axis in range(whole.dim())],)
            parts = (operator, value, *arguments)
        elif operator in (
            aten.view.default,
            aten.unsqueeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ) or (
            # The gradient of such a write that average pooling makes in channels-last order.
            operator is aten.as_strided.default and is_reshape(view.meta["val"], whole, offset)
        ):
            parts = (aten.reshape_as.default, value, self._present(source))
        else:
            raise EmissionError(f"a write into a view that {operator} made")
        made = self.graph.call_function(parts[0], parts[1:])
        made.meta["val"] = whole
        return made

    def _read(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self._present)


def _writes_into_first(node: fx.Node) -> bool:
    """Whether the operator returns the tensor that it writes into, as ``add_`` does."""
    operator = node.target
    return (
        isinstance(operator, torch._ops.OpOverload)
        and operator._schema.is_mutable
        and _has_views(operator)
    )


def _viewed(node: fx.Node, operator: torch._ops.OpOverload | None) -> fx.Node | None:
    """Return the tensor, or the list of tensors, whose memory the node's result shares."""
    source: Any = node.args[0] if node.args else None
    if node.target is getitem:
        return (
            source
            if isinstance(source.target, torch._ops.OpOverload) and _has_views(source.target)
            else None
        )
    return (
        source
        if operator is not None and _has_views(operator) and isinstance(source, fx.Node)
        else None
    )


def _has_views(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator's results share memory with its arguments."""
    return any(result.alias_info is not None for result in operator._schema.returns)


def _functional(operator: torch._ops.OpOverload) -> torch._ops.OpOverload:
    if operator in FUNCTIONAL_NAMES:
        return FUNCTIONAL_NAMES[operator]
    name = operator._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None)
    if packet is not None and name.endswith("_") and operator._overloadname in packet.overloads():
        return getattr(packet, operator._overloadname)  # type: ignore[no-any-return]
    if packet is not None and len(operator._schema.returns) == 1:  # such as div.Tensor for div.out
        for overload in packet.overloads():
            functional: torch._ops.OpOverload = getattr(packet, overload)
            if not functional._schema.is_mutable and _inputs(functional) == _inputs(operator):
                return functional
    raise EmissionError(f"{operator}, which writes into a tensor")


def _inputs(operator: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Return name and type of each argument that the operator does not write into."""
    return [
        (argument.name, str(argument.type))
        for argument in operator._schema.arguments
        if not argument.is_write
    ]


def _results(
    graph: fx.Graph, made: fx.Node, node: fx.Node, targets: list[fx.Node]
) -> list[fx.Node]:
    """Return the nodes of the new values of ``targets``, which the operator would have written
    into."""
    if _writes_into_first(node):
        return [made]
    count = len(node.meta["val"])
    results = [graph.call_function(getitem, (made, count + index)) for index in range(len(targets))]
    for result, target in zip(results, targets, strict=True):
        result.meta["val"] = target.meta["val"]
    made.meta = dict(
        made.meta, val=(*node.meta["val"], *(target.meta["val"] for target in targets))
    )
    return results
