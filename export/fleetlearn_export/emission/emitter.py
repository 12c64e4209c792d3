"""``Emitter``: the ONNX graph that the functions in ``operators/`` write into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor

from fleetlearn_export.emission.constants import Constants, is_large
from fleetlearn_export.model.steps import Tensors

ELEMENT_TYPES: dict[torch.dtype, int] = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.int16: onnx.TensorProto.INT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}
"""ONNX's numbers for the element types that a graph may hold."""

Size = int | torch.SymInt
Array = NDArray[Any]


class EmissionError(Exception):
    """An operator, or a use of it, that ``operators/`` does not write. The text says which."""


class Value(NamedTuple):
    """A tensor of the traced program, as the functions in ``operators/`` get it."""

    name: str
    """Its name in the ONNX graph."""
    traced: Tensor
    """A tensor without values that knows shape and dtype."""

    @property
    def shape(self) -> list[Size]:
        return list(self.traced.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.traced.dtype

    @property
    def rank(self) -> int:
        return self.traced.dim()


Source = Value | str
"""What a node reads: a tensor of the traced program, or the name of another node's output."""
Handler = Callable[..., str | Sequence[str | None]]
"""``handler(graph, out, *args, **kwargs)`` writes one call of an ATen operator and returns the name
of the result's value, or a list of names where the operator has several results.

graph: the Emitter. out: the traced result, a tensor without values (a tuple of them if there are
several). args and kwargs: the operator's own, with a Value in place of each tensor, and sizes that
depend on the number of examples as torch.SymInt. Raises EmissionError for a use that the handler
does not write.
"""


Write = Callable[
    [Callable[[Tensors], Tensors], Tensors, Mapping[str, int], Sequence[str]], onnx.GraphProto
]
"""``write(function, arguments, rows, outputs)`` traces a function and writes it as a graph, the
body of an operator.

arguments: name -> an example. rows: argument -> the axis whose size is the number of examples.
outputs: the results' names. Raises EmissionError.
"""


class Emitter:
    """An ONNX graph that grows node by node. A node that is there already, with the same inputs, is
    used again."""

    def __init__(
        self,
        examples: str,
        backward: bool = True,
        axis: int = 0,
        kept_apart: Constants | None = None,
        *,
        write: Write,
    ) -> None:
        """examples: the name of an input whose ``axis`` has the number of examples. backward:
        whether the graph has a backward pass, which uses again what the forward pass computes.
        kept_apart: gets the large constants. write: writes bodies of operators."""
        self.write = write
        self._kept_apart = kept_apart
        self.backward = backward
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._examples, self._axis = examples, axis
        self._made: dict[Any, list[str]] = {}
        self._makers: dict[str, onnx.NodeProto] = {}
        self._constant_names: dict[Any, str] = {}
        self._count = 0

    def node(self, operator: str, *inputs: Source | None, **attributes: Any) -> str:
        """Add a node with one output. Returns the output's name. An input that is None is left
        out."""
        return self.nodes_outputs(operator, 1, *inputs, **attributes)[0]

    def nodes_outputs(
        self, operator: str, outputs: int, *inputs: Source | None, **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs. Returns their names."""
        names = [input_.name if isinstance(input_, Value) else input_ or "" for input_ in inputs]
        while names and not names[-1]:
            # ONNX Runtime 1.31 crashes where LayerNormalization has "" as its last input
            names.pop()
        attributes = {name: value for name, value in attributes.items() if value is not None}
        # repr, since attributes may be lists and graphs, which have no hash.
        key = (operator, *names, outputs, repr(sorted(attributes.items())))
        if key not in self._made:
            made = [self._new_name() for _ in range(outputs)]
            self.nodes.append(helper.make_node(operator, names, made, name=made[0], **attributes))
            self._makers |= dict.fromkeys(made, self.nodes[-1])
            self._made[key] = made
        return self._made[key]

    def maker(self, name: str, operator: str) -> onnx.NodeProto | None:
        """Return the node that makes a value if it is of this operator, else None."""
        node = self._makers.get(name)
        return node if node is not None and node.op_type == operator else None

    def _new_name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def constant(self, value: Any, dtype: torch.dtype = torch.float32) -> str:
        """Return the name of a constant: a number or nested lists or an array, of ``dtype``."""
        return self.array(
            np.asarray(value, dtype=helper.tensor_dtype_to_np_dtype(_element_type(dtype)))
        )

    def array(self, value: Array) -> str:
        """Return the name of a constant that holds the array. Equal arrays are one constant."""
        # ascontiguousarray would give a scalar an axis.
        value = np.ascontiguousarray(value) if value.ndim else value
        key = (value.dtype.str, value.shape, sha256(value.data).digest())
        if key not in self._constant_names:
            name = f"c{len(self.constants)}"
            apart = self._kept_apart if is_large(value) else None
            self.constants[name] = (apart.reference if apart else _embedded)(name, value)
            self._constant_names[key] = name
        return self._constant_names[key]

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of a constant int64 vector, such as axes."""
        return self.constant(list(values), torch.int64)

    def number(self, value: Any, dtype: torch.dtype) -> str:
        """Return a scalar of ``dtype``: a Python number, or one that depends on the number of
        examples."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            expression = value.node.expr
            if isinstance(value, torch.SymInt) and not (
                expression.is_number or dtype.is_floating_point
            ):
                return self.node(
                    "Cast", self.node("Squeeze", self._size(expression)), to=_element_type(dtype)
                )
            if not expression.is_number:
                scalar = self.node("Squeeze", self._float_size(expression))
                return self.node("Cast", scalar, to=_element_type(dtype))
            value = (
                bool(expression)
                if isinstance(value, torch.SymBool)
                else type(value.node.hint)(expression)
            )
        return self.constant(value, dtype)

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """Return an operand of ``dtype``: a Value, which is cast if its dtype is another, or a
        number."""
        return self.cast(value, dtype) if isinstance(value, Value) else self.number(value, dtype)

    def cast(self, x: Value, dtype: torch.dtype) -> str:
        """Return ``x`` as ``dtype``. A constant becomes another constant, unless that is larger."""
        if x.dtype == dtype:
            return x.name
        if (row := self.constants.get(x.name)) is not None and x.dtype.itemsize >= dtype.itemsize:
            value = self._kept_apart.array(row) if self._kept_apart else numpy_helper.to_array(row)
            return self.array(value.astype(helper.tensor_dtype_to_np_dtype(_element_type(dtype))))
        return self.node("Cast", x, to=_element_type(dtype))

    def cast_node(self, name: str, dtype: torch.dtype) -> str:
        """Return another node's output as ``dtype``."""
        return self.node("Cast", name, to=_element_type(dtype))

    def shape(self, sizes: Sequence[Size]) -> str:
        """Return an int64 vector of sizes, for Reshape and Expand."""
        sizes = [fixed_size(size) for size in sizes]
        if all(isinstance(size, int) for size in sizes):
            return self.integers([int(size) for size in sizes])
        parts, run = [], list[int]()
        for size in sizes:
            if isinstance(size, int):
                run.append(size)
                continue
            parts += [self.integers(run)] if run else []
            parts.append(self._size(size.node.expr))
            run = []
        parts += [self.integers(run)] if run else []
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    def size(self, size: Size) -> str:
        """Return an int64 vector of one size."""
        return self.shape([size])

    def reshaped(self, x: Source, sizes: Sequence[Size]) -> str:
        """Return ``x`` in another shape."""
        sizes = [fixed_size(size) for size in sizes]
        if isinstance(x, Value) and len(sizes) == x.rank and all(map(same_size, sizes, x.shape)):
            return x.name
        free = [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]
        if len(free) == 1 and 0 not in sizes:
            return self.node(
                "Reshape",
                x,
                self.integers(
                    [-1 if axis in free else int(size) for axis, size in enumerate(sizes)]
                ),
            )
        empty = any(isinstance(size, int) and size == 0 for size in sizes)
        return self.node("Reshape", x, self.shape(sizes), allowzero=1 if empty else None)

    def expanded(self, x: Source, sizes: Sequence[Size]) -> str:
        """Return ``x`` repeated along its axes of size 1, and along new axes in front, to the shape
        ``sizes``."""
        if isinstance(x, Value) and x.rank == len(sizes) and all(map(same_size, x.shape, sizes)):
            return x.name
        # A 1 keeps the size of that axis, so that a free size need not be computed.
        own = x.shape if isinstance(x, Value) else []
        front = len(sizes) - len(own)
        unchanged = [
            axis >= front and same_size(own[axis - front], size) for axis, size in enumerate(sizes)
        ]
        return self.node(
            "Expand",
            x,
            self.shape([1 if keep else size for keep, size in zip(unchanged, sizes, strict=True)]),
        )

    def transposed(self, x: Source, order: Sequence[int]) -> str:
        """Return ``x`` with its axes in this order."""
        if list(order) == list(range(len(order))):
            return x.name if isinstance(x, Value) else x
        return self.node("Transpose", x, perm=list(order))

    def flipped(self, x: Source, axes: Sequence[int]) -> str:
        """Return ``x`` with its elements in reverse along these axes."""
        if not axes:
            return x.name if isinstance(x, Value) else x
        before = self.integers([-(2**63)] * len(axes))
        ones = self.integers([-1] * len(axes))
        return self.node("Slice", x, ones, before, self.integers(axes), ones)

    def padded(
        self,
        x: Source,
        rank: int,
        counts: Mapping[int, tuple[Size, Size]],
        mode: str | None = None,
        value: Any = None,
    ) -> str:
        """Return ``x`` with elements added before and after: ``counts`` of each axis. A negative
        number cuts.

        mode: edge or reflect; a constant else. value: the name of that constant, 0 else.
        """
        pads: list[Size] = [0] * (2 * rank)
        for axis, (before, after) in counts.items():
            pads[axis], pads[rank + axis] = fixed_size(before), fixed_size(after)
        if all(isinstance(size, int) and size == 0 for size in pads):
            return x.name if isinstance(x, Value) else x
        return self.node("Pad", x, self.shape(pads), value, mode=mode)

    def filled(self, value: Any, sizes: Sequence[Size], dtype: torch.dtype) -> str:
        """Return a tensor of one value."""
        number = self.number(value, dtype)
        return self.node("Expand", number, self.shape(sizes)) if len(sizes) else number

    def count(self, sizes: Sequence[Size], dtype: torch.dtype = torch.float32) -> str:
        """Return the product of sizes, the number of elements, as a scalar."""
        product: Any = 1
        for size in sizes:
            product = product * (size.node.expr if isinstance(size, torch.SymInt) else size)
        if isinstance(product, int) or product.is_number:
            return self.constant(int(product), dtype)
        return self.node("Cast", self.node("Squeeze", self._size(product)), to=_element_type(dtype))

    def _size(self, expression: Any) -> str:
        """Return a whole-number expression of the number of examples as an int64 vector of length
        1."""
        if expression.is_Integer:
            return self.integers([int(expression)])
        if expression.is_Symbol:
            return self.node("Shape", self._examples, start=self._axis, end=self._axis + 1)
        kind = type(expression).__name__
        if expression.is_Add or expression.is_Mul:
            return self._folded(
                "Mul" if expression.is_Mul else "Add",
                [self._size(term) for term in expression.args],
            )
        if kind in ("FloorDiv", "CleanDiv"):
            return self.node("Div", *(self._size(term) for term in expression.args))
        if kind in ("Mod", "PythonMod"):
            return self.node("Mod", *(self._size(term) for term in expression.args))
        if kind in ("Max", "Min"):
            return self._folded(kind, [self._size(term) for term in expression.args])
        raise EmissionError(f"a size {expression} of the number of examples")

    def _float_size(self, expression: Any) -> str:
        """Return an expression of the number of examples as a float32 vector of length 1."""
        if expression.is_number:
            return self.constant([float(expression)])
        kind = type(expression).__name__
        if kind == "ToFloat":
            return self._float_size(expression.args[0])
        if kind in ("IntTrueDiv", "FloatTrueDiv"):
            return self.node("Div", *(self._float_size(term) for term in expression.args))
        if expression.is_Add or expression.is_Mul:
            parts = [self._float_size(term) for term in expression.args]
            return self._folded("Mul" if expression.is_Mul else "Add", parts)
        if expression.is_Pow or kind in ("FloatPow", "PowByNatural"):
            return self.node("Pow", *(self._float_size(term) for term in expression.args))
        if kind == "OpaqueUnaryFn_sqrt":
            return self.node("Sqrt", self._float_size(expression.args[0]))
        return self.node("Cast", self._size(expression), to=onnx.TensorProto.FLOAT)

    def _folded(self, operator: str, parts: Sequence[str]) -> str:
        result = parts[0]
        for part in parts[1:]:
            result = self.node(operator, result, part)
        return result


def fixed_size(size: Size) -> Size:
    """Return a size that is known to be a number as an int."""
    if isinstance(size, torch.SymInt) and size.node.expr.is_number:
        return int(size.node.expr)
    return size


def same_size(one: Size, other: Size) -> bool:
    """Whether two sizes are equal for every number of examples."""
    first, second = (
        operand.node.expr if isinstance(operand, torch.SymInt) else operand
        for operand in (one, other)
    )
    return bool(first == second)


def is_reshape(view: Tensor, whole: Tensor, offset: int | None) -> bool:
    """Whether as_strided is a plain reshape: all elements of a contiguous tensor in their order."""
    every = same_size(view.numel(), whole.numel()) and not offset and whole.storage_offset() == 0
    return every and view.is_contiguous() and whole.is_contiguous()


def fixed_sizes(x: Value | Tensor, axes: Sequence[int] | slice = slice(None)) -> list[int]:
    """Return the sizes of some axes as numbers. Raises EmissionError if one depends on the number
    of examples."""
    shape = list(x.shape)
    sizes = [
        fixed_size(size)
        for size in (shape[axes] if isinstance(axes, slice) else [shape[axis] for axis in axes])
    ]
    if not all(isinstance(size, int) for size in sizes):
        raise EmissionError(
            f"a tensor of shape {tuple(shape)} where these sizes must not depend on the number of "
            "examples"
        )
    return [int(size) for size in sizes]


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    return axis % rank if rank else 0


def axes_of(axes: Sequence[int] | int | None, rank: int) -> list[int]:
    """Return axes counted from the front; all of them for None or an empty list, as PyTorch's
    reductions mean it."""
    if axes is None or (not isinstance(axes, int) and not len(axes)):
        return list(range(rank))
    return [axis_of(axis, rank) for axis in ([axes] if isinstance(axes, int) else axes)]


def _embedded(name: str, value: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(value, name)


def _element_type(dtype: torch.dtype) -> int:
    if dtype not in ELEMENT_TYPES:
        raise EmissionError(f"a tensor of {dtype}")
    return ELEMENT_TYPES[dtype]
