"""Resized images as matrix products in ONNX, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleetlearn_export.checks.double_precision import DoublePrecision
from fleetlearn_export.emission.table import decompositions
from fleetlearn_export.tracing.trace import trace
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

RANDOM = torch.Generator().manual_seed(6)
IMAGES = torch.randn(3, 2, 4, 5, generator=RANDOM)

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"mode": "nearest", "scale_factor": 2}),
    (1, {"mode": "linear", "size": 7}),
    (2, {"mode": "nearest", "scale_factor": 2}),
    (2, {"mode": "nearest", "scale_factor": (1.7, 0.6)}),
    (2, {"mode": "nearest", "size": (7, 3)}),
    (2, {"mode": "nearest-exact", "size": (7, 3)}),
    (2, {"mode": "bilinear", "scale_factor": 2}),
    (2, {"mode": "bilinear", "scale_factor": (1.7, 0.6)}),
    (2, {"mode": "bilinear", "scale_factor": 1.7, "recompute_scale_factor": True}),
    (2, {"mode": "bilinear", "size": (8, 3), "align_corners": True}),
    (2, {"mode": "bilinear", "size": (1, 1), "align_corners": True}),
    (2, {"mode": "bicubic", "size": (7, 9)}),
    (2, {"mode": "bicubic", "scale_factor": 1.5, "align_corners": True}),
    (3, {"mode": "nearest", "scale_factor": 2}),
    (3, {"mode": "trilinear", "size": (3, 3, 3)}),
]


@pytest.mark.parametrize(("axes", "options"), CASES)
def test_resized_and_its_gradient(axes: int, options: dict[str, Any]) -> None:
    x = torch.randn(3, 2, *(4, 5, 2)[:axes], generator=RANDOM)
    grad = torch.randn(functional.interpolate(x, **options).shape, generator=RANDOM)

    def both(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return functional.interpolate(x, **options), gradient_of(
            lambda x: functional.interpolate(x, **options)
        )(x, grad)

    model = check_emission(None, both, x, grad, tolerance=2e-6)
    assert not {"Gather", "GatherND", "ScatterElements"} & {
        node.op_type for node in model.graph.node
    }


def test_the_matrix_is_not_repeated_for_each_image() -> None:
    model = check_emission(
        torch.ops.aten.bmm.default,
        lambda x: functional.interpolate(x, size=(8, 3), mode="bilinear"),
        IMAGES,
    )
    used = {name for node in model.graph.node if node.op_type == "MatMul" for name in node.input}
    assert sum(row.name in used and len(row.dims) == 2 for row in model.graph.initializer) >= 1


def test_pytorch_resizes_as_before_after_tracing() -> None:
    before = dict(torch.ops.aten.upsample_bilinear2d.vec.py_kernels)
    check_emission(None, lambda x: functional.interpolate(x, size=(8, 3), mode="bilinear"), IMAGES)
    assert torch.ops.aten.upsample_bilinear2d.vec.py_kernels == before


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_traced_resize_is_pytorchs_in_float64(mode: str) -> None:
    """In float32 PyTorch itself is 1e-8 off, where it computes the places between two pixels."""

    def resized(x: Tensor) -> Tensor:
        return functional.interpolate(x, size=(16, 24), mode=mode, align_corners=True)

    x = torch.randn(3, 2, 4, 5, generator=RANDOM)
    module = trace(lambda given: {"out": resized(given["x"])}, {"x": x}, {"x": 0}, decompositions())
    with DoublePrecision():
        (found,) = module(x.double())
    exact = resized(x.double())
    assert (found - exact).abs().max() < 1e-14
    assert (resized(x) - exact).abs().max() > 1e-8
    model = check_emission(None, resized, x, tolerance=2e-6)
    used = {name for node in model.graph.node for name in node.input}
    assert not any(
        row.data_type == TensorProto.DOUBLE for row in model.graph.initializer if row.name in used
    )
