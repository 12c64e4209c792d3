"""Topologies: who is whose neighbour."""

from __future__ import annotations

import hashlib
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.peers.spectrum import reached_from_first
from fleetlearn_device.peers.topologies import (
    Topology,
    exponential,
    one_peer_exponential,
    random_regular,
    ring,
    torus,
)


def test_neighbours_by_hand() -> None:
    third, fifth = pytest.approx(1 / 3), pytest.approx(1 / 5)
    assert ring(5).row(0) == {1: third, 4: third}
    assert ring(2).row(1) == {0: 0.5}
    assert ring(1).row(0) == {}
    assert torus(3, 4).row(0) == {1: fifth, 3: fifth, 4: fifth, 8: fifth}
    assert list(exponential(16).row(0)) == [1, 2, 4, 8, 12, 14, 15]
    assert torus(1, 6).row(2) == ring(6).row(2)


@pytest.mark.parametrize("peers", [2, 8, 32])
def test_one_peer_exponential_reaches_the_mean_after_log2_n_mixings(peers: int) -> None:
    matrices = [matrix.dense() for matrix in one_peer_exponential(peers)]
    assert len(matrices) == peers.bit_length() - 1
    np.testing.assert_array_equal(reduce(np.matmul, matrices), np.full((peers, peers), 1 / peers))


@pytest.mark.parametrize("peers", [1, 3, 6, 13])
def test_one_peer_exponential_of_other_numbers_becomes_the_mean(peers: int) -> None:
    matrices = [matrix.dense() for matrix in one_peer_exponential(peers)]
    for matrix in matrices:
        np.testing.assert_array_equal(matrix, matrix.T)
        assert set(matrix.ravel()) <= {0, 0.5, 1}
    turns = np.linalg.matrix_power(reduce(np.matmul, matrices), 100)
    np.testing.assert_allclose(turns, np.full((peers, peers), 1 / peers), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("peers", "degree"), [(2, 1), (3, 2), (8, 3), (9, 4), (10, 7), (500, 6)])
def test_random_regular_graphs_are_regular_connected_and_of_their_seed(
    peers: int, degree: int
) -> None:
    matrix = random_regular(peers, degree, seed=5)
    assert {len(matrix.row(peer)) for peer in range(peers)} == {degree}
    assert all(peer not in matrix.row(peer) for peer in range(peers))
    assert reached_from_first(matrix).all()
    again = random_regular(peers, degree, seed=5)
    np.testing.assert_array_equal(matrix.neighbours, again.neighbours)


def test_random_regular_graph_is_the_same_on_every_machine() -> None:
    """Peers make it by themselves: another graph somewhere would be another W."""
    neighbours = random_regular(100, 4, seed=7).neighbours.astype("<i8")
    assert hashlib.sha256(neighbours.tobytes()).hexdigest()[:16] == "a452c40f0b24dcd4"
    other = random_regular(100, 4, seed=8).neighbours
    assert (neighbours != other).any()


@pytest.mark.parametrize(
    ("peers", "degree", "words"),
    [(5, 3, "must be even"), (5, 5, "expected 2 to 4"), (5, 1, "expected 2 to 4")],
)
def test_impossible_random_regular_graphs_say_why(peers: int, degree: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        random_regular(peers, degree, seed=0)


def test_topologies_by_their_settings(tmp_path: Path) -> None:
    for kind in ("ring", "torus", "random-regular", "exponential", "complete"):
        (matrix,) = Topology(kind).matrices(12)
        assert len(matrix) == 12
        assert reached_from_first(matrix).all()
    assert Topology("torus").matrices(12)[0].row(0) == torus(3, 4).row(0)
    assert Topology("torus", rows=2).matrices(12)[0].row(0) == torus(2, 6).row(0)
    assert len(Topology("one-peer-exponential").matrices(12)) == 4
    np.save(tmp_path / "w.npy", ring(12).dense())
    read = Topology("file", file=str(tmp_path / "w.npy"))
    assert read.matrices(12)[0].row(3) == pytest.approx(ring(12).row(3))
    with pytest.raises(ValueError, match="is of 12 peers; there are 13"):
        read.matrices(13)
    with pytest.raises(ValueError, match="has no file"):
        Topology("file").matrices(3)
    with pytest.raises(ValueError, match="12 peers cannot stand in 5 rows"):
        Topology("torus", rows=5).matrices(12)
    with pytest.raises(ValueError, match="at least 1 of each"):
        torus(0, 3)
