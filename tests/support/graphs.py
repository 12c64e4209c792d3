"""ONNX graphs made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import helper


def graph(
    nodes: Iterable[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: list[str],
    constants: dict[str, np.ndarray[Any, Any]] | None = None,
    opset: int = 18,
    ir: int = 8,
) -> onnx.ModelProto:
    """A model; an axis named ``n`` is the batch's."""
    made = helper.make_graph(
        list(nodes),
        "graph",
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, (kind, shape) in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
