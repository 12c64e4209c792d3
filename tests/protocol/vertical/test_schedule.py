"""Which rows a step takes."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.splitmix64 import GAMMA, mix
from fleetlearn_protocol.vertical.schedule import (
    is_checkpoint,
    order_of_epoch,
    rows_of_step,
    seed_of_step,
    steps_of_epoch,
)


def test_an_epoch_takes_each_row_once_and_the_next_in_another_order() -> None:
    epoch = np.concatenate([rows_of_step(step, 30, 10, 4) for step in range(3)])
    assert sorted(epoch.tolist()) == list(range(30))
    assert rows_of_step(3, 30, 10, 4).tolist() != epoch[:10].tolist()
    assert rows_of_step(0, 30, 10, 5).tolist() != epoch[:10].tolist()


def test_what_is_less_than_a_batch_is_left_out_of_an_epoch() -> None:
    assert steps_of_epoch(35, 10) == 3
    assert all(len(rows_of_step(step, 35, 10, 0)) == 10 for step in range(9))
    assert len(rows_of_step(5, 7, 10, 0)) == 7


def test_the_order_is_that_of_splitmix64() -> None:
    def number(row: int) -> int:
        with np.errstate(over="ignore"):
            start = mix(mix(np.array([9], np.uint64)) + np.uint64(2))
            return int(mix(start + np.uint64(row + 1) * GAMMA)[0])

    expected = sorted(range(20), key=number)
    assert order_of_epoch(20, 9, 2).tolist() == expected


def test_each_part_and_each_step_draws_from_a_seed_of_its_own() -> None:
    seeds = {seed_of_step(step, 1, part) for step in range(50) for part in range(4)}
    assert len(seeds) == 200
    assert max(seeds) < 2**53


@pytest.mark.parametrize(("step", "expected"), [(0, True), (3, False), (4, True), (10, True)])
def test_checkpoints_come_each_so_many_steps_and_at_the_end(step: int, expected: bool) -> None:
    assert is_checkpoint(step, 4, 10) is expected
