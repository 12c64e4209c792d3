from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zoo
from bundle_cache import cached_export
from export_cases import Case
from fleetlearn_export import LocalStep
from fleetlearn_export.inspection import graph_costs, step_memory
from graphs import graph
from onnx import TensorProto, helper
from step_peak import estimated, measured

node = helper.make_node
FLOAT = TensorProto.FLOAT


def test_peak_of_intermediates_worked_out_by_hand() -> None:
    """1 unit = 1024 bytes: x (n, 256) with one example."""
    model = graph(
        [
            node("MatMul", ["x", "w"], ["a"]),  # a: 2 units; alive to the end
            node("Relu", ["a"], ["b"]),  # not in place, a is read later: 4 units
            node("Tanh", ["b"], ["c"]),  # in place
            node("Reshape", ["c", "s"], ["d"]),  # the same memory
            node("Concat", ["d", "d"], ["e"], axis=1),  # 4 more: 8 units
            node("ReduceSum", ["e"], ["f"], keepdims=1),  # 256 bytes, rounded up
            node("Add", ["a", "f"], ["g"]),  # an output, which the device has memory for
        ],
        {"x": (FLOAT, ["n", 256])},
        ["g"],
        {"w": np.zeros((256, 512), np.float32), "s": np.array([0, -1])},
    )
    assert (
        step_memory.peak_of_intermediates(model, graph_costs.values(model, 1))
        == 8 * 1024 + 256 - 256
    )
    assert step_memory.peak_of_intermediates(model, graph_costs.values(model, 3)) == 3 * 8 * 1024


def test_a_transposition_inside_a_product_and_a_convolutions_workspace() -> None:
    matrices = [node("Transpose", ["w"], ["v"], perm=[1, 0]), node("MatMul", ["x", "v"], ["y"])]
    inputs = {"x": (FLOAT, ["n", 64]), "w": (FLOAT, [32, 64])}
    model = graph(matrices, inputs, ["y"])
    assert step_memory.peak_of_intermediates(model, graph_costs.values(model, 4)) == 0
    model = graph([*matrices, node("Relu", ["v"], ["z"])], inputs, ["y", "z"])
    assert step_memory.peak_of_intermediates(model, graph_costs.values(model, 4)) == 4 * 32 * 64

    for filters, expected in ((16, 4 * 9 * (3 * 4)), (8, 0)):  # more, or fewer, than the 9 places
        convolution = graph(
            [node("Conv", ["x", "w"], ["y"])],
            {"x": (FLOAT, ["n", 3, 4, 4]), "w": (FLOAT, [filters, 3, 2, 2])},
            ["y"],
        )
        assert (
            step_memory.peak_of_intermediates(convolution, graph_costs.values(convolution, 2))
            == expected
        )


@pytest.mark.parametrize("batch", [20, 100])
@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn", "mcmahan"])
def test_memory_is_near_what_is_measured(
    cases: Callable[[str], Case], name: str, batch: int
) -> None:
    bundle = cases(name).exported.bundle
    found, expected = estimated(bundle, batch), measured(bundle, batch)
    assert found == pytest.approx(expected, rel=0.1)
    if name == "mcmahan":  # most of whose memory is its own
        assert found - step_memory.BASE == pytest.approx(expected - step_memory.BASE, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inverted-residual", "transformer"])
def test_memory_of_larger_models(tmp_path: Path, name: str) -> None:
    case = zoo.make(name)
    step = LocalStep("adam", proximal=True)
    made = cached_export(
        case.module,
        case.loss,
        case.batch(4),
        tmp_path / "zoo.bundle",
        step=step,
        targets=case.targets,
    )
    for batch in (20, 100):
        assert estimated(made.bundle, batch) == pytest.approx(measured(made.bundle, batch), rel=0.1)
