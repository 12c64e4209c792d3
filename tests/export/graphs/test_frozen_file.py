from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from fleetlearn_export.emission.constants import MIN_BYTES, Constants
from fleetlearn_export.graphs.conversion import serialised
from fleetlearn_export.graphs.frozen_file import (
    ALIGNMENT,
    with_constants,
    with_frozen_file,
    write_safetensors,
)
from fleetlearn_protocol.manifest import EVAL, FROZEN, INFER, TRAIN
from graphs import graph
from onnx import TensorProto, helper
from safetensors.numpy import load, save

random = np.random.default_rng(0)
SHARED = random.standard_normal((16, 32)).astype(np.float32)
ODD = random.standard_normal((7, 37)).astype(np.float32)
HALVES = random.standard_normal((33, 17)).astype(np.float16)
SMALL = random.standard_normal((3, 5)).astype(np.float32)


def content(constants: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """A graph that multiplies each constant by x."""
    nodes = [
        node
        for name, value in constants.items()
        for node in (
            helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{name}.float", "x"], [f"{name}.out"]),
        )
    ]
    made = graph(
        nodes, {"x": (TensorProto.FLOAT, [])}, [f"{name}.out" for name in constants], constants
    )
    return made.SerializeToString()


FILES = {
    TRAIN: content({"w": SHARED, "odd": ODD, "half": HALVES, "small": SMALL}),
    EVAL: content({"weight": SHARED, "odd": ODD * 2}),
    INFER: content({"w": SHARED}),
}

KNOWN = {
    hashlib.sha256(value.tobytes()).hexdigest(): name
    for name, value in {"backbone.weight": SHARED, "odd": ODD, "half": HALVES}.items()
}


def move_constants(
    files: dict[str, bytes], known: dict[str, str], folder: Path
) -> dict[str, bytes]:
    """Take the large constants out of all graphs but infer.onnx, and write their file."""
    constants = Constants()
    taken = {
        path: serialised(onnx.load_model_from_string(graph), constants) if path != INFER else graph
        for path, graph in files.items()
    }
    moved = with_frozen_file(taken, constants, known, folder / "frozen")
    return {
        path: file.read_bytes() if isinstance(file, Path) else file for path, file in moved.items()
    }


def test_each_constant_is_in_the_file_once_under_a_name_for_people(tmp_path: Path) -> None:
    moved = move_constants(FILES, KNOWN, tmp_path)
    tensors = load(moved[FROZEN])
    unknown = f"constant.{hashlib.sha256((ODD * 2).tobytes()).hexdigest()[:16]}.7x37"
    expected = {
        "backbone.weight.16x32": SHARED,
        unknown: ODD * 2,
        "odd.7x37": ODD,
        "half.33x17": HALVES,
    }
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(tensors[name], value)
    assert moved[INFER] == FILES[INFER], "infer.onnx is one file for people"
    assert move_constants(FILES, KNOWN, tmp_path) == moved, "the same bytes each time"
    assert len(moved[TRAIN]) < len(FILES[TRAIN]) - SHARED.nbytes


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    moved = move_constants(FILES, KNOWN, tmp_path)
    for path in (TRAIN, EVAL):
        for row in onnx.load_model_from_string(moved[path]).graph.initializer:
            entries = {entry.key: entry.value for entry in row.external_data}
            if entries:
                assert int(entries["length"]) >= MIN_BYTES
                width = (
                    ALIGNMENT
                    if int(entries["length"]) % ALIGNMENT == 0
                    else (row.data_type == TensorProto.FLOAT and 4) or 2
                )
                assert int(entries["offset"]) % width == 0


def test_a_graph_gives_what_it_gave(tmp_path: Path) -> None:
    moved = move_constants(FILES, KNOWN, tmp_path)
    (tmp_path / "graphs").mkdir()
    for path, file in moved.items():
        (tmp_path / path).write_bytes(file)
    for path in (TRAIN, EVAL):
        feed = {"x": np.array(1.5, np.float32)}
        before = onnxruntime.InferenceSession(FILES[path], providers=["CPUExecutionProvider"]).run(
            None, feed
        )
        after = onnxruntime.InferenceSession(
            tmp_path / path, providers=["CPUExecutionProvider"]
        ).run(None, feed)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
        restored = with_constants(onnx.load_model_from_string(moved[path]), moved[FROZEN])
        assert restored == onnx.load_model_from_string(FILES[path])


def test_small_constants_stay_where_they_are(tmp_path: Path) -> None:
    files = {TRAIN: content({"small": SMALL}), EVAL: content({"small": SMALL})}
    assert move_constants(files, KNOWN, tmp_path) == files


def test_the_file_is_the_same_whatever_the_graphs_call_their_constants(tmp_path: Path) -> None:
    other = {
        TRAIN: content({"c1": HALVES, "c2": ODD, "c3": SHARED}),
        EVAL: content({"c7": ODD * 2}),
    }
    assert (
        move_constants(other, KNOWN, tmp_path)[FROZEN]
        == move_constants(FILES, KNOWN, tmp_path)[FROZEN]
    )


def test_tensors_are_written_as_safetensors_writes_them(tmp_path: Path) -> None:
    arrays = {
        "layer.10.w": SHARED,
        "layer.9.w": ODD,
        "b": SMALL,
        "a\u00e9": SMALL[0],
        "number": np.array(3, np.float32),
    }
    path = write_safetensors(
        {name: torch.from_numpy(array) for name, array in arrays.items()}, tmp_path / "file"
    )
    assert path.read_bytes() == save(arrays)
