"""The model that a new run begins with: the bundle's, or what a safetensors file of the plan's key
``initial`` has. PyTorch is not needed; a ``state_dict`` is such a file:

    safetensors.torch.save_file(model.state_dict(), "weights.safetensors")
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec
import numpy as np
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import Code, ProtocolError, in_words
from fleetlearn_protocol.manifest import Parameter
from fleetlearn_protocol.vector import Vector, check_finite, views
from numpy.typing import NDArray

from fleetlearn_coordinator.plan.plan_for_bundle import PlanError
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.toml_errors import near

TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
"""The format's name of a tensor's type -> what its bytes are read as."""
LONGEST_HEADER = 100 * 2**20
"""The format's own limit, in bytes."""


class _Tensor(msgspec.Struct):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Where its bytes begin and end, behind the header."""


def initial_model(plan: PlanKeys, bundle: Bundle) -> Vector:
    """Return the model that a new run of this bundle begins with: float32, shape (P,).

    Of the plan's file each parameter that travels is taken by its name, as float32; what else is in
    the file is not looked at. Raises BundleError, and PlanError where the file does not fit."""
    if plan.initial is None:
        return bundle.parameters()[: bundle.manifest.size]
    try:
        return _read(plan.initial, bundle.manifest.travelling, bundle.manifest.size)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        text = f"{plan.file}: initial = {str(plan.initial)!r}: {in_words(error)}"
        raise PlanError(Code.BAD_MESSAGE, text) from None
    except ProtocolError as error:
        text = f"{plan.file}: initial = {str(plan.initial)!r}: {error.text}"
        raise PlanError(error.code, text) from None


def _read(path: Path, table: tuple[Parameter, ...], size: int) -> Vector:
    """Raises OSError, ValueError, MsgspecError and ProtocolError (not-finite)."""
    if path.stat().st_size < 8:
        raise ValueError("this is no safetensors file: it has fewer than 8 bytes")
    content = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if start > min(len(content), LONGEST_HEADER):
        raise ValueError(
            f"this is no safetensors file: it has {len(content)} bytes, and says that its header "
            f"ends at {start}"
        )
    header = msgspec.json.decode(content[8:start].tobytes(), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    vector = np.empty(size, np.float32)
    places = views(vector, table)
    for row in table:
        if row.name not in header:
            raise ValueError(
                f"tensor {row.name} of the model is missing{near(row.name, header)} Tensors: "
                f"{_some(list(header))}"
            )
        tensor = msgspec.json.decode(header[row.name], type=_Tensor)
        places[row.name][...] = _values(row, tensor, content[start:])
    check_finite(vector)
    return vector


def _values(row: Parameter, tensor: _Tensor, content: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return a tensor's values. Raises ValueError."""
    if tensor.shape != row.shape:
        raise ValueError(
            f"tensor {row.name} has shape {tensor.shape}; the bundle's model has {row.shape}"
        )
    if tensor.dtype not in TYPES:
        raise ValueError(
            f"tensor {row.name} is of {tensor.dtype}; expected one of {', '.join(TYPES)}"
        )
    kind = np.dtype(TYPES[tensor.dtype])
    begin, end = tensor.data_offsets
    if not 0 <= begin <= end <= len(content) or end - begin != kind.itemsize * prod(row.shape):
        raise ValueError(
            f"tensor {row.name} of shape {row.shape} is said to be at bytes {begin} to {end} of "
            f"{len(content)}: the file was not written to its end, or is damaged"
        )
    values = np.frombuffer(content[begin:end].tobytes(), kind)
    if tensor.dtype == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).reshape(row.shape)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "none"
