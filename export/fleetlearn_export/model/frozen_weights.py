"""Frozen weights in fewer bits: how they are rounded, so that PyTorch and the bundle's graphs have
the same numbers.

A weight is ``codes * scale``, with one scale for each slice along its first axis: a layer's output
channel, or a row of a table. The codes are int8, from -127 to 127, or float16, from -1 to 1, so
that float16 holds weights of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.user_model import UserModel, evaluation_mode

Stored = Literal["float32", "float16", "int8"]
"""The dtype in which a bundle stores frozen weights."""
MIN_BYTES = 1024
"""A smaller tensor stays float32, and so does one with a single axis: biases and norms are few
bytes and count much."""
LARGEST_CODE = {"int8": 127, "float16": 1}
EXACT = 1e-6
"""Largest difference of a decoded weight, relative to its slice's largest, that is rounding of
float32 arithmetic."""

Array = NDArray[Any]


class Coded(NamedTuple):
    """A float32 tensor as codes and scales."""

    codes: Array
    """int8 or float16, shape of the tensor."""
    scales: Array
    """float32, one for each slice along ``axis``."""
    axis: int

    @property
    def broadcast_scales(self) -> Array:
        """The scales in a shape that multiplies the codes."""
        shape = [1] * self.codes.ndim
        shape[self.axis] = -1
        return self.scales.reshape(shape)

    def decode(self) -> Array:
        return self.codes.astype(np.float32) * self.broadcast_scales


def encode(values: Array, stored: Stored, axis: int = 0) -> Coded:
    """Round a float32 tensor: symmetrically, and so that the largest value of each slice is
    exact."""
    largest = np.abs(values).max(axis=tuple(set(range(values.ndim)) - {axis}))
    scales = np.where(largest > 0, largest / np.float32(LARGEST_CODE[stored]), 1).astype(np.float32)
    unrounded = Coded(values, scales, axis)
    codes = values / unrounded.broadcast_scales
    return unrounded._replace(
        codes=np.rint(codes).astype(np.int8) if stored == "int8" else codes.astype(np.float16)
    )


def find_codes(values: Array, stored: Stored) -> Coded | None:
    """Return the codes that the tensor was made from, or None.

    They are found again where the values were multiplied by a number for each slice (a BatchNorm
    that was folded into a convolution), and where the axes were exchanged.
    """
    for axis in range(values.ndim):
        coded = encode(values, stored, axis)
        allowed = EXACT * LARGEST_CODE[stored] * coded.broadcast_scales
        if (np.abs(coded.decode() - values) <= allowed).all():
            return coded
    return None


def has_codes(shape: tuple[int, ...], size: int) -> bool:
    """Whether a frozen float32 tensor of this shape and number of bytes is stored in fewer bits."""
    return len(shape) > 1 and size >= MIN_BYTES


@contextmanager
def rounded(model: nn.Module, stored: Stored) -> Iterator[dict[str, Tensor]]:
    """Round the model's frozen weights as the bundle will hold them. Yields the weights as they
    were, by name.

    Restores the model when the block ends. Raises ExportError if ``stored`` is not a dtype for
    this.
    """
    if stored not in get_args(Stored):
        raise ExportError(f"frozen={stored!r}; expected one of {', '.join(get_args(Stored))}")
    before: dict[str, Tensor] = {}
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    try:
        for name, value in frozen.items() if stored != "float32" else ():
            if value.dtype == torch.float32 and has_codes(tuple(value.shape), value.nbytes):
                before[name] = value.data
                value.data = torch.from_numpy(encode(value.data.numpy(), stored).decode())
        yield before
    finally:
        for name, value_before in before.items():
            frozen[name].data = value_before


def names_of_constants(model: nn.Module, stored: Stored) -> dict[str, str]:
    """Return the names of what the graphs hold of the model: SHA-256 of a tensor's bytes, or its
    codes' -> name."""
    names: dict[str, str] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.requires_grad:
            continue
        array = value.detach().contiguous().numpy()
        names.setdefault(sha256(array.data).hexdigest(), name)
        if (
            stored != "float32"
            and array.dtype == np.float32
            and has_codes(array.shape, array.nbytes)
        ):
            names.setdefault(sha256(encode(array, stored).codes.data).hexdigest(), f"{name}.codes")
    return names


def effect_of_rounding(user: UserModel, before: dict[str, Tensor]) -> float | None:
    """Return the largest change of an output in evaluation mode, relative to the largest output;
    None: nothing rounded.

    ``before``: the weights as they were. It is measured on the example.
    """
    if not before:
        return None

    def outputs(tensors: dict[str, Tensor]) -> list[Any]:
        inputs = tuple(value.clone() for value in user.inputs().values())
        with evaluation_mode(user.model), torch.no_grad(), user.evaluation_draws():
            return pytree.tree_leaves(functional_call(user.model, tensors, inputs))

    pairs = [
        (value.float(), other.float())
        for value, other in zip(outputs(before), outputs({}), strict=True)
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    changes = (
        float((other - value).abs().max() / value.abs().max().clamp_min(1e-30))
        for value, other in pairs
    )
    return max(changes, default=0.0)
