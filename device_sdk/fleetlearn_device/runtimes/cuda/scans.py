"""Loops of a known number of steps (Scan), written out: a GPU cannot record a step that has a loop.

Recurrent layers are loops (fleetlearn_export/emission/operators/scan.py). Written out, they cost
what their number of operators costs, so that few are left within the steps. What follows from the
rows alone, such as a factor of a gate's gradient, is computed once for all steps before the first;
what outputs alone need is computed once for all steps after the last. An operator that is moved
computes each element by itself, or only moves it, so that the numbers stay the same. On an H100 a
step of two LSTM layers over 80 characters takes 12 ms in place of 37 to 52, of a GRU 1.6 in place
of 8 (benchmarks/gpu.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fleetlearn_device.runtimes.cuda.encoding import (
    Field,
    Node,
    constant,
    fields,
    given,
    integer,
    node,
    packed,
)

MOST_NODES = 30_000
"""Nodes in the place of one loop, at most: a session takes a second to read 6,000."""
WIDEST = 32
"""Inputs of a Concat and outputs of a Split, at most. Up to this number the provider's kernels get
the tensors' addresses as arguments. Otherwise they read the addresses from the host's memory, where
others stand when a recorded step is replayed."""
BY_ELEMENT = frozenset(["Add", "Sub", "Mul", "Div", "Neg", "Sigmoid", "Tanh", "Relu", "Exp"])
ALONG_AXIS = frozenset(["Split", "Concat"])
"""These are moved too. Their axis comes one later where the steps are the first."""
REWRITTEN = ("If", "Loop", "Scan", "BatchNormalization", "Col2Im", "Bitwise")
"""A loop stays that has operators whose names begin so: graphs.py rewrites them in its body."""


class _Body(NamedTuple):
    """The graph of one step."""

    nodes: list[Node]
    given: list[str]
    """States, then rows."""
    made: list[str]
    """States, then outputs."""
    constants: dict[str, bytes]
    """Name -> TensorProto."""
    ranks: dict[str, int]
    """Of what is given and made."""


class _Order(NamedTuple):
    """A body's nodes, by when they are computed."""

    before: list[Node]
    """For all steps at once, from the rows."""
    within: list[Node]
    """In each step."""
    after: list[Node]
    """For all steps at once, for the outputs."""


def described(value: Field) -> tuple[str, list[int]]:
    """Return the name and the sizes that a ValueInfoProto states; 0 where a size is not fixed."""
    parts = {row.number: row.value for row in fields(value.value)}
    sizes = []
    for tensor in (row for row in fields(parts.get(2, b"")) if row.number == 1):
        for shape in (row for row in fields(tensor.value) if row.number == 2):
            for dimension in (row for row in fields(shape.value) if row.number == 1):
                fixed = [row for row in fields(dimension.value) if row.number == 1]
                sizes.append(packed(fixed[0])[0] if fixed else 0)
    return parts.get(1, b"").decode(), sizes


def written_out(scan: Node, sizes: Mapping[str, Sequence[int]]) -> bytes | None:
    """Return the nodes in the place of a Scan, or None where it has to stay: how many steps it has
    is not known, or they are too many, or it is of a kind that bundles do not have.

    sizes: of the values of the graph around it, by name.
    """
    rows = scan.integer("num_scan_inputs", 0)
    states = len(scan.inputs) - rows
    axes = {*scan.integers("scan_input_axes", [0]), *scan.integers("scan_output_axes", [0])}
    directions = {
        *scan.integers("scan_input_directions", [0] * rows),
        *scan.integers("scan_output_directions", [0] * (len(scan.outputs) - states)),
    }
    body = _body_of(scan)
    steps = (sizes.get(scan.inputs[states]) or [0])[0] if rows else 0
    ranks = {body.ranks[name] for name in body.given}
    if (
        not 0 < steps * len(body.nodes) <= MOST_NODES
        or axes != {0}
        or len(directions) != 1
        or len(ranks) != 1  # what is moved must broadcast as it does in a step
        or 0 in ranks
        or any(each.operator.startswith(REWRITTEN) for each in body.nodes)
    ):
        return None
    times = range(steps)
    return b"".join(_Loop(scan, body, states).nodes(times[::-1] if directions == {1} else times))


def _body_of(scan: Node) -> _Body:
    graph = next(row.value for row in scan.attributes["body"] if row.number == 6)
    body = _Body([], [], [], {}, {})
    for row in fields(graph):
        if row.number == 1:
            body.nodes.append(Node(row))
        elif row.number == 5:
            name = next(part.value.decode() for part in fields(row.value) if part.number == 8)
            body.constants[name] = row.value
        elif row.number in (11, 12):
            name, sizes = described(row)
            (body.given if row.number == 11 else body.made).append(name)
            body.ranks[name] = len(sizes)
    return body


class _Loop:
    """A Scan, and the names in it."""

    def __init__(self, scan: Node, body: _Body, states: int) -> None:
        self.scan, self.body = scan, body
        self.prefix = f"{scan.outputs[0]}."
        self.first_axis = f"{self.prefix}first-axis"
        # Another name of a value is no operator.
        self.same = {
            each.outputs[0]: each.inputs[0] for each in body.nodes if each.operator == "Identity"
        }
        self.states, self.rows = body.given[:states], body.given[states:]
        made = [self.own(name) for name in body.made]
        self.next_states, self.outputs = made[:states], made[states:]
        self.order = self._order()

    def own(self, name: str) -> str:
        """Return a value's first name."""
        while name in self.same:
            name = self.same[name]
        return name

    def inputs(self, operation: Node) -> list[str]:
        return [self.own(name) for name in operation.inputs]

    def _order(self) -> _Order:
        nodes = [each for each in self.body.nodes if each.operator != "Identity"]
        before, known = list[Node](), {*self.rows}
        for each in nodes:
            values = {*self._values(each)}
            if values and values <= known and self._is_movable(each):
                before.append(each)
                known |= {*each.outputs}
        steps = {*self.states, *(name for each in nodes for name in each.outputs)}
        after, needed = list[Node](), {*self.next_states}
        within = list[Node]()
        for each in reversed([each for each in nodes if each not in before]):
            values = {*self._values(each)}
            # of the body, and no weight from outside
            inside = values <= steps | known and self._is_movable(each)
            if inside and needed.isdisjoint(each.outputs):
                after.append(each)
            else:
                within.append(each)
                needed |= values
        return _Order(before, within[::-1], after[::-1])

    def _is_movable(self, operation: Node) -> bool:
        return operation.operator in BY_ELEMENT | ALONG_AXIS

    def _values(self, operation: Node) -> list[str]:
        """Return the inputs that are no constants which fit one step and all steps alike: a number,
        or the sizes of a Split."""
        values = self.inputs(operation)
        sized = operation.operator == "Split"
        return [
            name
            for place, name in enumerate(values)
            if not (name in self.body.constants and ((sized and place) or self._is_number(name)))
        ]

    def _is_number(self, name: str) -> bool:
        return not [row for row in fields(self.body.constants[name]) if row.number == 1]

    def nodes(self, times: Sequence[int]) -> Iterator[bytes]:
        """Yield the nodes in the loop's place. ``times``: of the steps, in their order."""
        yield constant(self.first_axis, np.array([0], np.int64))
        constants = {name: f"{self.prefix}{name}" for name in self.body.constants}
        for name, content in self.body.constants.items():
            yield given(constants[name], content)
        # A value of all steps, by its name in the body.
        rows = zip(self.rows, self.scan.inputs[len(self.states) :], strict=True)
        whole = {**constants, **dict(rows)}
        yield from self._moved(self.order.before, whole)
        parts = dict[str, list[str]]()
        used = {name for each in self.order.within for name in self.inputs(each)}
        for name in (used | {*self.next_states}) & (whole.keys() - constants.keys()):
            parts[name] = [f"{self.prefix}{time}.{name}" for time in range(len(times))]
            yield from self._taken_apart(whole[name], parts[name])
        kept = {*self.outputs, *(name for each in self.order.after for name in self.inputs(each))}
        kept -= {name for each in self.order.after for name in each.outputs} | whole.keys()
        made = {name: [""] * len(times) for name in sorted(kept)}
        state = dict(zip(self.states, self.scan.inputs, strict=False))
        for time in times:
            now = constants | state | {name: row[time] for name, row in parts.items()}
            for each in self.order.within:
                now |= {name: f"{self.prefix}{time}.{name}" for name in each.outputs}
                inputs = [now.get(name, name) for name in self.inputs(each)]
                yield _renamed(each, inputs, [now[name] for name in each.outputs])
            for name, row in made.items():
                row[time] = now[name]
            follow = [now.get(name, name) for name in self.next_states]
            state = dict(zip(self.states, follow, strict=True))
        for name, row in made.items():
            whole[name] = f"{self.prefix}all.{name}"
            yield from self._put_together(row, whole[name])
        yield from self._moved(self.order.after, whole)
        last = [*state.values(), *(whole[name] for name in self.outputs)]
        for name, output in zip(last, self.scan.outputs, strict=True):
            yield node("Identity", [name], [output])

    def _moved(self, operations: Sequence[Node], whole: dict[str, str]) -> Iterator[bytes]:
        """Yield nodes for all steps at once, and note their outputs in ``whole``."""
        for each in operations:
            whole |= {name: f"{self.prefix}all.{name}" for name in each.outputs}
            inputs = [whole[name] for name in self.inputs(each)]
            yield _renamed(each, inputs, [whole[name] for name in each.outputs], later=True)

    def _taken_apart(self, value: str, parts: Sequence[str]) -> Iterator[bytes]:
        """Yield nodes that give each step's part of the values of all steps."""
        if len(parts) == 1:
            yield node("Squeeze", [value, self.first_axis], parts)
            return
        groups = _groups(parts)
        names = [f"{group[0]}.{len(parts)}" for group in groups]
        sizes = f"{parts[0]}.{len(parts)}.sizes"
        yield constant(sizes, np.array([*map(len, groups)], np.int64))
        yield node("Split", [value, sizes], names, integer("axis", 0))
        for group, name in zip(groups, names, strict=True):
            yield from self._taken_apart(name, group)

    def _put_together(self, parts: Sequence[str], value: str) -> Iterator[bytes]:
        """Yield nodes that give the values of all steps, with the steps as the first axis."""
        names = list[str]()
        if len(parts) == 1:
            yield node("Unsqueeze", [parts[0], self.first_axis], [value])
            return
        for number, group in enumerate(_groups(parts)):
            names.append(f"{value}.{number}")
            yield from self._put_together(group, names[-1])
        yield node("Concat", names, [value], integer("axis", 0))


def _groups(parts: Sequence[str]) -> list[Sequence[str]]:
    """Return the parts in at most WIDEST groups, in their order."""
    size = -(-len(parts) // WIDEST)
    return [parts[start : start + size] for start in range(0, len(parts), size)]


def _renamed(
    operation: Node, inputs: Sequence[str], outputs: Sequence[str], *, later: bool = False
) -> bytes:
    """Return a node with these inputs and outputs. ``later``: the steps are the first axis of its
    values."""
    attributes = {
        name: b"".join(row.whole for row in rows) for name, rows in operation.attributes.items()
    }
    if later and operation.operator in ALONG_AXIS and (axis := operation.integer("axis", 0)) >= 0:
        attributes["axis"] = integer("axis", axis + 1)
    return node(operation.operator, inputs, outputs, *attributes.values())
