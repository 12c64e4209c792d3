"""Matrices from files: what is wrong, and in which row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.peers.matrix_file import from_dense, from_file
from fleetlearn_device.peers.topologies import torus

GOOD = "0.5, 0.25, 0.25\n0.25, 0.75, 0\n\n0.25, 0, 0.75\n"


def test_csv_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text(GOOD)
    matrix = from_file(path)
    assert [matrix.row(peer) for peer in range(3)] == [{1: 0.25, 2: 0.25}, {0: 0.25}, {0: 0.25}]
    np.testing.assert_array_equal(matrix.own, [0.5, 0.75, 0.75])


def test_npy_and_csv_of_few_digits_become_doubly_stochastic(tmp_path: Path) -> None:
    dense = torus(3, 4).dense()
    np.save(tmp_path / "w.npy", dense)
    np.savetxt(tmp_path / "w.csv", dense, fmt="%.7f", delimiter=",")
    exact, rounded = from_file(tmp_path / "w.npy"), from_file(tmp_path / "w.csv")
    np.testing.assert_array_equal(exact.dense(), dense)
    np.testing.assert_allclose(rounded.dense().sum(axis=0), 1.0, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,0\n0,x\n", "row 1 is not numbers: .*'x'"),
        ("1,0\n0\n", "row 1 has 1 weights, and row 0 has 2"),
        ("1,0\n", r"has the shape \(1, 2\); expected n rows of n weights"),
        ("", "has the shape"),
        ("1.2,-0.2\n-0.2,1.2\n", "row 0 has -0.2 in column 1; weights are 0 or more"),
        ("nan,1\n1,0\n", "row 0 has nan in column 0"),
        ("1,0,0\n0,0.5,0.5\n0,0.5,0.4\n", "row 2 adds up to 0.9; each row must add up to 1"),
        (
            "0.5,0.5,0\n0.25,0.5,0.25\n0.25,0,0.75\n",
            "row 0 has 0.5 in column 1, and row 1 has 0.25 in column 0; W must be symmetric",
        ),
        ("0.5,0.5,0\n0.5,0.5,0\n0,0,1\n", "row 2 has no way to row 0"),
        ("0,1\n1,0\n", "no row has a weight for its own model"),
    ],
)
def test_what_is_wrong_is_said_with_its_row(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        from_file(path)


def test_doubly_stochastic_and_not_symmetric_is_refused() -> None:
    """A one-way ring keeps the mean of all, yet not that of those who are there."""
    one_way = (np.eye(4) + np.roll(np.eye(4), 1, axis=1)) / 2
    with pytest.raises(ValueError, match="must be symmetric"):
        from_dense(one_way)
