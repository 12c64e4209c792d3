"""The large constants of a bundle's graphs, which are kept beside the graphs, each once.

A graph refers to such a constant by ``#`` and its key, as ONNX's external data. A frozen model of
400 MB would else be copied with each graph that is written, cleaned, serialised and run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
MIN_BYTES = 1024
"""Smaller constants stay in the graphs."""
MIN_ELEMENTS = 1025
"""Constants of fewer elements stay in a graph until it is finished: the cleaning compares these."""
DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "F32",
    TensorProto.FLOAT16: "F16",
    TensorProto.INT8: "I8",
    TensorProto.UINT8: "U8",
    TensorProto.BOOL: "BOOL",
    TensorProto.INT32: "I32",
    TensorProto.INT64: "I64",
    TensorProto.DOUBLE: "F64",
}
"""ONNX's dtype -> safetensors' name for it, of the constants that are kept apart."""


class Constants:
    """Constants by their keys. Equal ones of the same dtype and shape are one."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        """Key -> the constant. Its memory is the model's where the model holds it."""

    def reference(self, name: str, array: Array) -> TensorProto:
        """Keep a constant. Returns the initializer ``name`` that refers to it."""
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        key = f"{sha256(array.data).hexdigest()}.{DTYPES[dtype]}.{'x'.join(map(str, array.shape))}"
        self.arrays.setdefault(key, array)
        row = TensorProto(
            name=name, data_type=dtype, dims=array.shape, data_location=TensorProto.EXTERNAL
        )
        row.external_data.add(key="location", value=f"#{key}")
        return row

    def take(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Keep a graph's large constants apart too. Changes the graph in place, and returns it."""
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= MIN_BYTES and tensor.data_type in DTYPES:
                tensor.CopyFrom(self.reference(tensor.name, numpy_helper.to_array(tensor)))
        return model

    def array(self, row: TensorProto) -> Array:
        """Return an initializer's values."""
        key = key_of(row)
        return self.arrays[key] if key else numpy_helper.to_array(row)

    def named(self, rows: Iterable[TensorProto]) -> Mapping[str, Array]:
        """Return the constants to which initializers refer, by the initializers' names."""
        return {row.name: self.arrays[key] for row in rows if (key := key_of(row))}


def is_large(array: Array) -> bool:
    """Whether a constant is kept apart from the beginning."""
    known = helper.np_dtype_to_tensor_dtype(array.dtype) in DTYPES
    return known and array.nbytes >= MIN_BYTES and array.size >= MIN_ELEMENTS


def key_of(row: TensorProto) -> str | None:
    """Return the key to which an initializer refers; None if it holds its values."""
    locations = [entry.value for entry in row.external_data if entry.key == "location"]
    return locations[0][1:] if locations and locations[0].startswith("#") else None


def size_of(row: TensorProto) -> int:
    """Return the bytes of an initializer's values, wherever they are."""
    return (
        int(np.prod(row.dims, dtype=np.int64))
        * helper.tensor_dtype_to_np_dtype(row.data_type).itemsize
    )
