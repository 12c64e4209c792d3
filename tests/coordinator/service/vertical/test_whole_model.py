"""Which files become one model, and which are refused by name."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.service.vertical.whole_model import whole_model
from fleetlearn_protocol.computations.onnx_file import OnnxNode, OnnxValue, onnx_model
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.vertical.joined_model import PartOrigin, origin_of, with_origin
from vertical_world import BUNDLES, CUTS


def part(inputs: list[str], node: OnnxNode) -> bytes:
    rows = [OnnxValue(name, "float32", (1,)) for name in inputs]
    return onnx_model("part", rows, [OnnxValue("output", "float32", (1,))], [node], {})


def bottom(party: str, step: int = 30) -> bytes:
    content = part(["x"], OnnxNode("Tanh", ("x",), ("output",)))
    return with_origin(content, PartOrigin(BUNDLES[party], step))


TOP = part(
    ["activations_bank", "activations_shop"],
    OnnxNode("Add", ("activations_bank", "activations_shop"), ("output",)),
)


def test_the_bottoms_of_all_parties_and_the_top_become_one_model() -> None:
    """In the order of the parties, whatever that of the files."""
    files = {"shop.onnx": bottom("shop"), "bank.onnx": bottom("bank")}
    content = whole_model(CUTS, files, TOP, 30)
    assert content.index(b"bank.x") < content.index(b"shop.x")
    assert origin_of(content) is None


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"b.onnx": bottom("bank")}, "the bottom of shop is missing"),
        ({"b.onnx": bottom("bank"), "again.onnx": bottom("bank")}, "again.onnx is a second file"),
        ({"b.onnx": bottom("bank", 20)}, "b.onnx is the bottom of bank after step 20"),
        ({"b.onnx": TOP}, "b.onnx is no bottom of this run"),
        ({"b.onnx": with_origin(TOP, PartOrigin("c" * 64, 30))}, "no bottom of this run"),
        ({"b.onnx": b"\xff"}, "b.onnx is no ONNX file"),
    ],
)
def test_files_that_are_not_the_parts_of_one_step_are_refused(
    files: dict[str, bytes], said: str
) -> None:
    with pytest.raises(FleetError, match=said):
        whole_model(CUTS, files, TOP, 30)
