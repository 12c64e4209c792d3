from __future__ import annotations

from fleetlearn_export.graphs.reading import ancestors, reads, rename, rename_reads
from onnx import NodeProto, TensorProto, helper


def scan() -> NodeProto:
    """A Scan whose body reads ``weights`` from outside, and ``twice`` in another body inside of
    that one."""
    float_ = TensorProto.FLOAT
    inner = helper.make_graph(
        [helper.make_node("Mul", ["twice", "sum"], ["product"])],
        "inner",
        [],
        [helper.make_tensor_value_info("product", float_, None)],
    )
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "weights"], ["sum"]),
            helper.make_node("If", ["more"], ["chosen"], then_branch=inner, else_branch=inner),
        ],
        "body",
        [helper.make_tensor_value_info(name, float_, None) for name in ("state", "row")],
        [helper.make_tensor_value_info(name, float_, None) for name in ("sum", "chosen")],
        [helper.make_tensor("more", TensorProto.BOOL, [], [True])],
    )
    return helper.make_node(
        "Scan", ["first", "", "rows"], ["last", "all"], body=body, num_scan_inputs=1
    )


def test_what_bodies_read_from_outside_is_read() -> None:
    assert set(reads(scan())) == {"first", "rows", "weights", "twice"}


def test_what_bodies_read_from_outside_is_renamed() -> None:
    node = scan()
    rename_reads(
        node, {"weights": "other", "twice": "thrice", "rows": "columns", "last": "not read"}
    )
    assert set(reads(node)) == {"first", "columns", "other", "thrice"}
    assert list(node.output) == ["last", "all"]


def test_results_are_renamed_too() -> None:
    node = scan()
    rename(node, {"last": "end", "chosen": "taken", "twice": "thrice"})
    assert list(node.output) == ["end", "all"]
    assert [row.name for row in node.attribute[0].g.output] == ["sum", "taken"]
    assert set(reads(node)) == {"first", "rows", "weights", "thrice"}


def test_ancestors_make_what_bodies_read() -> None:
    made = [helper.make_node("Neg", ["a"], [name]) for name in ("weights", "unread", "twice")]
    last = helper.make_node("Neg", ["all"], ["wanted"])
    assert ancestors([*made, scan(), last], ["wanted"]) == [made[0], made[2], scan(), last]
    assert ancestors([*made, scan(), last], ["wanted"], stop=["weights", "rows"]) == [
        made[2],
        scan(),
        last,
    ]
