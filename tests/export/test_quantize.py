from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from export_cases import DIGITS, Case
from fleetlearn_export import ExportError
from fleetlearn_export.quantize import Score, quantize, read_data, read_model
from fleetlearn_protocol import pack_bundle, write_inference_model
from fleetlearn_protocol.manifest import INFER
from fleetlearn_protocol.vector import flatten
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]


def linear(weights: Array, bias: Array) -> bytes:
    """x (n, in) -> output (n, out)."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["output"], transB=1)],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weights.shape[1]])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["n", weights.shape[0]])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(bias, "b")],
    )
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    ).SerializeToString()
    return content


def random_linear() -> tuple[bytes, Array, dict[str, Array]]:
    random = np.random.default_rng(0)
    weights = random.normal(size=(5, 16)).astype(np.float32) * np.array(
        [[0.01], [0.1], [1], [10], [100]], np.float32
    )
    x = random.uniform(-1, 1, (40, 16)).astype(np.float32)
    content = linear(weights, np.zeros(5, np.float32))
    return content, weights, {"x": x, "y": (x @ weights.T).argmax(1)}


def test_weights_are_rounded_to_seven_bits_with_a_scale_for_each_channel() -> None:
    content, weights, data = random_linear()
    made = quantize(content, data)
    model = onnx.load_model_from_string(made.content)
    assert [(row.domain, row.version) for row in model.opset_import] == [("", 18)]
    assert (model.ir_version, {node.domain for node in model.graph.node}) == (8, {""})

    tensors = {row.name: numpy_helper.to_array(row) for row in model.graph.initializer}
    (stored,) = (
        array for array in tensors.values() if array.dtype == np.int8 and array.size == weights.size
    )
    assert np.abs(stored).max() == 64
    scale = np.abs(weights).max(1, keepdims=True) / 64
    np.testing.assert_allclose(
        stored.reshape(5, 16) * scale, weights, atol=0.501 * scale.max(), rtol=0
    )
    # each with its own scale: a common one would lose the small rows altogether
    for row in range(5):
        np.testing.assert_allclose(
            stored.reshape(5, 16)[row] * scale[row], weights[row], atol=0.501 * scale[row, 0]
        )

    assert (made.operators, made.elements) == ({"Gemm": 1}, (80, 85))
    assert made.scores["output"].name == "accuracy"
    assert made.scores["output"].before == 1.0
    expected = data["x"] @ weights.T
    assert made.magnitude == pytest.approx(np.abs(expected).max(), rel=1e-5)
    assert 0 < made.mean < made.largest < 0.05 * made.magnitude
    assert made.examples == 40
    assert quantize(content, data).content == made.content


def test_embeddings_and_grouped_transposed_convolutions(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {
        "table": random.normal(size=(50, 6)),
        "w": random.normal(size=(6, 2, 3)),  # in, out / groups, kernel
        "b": random.normal(size=4),
        "v": random.normal(size=(8, 3)),
    }
    node = helper.make_node
    graph = helper.make_graph(
        [
            # (n, 6, 6): words, then features, taken for channels
            node("Gather", ["table", "x"], ["embedded"]),
            # (n, 4, 8)
            node("ConvTranspose", ["embedded", "w", "b"], ["wide"], group=2, name="up"),
            node("MatMul", ["wide", "v"], ["output"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 6])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["n", 4, 3])],
        [
            numpy_helper.from_array(value.astype(np.float32), name)
            for name, value in tensors.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    made = quantize(model.SerializeToString(), {"x": random.integers(0, 50, (30, 6))})
    # onnxruntime 1.19 cannot quantise the bias of the transposed convolution: it stays as it is.
    assert made.operators == {"Gather": 1, "MatMul": 1}
    assert made.elements == (300 + 24, 300 + 36 + 4 + 24)
    assert made.mean < 0.02 * made.magnitude


def test_nothing_is_printed_and_the_programs_log_stays_as_it_is(tmp_path: Path) -> None:
    content, _, data = random_linear()
    (tmp_path / "model.onnx").write_bytes(content)
    np.savez(tmp_path / "set.npz", **data)
    program = (
        "import logging; from fleetlearn_export.quantize import quantize, read_data, read_model; "
        "before = [*logging.root.handlers], logging.root.level; "
        "quantize(read_model('model.onnx')[0], read_data('set.npz')); "
        "assert (logging.root.handlers, logging.root.level) == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.fixture(scope="module")
def trained(cases: Callable[[str], Case]) -> tuple[bytes, dict[str, Array]]:
    """A CNN trained on the digits, as the coordinator's export-model writes it, and the held-out
    set."""
    case, data = cases("cnn"), DIGITS["data"]()
    model = DIGITS["model"]()
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for _ in range(8):
        for x, y in zip(case.x.split(64), case.y.split(64), strict=True):
            optimizer.zero_grad()
            case.loss(model(x), y).backward()
            optimizer.step()
    bundle = case.exported.bundle
    values = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    content = write_inference_model(bundle, flatten(values, bundle.manifest.parameters))
    return content, {"x": data.x_test, "y": data.y_test}


def test_a_trained_cnn_keeps_its_accuracy(trained: tuple[bytes, dict[str, Array]]) -> None:
    content, data = trained
    made = quantize(content, data)
    assert made.operators == {"Conv": 2, "Gemm": 2}
    assert made.elements[0] == pytest.approx(made.elements[1], rel=0.02)
    assert made.size_before == len(content) > 2.5 * len(made.content)
    score = made.scores["output"]
    assert score.name == "accuracy"
    assert score.before > 0.93
    assert score.after > score.before - 0.01
    assert made.mean < 0.02 * made.magnitude


def test_a_part_without_labels(trained: tuple[bytes, dict[str, Array]]) -> None:
    content, data = trained
    made = quantize(content, {"x": data["x"][:10]})
    assert made.scores == {}
    assert made.examples == 10
    # Ranges measured on 10 examples, outputs compared on those alone.
    assert made.largest < 0.2 * made.magnitude


RUN = """
import sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
np.save(sys.argv[2], session.run(None, {"x": np.load(sys.argv[3])})[0])
"""


def test_plain_onnx_runtime_gives_the_same(
    trained: tuple[bytes, dict[str, Array]], tmp_path: Path
) -> None:
    content, data = trained
    made = quantize(content, data)
    (tmp_path / "int8.onnx").write_bytes(made.content)
    np.save(tmp_path / "x.npy", data["x"])
    files = [str(tmp_path / name) for name in ("int8.onnx", "outputs.npy", "x.npy")]
    subprocess.run([sys.executable, "-c", RUN, *files], check=True, timeout=60)
    outputs = np.load(tmp_path / "outputs.npy")
    assert (outputs.argmax(1) == data["y"]).mean() == pytest.approx(
        made.scores["output"].after, abs=0.006
    )


def test_regression_scores_and_targets_by_name() -> None:
    content, weights, data = random_linear()
    expected = (data["x"] @ weights.T).astype(np.float32)
    made = quantize(content, {"x": data["x"], "aside": data["y"], "t": expected + 1}, targets=["t"])
    assert made.scores["output"] == Score(
        "mean squared error", pytest.approx(1.0), made.scores["output"].after
    )
    assert made.scores["output"].after != made.scores["output"].before
    # Two arrays are left over, and none of them is called y: neither is taken for the target.
    assert quantize(content, {"x": data["x"], "s": data["y"], "t": data["y"]}).scores == {}


def test_reading_a_bundle_and_its_zip(cases: Callable[[str], Case], tmp_path: Path) -> None:
    bundle = cases("cnn").exported.bundle
    assert read_model(bundle.path) == (bundle.read(INFER), ["y"])
    packed = pack_bundle(bundle.path, tmp_path / "packed.zip")
    assert read_model(packed) == (bundle.read(INFER), ["y"])
    (tmp_path / "infer.onnx").write_bytes(bundle.read(INFER))
    assert read_model(tmp_path / "infer.onnx") == (bundle.read(INFER), None)
    with pytest.raises(ExportError, match=r"none\.onnx cannot be read: no such file"):
        read_model(tmp_path / "none.onnx")


def test_reading_a_set(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x=np.arange(3))
    assert read_data(tmp_path / "set.npz")["x"].tolist() == [0, 1, 2]
    np.save(tmp_path / "x.npy", np.arange(3))
    (tmp_path / "text.npz").write_text("text")
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    for name, text in (
        ("x.npy", "is a single array"),
        ("text.npz", "is a text file, such as CSV; expected an .npz file"),
        ("pickled.npz", "the array x holds Python objects; expected plain arrays"),
        ("none.npz", r"none\.npz does not exist"),
    ):
        with pytest.raises(ExportError, match=text):
            read_data(tmp_path / name)


def test_errors() -> None:
    content, _, data = random_linear()
    x, y = data["x"], data["y"]
    for wrong, text in (
        ({"z": x}, "the set has no x; expected x: float32 (n, 16), and it has ['z']"),
        (
            {"x": x.astype(np.float64)},
            "x of the set is float64 (40, 16); expected x: float32 (n, 16)",
        ),
        ({"x": x[:, :3]}, "x of the set is float32 (40, 3); expected x: float32 (n, 16)"),
        ({"x": x[0]}, "x of the set is float32 (16,); expected x: float32 (n, 16)"),
        ({"x": x[:0]}, "expected at least one"),
        ({"x": x, "y": y[:7]}, "y of the set has shape (7,); the inputs have 40 examples"),
    ):
        with pytest.raises(ExportError, match=re.escape(text)):
            quantize(content, wrong)
    with pytest.raises(ExportError, match="is not an ONNX model, or damaged"):
        quantize(content[:50], data)
    relu = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
    )
    model = helper.make_model(relu, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with pytest.raises(ExportError, match=r"nothing to quantise: .* it has Relu"):
        quantize(model.SerializeToString(), data)
