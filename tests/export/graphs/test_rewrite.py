"""Rewritten graphs compute the same, with fewer operators."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxruntime
import pytest
from fleetlearn_export.graphs.rewrite import rewrite

HEAD = """<ir_version: 8, opset_import: ["" : 18]>
main (float[4,3] w, float[5,4] a, float[5,3] b, float[3,5] c, float lr, float[n,6,8] x)
  => (float[l,m] out)
"""
BLOCK = """<ir_version: 8, opset_import: ["" : 18]>
main (float[2,4,3] w, float[2,5,4] a, float[2,5,3] b, float[2,3,5] c, float lr)
  => (float[2,4,3] out)
"""
KERNEL = """<ir_version: 8, opset_import: ["" : 18]>
main (float[256,64,2,2] w, float[5,256] a, float[5,256] b, float lr) => (float[256,64,2,2] out)
"""
SCALED = """sizes = Constant<value = int64[4] {256, 64, 2, 2}>()
r = Reshape(g, sizes) s = Mul(lr, r) out = Sub(w, s)"""


def values(model: onnx.ModelProto) -> np.ndarray:
    rng = np.random.default_rng(0)
    feeds = {
        row.name: np.asarray(
            rng.standard_normal([size.dim_value or 2 for size in row.type.tensor_type.shape.dim]),
            np.float32,
        )
        for row in model.graph.input
    }
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    result: np.ndarray = session.run(None, feeds)[0]
    return result


def rewritten(body: str) -> Counter[str]:
    """The operators after rewriting."""
    return Counter(node.op_type for node in rewritten_graph(body, HEAD).node)


def rewritten_graph(body: str, head: str) -> onnx.GraphProto:
    """What the graph computes is compared."""
    before = onnx.parser.parse_model(head + "{" + body + "}")
    model = ir.from_proto(onnx.shape_inference.infer_shapes(before))
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    rewrite(model.graph)
    passes.RemoveUnusedNodesPass()(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after)
    np.testing.assert_allclose(values(after), values(before), rtol=1e-5, atol=1e-6)
    return after.graph


@pytest.mark.parametrize(
    "body",
    [
        "at = Transpose(a) g = MatMul(at, b) s = Mul(lr, g) out = Sub(w, s)",
        "at = Transpose(a) ct = Transpose(c) g = MatMul(at, ct) s = Mul(g, lr) out = Sub(w, s)",
        # As PyTorch computes the gradient of a linear layer's weights.
        "at = Transpose<perm = [1, 0]>(a) g = MatMul(at, b) t = Transpose<perm = [1, 0]>(g) "
        "u = Transpose<perm = [1, 0]>(t) s = Mul(lr, u) out = Sub(w, s)",
    ],
)
def test_an_update_is_one_product(body: str) -> None:
    assert rewritten(body) == {"Mul": 1, "Gemm": 1}


@pytest.mark.parametrize(
    ("body", "scaled"),
    [
        # w has fewer columns than rows, so the second factor is the smaller one.
        (
            "at = Transpose<perm = [0, 2, 1]>(a) g = MatMul(at, b) s = Mul(lr, g) out = Sub(w, s)",
            "b",
        ),
        (
            "at = Transpose<perm = [0, 2, 1]>(a) ct = Transpose<perm = [0, 2, 1]>(c) g = "
            "MatMul(at, ct) s = Mul(g, lr) out = Sub(w, s)",
            "c",
        ),
    ],
)
def test_an_update_of_a_block_scales_the_smaller_factor(body: str, scaled: str) -> None:
    graph = rewritten_graph(body, BLOCK)
    found = Counter(node.op_type for node in graph.node)
    assert found == {"Transpose": 1 + (scaled == "c"), "Mul": 1, "MatMul": 1, "Sub": 1}
    (mul,) = (node for node in graph.node if node.op_type == "Mul")
    assert list(mul.input) == [scaled, "lr"]


@pytest.mark.parametrize(
    "body",
    [
        # The gradient, or the step, is used elsewhere too.
        "at = Transpose(a) g = MatMul(at, b) s = Mul(lr, g) d = Sub(w, s) out = Add(d, g)",
        "at = Transpose(a) g = MatMul(at, b) s = Mul(lr, g) d = Sub(w, s) out = Add(d, s)",
        # One row, which the subtraction repeats.
        "z = Constant<value_ints: ints = [0]>() r = ReduceSum<keepdims = 1>(w, z) at = "
        "Transpose(a) g = MatMul(at, b) s = Mul(lr, g) out = Sub(r, s)",
        "at = Transpose(a) g = MatMul(at, b) s = Mul(w, g) out = Sub(w, s)",
    ],
)
def test_other_updates_stay(body: str) -> None:
    assert "Gemm" not in rewritten(body)


def test_an_update_of_a_kernel_scales_a_factor_before_it_is_turned() -> None:
    """ONNX Runtime multiplies with what is turned, if nothing is in between."""
    graph = rewritten_graph(f"at = Transpose(a) g = MatMul(at, b) {SCALED}", KERNEL)
    makers = {name: node for node in graph.node for name in node.output}
    (product,) = (node for node in graph.node if node.op_type == "MatMul")
    turned = makers[product.input[0]]
    assert (turned.op_type, makers[turned.input[0]].op_type) == ("Transpose", "Mul")
    assert [node.op_type for node in graph.node].count("Mul") == 1


@pytest.mark.parametrize(
    "body",
    [
        (
            f"at = Transpose(a) g = MatMul(at, b) {SCALED.replace('out', 'u')} t = Relu(r) out = "
            "Add(u, t)"
        ),
        f"at = Transpose(a) h = MatMul(at, b) g = Relu(h) {SCALED}",
    ],
)
def test_an_update_of_a_kernel_stays_where_the_gradient_is_read_too_or_no_product(
    body: str,
) -> None:
    (scaled,) = (node for node in rewritten_graph(body, KERNEL).node if node.op_type == "Mul")
    assert "r" in scaled.input


def test_transposes_that_are_needed_stay() -> None:
    turned = "shape = Constant<value_ints: ints = [3, -1]>() p = Transpose<perm = [1, 2, 0]>(x) "
    assert (
        rewritten(turned + "q = Transpose<perm = [1, 2, 0]>(p) out = Reshape(q, shape)")[
            "Transpose"
        ]
        == 2
    )
    assert (
        rewritten(turned + "q = Transpose<perm = [2, 0, 1]>(p) out = Reshape(q, shape)")[
            "Transpose"
        ]
        == 0
    )
    both = (
        "q = Transpose<perm = [2, 0, 1]>(p) r = Reshape(p, shape) s = Reshape(q, shape) out = "
        "Add(r, s)"
    )
    assert rewritten(turned + both)["Transpose"] == 1


SLICES = "".join(
    f"{name} = Constant<value_ints: ints = {ints}>() "
    for name, ints in {"one": [1], "two": [2], "five": [5], "last": [-1], "shape": [3, -1]}.items()
)


def test_slices_along_different_axes_are_one() -> None:
    body = (
        "s = Slice(x, one, five, two, two) t = Slice(s, two, five, one, one) out = Reshape(t, "
        "shape)"
    )
    assert rewritten(SLICES + body)["Slice"] == 1


@pytest.mark.parametrize("axis", ["two", "last"])
def test_slices_that_may_be_along_one_axis_stay(axis: str) -> None:
    body = (
        f"s = Slice(x, one, five, two, one) t = Slice(s, one, five, {axis}, one) out = Reshape(t, "
        "shape)"
    )
    assert rewritten(SLICES + body)["Slice"] == 2


ONE_ELEMENT = """<ir_version: 8, opset_import: ["" : 18]>
main (float[n,6,1,1] x, float lr, float[n,6,2,2] y) => (float[k,l,m,o] out)
"""


@pytest.mark.parametrize("number", ["lr", "half"])
def test_number_gets_the_axes_of_a_tensor_that_ends_in_one_element(number: str) -> None:
    half = "half = Constant<value: tensor = float {0.5}>() "
    graph = rewritten_graph(
        f"{half} a = Mul(x, {number}) b = Neg(a) out = Sub(b, {number})", ONE_ELEMENT
    )
    reshaped = [node.output[0] for node in graph.node if node.op_type == "Reshape"]
    wide = [row.name for row in graph.initializer if list(row.dims) == [1, 1, 1, 1]]
    for node in graph.node:
        assert node.op_type not in ("Mul", "Sub") or node.input[1] in reshaped + wide


def test_number_stays_as_it_is_beside_other_tensors() -> None:
    graph = rewritten_graph("a = Mul(y, lr) b = Neg(a) c = Sub(b, lr) out = Add(c, x)", ONE_ELEMENT)
    assert [node.op_type for node in graph.node] == ["Mul", "Neg", "Sub", "Add"]


@pytest.mark.parametrize(("copies", "expected"), [(5, []), (1, ["Expand"])])
def test_a_product_with_copies_of_a_matrix_needs_no_copies(
    copies: int, expected: list[str]
) -> None:
    """Where the other operand has only one matrix, the copies make as many products."""
    head = f"""<ir_version: 8, opset_import: ["" : 18]>
    main (float[{copies},4,3] a, float[3,2] w) => (float[5,4,2] out)
    """
    graph = rewritten_graph(
        "sizes = Constant<value = int64[3] {5, 3, 2}>() e = Expand(w, sizes) out = MatMul(a, e)",
        head,
    )
    assert [node.op_type for node in graph.node] == [*expected, "MatMul"]
