from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export_cases import Case
from fleetlearn_export import ExportError
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.graphs.conversion import check_standard, serialised, write_with_parameters
from onnx import TensorProto, helper


def model_of(
    node: onnx.NodeProto, opset: int = 18, ir_version: int = 8, domain: str = ""
) -> onnx.ModelProto:
    a, b = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "ab")
    graph = helper.make_graph([node], "g", [a], [b])
    imports = [
        helper.make_opsetid("", opset),
        *([helper.make_opsetid(domain, 1)] if domain else []),
    ]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


RELU = helper.make_node("Relu", ["a"], ["b"])


def test_a_standard_graph_passes() -> None:
    check_standard(model_of(RELU))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            model_of(
                helper.make_node("Gelu", ["a"], ["b"], domain="com.microsoft"),
                domain="com.microsoft",
            ),
            "com.microsoft::Gelu",
        ),
        (model_of(RELU, opset=21), "opset 21"),
        (model_of(RELU, domain="com.microsoft"), "com.microsoft"),
        (model_of(RELU, ir_version=11), "IR version 11"),
        (model_of(helper.make_node("Relu", ["nowhere"], ["b"])), "not valid ONNX: .*nowhere"),
    ],
)
def test_others_are_refused_by_name(model: onnx.ModelProto, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        check_standard(model)


def test_operators_inside_branches_are_seen() -> None:
    inner = model_of(helper.make_node("Gelu", ["a"], ["b"], domain="com.microsoft")).graph
    del inner.input[:]
    branch = helper.make_node("If", ["a"], ["b"], then_branch=inner, else_branch=inner)
    with pytest.raises(ExportError, match=r"com\.microsoft::Gelu"):
        check_standard(model_of(branch))


@pytest.mark.parametrize(
    "name", ["softmax", "mlp", "cnn", pytest.param("mcmahan", marks=pytest.mark.slow)]
)
def test_exported_graphs_hold_standard_operators_only(
    cases: Callable[[str], Case], name: str
) -> None:
    bundle = cases(name).exported.bundle
    for file in ("train", "eval", "infer"):
        model = onnx.load_model_from_string(bundle.read(f"graphs/{file}.onnx"))
        assert {node.domain for node in model.graph.node} == {""}
        assert [(row.domain, row.version) for row in model.opset_import] == [
            ("", bundle.manifest.opset)
        ]
        assert model.ir_version == bundle.manifest.ir_version
        assert bundle.manifest.opset <= 20
        assert model.ir_version <= 10
        assert not model.functions
        free = [
            row.type.tensor_type.shape.dim[0].dim_param
            for row in model.graph.input
            if "x" in row.name.split(".")
        ]
        assert free == ["n"]
        names = [output for node in model.graph.node for output in node.output]
        used = {name for node in model.graph.node for name in node.input} | {
            row.name for row in model.graph.output
        }
        dead = [node.op_type for node in model.graph.node if not used.intersection(node.output)]
        assert not dead
        assert len(set(names)) == len(names)


def test_parameters_become_initializers_whose_bytes_are_found(tmp_path: Path) -> None:
    """Two parameters with the same bytes, of which one has a long name and the other's name is a
    part of it."""
    long = "layer." * 30 + "w"
    inputs = [
        helper.make_tensor_value_info(f"param.{name}", TensorProto.FLOAT, [300])
        for name in ("w", long, "unused")
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [300])
    graph = helper.make_graph(
        [helper.make_node("Add", ["param.w", f"param.{long}"], ["output"])], "g", inputs, [output]
    )
    values = {name: torch.arange(300).float() for name in ("w", long, "unused")}
    offsets = write_with_parameters(helper.make_model(graph), values, None, tmp_path / "g.onnx")
    assert set(offsets) == {"w", long}
    changed = bytearray((tmp_path / "g.onnx").read_bytes())
    assert changed == onnx.load_model_from_string(bytes(changed)).SerializeToString(
        deterministic=True
    )
    for name, factor in (("w", 10), (long, 1000)):
        changed[offsets[name] : offsets[name] + 1200] = (
            np.arange(300, dtype="<f4") * factor
        ).tobytes()
    model = onnx.load_model_from_string(bytes(changed))
    assert not model.graph.input
    arrays = {row.name: onnx.numpy_helper.to_array(row) for row in model.graph.initializer}
    assert arrays["param.w"][7] == 70
    assert arrays[f"param.{long}"][7] == 7000


def test_constants_that_are_kept_apart_are_written_into_the_file(tmp_path: Path) -> None:
    constants = Constants()
    table = np.arange(2000, dtype=np.float32).reshape(4, 500)
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [4, 500])
    nodes = [helper.make_node("Mul", ["table", "factor"], ["output"])]
    rows = [
        constants.reference("table", table),
        onnx.numpy_helper.from_array(np.float32(2), "factor"),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], [output], rows))
    assert write_with_parameters(model, {}, constants, tmp_path / "g.onnx") == {}
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(table, "table"))
    assert (tmp_path / "g.onnx").read_bytes() == model.SerializeToString(deterministic=True)


def test_a_graph_above_protobufs_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fleetlearn_export.graphs.conversion.MAX_BYTES", 10)
    with pytest.raises(ExportError, match="ONNX files end at 10"):
        serialised(model_of(RELU))
    with pytest.raises(ExportError, match="ONNX files end at 10"):
        write_with_parameters(model_of(RELU), {}, None, tmp_path / "g.onnx")
