"""Graphs as they are rewritten for CUDA: checked with the package onnx, and run on the CPU against
the originals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import zoo
from bundle_cache import cached_export
from fleetlearn_device.runtimes.cuda.graphs import LARGEST_MATRIX, for_cuda
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import CPU, PROVIDERS, Provider
from fleetlearn_protocol import open_bundle, pack_bundle
from fleetlearn_protocol.manifest import FROZEN, TRAIN
from onnx import TensorProto, helper, numpy_helper
from torch import nn


def norm_graph(rank: int, **attributes: float) -> onnx.ModelProto:
    """BatchNormalization on batch statistics, in training mode unless the attributes say
    otherwise."""
    sizes = [None, 3, 4, 5, 2][:rank]
    chosen = {"training_mode": 1, "momentum": 0.0, "epsilon": 0.01} | attributes
    outputs = ["y", "mean", "var"] if chosen["training_mode"] else ["y"]
    node = helper.make_node(
        "BatchNormalization", ["x", "scale", "shift", "m", "v"], outputs, **chosen
    )
    # reads it: the order of the nodes must stay
    after = helper.make_node("Neg", ["y"], ["negative"])
    vectors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [3])
        for name in ("scale", "shift", "m", "v")
    ]
    graph = helper.make_graph(
        [node, after],
        "norm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes), *vectors],
        [
            helper.make_tensor_value_info(
                name, TensorProto.FLOAT, [3] if name in ("mean", "var") else sizes
            )
            for name in (*outputs, "negative")
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def inputs_of(rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(rank)
    x = rng.normal(3, 2, [7, 3, 4, 5, 2][:rank]).astype(np.float32)
    return {"x": x} | {
        name: rng.normal(1, 0.1, 3).astype(np.float32) for name in ("scale", "shift", "m", "v")
    }


def results(model: bytes, given: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(model, providers=[CPU])
    return list(session.run(None, given))


def operators(model: bytes) -> list[str]:
    parsed = onnx.load_from_string(model)
    onnx.checker.check_model(parsed, full_check=True)
    return [node.op_type for node in parsed.graph.node]


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_sums_give_the_same_result_and_statistics(rank: int) -> None:
    model, given = norm_graph(rank).SerializeToString(), inputs_of(rank)
    rewritten = for_cuda(model)
    assert rewritten is not None
    assert operators(rewritten).count("ReduceMean") == 2
    training = [
        node
        for node in onnx.load_from_string(rewritten).graph.node
        if any(row.name == "training_mode" for row in node.attribute)
    ]
    assert not training
    for found, expected in zip(results(rewritten, given), results(model, given), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    axes = (0, *range(2, rank))
    np.testing.assert_allclose(results(rewritten, given)[1], given["x"].mean(axes), atol=1e-6)
    np.testing.assert_allclose(results(rewritten, given)[2], given["x"].var(axes), atol=1e-5)


@pytest.mark.parametrize("attributes", [{"training_mode": 0}, {"momentum": 0.5}])
def test_other_normalisations_stay(attributes: dict[str, float]) -> None:
    model = norm_graph(4, **attributes).SerializeToString()
    assert for_cuda(model) == model


def test_defaults_are_those_of_onnx() -> None:
    """Without the attribute, epsilon is 1e-5; and momentum is 0.9, with which the outputs are no
    batch's statistics."""
    model = norm_graph(4)
    (norm, _) = model.graph.node
    (epsilon,) = (row for row in norm.attribute if row.name == "epsilon")
    norm.attribute.remove(epsilon)
    rewritten = for_cuda(model.SerializeToString())
    assert rewritten is not None
    (kept,) = (
        node
        for node in onnx.load_from_string(rewritten).graph.node
        if node.op_type == "BatchNormalization"
    )
    assert helper.get_node_attr_value(kept, "epsilon") == pytest.approx(1e-5)
    (momentum,) = (row for row in norm.attribute if row.name == "momentum")
    norm.attribute.remove(momentum)
    assert for_cuda(model.SerializeToString()) == model.SerializeToString()


def test_graphs_inside_of_a_graph_are_rewritten_too() -> None:
    """As the steps of train_many.onnx, which some devices do not do any more."""
    inner = norm_graph(4)
    del inner.graph.input[:]
    other = helper.make_graph(
        [
            helper.make_node("Identity", [source], [f"same.{number}"])
            for number, source in enumerate("xmvx")
        ],
        "other",
        [],
        [
            helper.make_tensor_value_info(f"same.{number}", TensorProto.FLOAT, None)
            for number in range(4)
        ],
    )
    names = ["y1", "mean1", "var1", "negative1"]
    outer = norm_graph(4)
    del outer.graph.node[:], outer.graph.output[:]
    outer.graph.node.append(
        helper.make_node("If", ["flag"], names, then_branch=inner.graph, else_branch=other)
    )
    outer.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    outer.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names
    )
    model = outer.SerializeToString()
    rewritten = for_cuda(model)
    assert rewritten is not None
    assert b"training_mode" not in rewritten
    for flag in (True, False):
        given = inputs_of(4) | {"flag": np.array(flag)}
        for found, expected in zip(results(rewritten, given), results(model, given), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_a_graph_with_nothing_to_rewrite_is_not_even_read() -> None:
    assert for_cuda(b"no graph at all") is None
    with pytest.raises(ValueError, match="no encoded message"):
        for_cuda(b"\x0f training_mode")
    with pytest.raises(ValueError, match="a field ends at byte 201 of 16"):
        for_cuda(b"\x0a\xc6\x01training_mode"[:16])
    with pytest.raises(ValueError, match="a number has no end"):
        for_cuda(b"\x0a\x0dtraining_mode\xff")


def columns_graph(
    image: list[int], kernel: list[int], constants: bool = True, **attributes: list[int]
) -> tuple[bytes, dict[str, Any]]:
    """Return a graph of Col2Im over 2 examples with 3 channels, and its inputs."""
    axes = len(image)
    pads, strides, dilations = (
        attributes.get(name, [default] * count)
        for name, default, count in (
            ("pads", 0, 2 * axes),
            ("strides", 1, axes),
            ("dilations", 1, axes),
        )
    )
    places = [
        (image[i] + pads[i] + pads[axes + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i in range(axes)
    ]
    x = (
        np.random.default_rng(0)
        .normal(size=[2, 3 * int(np.prod(kernel)), int(np.prod(places))])
        .astype(np.float32)
    )
    sizes = {"image": np.array(image), "kernel": np.array(kernel)}
    graph = helper.make_graph(
        [helper.make_node("Col2Im", ["x", "image", "kernel"], ["y"], **attributes)],
        "columns",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *x.shape[1:]])]
        + [
            helper.make_tensor_value_info(name, TensorProto.INT64, [axes])
            for name in sizes
            if not constants
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, *image])],
        [numpy_helper.from_array(values, name) for name, values in sizes.items() if constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return model.SerializeToString(), {"x": x} | ({} if constants else sizes)


@pytest.mark.parametrize(
    ("image", "kernel", "attributes"),
    [
        ([4, 5], [3, 2], {}),
        ([2, 2], [3, 3], {"pads": [1, 1, 1, 1]}),
        ([5, 4], [2, 3], {"pads": [1, 0, 0, 2], "strides": [2, 1]}),
        ([7, 6], [2, 2], {"dilations": [3, 2], "strides": [1, 2], "pads": [0, 1, 1, 0]}),
        ([4, 4], [1, 1], {"strides": [2, 2]}),
    ],
)
def test_columns_become_images_by_a_product(
    image: list[int], kernel: list[int], attributes: dict[str, list[int]]
) -> None:
    """Beside ONNX Runtime's own operator, and PyTorch's where its padding is the same on both
    sides."""
    model, given = columns_graph(image, kernel, **attributes)
    rewritten = for_cuda(model)
    assert rewritten is not None
    assert operators(rewritten) == [
        "Constant",
        "Constant",
        "Constant",
        "Reshape",
        "MatMul",
        "Reshape",
    ]
    (found,), (expected,) = results(rewritten, given), results(model, given)
    assert found.shape == expected.shape == (2, 3, *image)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    pads = attributes.get("pads", [0, 0, 0, 0])
    if pads[:2] == pads[2:]:
        others = {
            "stride": attributes.get("strides", 1),
            "dilation": attributes.get("dilations", 1),
        }
        folded = torch.nn.functional.fold(
            torch.from_numpy(given["x"]), image, kernel, padding=pads[:2], **others
        )
        np.testing.assert_allclose(found, folded.numpy(), rtol=0, atol=1e-6)


def test_columns_of_one_axis() -> None:
    """Bundles have none, since ONNX Runtime's own operator is wrong for some."""
    model, given = columns_graph([6], [3], pads=[1, 1])
    rewritten = for_cuda(model)
    assert rewritten is not None
    expected = np.zeros([2, 3, 8], np.float32)
    taps = given["x"].reshape(2, 3, 3, 6)
    for tap in range(3):
        expected[:, :, tap : tap + 6] += taps[:, :, tap]
    np.testing.assert_allclose(results(rewritten, given)[0], expected[:, :, 1:7], rtol=0, atol=1e-6)


def test_columns_of_a_large_image_stay_and_so_do_those_of_unknown_size() -> None:
    """32 x 32 places of 3 x 3 taps: a matrix of 9 million elements."""
    assert LARGEST_MATRIX < 9 * 32**4
    for model, _ in (
        columns_graph([34, 34], [3, 3]),
        columns_graph([4, 4], [3, 3], constants=False),
    ):
        assert for_cuda(model) == model


def test_all_else_of_a_model_stays_as_it_is() -> None:
    """Initial values, large numbers of dimensions, and fields that come after the graph."""
    model = norm_graph(4)
    model.graph.initializer.append(
        numpy_helper.from_array(np.arange(300, dtype=np.float32), "spare")
    )
    model.metadata_props.add(key="k", value="v" * 200)
    rewritten = for_cuda(model.SerializeToString())
    assert rewritten is not None
    found = onnx.load_from_string(rewritten)
    del found.graph.node[:], model.graph.node[:]
    assert found == model


def small() -> zoo.Case:
    """Two layers with batch normalisation between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 64), nn.Sequential(nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        )
    return zoo.classifier(model, zoo.numbers(64))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_steps_of_a_network_with_batch_normalisation(
    frozen: bool, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU with the rewritten graph, in the GPU's place."""
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu", for_cuda))
    case = small()
    path = tmp_path / "small.bundle"
    chosen = {"train": "1.*"} if frozen else {}
    cached_export(
        case.module,
        case.loss,
        case.batch(4),
        path,
        metrics=case.metrics,
        targets=case.targets,
        **chosen,
    )
    assert (FROZEN in open_bundle(path).manifest.files) == frozen
    assert for_cuda(open_bundle(path).read(TRAIN)) is not None
    if packed:
        bundle = pack_bundle(path, tmp_path / "small.zip")
        shutil.rmtree(path)
        path = Path(bundle)
    expected, found = (open_runtime(path, provider=name) for name in ("cpu", "cuda"))
    for step in range(3):
        batch = tuple(array.numpy() for array in case.batch(8, step))
        assert found.step(batch, lr=0.05) == pytest.approx(expected.step(batch, lr=0.05), abs=1e-5)
    assert np.abs(expected.parameters - expected.anchor).max() > 1e-3
    np.testing.assert_allclose(found.parameters, expected.parameters, rtol=0, atol=1e-5)
    assert not np.array_equal(found.parameters, expected.parameters)
