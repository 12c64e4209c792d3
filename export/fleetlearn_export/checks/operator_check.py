"""Comparison of each operator of an emitted graph with PyTorch in float64, on the runtime's own
inputs of the operator.

Errors do not add up on the way, so little is allowed, even where a whole gradient is percents off
in float32. The runtime gives every traced tensor as an output; its own fusions are switched off for
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fleetlearn_export.checks.comparison import in_blocks, largest, largest_difference, nudged
from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from fleetlearn_export.checks.runtime_values import Numbers, arguments, values_by_part
from fleetlearn_export.emission.emit import Call, Emission
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import (
    first_line,
    location_of_node,
    location_of_operator,
)
from fleetlearn_export.model.steps import Tensors

RELATIVE = 1e-4
"""Difference that is always allowed, relative to the result's largest element."""
TIMES_OWN_ERROR = 16
"""The operator's own error times this is allowed in addition. Its own error is PyTorch's error in
float32, or the effect of nudged inputs: they show how large the error of a sum is that is
mathematically 0."""
SMALL = 0.1
"""A difference below this part of what RELATIVE allows is small. It passes without float64 and
without the operator's own error, which would only allow more."""
HUGE = 1e30
"""Larger elements, such as a mask's lowest number, are compared by their own size; they are no
scale for others."""
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
POOLING = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
"""Poolings, with the number of an image's axes. ONNX numbers the elements of the whole array,
PyTorch those of one image's channel; and equal maxima may be picked differently. So the values at
the indices are compared."""
ORDERING = {aten.sort.default: 1, aten.sort.stable: 1, aten.topk.default: 2}
"""Operators that return sorted elements with their indices, and the place of the axis among the
arguments. PyTorch may put equal elements in any order, so the values at the indices, the second
result, are compared."""
POOLING_BACKWARD = {
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
}


class Compared(NamedTuple):
    """An operator of the graph, compared with PyTorch."""

    call: Call
    excess: float
    """The largest difference, in units of what is allowed for it."""
    text: str
    """What that difference is."""

    def name(self) -> str:
        return f"{self.call.node.target} ({self.call.node.name})"


class OperatorsChecked(NamedTuple):
    """What ``check_operators`` found."""

    worst: Compared
    compared: int
    """Number of operators that were compared."""
    skipped: Mapping[str, str]
    """Operator that was not compared -> why."""

    def described(self) -> str:
        """Return a line for the user."""
        skipped = "".join(
            f"; {name} was not compared: {reason}" for name, reason in self.skipped.items()
        )
        worst = f"the worst, {self.worst.name()}, at {self.worst.excess:.2g} of what is allowed"
        return f"{self.compared} operators compared with PyTorch, {worst}{skipped}"


def check_operators(
    module: fx.GraphModule,
    emission: Emission,
    inputs: Tensors,
    located: Callable[[], fx.Graph] | None = None,
    *,
    of_the_batch: bool = False,
) -> OperatorsChecked:
    """Compare each operator, with the graph's ``inputs``.

    module: the traced graph that was emitted. located: returns a graph of the user's loss, for the
    lines of the user's code of operators of the backward pass. of_the_batch: whether only operators
    are compared that have other arguments with another batch. Raises ExportError; the text names
    the operator with the largest excess.
    """
    compared, skipped = compare_operators(module, emission, inputs, of_the_batch=of_the_batch)
    worst = max(compared, key=lambda row: row.excess)
    bad = [operator for operator in compared if operator.excess > 1]
    if bad:
        node = worst.call.node
        where = location_of_node(node) or (
            location_of_operator(str(node.target), located()) if located else ""
        )
        raise ExportError(
            f"operator {worst.name()}{where} was exported as something else: {worst.text}, "
            f"{worst.excess:.3g} times what is allowed (and {len(bad) - 1} more operators)"
        )
    return OperatorsChecked(worst, len(compared), skipped)


def compare_operators(
    module: fx.GraphModule, emission: Emission, inputs: Tensors, *, of_the_batch: bool = False
) -> tuple[list[Compared], dict[str, str]]:
    """Return all operators that were compared, and those that were not with the reason.

    of_the_batch: as for ``check_operators``. Raises ExportError if the runtime cannot run the
    graph; the text names the operator.
    """
    left_out = _of_parameters_alone(module, emission) if of_the_batch else set()
    numbers = Numbers(module, emission, inputs)
    compared: list[Compared] = []
    skipped: dict[str, str] = {}
    for calls, values in values_by_part(module, emission, inputs, numbers):
        for call in calls:
            if call.node in left_out:
                continue
            try:
                compared.append(_compared(call, emission, values, numbers))
            except _IncomparableError as reason:
                skipped[str(call.node.target)] = str(reason)
    return compared, skipped


def _of_parameters_alone(module: fx.GraphModule, emission: Emission) -> set[fx.Node]:
    """Return the nodes that read neither the batch nor the seed, such as a weight's transpose."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        of_the_data = node.op == "placeholder" and emission.values[node].startswith(
            ("batch.", "seed")
        )
        if not of_the_data and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


class _IncomparableError(Exception):
    """The operator cannot be compared with PyTorch. The text says why."""


def _compared(
    call: Call, emission: Emission, values: Mapping[str, Tensor], numbers: Numbers
) -> Compared:
    """Compare the call's results with PyTorch's. Raises _IncomparableError."""
    node = call.node
    if node.target in UNINITIALISED:
        raise _IncomparableError("its result is uninitialised")
    args, kwargs = arguments(call, emission, values, numbers)
    if node.target in POOLING:
        axes = POOLING[node.target]
        count = prod(args[0].shape[-axes:])
    if node.target in POOLING_BACKWARD:
        args = (*args[:-1], args[-1] % prod(args[1].shape[-POOLING_BACKWARD[node.target] :]))
    if node.target is aten.topk.default:
        # The graph's are sorted. PyTorch's are in any order if the model does not ask for more.
        args, kwargs = args[:4], {name: value for name, value in kwargs.items() if name != "sorted"}
    computation = _Computation(node.target, args, kwargs)
    worst, text = 0.0, "the same"
    for index, (name, own) in enumerate(zip(call.results, computation.own(), strict=False)):
        if name is None or not isinstance(own, Tensor):
            continue
        got = values[name]
        what = f"result {index} of shape {tuple(own.shape)}"
        if got.shape != own.shape or got.dtype != own.dtype:
            return Compared(
                call, np.inf, f"{what} and {own.dtype} has shape {tuple(got.shape)} and {got.dtype}"
            )
        if own.is_floating_point():
            excess, difference = _excess(got, own, index, computation)
            now = f"{what} differs by {difference:.3g}"
        else:
            if node.target in POOLING:
                got, own = (_at_indices(args[0], side % count, axes) for side in (got, own))
            if node.target in ORDERING and index == 1:
                place_of_axis = ORDERING[node.target]
                axis = args[place_of_axis] if len(args) > place_of_axis else kwargs.get("dim", -1)
                got, own = (args[0].gather(axis, side) for side in (got, own))
            different = int((got != own).sum())
            excess, now = np.inf if different else 0.0, f"{what} has {different} other elements"
        if excess > worst:
            worst, text = excess, now
    return Compared(call, worst, text)


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
                raise _IncomparableError(
                    f"PyTorch cannot compute it by itself ({first_line(error)})"
                ) from error
        return self._own

    def precise(self) -> list[Any]:
        """Return the results in float64."""
        if self._precise is None:
            self._precise = self._in_double(self._args)
        return self._precise

    def noisy(self) -> list[Any]:
        """Return the results in float64 of nudged inputs."""
        if self._noisy is None:
            random = torch.Generator().manual_seed(0)

            def noisy(value: Any) -> Any:
                floating = isinstance(value, Tensor) and value.is_floating_point()
                return nudged(value, random) if floating else value

            self._noisy = self._in_double(pytree.tree_map(noisy, as_double(self._args)))
        return self._noisy

    def _in_double(self, args: Any) -> list[Any]:
        try:
            with DoublePrecision():
                return self._run(as_double(args), as_double(self._kwargs))
        except Exception as error:
            raise _IncomparableError(
                f"PyTorch cannot compute it in float64 ({first_line(error)})"
            ) from error

    def _run(self, args: Any, kwargs: Any) -> list[Any]:
        with torch.no_grad():
            results = self._operator(*args, **kwargs)
        return list(results) if isinstance(results, list | tuple) else [results]


def _excess(got: Tensor, own: Tensor, place: int, computation: _Computation) -> tuple[float, float]:
    """Return the largest difference in units of what is allowed, and the difference."""
    if torch.equal(got, own):  # what PyTorch computes itself needs no float64 to be right
        return 0.0, 0.0
    # What hardly differs from PyTorch's own result needs none either.
    scale, difference = largest(own), largest_difference(own, got)
    if difference <= SMALL * RELATIVE * scale < HUGE:
        return difference / (RELATIVE * scale + 1e-38), difference
    precise = computation.precise()[place]
    scale, difference = largest(precise), largest_difference(precise, got)
    if difference <= SMALL * RELATIVE * scale < HUGE:
        return difference / (RELATIVE * scale + 1e-38), difference
    noisy = computation.noisy()[place]
    scale = _scale(own, precise)
    differences = [
        [_difference(value, exact, scale) for value in (first, second, third)]
        for first, second, third, exact in _with_infinities(got, own, noisy, precise)
    ]
    difference, *rounding = np.max(differences, axis=0)
    allowed = (
        RELATIVE * scale + TIMES_OWN_ERROR * max(filter(np.isfinite, rounding), default=0.0) + 1e-38
    )
    return float(np.nan_to_num(difference / allowed, nan=np.inf)), float(difference)


def _with_infinities(
    got: Tensor, own: Tensor, noisy: Tensor, precise: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of the tensors. Where float32 overflows, infinity is right."""
    for first, second, third, exact in in_blocks(got, own, noisy, precise):
        yield first, second, third, torch.where(second.isfinite(), exact, second)


def _scale(own: Tensor, precise: Tensor) -> float:
    """Return the largest element that is not huge; HUGE if all are."""
    sizes = (
        torch.where(one.isfinite(), exact, one).abs() for one, exact in in_blocks(own, precise)
    )
    return max(
        (float(size[size < HUGE].max()) for size in sizes if bool((size < HUGE).any())),
        default=HUGE,
    )


def _difference(one: Tensor, precise: Tensor, scale: float) -> float:
    """Return the largest difference from ``precise``. Differences of huge elements count in
    proportion."""
    found = (one - precise).abs() * (scale / precise.abs()).clamp(max=1.0).nan_to_num(1.0)
    return float(torch.where((one == precise) | (one.isnan() & precise.isnan()), 0.0, found).max())


def _at_indices(x: Tensor, indices: Tensor, axes: int) -> Tensor:
    """Return the elements of images at pooling's indices."""
    return x.flatten(-axes).gather(-1, indices.flatten(-axes))
