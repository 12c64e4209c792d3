from __future__ import annotations

from fleetlearn_export.inspection.arena import arena_bytes, rounded

MIB = 2**20


def test_pieces_are_rounded_up() -> None:
    assert [rounded(size) for size in (0, 1, 256, 257)] == [256, 256, 256, 512]


def test_free_memory_is_used_again() -> None:
    assert arena_bytes([("a", 1024), ("a", 0), ("b", 512), ("c", 512)]) == 1024


def test_the_rest_of_a_piece_is_used_again() -> None:
    """a leaves 4 MiB in a region of 4 MiB; b takes 3 of it, and c the last."""
    assert arena_bytes([("a", 4 * MIB), ("a", 0), ("b", 3 * MIB), ("c", MIB)]) == 4 * MIB


def test_a_piece_is_not_cut_where_little_would_be_left() -> None:
    """b takes all of a's piece; c, which would fit behind b, needs a new region."""
    small = 2**14
    assert arena_bytes([("a", MIB), ("a", 0), ("b", MIB - small), ("c", small)]) == MIB + small


def test_neighbours_that_are_free_become_one() -> None:
    pieces = [("a", MIB // 4), ("b", MIB // 4), ("c", MIB // 2)]
    for order in ("abc", "cba", "acb"):
        assert arena_bytes([*pieces, *((name, 0) for name in order), ("d", MIB)]) == MIB
