"""Sub-models: what is selected of a vector, of a manifest, and of a content's bytes."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol.encodings import UINT32, find_encoding
from fleetlearn_protocol.errors import BundleError, Code, ProtocolError
from fleetlearn_protocol.formats.whole import rows_from_bytes, rows_to_bytes
from fleetlearn_protocol.manifest import PERSONAL, Manifest, PublicExamples, SparseRows
from fleetlearn_protocol.manifest_file import _odd_sparse_rows, read_manifest, write_manifest
from fleetlearn_protocol.messages import (
    MAX_CONTROL_BYTES,
    MOST_ROWS,
    ROW_ELEMENTS,
    ROWS,
    UPDATE,
    ContentSelection,
    Fetch,
    Part,
    Piece,
    Report,
    encode,
)
from fleetlearn_protocol.sparse_rows import (
    RowLayout,
    RowSegment,
    check_rows,
    check_selection,
    elements_in,
    put_back,
    row_layout,
    rows_of,
    select,
    select_bytes,
    selected_bytes,
    selection_of,
    sub_manifest,
    touched_rows,
    with_row_elements,
)
from fleetlearn_protocol.vector import Vector

LAYOUT = RowLayout(
    100,
    (RowSegment(0, 3, 0), RowSegment(3, 403, 4), RowSegment(403, 405, 0), RowSegment(405, 505, 1)),
)
RANDOM = np.random.default_rng(1)
VECTOR: Vector = RANDOM.normal(size=505).astype(np.float32)
SOME = np.array([0, 1, 7, 8, 50, 99])


def manifest(**changes: object) -> Manifest:
    """A manifest with two sparse tables of 5 rows, a vector between them, and Adam's state."""
    rows = [
        {"name": "bias", "shape": [2], "offset": 0},
        {"name": "items.weight", "shape": [5, 3], "offset": 2},
        {"name": "item_bias", "shape": [5, 1], "offset": 17},
    ]
    file = {"sha256": "0" * 64, "size": 1000}
    paths = ("graphs/train.onnx", "graphs/eval.onnx", "graphs/infer.onnx", "parameters.safetensors")
    table = {
        "format": "fleetlearn.bundle",
        "version": 1,
        "name": "items",
        "parameters": rows,
        "batch": [
            {"name": "item", "dtype": "int64", "shape": [4], "below": 5},
            {"name": "y", "dtype": "float32", "shape": []},
        ],
        "outputs": [{"name": "output", "dtype": "float32", "shape": []}],
        "hyper": [],
        "step": {"optimizer": "adam"},
        "metrics": [],
        "files": dict.fromkeys(paths, file),
        "state": [
            {"name": "m.items.weight", "shape": [5, 3], "offset": 0},
            {"name": "m.bias", "shape": [2], "offset": 15},
            {"name": "t", "shape": [], "offset": 17},
        ],
        "sparse": {"tables": ["items.weight", "item_bias"], "arrays": ["item"], "rows": 5},
    }
    return read_manifest(msgspec.json.encode(table | changes))


def test_what_is_selected_is_put_back() -> None:
    selected = select(VECTOR, LAYOUT, SOME)
    assert len(selected) == LAYOUT.elements(6) == 5 + 6 * 5
    assert np.array_equal(selected[:3], VECTOR[:3])
    assert np.array_equal(selected[3:27].reshape(6, 4)[2], VECTOR[3 + 28 : 3 + 32])
    assert np.array_equal(selected[29:], VECTOR[405:][SOME])
    after = np.zeros_like(VECTOR)
    put_back(after, LAYOUT, SOME, selected)
    assert np.array_equal(select(after, LAYOUT, SOME), selected)
    assert np.array_equal(touched_rows(after, LAYOUT), SOME)
    assert np.count_nonzero(after) == len(selected)


def test_bytes_are_selected_as_elements_are() -> None:
    """From memory, and stretch by stretch from a file: rows that follow each other are one."""
    selection = selection_of(LAYOUT, SOME, 4)
    content = VECTOR.tobytes()
    check_selection(selection, len(content))
    assert np.array_equal(rows_of(selection), SOME)
    expected = select(VECTOR, LAYOUT, SOME).tobytes()
    for near, reads in ((0, 2 + 2 * 4), (100, 2 + 2 * 3), (10_000, 2 + 2)):
        read = Mock(side_effect=lambda begin, size: content[begin : begin + size])
        assert select_bytes(read, selection, near) == expected
        assert read.call_count == reads
    assert selected_bytes(selection) == len(expected)


def test_no_row_is_selected() -> None:
    selection = selection_of(LAYOUT, SOME[:0], 4)
    content, reads = VECTOR.tobytes(), list[tuple[int, int]]()

    def read(begin: int, size: int) -> bytes:
        reads.append((begin, size))
        return content[begin : begin + size]

    assert select_bytes(read, selection, 0) == VECTOR[[0, 1, 2, 403, 404]].tobytes()
    assert reads == [(0, 12), (4 * 403, 8)]


@pytest.mark.parametrize(
    ("pieces", "rows"),
    [
        ([Piece(0, 8), Piece(4, 4)], ()),
        ([Piece(0, 4), Piece(8, 4, True), Piece(12, 4)], (1,)),
        ([Piece(40, 4, True)], (0, 16)),
        ([Piece(100, 8)], ()),
    ],
    ids=["two overlap", "a row overlaps a stretch", "a row beyond the end", "beyond the end"],
)
def test_pieces_that_are_none_of_a_content(pieces: list[Piece], rows: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_selection(ContentSelection(tuple(pieces), rows), 104)
    assert caught.value.code is Code.BAD_MESSAGE


def test_the_most_rows_fit_into_a_message() -> None:
    layout = RowLayout(2**31, (RowSegment(0, 2**31, 1),))
    rows = np.sort(RANDOM.choice(2**31, MOST_ROWS, replace=False))
    message = encode(Fetch("0" * 64, selection=selection_of(layout, rows, 4)))
    assert len(message) < MAX_CONTROL_BYTES


def test_rows_travel_as_whole_numbers() -> None:
    assert np.array_equal(rows_from_bytes(rows_to_bytes(SOME)), SOME)
    for wrong in ([3, 3], [4, 2]):
        with pytest.raises(ProtocolError, match="must ascend"):
            rows_from_bytes(rows_to_bytes(np.array(wrong)))
    with pytest.raises(ProtocolError, match="0 to 99"):
        check_rows(np.array([5, 100]), LAYOUT)


def test_rows_are_no_floats() -> None:
    whole = rows_to_bytes(SOME)
    with pytest.raises(ProtocolError, match="each takes 4"):
        rows_from_bytes(whole[:5])
    with pytest.raises(ProtocolError, match="it takes numbers of rows"):
        UINT32.encode(VECTOR)
    with pytest.raises(ProtocolError, match="floats were expected"):
        UINT32.decode(whole)
    assert UINT32.check(whole) == 99
    assert find_encoding("uint32") is UINT32
    assert with_row_elements([UPDATE]) == [UPDATE]
    assert with_row_elements([ROWS]) == [ROWS, ROW_ELEMENTS, UPDATE]


def test_the_sub_models_manifest() -> None:
    whole = manifest()
    layout = row_layout(whole)
    assert layout == RowLayout(
        5, (RowSegment(0, 2, 0), RowSegment(2, 17, 3), RowSegment(17, 22, 1))
    )
    part = sub_manifest(whole, 2)
    assert part.size == layout.elements(2) == 10
    assert [(row.shape, row.offset) for row in part.parameters] == [
        ((2,), 0),
        ((2, 3), 2),
        ((2, 1), 8),
    ]
    assert [(row.shape, row.offset) for row in part.state] == [((2, 3), 0), ((2,), 6), ((), 8)]
    assert [array.below for array in part.batch] == [2, None]
    assert whole.elements_of(ROWS) == 5
    assert whole.elements_of(ROW_ELEMENTS) == 4
    assert read_manifest(write_manifest(whole)).sparse == whole.sparse
    one = msgspec.structs.replace(whole, sparse=SparseRows(("item_bias",), ("item",), 5))
    assert row_layout(one) == RowLayout(5, (RowSegment(0, 17, 0), RowSegment(17, 22, 1)))
    check_rows(np.array([0, 4]), layout)
    assert row_layout(msgspec.structs.replace(whole, sparse=msgspec.UNSET)) is None


def test_the_elements_of_a_report_follow_from_its_rows() -> None:
    def report(*parts: Part) -> Report:
        return Report("t", 1, parts, 1, 1, 1.0, True, 0.0)

    update = Part(UPDATE, "float32", 40, 0)
    rows = Part(ROWS, "uint32", 8, 0)
    assert elements_in(report(rows, update), manifest().elements_of)(UPDATE) == 10
    assert elements_in(report(rows, update), manifest().elements_of)(ROWS) == 5
    assert elements_in(report(update), manifest().elements_of)(UPDATE) == manifest().size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tables": ["nothing"]}, "no parameter that travels"),
        ({"tables": ["bias"]}, "must have 5 rows"),
        ({"rows": 6}, "must have 6 rows"),
        ({"arrays": ["y"]}, "no array of int64"),
    ],
)
def test_sparse_rows_that_contradict_the_manifest(changes: dict[str, object], words: str) -> None:
    sparse = msgspec.to_builtins(SparseRows(("items.weight", "item_bias"), ("item",), 5))
    with pytest.raises(BundleError, match=words):
        manifest(sparse=sparse | changes)


def test_what_a_bundle_with_sparse_rows_cannot_have() -> None:
    with pytest.raises(BundleError, match="no buffers that travel"):
        manifest(step={"optimizer": "custom"})
    with pytest.raises(BundleError, match="reads no correction"):
        manifest(step={"correction": True}, references=["correction"])
    array = {"name": "item", "dtype": "int64", "shape": [], "below": 4}
    with pytest.raises(BundleError, match="integers must be 0 to 4"):
        manifest(batch=[array])
    with pytest.raises(BundleError, match="kept from task to task"):
        manifest(state=[{"name": "t", "shape": [], "offset": 0, "kept": True}])
    public = msgspec.structs.replace(manifest(), public=PublicExamples(3, 2))
    assert "no graphs" in str(_odd_sparse_rows(public))
    own = {"name": "own", "shape": [1], "offset": 22, "personal": True}
    rows = msgspec.to_builtins(manifest().parameters)
    with pytest.raises(BundleError, match=PERSONAL):
        manifest(parameters=[*rows, own])
