"""graphs/frozen.safetensors: the large constants of a bundle's graphs, each once.

The graphs refer to a tensor by its place in the file, as ONNX's external data. The file is also a
safetensors file: its header gives each place a name, dtype and shape.
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


def with_frozen_file(
    files: Mapping[str, bytes], constants: Constants, known: Mapping[str, str], target: Path
) -> dict[str, bytes | Path]:
    """Return ``files`` with the file of all constants, to which the graphs refer by places instead
    of keys.

    infer.onnx keeps all of its constants, because people take it out of the bundle.

    known: the SHA-256 of a tensor's bytes -> its name in the file. Other tensors are named after
        their bytes, and none after the graph that it is from: different graphs with the same
        constants have the same file.
    target: where the file is written.
    """
    paths = [path for path in (EVAL, TRAIN, TRAIN_MANY, *OF_FEATURES) if path in files]
    graphs = {path: onnx.load_model_from_string(files[path]) for path in paths}
    rows = [tensor for model in graphs.values() for tensor in model.graph.initializer]
    # not what was folded or coded
    used = {key: constants.arrays[key] for row in rows if (key := key_of(row))}
    if not used:
        return dict(files)
    places = _write_aligned({key: _name(key, known) for key in used}, used, target)
    for row in rows:
        if key := key_of(row):
            begin, size = places[key]
            entries = {
                "location": PurePosixPath(FROZEN).name,
                "offset": str(begin),
                "length": str(size),
            }
            row.ClearField("external_data")
            row.external_data.extend(
                StringStringEntryProto(key=name, value=text) for name, text in entries.items()
            )
    moved = {path: model.SerializeToString(deterministic=True) for path, model in graphs.items()}
    return {**files, **moved, FROZEN: target}


def with_constants(model: onnx.ModelProto, content: bytes) -> onnx.ModelProto:
    """Put the constants back into a graph that ``with_frozen_file`` made, from the file's bytes.
    Returns the graph."""
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            begin = int(entries["offset"])
            tensor.raw_data = content[begin : begin + int(entries["length"])]
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model


def write_safetensors(values: Mapping[str, Tensor], path: Path) -> Path:
    """Write float32 tensors, one after the other, as ``safetensors.numpy.save`` would. Returns
    ``path``."""
    _write({name: ("F32", values[name].numpy()) for name in sorted(values)}, path, 8)
    return path


def _name(key: str, known: Mapping[str, str]) -> str:
    digest, _, shape = key.split(".")  # the same bytes may be there in two shapes
    return f"{known.get(digest) or 'constant.' + digest[:16]}.{shape}"


def _write_aligned(
    names: Mapping[str, str], arrays: Mapping[str, Array], path: Path
) -> dict[str, tuple[int, int]]:
    """Write the file. Returns where each tensor begins in it, with its number of bytes.

    names: key -> name. The format allows no gaps. So tensors whose size is a multiple of ALIGNMENT
    come first, then those of the widest dtype: each begins at a multiple of its elements' size.
    """
    order = sorted(
        names,
        key=lambda key: (arrays[key].nbytes % ALIGNMENT > 0, -arrays[key].itemsize, names[key]),
    )
    begins = _write(
        {names[key]: (key.split(".")[1], arrays[key]) for key in order}, path, ALIGNMENT
    )
    return {key: (begins[names[key]], arrays[key].nbytes) for key in order}


def _write(tensors: Mapping[str, tuple[str, Array]], path: Path, alignment: int) -> dict[str, int]:
    """Write tensors, given with safetensors' names for their dtypes. Returns where each begins in
    the file.

    alignment: the first tensor begins at a multiple of this many bytes.
    """
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, array) in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    begins = {}
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, (_, array) in tensors.items():
            begins[name] = stream.tell()
            stream.write(array.data)
    return begins
