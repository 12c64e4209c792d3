"""What stands in the place of functions and operators whose gradient ONNX Runtime's builder does
not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnxruntime
import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_export.ort_training.forward import (
    EXPANSIONS,
    REPLACEMENTS,
    ReplacedFunctions,
    _expanded,
    forward_model,
)
from torch import nn
from torch.nn import functional

X, Y = torch.randn(4, 6), torch.randn(4, 6)
IMAGE = torch.randn(3, 2, 9, 8)
LABELS = torch.tensor([0, 5, 2, 2])
TABLE = torch.randn(7, 5)
WEIGHT = torch.randn(4, 2, 3, 2)


@pytest.mark.parametrize(
    ("function", "given", "options"),
    [
        (functional.l1_loss, (X, Y), {}),
        (functional.l1_loss, (X, Y), {"reduction": "sum"}),
        (functional.huber_loss, (X, Y), {"delta": 0.5}),
        (functional.huber_loss, (X, Y), {"reduction": "none"}),
        (functional.smooth_l1_loss, (X, Y), {"beta": 0.3}),
        (functional.smooth_l1_loss, (X, Y), {"beta": 0.0, "reduction": "sum"}),
        (functional.cross_entropy, (X, LABELS), {"label_smoothing": 0.2}),
        (functional.bilinear, (X, Y[:, :5], torch.randn(3, 6, 5), torch.randn(3)), {}),
        (functional.embedding_bag, (LABELS.reshape(2, 2), TABLE), {"mode": "sum"}),
        (
            functional.embedding_bag,
            (LABELS.reshape(2, 2), TABLE),
            {"mode": "mean", "norm_type": 2.0},
        ),
        (functional.conv2d, (IMAGE, WEIGHT, None, 1, "same", (2, 1)), {}),
        (functional.avg_pool1d, (IMAGE[0], 3, 2), {}),
        (functional.avg_pool2d, (IMAGE, (2, 3), 2, 1), {}),
        (functional.avg_pool3d, (IMAGE[None], 2), {}),
        (functional.adaptive_avg_pool2d, (IMAGE, (4, None)), {}),
        (functional.adaptive_avg_pool1d, (IMAGE[0], 5), {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_the_same_in_other_words(
    function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    assert REPLACEMENTS[function](*given, **options) is not None
    with ReplacedFunctions():
        found = function(*given, **options)
    torch.testing.assert_close(found, function(*given, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "given", "options"),
    [
        (functional.cross_entropy, (X, LABELS), {}),
        (functional.cross_entropy, (X, LABELS), {"label_smoothing": 0.2, "weight": torch.rand(6)}),
        (functional.cross_entropy, (X, LABELS), {"label_smoothing": 0.2, "ignore_index": 2}),
        (functional.huber_loss, (X, Y), {"weight": torch.rand(4, 6)}),
        (functional.embedding_bag, (LABELS, TABLE, torch.tensor([0, 3])), {}),
        (functional.embedding_bag, (LABELS.reshape(2, 2), TABLE), {"padding_idx": 2}),
        (functional.conv2d, (IMAGE, WEIGHT), {}),
        (functional.avg_pool2d, (IMAGE, 2), {"ceil_mode": True}),
        (functional.avg_pool2d, (IMAGE, 3, 2, 1), {"count_include_pad": False}),
        (functional.adaptive_avg_pool2d, (IMAGE, 1), {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_other_words_do_not_cover_stays(
    function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    assert REPLACEMENTS[function](*given, **options) is None
    with ReplacedFunctions():
        found = function(*given, **options)
    torch.testing.assert_close(found, function(*given, **options))


@pytest.mark.parametrize("name", [row.split(" ", 1)[0] for row in EXPANSIONS])
def test_an_expanded_operator_gives_what_the_operator_gives(name: str) -> None:
    inputs = {"x": np.random.default_rng(0).normal(0, 3, (2, 3, 4, 5)).astype(np.float32)}
    options: dict[str, float] = {}
    match name:
        case "InstanceNormalization":
            inputs |= {
                "scale": np.array([1, 2, 3], np.float32),
                "bias": np.array([0, -1, 1], np.float32),
            }
            options = {"epsilon": 0.3}
        case "PRelu":
            inputs |= {"slope": np.array([0.1, 0.2, -0.5], np.float32).reshape(3, 1, 1)}
        case "Elu" | "HardSigmoid":
            options = {"alpha": 0.4}
    node = onnx.helper.make_node(name, list(inputs), ["y"], **options)
    rows = [
        onnx.helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, value.shape)
        for key, value in inputs.items()
    ]
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, inputs["x"].shape)
    graph = onnx.helper.make_graph([node], "g", rows, [out])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    expanded = _expanded(whole)
    assert name not in {row.op_type for row in expanded.graph.node}
    assert not expanded.functions
    results = [
        onnxruntime.InferenceSession(
            row.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, inputs)[0]
        for row in (model, expanded)
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=2e-6)


def test_a_gradient_that_would_end_the_process_is_never_asked_for(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(), nn.LazyLinear(2)
    )
    x, y = torch.randn(3, 1, 6, 6), torch.randn(3, 2)
    model(x)
    user = make_user_model(model, functional.mse_loss, (x, y), {}, None, 1)
    with (
        training_mode(model),
        pytest.raises(ExportError, match="gradient of AveragePool divides by 0"),
    ):
        forward_model(user, dict(model.named_parameters()), tmp_path)
