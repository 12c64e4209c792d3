"""Operators on small vectors of several layers become one, with the same results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from fleetlearn_export import export_bundle
from fleetlearn_export.graphs.small_vectors import LONGEST, TOGETHER, put_vectors_together
from fleetlearn_protocol.manifest import TRAIN, LocalStep
from onnx import parser
from torch import nn
from torch.nn import functional


def model(
    lengths: list[int], body: str, outputs: str, scalars: str = "float kept, float factor"
) -> onnx.ModelProto:
    vectors = [
        f"float[{length}] old_{k}, float[{length}] mean_{k}" for k, length in enumerate(lengths)
    ]
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    step ({", ".join(vectors)}, {scalars}) => ({outputs}) {{ {body} }}"""
    return parser.parse_model(text)


def together(before: onnx.ModelProto) -> Counter[str]:
    """Return how often each operator is in the changed graph, after a look at its results: no bit
    is another."""
    after = onnx.ModelProto()
    after.CopyFrom(before)
    put_vectors_together(after)
    onnx.checker.check_model(after, full_check=True)
    random = np.random.default_rng(2)
    given = {
        row.name: np.asarray(
            random.random([size.dim_value for size in row.type.tensor_type.shape.dim], np.float32)
        )
        for row in before.graph.input
    }
    results = [
        onnxruntime.InferenceSession(
            row.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, given)
        for row in (before, after)
    ]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    return Counter(node.op_type for node in after.graph.node)


def updates(count: int) -> str:
    return "\n".join(
        (
            f"kept_{k} = Mul(old_{k}, kept) new_{k} = Mul(mean_{k}, factor) next_{k} = "
            f"Add(kept_{k}, new_{k})"
        )
        for k in range(count)
    )


def results(lengths: list[int], name: str = "next") -> str:
    return ", ".join(f"float[{length}] {name}_{k}" for k, length in enumerate(lengths))


@pytest.mark.parametrize("count", [2, 3, TOGETHER, TOGETHER + 2, 2 * TOGETHER + 3])
def test_updates_of_several_layers(count: int) -> None:
    lengths = list(range(3, 3 + count))
    found = together(model(lengths, updates(count), results(lengths)))
    groups, alone = divmod(count, TOGETHER)
    # three operators for two layers save none
    groups, alone = (groups, alone) if alone < 3 else (groups + 1, 0)
    assert found == Counter(
        Concat=2 * groups, Mul=2 * (groups + alone), Add=groups + alone, Split=groups
    )


FACTORS = (
    "a_{k} = Add(mean_{k}, factor) b_{k} = Sqrt(a_{k}) c_{k} = Reciprocal(b_{k}) d_{k} = "
    "Mul(c_{k}, old_{k})"
)
READERS = "e_{k} = Exp(d_{k}) next_{k} = Div(e_{k}, c_{k})"


def test_what_the_backward_pass_reads_is_computed_when_it_begins() -> None:
    early, late = ("\n".join(row.format(k=k) for k in range(3)) for row in (FACTORS, READERS))
    lengths, loss = [2, 4, 5], "loss = Mul(kept, factor)"
    outputs = f"float loss, {results(lengths)}"
    found = together(model(lengths, f"{early} {loss} {late}", outputs))
    assert found == Counter(Concat=2, Add=1, Sqrt=1, Reciprocal=1, Mul=2, Split=2, Exp=3, Div=3)
    # Exp reads them before the loss is there: they cannot wait.
    found = together(model(lengths, f"{early} {late} {loss}", outputs))
    assert found == Counter(Add=3, Sqrt=3, Reciprocal=3, Mul=4, Exp=3, Div=3)


def test_a_chain_reads_what_another_one_has_put_together() -> None:
    body = "\n".join(
        f"a_{k} = Add(old_{k}, factor) b_{k} = Sqrt(a_{k}) d_{k} = Exp(b_{k}) "
        f"c_{k} = Mul(b_{k}, kept) next_{k} = Add(c_{k}, kept)"
        for k in range(3)
    )
    lengths = [2, 3, 5]
    outputs = f"float loss, {results(lengths)}, {results(lengths, 'd')}"
    # Exp reads what Sqrt gives, so that the first two are for the backward pass, and the last two
    # for the end.
    found = together(model(lengths, f"loss = Mul(kept, factor) {body}", outputs))
    assert found == Counter(Mul=2, Concat=1, Add=2, Sqrt=1, Split=2, Exp=3)


def test_chains_of_other_forms_stay() -> None:
    other_scalar = updates(3).replace("Mul(mean_1, factor)", "Mul(mean_1, kept)")
    other_operator = updates(3).replace("Add(kept_1, new_1)", "Sub(kept_1, new_1)")
    for body in (other_scalar, other_operator):
        found = together(model([3, 3, 3], body, results([3, 3, 3])))
        assert (found["Concat"], found["Mul"]) == (0, 6)


def test_two_operators_for_three_vectors_stay() -> None:
    body = "\n".join(
        f"new_{k} = Mul(mean_{k}, factor) next_{k} = Sub(old_{k}, new_{k})" for k in range(4)
    )
    assert together(model([3, 3, 3, 3], body, results([3, 3, 3, 3]))) == Counter(Mul=4, Sub=4)


def test_long_vectors_and_other_shapes_stay() -> None:
    for size in (f"{LONGEST + 1}", "2, 2"):
        before = model([1, 1, 1], updates(3), results([1, 1, 1]))
        text = onnx.printer.to_text(before).replace("float[1]", f"float[{size}]")
        assert "Concat" not in together(parser.parse_model(text))


def test_a_vector_with_one_element_may_be_wider_later() -> None:
    body = updates(3).replace("Mul(mean_1, factor)", "Mul(mean_0, factor)")
    assert "Concat" not in together(model([1, 3, 1], body, results([1, 3, 1])))


@pytest.mark.parametrize(("optimizer", "roots"), [("sgd", 1), ("adam", 7)])
def test_a_network_with_batch_norms(optimizer: Any, roots: int, tmp_path: Path) -> None:
    """export_bundle compares with PyTorch. Adam has a root for all seven vectors, one for each of
    four other tensors, and one for its correction."""
    layers = [
        (nn.LazyConv2d(width, 3, padding=1, bias=False), nn.LazyBatchNorm2d(), nn.ReLU())
        for width in (4, 6, 5)
    ]
    network = nn.Sequential(
        *(layer for row in layers for layer in row), nn.Flatten(), nn.LazyLinear(3)
    )
    batch = torch.randn(4, 2, 5, 5), torch.tensor([0, 1, 2, 0])
    network(batch[0])
    step = LocalStep(optimizer)
    exported = export_bundle(network, functional.cross_entropy, batch, tmp_path / "b", step=step)
    graph = onnx.load(exported.bundle.path / TRAIN).graph
    found = Counter(node.op_type for node in graph.node)
    assert (found["Reciprocal"], found["Sqrt"]) == (1, roots)
