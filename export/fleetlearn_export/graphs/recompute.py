"""Computes results of the forward pass again in the backward pass, so that they need no memory in
between.

At the turn, the moment with the most bytes in memory, the results that the backward pass still
reads are alive. Those that cheap operators make from others can be computed again when they are
read. Which ones to keep is a minimum cut: the fewest bytes from which cheap operators make all the
rest. Where that does not save enough, convolutions whose result is larger than their input run
twice too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import networkx
import onnx
from onnx import NodeProto, helper

from fleetlearn_export.graphs.reading import reads, rename_reads


def words(text: str) -> frozenset[str]:
    """Return the words of the text."""
    return frozenset(text.split())


CHEAP = words(
    "Abs Add And BatchNormalization Cast Clip Div Elu Equal Erf Exp Expand Flatten Gelu Greater "
    "GreaterOrEqual HardSigmoid HardSwish Identity LeakyRelu Less LessOrEqual Log Max Min Mod Mul "
    "Neg Not Or PRelu Pow Reciprocal Relu Reshape Sigmoid Sign Slice Softplus Sqrt Squeeze Sub Sum "
    "Tanh ThresholdedRelu Transpose Unsqueeze Where"
)
"""Operators with a pass over memory at most, which may run twice."""

WIDENS = 1.5
"""A convolution whose result has more than this many times its input's bytes may run twice too,
where cheap operators alone do not save enough: the first one of an inverted residual block, with a
kernel of one element."""

AGAIN = "/again"
"""The end of the names of what is computed again."""
LATER = "/later"
"""The end of the names of what is available only in the backward pass: a reshape to the same
shape."""
NEAR = 20
"""The gradient for which a recomputation waits is one of this many results before the first
reader."""

Sizes = Mapping[str, int]
"""Tensor -> bytes."""
Second = Callable[[NodeProto], NodeProto | None]
"""Node -> the node that makes its first result a second time; None if the result must be kept."""


class Recomputed(NamedTuple):
    """A graph whose backward pass computes results of the forward pass again."""

    model: onnx.ModelProto
    peak: int
    """Bytes at one time, as the given function counts them."""
    again: int
    """Bytes that operators write a second time in each step: what the saving costs in time."""


def fit(
    model: onnx.ModelProto,
    sizes: Sizes,
    peak: Callable[[onnx.ModelProto, Sizes], int],
    budget: float,
) -> Recomputed:
    """Return the graph with as little recomputed as the budget allows; with the least peak if none
    fits.

    sizes: of all tensors. peak: returns the bytes that a graph needs. budget: how many it may need.
    """
    best = Recomputed(model, peak(model, sizes), 0)
    # The larger the smallest tensor that is computed again, the fewer are.
    limits = sorted({size for size in sizes.values() if size >= max(sizes.values()) / 1000})
    for convolutions in (False, True):
        if best.peak <= budget:
            return best
        low, high = 0, len(limits) - 1
        fitting = None
        while low <= high:
            middle = (low + high) // 2
            attempt = recomputed(model, sizes, peak, limits[middle], convolutions=convolutions)
            best = min(best, attempt, key=lambda row: row.peak)
            if attempt.peak <= budget:
                fitting, low = attempt, middle + 1
            else:
                high = middle - 1
        best = fitting or best
    return best


def recomputed(
    model: onnx.ModelProto,
    sizes: Sizes,
    peak: Callable[[onnx.ModelProto, Sizes], int],
    smallest: int,
    *,
    convolutions: bool = False,
) -> Recomputed:
    """Return the graph that computes results of at least ``smallest`` bytes again where that saves
    memory.

    convolutions: whether those that widen their input may run twice.
    """
    order = in_order_of_execution(model)
    turn = _turn(order, sizes)
    forward, outputs = order[: turn + 1], {output.name for output in model.graph.output}
    maker = {name: node for node in forward for name in node.output if name and name not in outputs}
    # What runs twice is written before its first reader in the file, which keeps its order: ONNX
    # Runtime follows that.
    nodes, behind = list(model.graph.node), {node.name for node in order[turn + 1 :]}
    late: dict[str, int] = {}
    """Result of the forward pass -> place in the file of its first reader behind the turn."""
    for index, node in enumerate(nodes):
        if node.name in behind:
            for name in reads(node):
                if name in maker:
                    late.setdefault(name, index)
    second = partial(_second, sizes=sizes, convolutions=convolutions)
    kept = _kept(maker, late, sizes, smallest, second)
    writer = _Writer(nodes, behind, maker, kept, sizes, second)
    for name in sorted(late, key=late.__getitem__):
        writer.again(name, late[name], name)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:]
    known = {described.name: described for described in changed.graph.value_info}
    for old, new in writer.clones.items():
        if old in known:
            changed.graph.value_info.add().CopyFrom(known[old])
            changed.graph.value_info[-1].name = new
    for index, node in enumerate(nodes):
        changed.graph.node.extend(writer.before.get(index, ()))
        row = changed.graph.node.add()
        row.CopyFrom(node)
        if node.name in behind:
            rename_reads(row, writer.clones)
    return Recomputed(changed, peak(changed, {**sizes, **writer.sizes}), sum(writer.sizes.values()))


def in_order_of_execution(model: onnx.ModelProto) -> list[NodeProto]:
    """Return the nodes in ONNX Runtime's order: depth first from the nodes without readers, from
    the last in the file.

    Of a node's inputs, the one that is last in the file is made first.
    """
    nodes = model.graph.node
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    read = {name for node in nodes for name in reads(node)}
    order, seen = [], set()
    stack = [(index, False) for index, node in enumerate(nodes) if read.isdisjoint(node.output)]
    while stack:
        index, done = stack.pop()
        if done:
            order.append(nodes[index])
        elif index not in seen:
            seen.add(index)
            stack.append((index, True))
            stack += (
                (row, False)
                for row in sorted({maker[name] for name in reads(nodes[index]) if name in maker})
            )
    return order


def _turn(nodes: list[NodeProto], sizes: Sizes) -> int:
    """Return the place at which the most bytes are alive."""
    last = {name: index for index, node in enumerate(nodes) for name in reads(node)}
    change = [0] * (len(nodes) + 1)
    for index, node in enumerate(nodes):
        for name in node.output:
            if name in last:
                change[index] += sizes.get(name, 0)
                change[last[name] + 1] -= sizes.get(name, 0)
    now, most, turn = 0, 0, 0
    for index in range(len(nodes)):
        now += change[index]
        if now > most:
            most, turn = now, index
    return turn


def _kept(
    maker: Mapping[str, NodeProto],
    late: Mapping[str, int],
    sizes: Sizes,
    smallest: int,
    second: Second,
) -> set[str]:
    """Return the results to keep: the least bytes from which cheap operators make all that is read
    later."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for name in late:
        graph.add_edge((name, "out"), "sink")
    waiting, seen = list(late), set(late)
    while waiting:
        name = waiting.pop()
        node = second(maker[name])
        graph.add_edge((name, "in"), (name, "out"), capacity=max(1, sizes.get(name, 0)))
        if (
            node is None
            or name != maker[name].output[0]
            or (name in late and sizes.get(name, 0) < smallest)
        ):
            graph.add_edge("source", (name, "in"))
            continue
        for source in node.input:
            if source in maker:
                graph.add_edge((source, "out"), (name, "in"))
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
    reachable = networkx.minimum_cut(graph, "source", "sink")[1][0]
    return {name for name in seen if (name, "in") in reachable and (name, "out") not in reachable}


def _second(node: NodeProto, sizes: Sizes, convolutions: bool) -> NodeProto | None:
    """Return the node that makes the first result of ``node`` a second time; None if that is not
    cheap.

    Batch normalisation in training mode is then given the mean and the variance that it found the
    first time.
    """
    if convolutions and node.op_type == "Conv":
        return node if sizes.get(node.output[0], 0) > WIDENS * sizes.get(node.input[0], 0) else None
    if node.op_type not in CHEAP:
        return None
    attributes = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    if not attributes.get("training_mode"):
        return node
    if len(node.output) < 3 or attributes.get("momentum") != 0:
        return None
    inputs = [*node.input[:3], *node.output[1:3]]
    return helper.make_node(
        node.op_type, inputs, node.output[:1], name=node.name, epsilon=attributes["epsilon"]
    )


class _Writer:
    """Writes the operators that run again."""

    def __init__(
        self,
        nodes: list[NodeProto],
        behind: set[str],
        maker: Mapping[str, NodeProto],
        kept: set[str],
        sizes: Sizes,
        second: Second,
    ) -> None:
        """nodes: the graph's. behind: names of those behind the turn. maker: of the results before
        it."""
        self._nodes, self._maker, self._kept, self._all_sizes = nodes, maker, kept, sizes
        self._second = second
        self._gradients = [node.output[0] if node.name in behind else "" for node in nodes]
        self._places = {name: index for index, name in enumerate(self._gradients) if name}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in nodes:
            for name in node.input if node.name in behind else ():
                self._readers.setdefault(name, []).append(node)
        self.clones: dict[str, str] = {}
        """Result -> the name of the same, computed again."""
        self.before: dict[int, list[NodeProto]] = {}
        """Place of a node -> operators to write before it."""
        self.sizes: dict[str, int] = {}
        """The bytes of what is computed again."""

    def again(self, name: str, index: int, wanted: str) -> str:
        """Return the name of the result as computed again for the node at ``place``, or its own if
        it is kept.

        wanted: the input of that node for which the result is computed.
        """
        node = (
            self._second(self._maker[name])
            if name in self._maker and name not in self._kept
            else None
        )
        if node is None:
            return name
        if name not in self.clones:
            inputs = [self.again(source, index, wanted) if source else "" for source in node.input]
            if inputs == list(node.input):
                largest = max(
                    node.input, key=lambda row: (row in self._maker, self._all_sizes.get(row, 0))
                )
                later = self._behind_gradient(name, largest, index, wanted)
                if not later:
                    return name
                inputs[inputs.index(largest)] = later
            self.clones[name] = f"{name}{AGAIN}"
            made = NodeProto()
            made.CopyFrom(node)
            made.name = self.clones[name]
            made.input[:] = inputs
            made.output[:] = [made.name]
            self.before.setdefault(index, []).append(made)
            self.sizes[made.name] = self._all_sizes.get(name, 0)
        return self.clones[name]

    def _behind_gradient(self, name: str, source: str, index: int, wanted: str) -> str:
        """Return ``source``, available only once the backward pass has come near ``place``; "" if
        no gradient is made shortly before it.

        Its shape gets a 0 that depends on a gradient. Without that ONNX Runtime would find both
        computations equal, and do one of them. A reshape to the same shape copies nothing.
        """
        gradient = self._partner(wanted, index) or self._largest_before(index)
        if not gradient:
            return ""
        label = f"{name}{LATER}"
        self.before.setdefault(index, []).extend(
            [
                helper.make_node(
                    "Shape", [gradient], [f"{label}/size"], name=f"{label}/size", start=0, end=1
                ),
                helper.make_node(
                    "Sub",
                    [f"{label}/size", f"{label}/size"],
                    [f"{label}/zero"],
                    name=f"{label}/zero",
                ),
                helper.make_node("Shape", [source], [f"{label}/same"], name=f"{label}/same"),
                helper.make_node(
                    "Add",
                    [f"{label}/same", f"{label}/zero"],
                    [f"{label}/shape"],
                    name=f"{label}/shape",
                ),
                helper.make_node("Reshape", [source, f"{label}/shape"], [label], name=label),
            ]
        )
        return label

    def _largest_before(self, index: int) -> str:
        """Return the largest gradient that is made shortly before ``place``; "" if there is
        none."""
        rows = self._gradients[max(0, index - NEAR) : index]
        return max((self._all_sizes.get(row, 0), number, row) for number, row in enumerate(rows))[2]

    def _partner(self, name: str, index: int) -> str:
        """Return the first of the gradients that the result meets: then no gradient is made before
        it must be.

        "" if none of them is made shortly before ``place``.
        """
        waiting, seen, made_at = [name], {name}, list[int]()
        while waiting:
            for node in self._readers.get(waiting.pop(), ()):
                others = [
                    row
                    for row in node.input
                    if row in self._places and row not in seen and self._wide(row, name)
                ]
                made_at += [self._made_before(row, index) for row in others]
                new = [row for row in node.output if row and row not in seen and not others]
                seen |= set(new)
                waiting += new
        near = [row for row in made_at if index - NEAR <= row]
        return self._gradients[min(near)] if near else ""

    def _made_before(self, gradient: str, index: int) -> int:
        """Return the place of the gradient, or of what it is made from, before ``place``."""
        while self._places.get(gradient, -1) >= index:
            inputs = self._nodes[self._places[gradient]].input
            gradient = max(inputs, key=lambda row: self._all_sizes.get(row, 0), default="")
        return self._places.get(gradient, -1)

    def _wide(self, gradient: str, name: str) -> bool:
        """Whether this is a gradient of what it meets, rather than a vector."""
        return 100 * self._all_sizes.get(gradient, 0) > self._all_sizes.get(name, 0)
