"""Gradients become new parameters before the next gradient is made."""

from __future__ import annotations

from fleetlearn_export.checks.early_results import early_results

# Forward pass x, y; loss z; then two gradients, an alias of one, which makes nothing, and only then
# both updates.
READS = [["w"], ["x", "v"], ["y"], ["z", "x"], ["z", "y"], ["g"], ["g", "w"], ["h", "v"]]
MAKES = [["x"], ["y"], ["z"], ["h"], ["g"], [], ["new w"], ["new v"]]


def test_an_update_comes_behind_its_gradient() -> None:
    assert early_results(READS, MAKES) == [0, 1, 2, 4, 6, 5, 3, 7]


def test_what_all_results_need_keeps_its_order() -> None:
    assert early_results([[], ["a"], ["b"], ["a", "b"]], [["a"], ["b"], ["c"], ["d"]]) == [
        0,
        1,
        3,
        2,
    ]
