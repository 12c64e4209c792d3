"""graphs/frozen.safetensors: the large constants of a bundle's graphs, each once.

The graphs refer to a tensor by its place in the file, as ONNX's external data. The file is also a safetensors file: its
header gives each place a name, dtype and shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

import onnx
from fleetlearn_protocol.manifest import EVAL, FROZEN, OF_FEATURES, TRAIN, TRAIN_MANY
from fleetlearn_protocol.vector import digest
from onnx import TensorProto

MIN_BYTES = 1024
"""Smaller constants stay in the graphs."""
ALIGNMENT = 64
"""Tensors whose size is a multiple of this many bytes begin at one: a cache line."""
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
"""ONNX's dtype -> safetensors' name for it."""


class _Tensor(NamedTuple):
    """A tensor of the file; two constants of the same content are one."""

    dtype: int
    shape: tuple[int, ...]
    raw: bytes


def move_constants(files: Mapping[str, bytes], known: Mapping[bytes, str]) -> dict[str, bytes]:
    """Return ``files`` with the large constants of the training and evaluation graphs in a file of their own.

    infer.onnx keeps all of its constants, because people take it out of the bundle.

    known: a tensor's bytes -> its name in the file. Other tensors are named after their bytes, and none after the graph
        that it is from: different graphs with the same constants have the same file.
    """
    paths = [path for path in (EVAL, TRAIN, TRAIN_MANY, *OF_FEATURES) if path in files]
    graphs = {path: onnx.load_model_from_string(files[path]) for path in paths}
    names = {_tensor(row): _name(_tensor(row), known) for model in graphs.values() for row in _large(model)}
    if not names:
        return dict(files)
    content, places = _safetensors(names)
    for model in graphs.values():
        for row in _large(model):
            begin, size = places[_tensor(row)], len(row.raw_data)
            row.ClearField("raw_data")
            row.data_location = TensorProto.EXTERNAL
            entries = {"location": PurePosixPath(FROZEN).name, "offset": str(begin), "length": str(size)}
            row.external_data.extend(onnx.StringStringEntryProto(key=key, value=text) for key, text in entries.items())
    moved = {path: model.SerializeToString(deterministic=True) for path, model in graphs.items()}
    return {**files, **moved, FROZEN: content}


def with_constants(model: onnx.ModelProto, content: bytes) -> onnx.ModelProto:
    """Put the constants back into a graph that ``move_constants`` made, from the file's bytes. Returns the graph."""
    for row in model.graph.initializer:
        if row.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in row.external_data}
            begin = int(entries["offset"])
            row.raw_data = content[begin : begin + int(entries["length"])]
            row.ClearField("external_data")
            row.ClearField("data_location")
    return model


def _large(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for row in model.graph.initializer:
        if len(row.raw_data) >= MIN_BYTES and row.data_type in DTYPES:
            yield row


def _tensor(row: onnx.TensorProto) -> _Tensor:
    return _Tensor(row.data_type, tuple(row.dims), row.raw_data)


def _name(tensor: _Tensor, known: Mapping[bytes, str]) -> str:
    shape = "x".join(map(str, tensor.shape))  # the same bytes may be there in two shapes
    return f"{known.get(tensor.raw) or 'constant.' + digest(tensor.raw)[:16]}.{shape}"


def _safetensors(names: Mapping[_Tensor, str]) -> tuple[bytes, dict[_Tensor, int]]:
    """Return the file, and where each tensor begins in it.

    The format allows no gaps. So tensors whose size is a multiple of ALIGNMENT come first, then those of the widest
    dtype: each begins at a multiple of its elements' size.
    """
    width = {tensor: onnx.helper.tensor_dtype_to_np_dtype(tensor.dtype).itemsize for tensor in names}
    order = sorted(names, key=lambda row: (len(row.raw) % ALIGNMENT > 0, -width[row], names[row]))
    header: dict[str, object] = {}
    end = 0
    for tensor in order:
        begin, end = end, end + len(tensor.raw)
        header[names[tensor]] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    places = {}
    start = 8 + len(text)
    for tensor in order:
        places[tensor] = start
        start += len(tensor.raw)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensor.raw for tensor in order)]), places
