"""graphs/frozen.safetensors: the large constants of a bundle's graphs, each once.

The graphs refer to a tensor by its place in the file, as ONNX's external data. The file is also a safetensors file: its
header gives each place a name, dtype and shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import onnx
from fleetlearn_protocol.manifest import EVAL, FROZEN, OF_FEATURES, TRAIN, TRAIN_MANY
from onnx import StringStringEntryProto, TensorProto
from torch import Tensor

from fleetlearn_export.emission.constants import Array, Constants, key_of

ALIGNMENT = 64
"""Tensors whose size is a multiple of this many bytes begin at one: a cache line."""


def with_frozen_file(files: Mapping[str, bytes], constants: Constants, known: Mapping[str, str]) -> dict[str, bytes]:
    """Return ``files`` with the file of all constants, to which the graphs refer by places instead of keys.

    infer.onnx keeps all of its constants, because people take it out of the bundle.

    known: the SHA-256 of a tensor's bytes -> its name in the file. Other tensors are named after their bytes, and none
        after the graph that it is from: different graphs with the same constants have the same file.
    """
    paths = [path for path in (EVAL, TRAIN, TRAIN_MANY, *OF_FEATURES) if path in files]
    graphs = {path: onnx.load_model_from_string(files[path]) for path in paths}
    rows = [row for model in graphs.values() for row in model.graph.initializer]
    used = {key: constants.arrays[key] for row in rows if (key := key_of(row))}  # not what was folded or coded
    if not used:
        return dict(files)
    content, places = _safetensors({key: _name(key, known) for key in used}, used)
    for row in rows:
        if key := key_of(row):
            begin, size = places[key]
            entries = {"location": PurePosixPath(FROZEN).name, "offset": str(begin), "length": str(size)}
            row.ClearField("external_data")
            row.external_data.extend(StringStringEntryProto(key=name, value=text) for name, text in entries.items())
    moved = {path: model.SerializeToString(deterministic=True) for path, model in graphs.items()}
    return {**files, **moved, FROZEN: content}


def with_constants(model: onnx.ModelProto, content: bytes) -> onnx.ModelProto:
    """Put the constants back into a graph that ``with_frozen_file`` made, from the file's bytes. Returns the graph."""
    for row in model.graph.initializer:
        if row.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in row.external_data}
            begin = int(entries["offset"])
            row.raw_data = content[begin : begin + int(entries["length"])]
            row.ClearField("external_data")
            row.ClearField("data_location")
    return model


def write_safetensors(values: Mapping[str, Tensor], path: Path) -> Path:
    """Write float32 tensors, one after the other, as ``safetensors.numpy.save`` would. Returns ``path``."""
    header: dict[str, object] = {}
    end = 0
    for name in sorted(values):
        begin, end = end, end + values[name].nbytes
        header[name] = {"dtype": "F32", "shape": list(values[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            stream.write(values[name].numpy().data)
    return path


def _name(key: str, known: Mapping[str, str]) -> str:
    digest, _, shape = key.split(".")  # the same bytes may be there in two shapes
    return f"{known.get(digest) or 'constant.' + digest[:16]}.{shape}"


def _safetensors(names: Mapping[str, str], arrays: Mapping[str, Array]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the file, and where each tensor begins in it with its number of bytes.

    names: key -> name. The format allows no gaps. So tensors whose size is a multiple of ALIGNMENT come first, then
    those of the widest dtype: each begins at a multiple of its elements' size.
    """
    order = sorted(names, key=lambda key: (arrays[key].nbytes % ALIGNMENT > 0, -arrays[key].itemsize, names[key]))
    header: dict[str, object] = {}
    end = 0
    for key in order:
        begin, end = end, end + arrays[key].nbytes
        header[names[key]] = {
            "dtype": key.split(".")[1],
            "shape": list(arrays[key].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    places = {}
    start = 8 + len(text)
    for key in order:
        places[key] = start, arrays[key].nbytes
        start += arrays[key].nbytes
    return b"".join([len(text).to_bytes(8, "little"), text, *(arrays[key].data for key in order)]), places
