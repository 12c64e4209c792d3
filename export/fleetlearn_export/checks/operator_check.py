"""Comparison of each operator of an emitted graph with PyTorch in float64, on the runtime's own inputs of the operator.

Errors do not add up on the way, so little is allowed, even where a whole gradient is percents off in float32. One run
of the graph has every traced tensor as a further output; the runtime's own fusions are switched off in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fleetlearn_export.checks.comparison import Array, open_session
from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from fleetlearn_export.emission.emit import Call, Emission
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import first_line, location_of_node, location_of_operator
from fleetlearn_export.model.steps import Tensors

RELATIVE = 1e-4
"""Largest difference that is allowed, relative to the result's largest element,"""
ROUNDING = 16
"""and, added to it, so many times the operator's own error: that of PyTorch in float32, or the effect of NOISE."""
NOISE = 1e-6
"""Relative noise on the operator's inputs. It tells how large the error is of a sum that is mathematically 0."""
SMALL = 0.01
"""Below this part of what is allowed for its size a difference is small, and the operator's own error is not asked."""
HUGE = 1e30
"""Larger elements, such as a mask's lowest number, are compared by their own size; they are no scale for others."""
MAX_BYTES = 2**28
"""How many bytes of values are taken from one run of the graph."""

aten = torch.ops.aten
UNINITIALISED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operators whose result may hold any number."""
POOLING = {aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default}
"""ONNX numbers the elements of the whole array, PyTorch those of one image's channel; and equal maxima may be picked
differently. So the values at the indices are compared."""
POOLING_BACKWARD = {aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default}


class OperatorsChecked(NamedTuple):
    """What ``check_operators`` found."""

    excess: float
    """The largest difference, in units of what is allowed for it."""
    operator: str
    """Where that was."""
    compared: int
    """Number of operators that were compared."""
    skipped: dict[str, str]
    """Operator that was not compared -> why."""

    def described(self) -> str:
        """Return a line for the user."""
        skipped = "".join(f"; {name} not: {reason}" for name, reason in self.skipped.items())
        return f"{self.compared} operators compared, the worst at {self.excess:.2g} of what is allowed{skipped}"


def check_operators(
    module: fx.GraphModule, emission: Emission, given: Tensors, located: fx.Graph | None = None
) -> OperatorsChecked:
    """Compare each operator, with the graph's inputs ``given``.

    module: the traced graph that was emitted. located: a graph of the user's loss, for the lines of the user's code of
    operators of the backward pass. Raises ExportError; the text names the operator with the largest excess.
    """
    numbers = _Numbers(module, emission, given)
    found: list[tuple[float, str, Call]] = []
    skipped: dict[str, str] = {}
    for calls, values in _values_by_part(emission, given, numbers):
        for call in calls:
            target = call.node.target
            if target in UNINITIALISED:
                skipped[str(target)] = "its result is uninitialised"
                continue
            try:
                found.append((*_largest_excess(call, emission, values, numbers), call))
            except _IncomparableError as reason:
                skipped[str(target)] = str(reason)
    # NaN is neither above nor below: `not value <= 1` finds it too.
    bad = [row for row in found if not row[0] <= 1]
    if bad:
        excess, text, call = max(bad, key=lambda row: np.nan_to_num(row[0], nan=np.inf))
        place = location_of_node(call.node) or (location_of_operator(str(call.node.target), located) if located else "")
        raise ExportError(
            f"operator {call.node.target} ({call.node.name}){place} was exported as something else: {text}, "
            f"{excess:.3g} times what is allowed (and {len(bad) - 1} more operators)"
        )
    excess, _, call = max(found, key=lambda row: row[0])
    return OperatorsChecked(excess, f"{call.node.target} ({call.node.name})", len(found), skipped)


class _IncomparableError(Exception):
    """PyTorch cannot compute the operator by itself. The text says why."""


class _Numbers:
    """Sizes and numbers of the traced graph, for the number of examples in ``given``."""

    def __init__(self, module: fx.GraphModule, emission: Emission, given: Tensors) -> None:
        self._sizes: dict[Any, int] = {}
        self._known: dict[Any, Any] = {}
        for node in module.graph.find_nodes(op="placeholder"):
            traced = node.meta["val"]
            for size, real in zip(traced.shape, given[emission.values[node]].shape, strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._sizes[size.node.expr] = real

    def value(self, traced: Any) -> Any:
        """Return a traced size or number as Python's."""
        if not isinstance(traced, torch.SymInt | torch.SymFloat | torch.SymBool):
            return traced
        expression = traced.node.expr
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(traced)]
        if (kind, expression) not in self._known:
            self._known[kind, expression] = kind(expression.subs(self._sizes))
        return self._known[kind, expression]

    def bytes_of(self, traced: Tensor) -> int:
        count = traced.element_size()
        for size in traced.shape:
            count *= self.value(size)
        return count


def _values_by_part(
    emission: Emission, given: Tensors, numbers: _Numbers
) -> Iterator[tuple[list[Call], Mapping[str, Array]]]:
    """Yield calls, one after the other, with the values that the runtime has for them."""
    graph = emission.model.graph
    known = {name: value.numpy() for name, value in given.items()}
    known |= {row.name: numpy_helper.to_array(row) for row in graph.initializer}
    part: list[Call] = []
    names: dict[str, None] = {}
    room = MAX_BYTES
    for call in emission.calls:
        wanted = {
            name: node.meta["val"]
            for node in call.node.all_input_nodes
            if (name := emission.values.get(node)) is not None and name not in known
        }
        made = call.node.meta["val"]
        made = made if isinstance(made, list | tuple) else [made]
        wanted |= {name: row for name, row in zip(call.results, made, strict=False) if name and name not in known}
        needed = sum(numbers.bytes_of(row) for name, row in wanted.items() if name not in names)
        if part and needed > room:
            yield part, {**known, **_run(emission.model, list(names), given)}
            part, names, room = [], {}, MAX_BYTES
            needed = sum(map(numbers.bytes_of, wanted.values()))
        part.append(call)
        names |= dict.fromkeys(wanted)
        room -= needed
    if part:
        yield part, {**known, **_run(emission.model, list(names), given)}


def _run(model: onnx.ModelProto, names: list[str], given: Tensors) -> dict[str, Array]:
    """Run the graph, as it is written, with these values as its outputs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.output[:]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_session(changed.SerializeToString(), optimized=False)
    return session.run({name: value.numpy() for name, value in given.items()})


def _largest_excess(
    call: Call, emission: Emission, values: Mapping[str, Array], numbers: _Numbers
) -> tuple[float, str]:
    """Return the call's largest difference from PyTorch, in units of what is allowed, and a text that describes it."""
    node = call.node

    def argument(row: Any) -> Any:
        if not isinstance(row, fx.Node):
            return numbers.value(row)
        traced = row.meta["val"]
        if not isinstance(traced, Tensor):
            return numbers.value(traced)
        return torch.from_numpy(np.array(values[emission.values[row]]))

    args, kwargs = pytree.tree_map(argument, (node.args, node.kwargs), is_leaf=lambda row: isinstance(row, fx.Node))
    if node.target in POOLING_BACKWARD:
        args = (*args[:-1], _in_one_image(args[-1], args[1], _pooled_axes(node.target)))
    computation = _Computation(node.target, args, kwargs)
    worst, text = 0.0, "the same"
    for place, (name, own) in enumerate(zip(call.results, computation.own(), strict=False)):
        if name is None or not isinstance(own, Tensor):
            continue
        got = torch.from_numpy(np.array(values[name]))
        what = f"result {place}, {str(own.dtype).removeprefix('torch.')} {tuple(own.shape)}," if place else "its result"
        if got.shape != own.shape or got.dtype != own.dtype:
            return np.inf, f"{what} is {got.dtype} of shape {tuple(got.shape)} in place of {own.dtype} {own.shape}"
        if node.target in POOLING and place:
            axes = _pooled_axes(node.target)
            got, own = (_at_indices(args[0], indices, axes) for indices in (_in_one_image(got, args[0], axes), own))
        if not computation.own()[place].is_floating_point():
            excess, difference = (0.0, 0.0) if torch.equal(got, own) else (np.inf, float((got != own).sum()))
            text_now = f"{what} has {difference:.0f} other elements"
        else:
            excess, difference = _excess(got, own, place, computation)
            text_now = f"{what} differs by {difference:.3g}"
        if not excess <= worst:
            worst, text = excess, text_now
    return worst, text


class _Computation:
    """An operator with its inputs, in PyTorch."""

    def __init__(self, operator: Any, args: Any, kwargs: Any) -> None:
        self._operator, self._args, self._kwargs = operator, args, kwargs
        self._own: list[Any] | None = None
        self._precise: list[Any] | None = None
        self._noisy: list[Any] | None = None

    def own(self) -> list[Any]:
        """Return the results as PyTorch computes them, in float32."""
        if self._own is None:
            try:
                self._own = self._run(self._args, self._kwargs)
            except Exception as error:
                raise _IncomparableError(f"PyTorch cannot compute it by itself ({first_line(error)})") from error
        return self._own

    def precise(self) -> list[Any]:
        """Return the results in float64."""
        if self._precise is None:
            self._precise = self._in_double(self._args)
        return self._precise

    def noisy(self) -> list[Any]:
        """Return the results in float64 of inputs with noise."""
        if self._noisy is None:
            random = torch.Generator().manual_seed(0)

            def noisy(value: Any) -> Any:
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    return value
                return value * (1 + NOISE * torch.randn(value.shape, generator=random, dtype=torch.float64))

            self._noisy = self._in_double(pytree.tree_map(noisy, as_double(self._args)))
        return self._noisy

    def _in_double(self, args: Any) -> list[Any]:
        try:
            with DoublePrecision():
                return self._run(as_double(args), as_double(self._kwargs))
        except Exception as error:
            raise _IncomparableError(f"PyTorch cannot compute it in float64 ({first_line(error)})") from error

    def _run(self, args: Any, kwargs: Any) -> list[Any]:
        with torch.no_grad():
            results = self._operator(*args, **kwargs)
        return list(results) if isinstance(results, list | tuple) else [results]


def _excess(got: Tensor, own: Tensor, place: int, computation: _Computation) -> tuple[float, float]:
    """Return the largest difference in units of what is allowed, and the difference."""
    if not got.numel():
        return 0.0, 0.0
    precise = computation.precise()[place]
    scale, difference = _largest(precise), _largest(precise - got)
    if difference <= SMALL * RELATIVE * scale < HUGE:
        return difference / (RELATIVE * scale + 1e-38), difference
    # Where float32 overflows, infinity is right.
    precise = torch.where(own.isfinite(), precise, own)
    size = precise.abs()
    scale = float(size[size < HUGE].max()) if bool((size < HUGE).any()) else HUGE
    difference = _difference(got, precise, scale)
    rounding = (_difference(row, precise, scale) for row in (own, computation.noisy()[place]))
    allowed = RELATIVE * scale + ROUNDING * max(filter(np.isfinite, rounding), default=0.0) + 1e-38
    return difference / allowed, difference


def _largest(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, torch.inf))


def _difference(one: Tensor, precise: Tensor, scale: float) -> float:
    """Return the largest difference from ``precise``. Differences of huge elements count in proportion."""
    found = (one - precise).abs() * (scale / precise.abs()).clamp(max=1.0).nan_to_num(1.0)
    return float(torch.where((one == precise) | (one.isnan() & precise.isnan()), 0.0, found).max())


def _pooled_axes(operator: Any) -> int:
    return 3 if "3d" in str(operator) else 2


def _in_one_image(indices: Tensor, x: Tensor, axes: int) -> Tensor:
    """Return indices of max-pooling in PyTorch's numbering."""
    return indices % int(np.prod(x.shape[-axes:]))


def _at_indices(x: Tensor, indices: Tensor, axes: int) -> Tensor:
    """Return the elements of images at pooling's indices."""
    return x.flatten(-axes).gather(-1, indices.flatten(-axes))
