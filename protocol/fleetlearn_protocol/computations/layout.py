"""How named arrays lie in a computation's state, a vector of float32, and in its sums, a vector of
int64."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.vector import Vector

Sums: TypeAlias = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)
LIMB_BITS = (22, 21, 21)
"""Bits of each of the three elements that hold 64 bits, the lowest ones first. Whole numbers below
2^24 are exact in float32."""
_SHIFTS = np.cumsum((0, *LIMB_BITS))[:3].astype(np.uint64)
_MASKS = np.array([2**bits - 1 for bits in LIMB_BITS], np.uint64)


class StateField(NamedTuple):
    """A named array of a state."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: Literal["float64", "int64", "float32"] = "float64"
    """float64 and int64 take three elements each, which hold their 64 bits as whole numbers: any
    number comes back bit for bit. float32 takes one, and must be finite."""

    @property
    def elements(self) -> int:
        """How many elements of the vector hold it."""
        return prod(self.shape) * (1 if self.dtype == "float32" else 3)


class Layout:
    """The fields of a state, one after another."""

    def __init__(self, *fields: StateField) -> None:
        self.fields = fields
        self.size = sum(field.elements for field in fields)
        """P: elements of the vector."""

    def pack(self, values: Mapping[str, Any]) -> Vector:
        """Return the state, float32, shape (P,). A field that is not named is 0. Raises ValueError
        on a name or a shape that is no field's, and on a float32 that is not finite."""
        if unknown := sorted(values.keys() - {field.name for field in self.fields}):
            raise ValueError(f"{', '.join(unknown)} is no field of the state")
        vector, end = np.zeros(self.size, np.float32), 0
        for field in self.fields:
            place = vector[end : end + field.elements]
            end += field.elements
            if field.name not in values:
                continue
            array = np.asarray(values[field.name], field.dtype)
            if array.shape != field.shape:
                raise ValueError(
                    f"{field.name} has shape {array.shape}; the state has {field.shape} for it"
                )
            if field.dtype == "float32":
                if not np.isfinite(array).all():
                    raise ValueError(f"{field.name} is not finite, and a state of float32 must be")
                place[:] = array.reshape(-1)
            else:
                place[:] = _limbs(np.ascontiguousarray(array).reshape(-1).view(np.uint64))
        return vector

    def unpack(self, vector: Vector) -> dict[str, NDArray[Any]]:
        """Undo ``pack``: name -> array, each in new memory. Raises ValueError where the
        vector is of another size, or holds numbers that ``pack`` never writes."""
        if vector.shape != (self.size,):
            raise ValueError(f"a state of shape {vector.shape} was given; expected ({self.size},)")
        found, end = {}, 0
        for field in self.fields:
            part = vector[end : end + field.elements]
            end += field.elements
            if field.dtype == "float32":
                found[field.name] = part.reshape(field.shape).copy()
            else:
                found[field.name] = _whole(part, field.name).view(field.dtype).reshape(field.shape)
        return found


def _limbs(bits: NDArray[np.uint64]) -> Vector:
    limbs: Vector = ((bits[:, None] >> _SHIFTS) & _MASKS).astype(np.float32).reshape(-1)
    return limbs


def _whole(part: Vector, name: str) -> NDArray[np.uint64]:
    rows = part.reshape(-1, 3)
    fit = (rows >= 0) & (rows <= _MASKS.astype(np.float32)) & (np.floor(rows) == rows)
    if not fit.all():
        raise ValueError(f"{name} of the state is no whole numbers below 2^22: it is damaged")
    whole = rows.astype(np.uint64) << _SHIFTS
    bits: NDArray[np.uint64] = whole[:, 0] | whole[:, 1] | whole[:, 2]
    return bits


class SumsLayout:
    """The named arrays of sums, one after another."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.size = sum(map(prod, self.shapes.values()))
        """S: how many sums there are."""

    def pack(self, values: Mapping[str, Any]) -> Sums:
        """Return the sums, int64, shape (S,). What is not named is 0. Raises ValueError on a name
        or a shape that is not the layout's, and on numbers that are not whole."""
        if unknown := sorted(values.keys() - self.shapes.keys()):
            raise ValueError(f"{', '.join(unknown)} is not among the sums")
        sums, end = np.zeros(self.size, np.int64), 0
        for name, shape in self.shapes.items():
            place = sums[end : end + prod(shape)]
            end += place.size
            if name not in values:
                continue
            array = np.asarray(values[name])
            if array.dtype.kind not in "biu" or array.shape != shape:
                raise ValueError(
                    f"{name} is {array.dtype} of shape {array.shape}; expected whole numbers of "
                    f"shape {shape}"
                )
            place[:] = array.reshape(-1)
        return sums

    def unpack(self, sums: NDArray[Number]) -> dict[str, NDArray[Number]]:
        """Undo ``pack``: name -> array, a view. Raises ValueError on another size."""
        if sums.shape != (self.size,):
            raise ValueError(f"sums of shape {sums.shape} were given; expected ({self.size},)")
        found, end = {}, 0
        for name, shape in self.shapes.items():
            found[name] = sums[end : end + prod(shape)].reshape(shape)
            end += prod(shape)
        return found
