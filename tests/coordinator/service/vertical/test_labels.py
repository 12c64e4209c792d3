"""Labels that the coordinator has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.service.vertical.labels import read_labels
from fleetlearn_coordinator.service.vertical.settings import VerticalPlanError
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.vertical.alignment import hash_rows, hashes_as_bytes

HASHES = hash_rows(["a", "b", "c"], b"k" * 32)
RAW = np.frombuffer(hashes_as_bytes(HASHES), np.uint8).reshape(3, 32)
Y = Input("y", "int64", ())


def test_labels_are_sorted_by_their_hashes(tmp_path: Path) -> None:
    np.savez(tmp_path / "labels.npz", hashes=RAW, y=np.array([1.0, 2.0, 3.0]))
    found = read_labels(tmp_path / "labels.npz", [Y])
    assert np.array_equal(found.hashes, np.sort(HASHES))
    order = np.argsort(HASHES)
    assert found.arrays[0].tolist() == np.array([1, 2, 3])[order].tolist()
    assert found.arrays[0].dtype == np.int64


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"y": np.arange(3)}, "has no array hashes; expected hashes, y"),
        ({"hashes": RAW}, "has no array y"),
        ({"hashes": RAW[:, :31], "y": np.arange(3)}, r"is uint8 \(3, 31\); expected uint8"),
        ({"hashes": RAW[[0, 0, 1]], "y": np.arange(3)}, "has rows twice"),
        ({"hashes": RAW, "y": np.arange(2)}, r"has shape \(2,\); expected \(3,\)"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, arrays: Any, said: str) -> None:
    np.savez(tmp_path / "labels.npz", **arrays)
    with pytest.raises(VerticalPlanError, match=said):
        read_labels(tmp_path / "labels.npz", [Y])
    with pytest.raises(VerticalPlanError, match="labels_file: "):
        read_labels(tmp_path / "none.npz", [Y])
