from __future__ import annotations

from fleetlearn_device.runtimes import sessions
from fleetlearn_export.inspection import arena
from fleetlearn_export.inspection.arena import arena_bytes, rounded

MIB = 2**20
HANDLES = MIB // 32
"""Of a region of 1 MiB."""


def test_pieces_are_cut_as_the_devices_runtime_sets_it() -> None:
    assert arena.UNUSED_IN_A_PIECE == sessions.UNUSED_IN_A_PIECE


def test_pieces_are_rounded_up() -> None:
    assert [rounded(size) for size in (0, 1, 256, 257)] == [256, 256, 256, 512]


def test_free_memory_is_used_again() -> None:
    assert arena_bytes([("a", 1024), ("a", 0), ("b", 512), ("c", 512)]) == 1024 + HANDLES


def test_the_rest_of_a_piece_is_used_again() -> None:
    """a leaves 4 MiB in a region of 4 MiB; b takes 3 of it, and c the last."""
    assert (
        arena_bytes([("a", 4 * MIB), ("a", 0), ("b", 3 * MIB), ("c", MIB)]) == 4 * MIB + 4 * HANDLES
    )


def test_a_piece_is_not_cut_where_little_would_be_left() -> None:
    """b takes all of a's piece; c, which would fit behind b, needs a new region, of 2 MiB."""
    small = 2**14
    assert (
        arena_bytes([("a", MIB), ("a", 0), ("b", MIB - small), ("c", small)])
        == MIB + small + 3 * HANDLES
    )


def test_neighbours_that_are_free_become_one() -> None:
    pieces = [("a", MIB // 4), ("b", MIB // 4), ("c", MIB // 2)]
    for order in ("abc", "cba", "acb"):
        assert arena_bytes([*pieces, *((name, 0) for name in order), ("d", MIB)]) == MIB + HANDLES


def test_of_equal_pieces_the_one_of_the_later_region_is_taken() -> None:
    """Two regions of 16 MiB with one result each, of 9 and of 10 MiB. The next result, of 15, takes
    the second one."""
    results = [("a", 9 * MIB), ("b", 10 * MIB), ("a", 0), ("b", 0), ("c", 15 * MIB)]
    assert arena_bytes(results) == (9 + 15) * MIB + 32 * HANDLES
