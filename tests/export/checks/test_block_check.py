"""The check of train_many.onnx finds blocks that compute something else, and allows for float32's
own errors."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import pytest
import zoo
from fleetlearn_export import ExportError
from fleetlearn_export.checks import block_check
from fleetlearn_export.checks.comparison import compare
from fleetlearn_export.graphs.emitted import emitted
from fleetlearn_export.graphs.train_many import trace_many
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_protocol.manifest import TrainMany
from mutants import TracedStep, traced_step
from onnx import helper, numpy_helper

MANY = TrainMany(5, 3)


@pytest.fixture(scope="module")
def step() -> TracedStep:
    return traced_step(zoo.make("mlp"))


@pytest.fixture(scope="module")
def block(step: TracedStep) -> onnx.ModelProto:
    return emitted(partial(trace_many, step.step, step.module, MANY)).model


def check(step: TracedStep, model: onnx.ModelProto) -> float:
    with training_mode(step.user.model):
        return block_check.check_many(step.user, step.step, model.SerializeToString(), MANY)


def scaled(model: onnx.ModelProto, output: str, factors: list[float]) -> onnx.ModelProto:
    """Return the graph with another output, multiplied with a factor for each device."""
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    (node,) = (node for node in changed.graph.node if output in node.output)
    (row,) = (row for row in changed.graph.output if row.name == output)
    node.output[0] = "right"
    shape = [len(factors), *[1] * (len(row.type.tensor_type.shape.dim) - 1)]
    changed.graph.initializer.append(
        numpy_helper.from_array(np.array(factors, np.float32).reshape(shape), "factors")
    )
    changed.graph.node.append(helper.make_node("Mul", ["right", "factors"], [output]))
    return changed


@pytest.mark.parametrize("output", ["loss", "metric.accuracy", "next.param.0.bias"])
@pytest.mark.parametrize("tolerance", [1e-5, 1e-9])
def test_a_wrong_result_of_one_device_is_named(
    step: TracedStep,
    block: onnx.ModelProto,
    monkeypatch: pytest.MonkeyPatch,
    tolerance: float,
    output: str,
) -> None:
    """Also where rounding is allowed for: float32 keeps no tolerance of 1e-9."""
    monkeypatch.setattr(block_check, "compare", partial(compare, tolerance=tolerance))
    assert check(step, block) < 1e-6
    with pytest.raises(
        ExportError, match=f"the block of devices, device 4, differs from PyTorch in {output}"
    ):
        check(step, scaled(block, output, [1, 1, 1, 1, 1.01]))
