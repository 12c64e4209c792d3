"""Replaces complex numbers in a traced graph by pairs of real ones, and Fourier transforms by
products with matrices.

A discrete Fourier transform of a fixed length is linear: a product with a constant matrix of
cosines and one of sines. For the lengths of spectrograms, some hundreds, that is a small part of
what the network behind it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from fleetlearn_export.emission.emitter import EmissionError, fixed_size

aten = torch.ops.aten
BY_ROOT, BY_COUNT = 1, 2
"""PyTorch's numbers for the divisors of a transform: the root of the number of elements, or that
number; 0 is none."""
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Pair(NamedTuple):
    """A complex tensor of the traced graph, in the new one."""

    real: fx.Node
    imaginary: fx.Node | None
    """None if all of them are 0."""


def without_complex_numbers(module: fx.GraphModule) -> fx.GraphModule:
    """Return the traced graph, which writes into no tensor, without complex tensors.

    Raises EmissionError for an operator that is not in OPERATORS, and for a transform along the
    axis of the examples.
    """
    if not any(_is_complex(node.meta.get("val")) for node in module.graph.nodes):
        return module
    module.graph.eliminate_dead_code()
    writer = Writer(module)
    with enable_python_dispatcher():  # without it padding fixes the number of examples
        for node in module.graph.nodes:
            writer.add(node)
    return fx.GraphModule(module, writer.graph)


class Writer:
    """The new graph, and what the traced graph's nodes are in it."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = fx.Graph()
        self._module = module
        self._now: dict[fx.Node, fx.Node | Pair] = {}
        self._matrices: dict[str, fx.Node] = {}
        self._source: fx.Node

    def add(self, node: fx.Node) -> None:
        self._source = node
        results = node.meta.get("val")
        if not _is_complex(results) and not any(
            isinstance(self._now[source], Pair) for source in node.all_input_nodes
        ):
            self._now[node] = self.graph.node_copy(node, lambda row: self._now[row])
            return
        operator: Any = node.target
        function = OPERATORS.get(operator)
        if function is None or node.op != "call_function":
            raise EmissionError(f"operator {operator} with complex numbers")
        args, kwargs = pytree.tree_map(
            lambda row: self._now[row] if isinstance(row, fx.Node) else row,
            (node.args, node.kwargs),
            is_leaf=lambda row: isinstance(row, fx.Node),
        )
        self._now[node] = function(self, *args, **kwargs)

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node for an operator on real tensors."""
        node = self.graph.call_function(operator, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda row: row.meta["val"])
        node.meta = {
            key: value
            for key, value in self._source.meta.items()
            if key in ("stack_trace", "nn_module_stack")
        }
        node.meta["val"] = operator(*values[0], **values[1])
        return node

    def product(self, x: fx.Node, axis: int, name: str, matrix: Callable[[], Tensor]) -> fx.Node:
        """Return the product of ``x``, along an axis, with a constant matrix (size of the axis, new
        size)."""
        if name not in self._matrices:
            # In float64, and rounded once: who computes with it in float64, as the check does, gets
            # it exactly.
            self._module.register_buffer(name, matrix())
            constant = self.graph.get_attr(name)
            shape = getattr(self._module, name).shape
            constant.meta["val"] = x.meta["val"].new_empty(shape, dtype=torch.float64)
            self._matrices[name] = self.call(
                aten._to_copy.default, constant, dtype=x.meta["val"].dtype
            )
        last = x.meta["val"].dim() - 1
        moved = x if axis == last else self.call(aten.transpose.int, x, axis, last)
        *sizes, size = moved.meta["val"].shape
        found = self.call(
            aten.mm.default,
            self.call(aten.reshape.default, moved, [-1, size]),
            self._matrices[name],
        )
        sizes = [fixed_size(size) for size in sizes]
        free = [index for index, size in enumerate(sizes) if not isinstance(size, int)]
        if len(free) > 1:
            raise EmissionError(
                "a Fourier transform of a tensor with several sizes that depend on the examples"
            )
        shape = [-1 if index in free else size for index, size in enumerate(sizes)]
        found = self.call(aten.reshape.default, found, [*shape, found.meta["val"].shape[1]])
        return found if axis == last else self.call(aten.transpose.int, found, axis, last)


def _is_complex(results: Any) -> bool:
    return any(
        isinstance(leaf, Tensor) and leaf.is_complex() for leaf in pytree.tree_leaves(results)
    )


def _pair(write: Writer, x: Pair | fx.Node) -> Pair:
    return x if isinstance(x, Pair) else Pair(x, None)


def _imaginary(write: Writer, x: Pair) -> fx.Node:
    return x.imaginary or write.call(aten.zeros_like.default, x.real)


def _sum(write: Writer, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
    return write.call(aten.add.Tensor, a, b) if a and b else a or b


def _difference(write: Writer, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
    if b is None:
        return a
    return write.call(aten.sub.Tensor, a, b) if a else write.call(aten.neg.default, b)


def _each(operator: Any, write: Writer, *args: Any, **kwargs: Any) -> Pair:
    """Write an operator that does the same to real and imaginary parts."""
    if kwargs.get("dtype") in REAL:
        kwargs["dtype"] = REAL[kwargs["dtype"]]
    pairs = [
        leaf for leaf in pytree.tree_leaves(args, is_leaf=_is_argument) if isinstance(leaf, Pair)
    ]
    real = pytree.tree_map(
        lambda row: row.real if isinstance(row, Pair) else row, args, is_leaf=_is_argument
    )
    if not any(pair.imaginary for pair in pairs):
        return Pair(write.call(operator, *real, **kwargs), None)
    # Beside a complex tensor a real one stands for itself in the real part alone; indices are
    # neither.
    imaginary = pytree.tree_map(lambda row: _other_part(write, row), args, is_leaf=_is_argument)
    return Pair(write.call(operator, *real, **kwargs), write.call(operator, *imaginary, **kwargs))


def _is_argument(row: Any) -> bool:
    return isinstance(row, Pair | fx.Node)


def _other_part(write: Writer, row: Any) -> Any:
    if isinstance(row, Pair):
        return _imaginary(write, row)
    floating = (
        isinstance(row, fx.Node)
        and isinstance(row.meta["val"], Tensor)
        and row.meta["val"].is_floating_point()
    )
    return write.call(aten.zeros_like.default, row) if floating else row


def _added(operator: Any, write: Writer, a: Any, b: Any, alpha: Any = 1) -> Pair:
    if isinstance(a, int | float | complex) or isinstance(b, int | float | complex) or alpha != 1:
        raise EmissionError("a number that is added to complex numbers")
    return _each(operator, write, _pair(write, a), _pair(write, b))


def _multiplied(operator: Any, write: Writer, a: Any, b: Any) -> Pair:
    """Write a product: of elements or of matrices."""

    def part(one: Any, other: Any) -> fx.Node | None:
        return None if one is None or other is None else write.call(operator, one, other)

    (a_real, a_imaginary), (b_real, b_imaginary) = map(_parts, (a, b))
    real = _difference(write, part(a_real, b_real), part(a_imaginary, b_imaginary))
    imaginary = _sum(write, part(a_real, b_imaginary), part(a_imaginary, b_real))
    if real is None:
        assert imaginary is not None
        real = write.call(aten.zeros_like.default, imaginary)
    return Pair(real, imaginary)


def _parts(x: Any) -> tuple[Any, Any]:
    """Return real and imaginary part of a factor, None in place of 0."""
    if isinstance(x, complex):
        return x.real or None, x.imag or None
    return x if isinstance(x, Pair) else (x, None)


def _divided(operator: Any, write: Writer, a: Any, b: Any) -> Pair:
    if isinstance(b, Pair):
        a, b = _multiplied(aten.mul.Tensor, write, a, _conjugated(write, b)), _square(write, b)
        operator = aten.div.Tensor
    return Pair(
        write.call(operator, a.real, b), a.imaginary and write.call(operator, a.imaginary, b)
    )


def _conjugated(write: Writer, x: Pair) -> Pair:
    return Pair(x.real, x.imaginary and write.call(aten.neg.default, x.imaginary))


def _square(write: Writer, x: Pair) -> fx.Node:
    found = _sum(write, *(row and write.call(aten.mul.Tensor, row, row) for row in x))
    assert found is not None
    return found


def _size(write: Writer, x: Pair) -> fx.Node:
    return write.call(aten.sqrt.default, _square(write, x))


def _sign(write: Writer, x: Pair) -> Pair:
    """Write x / |x|, and 0 for 0: what the gradient of a size is multiplied with."""
    size = _size(write, x)
    nothing = write.call(aten.eq.Scalar, size, 0)
    divisor = write.call(aten.masked_fill.Scalar, size, nothing, 1)
    return _divided(aten.div.Tensor, write, x, divisor)


def _converted(
    write: Writer, x: Pair | fx.Node, dtype: torch.dtype | None = None, **options: Any
) -> Pair | fx.Node:
    x = _pair(write, x)
    if dtype is None or dtype in REAL:
        return _each(
            aten._to_copy.default, write, x, dtype=REAL.get(dtype) if dtype else None, **options
        )
    return write.call(aten._to_copy.default, x.real, dtype=dtype, **options)


def _as_real(write: Writer, x: Pair) -> fx.Node:
    return write.call(aten.stack.default, [x.real, _imaginary(write, x)], -1)


def _as_complex(write: Writer, x: fx.Node) -> Pair:
    real, imaginary = (write.call(aten.select.int, x, -1, part) for part in (0, 1))
    return Pair(real, imaginary)


def _polar(write: Writer, size: fx.Node, angle: fx.Node) -> Pair:
    real, imaginary = (
        write.call(aten.mul.Tensor, size, write.call(row, angle))
        for row in (aten.cos.default, aten.sin.default)
    )
    return Pair(real, imaginary)


def _axis_size(write: Writer, x: Pair, axis: int) -> fx.Node:
    return write.call(aten.sym_size.int, x.real, axis)


def _angle(write: Writer, x: Pair) -> fx.Node:
    return write.call(aten.atan2.default, _imaginary(write, x), x.real)


class _Lengths(NamedTuple):
    """The axes of a transform, and their lengths."""

    axes: list[int]
    sizes: list[int]

    def scale(self, normalization: int) -> float:
        return float(
            {BY_ROOT: prod(self.sizes) ** -0.5, BY_COUNT: 1 / prod(self.sizes)}.get(
                normalization, 1.0
            )
        )


def _lengths(x: fx.Node, axes: Sequence[int], last: Any = None) -> _Lengths:
    shape = x.meta["val"].shape
    axes = [axis % len(shape) for axis in axes]
    sizes = [fixed_size(shape[axis]) for axis in axes]
    sizes[-1:] = [fixed_size(last)] if last is not None else sizes[-1:]
    if not all(isinstance(size, int) for size in sizes):
        raise EmissionError("a Fourier transform along the axis of the examples")
    return _Lengths(axes, [int(size) for size in sizes])


def _waves(
    function: Callable[[Tensor], Tensor], rows: int, columns: int, length: int, scale: float
) -> Tensor:
    """Return scale * function(2 pi row column / length), float64 (rows, columns)."""
    turns = torch.arange(rows).unsqueeze(1) * torch.arange(columns) % length
    return scale * function(turns.to(torch.float64) * (2 * torch.pi / length))


def _wave(
    write: Writer, x: fx.Node | None, axis: int, kind: str, columns: int, length: int, scale: float
) -> fx.Node | None:
    """Return the sums of ``x`` times cosines, or sines, along an axis; ``columns`` of them."""
    if x is None:
        return None
    rows = int(x.meta["val"].shape[axis])
    matrix = partial(_waves, getattr(torch, kind), rows, columns, length, scale)
    name = (
        f"{kind}_{rows}_{columns}_{length}_{scale.hex()}".replace(".", "_")
        .replace("-", "_")
        .replace("+", "")
    )
    return write.product(x, axis, name, matrix)


def _turned(write: Writer, x: Pair, axis: int, length: int, scale: float, forward: bool) -> Pair:
    """Write a transform along one axis: the sums of x[j] exp(-+ 2 pi i j k / length)."""
    cosines, sines = (
        [_wave(write, row, axis, kind, length, length, scale) for row in x]
        for kind in ("cos", "sin")
    )
    plus, minus = (_sum, _difference) if forward else (_difference, _sum)
    real = plus(write, cosines[0], sines[1])
    assert real is not None
    return Pair(real, minus(write, cosines[1], sines[0]))


def _fft_complex(
    write: Writer, x: Pair, dim: Sequence[int], normalization: int, forward: bool
) -> Pair:
    found = _lengths(x.real, dim)
    scales = [found.scale(normalization), *[1.0] * (len(found.axes) - 1)]
    for axis, size, scale in zip(found.axes[::-1], found.sizes[::-1], scales, strict=True):
        x = _turned(write, x, axis, size, scale, forward)
    return x


def _fft_of_real(
    write: Writer, x: fx.Node, dim: Sequence[int], normalization: int, onesided: bool
) -> Pair:
    lengths = _lengths(x, dim)
    axis, size, scale = lengths.axes[-1], lengths.sizes[-1], lengths.scale(normalization)
    count = size // 2 + 1 if onesided else size
    real, sine = (_wave(write, x, axis, kind, count, size, scale) for kind in ("cos", "sin"))
    assert real is not None
    result = Pair(real, _difference(write, None, sine))
    return (
        _fft_complex(write, result, lengths.axes[:-1], 0, True) if len(lengths.axes) > 1 else result
    )


def _fft_to_real(
    write: Writer, x: Pair, dim: Sequence[int], normalization: int, last_dim_size: Any
) -> fx.Node:
    """Write the inverse of ``_fft_of_real``: all but the first and, of an even number, the last
    element count twice."""
    lengths = _lengths(x.real, dim, last_dim_size)
    axis, size, scale = lengths.axes[-1], lengths.sizes[-1], lengths.scale(normalization)
    if len(lengths.axes) > 1:
        x = _fft_complex(write, x, lengths.axes[:-1], 0, False)
    count = size // 2 + 1
    if x.real.meta["val"].shape[axis] != count:
        x = _each(aten.slice.Tensor, write, x, axis, 0, count)
    parts = []
    for kind, row in zip(("cos", "sin"), x, strict=True):

        def matrix(kind: str = kind) -> Tensor:
            twice = torch.full((count, 1), 2.0, dtype=torch.float64)
            twice[0] = 1
            twice[-1] = 1 if size % 2 == 0 else twice[-1]
            return twice * _waves(getattr(torch, kind), count, size, size, scale)

        name = (
            f"{kind}_back_{size}_{scale.hex()}".replace(".", "_").replace("-", "_").replace("+", "")
        )
        parts.append(row and write.product(row, axis, name, matrix))
    result = _difference(write, *parts)
    assert result is not None
    return result


EACH = (
    aten.alias.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
    aten.detach.default,
    aten.expand.default,
    aten.flip.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.mean.dim,
    aten.neg.default,
    aten.new_zeros.default,
    aten.permute.default,
    aten.reshape.default,
    aten.reshape_as.default,
    aten.roll.default,
    aten.select.int,
    aten.select_backward.default,
    aten.select_scatter.default,
    aten.slice.Tensor,
    aten.slice_backward.default,
    aten.slice_scatter.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.stack.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten._unsafe_view.default,
    aten.view.default,
    aten.zeros.default,
    aten.zeros_like.default,
    getitem,
)
"""Operators that do the same to real and imaginary parts."""

OPERATORS: dict[Any, Callable[..., Pair | fx.Node]] = {
    **{operator: partial(_each, operator) for operator in EACH},
    **{operator: partial(_added, operator) for operator in (aten.add.Tensor, aten.sub.Tensor)},
    **{
        operator: partial(_multiplied, operator)
        for operator in (aten.mul.Tensor, aten.mul.Scalar, aten.mm.default, aten.bmm.default)
    },
    **{operator: partial(_divided, operator) for operator in (aten.div.Tensor, aten.div.Scalar)},
    aten._conj.default: _conjugated,
    aten._conj_physical.default: _conjugated,
    aten.conj_physical.default: _conjugated,
    aten._to_copy.default: _converted,
    aten.abs.default: _size,
    aten.angle.default: _angle,
    aten.complex.default: lambda write, real, imaginary: Pair(real, imaginary),
    aten.polar.default: _polar,
    aten.sgn.default: _sign,
    aten.sym_size.int: _axis_size,
    aten.view_as_complex.default: _as_complex,
    aten.view_as_real.default: _as_real,
    aten._fft_c2c.default: _fft_complex,
    aten._fft_c2r.default: _fft_to_real,
    aten._fft_r2c.default: _fft_of_real,
}
"""Operator -> function of the Writer and the operator's arguments, with a Pair for each complex
tensor."""
