"""A ceiling for the process's memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.limits.memory import MemoryCeiling, resident_bytes

MIB = 2**20


def test_a_task_that_cannot_keep_below_the_ceiling_is_refused_before_it_begins() -> None:
    ceiling = MemoryCeiling(100, lambda: 60 * MIB)
    ceiling.check_task("b", 8, elements=MIB, beside=24 * MIB)  # 60 + 16 + 24
    with pytest.raises(MemoryError, match="need at least 101 MiB before the first") as refused:
        ceiling.check_task("b", 8, elements=MIB, beside=25 * MIB)
    assert "batch_size" not in str(refused.value), "smaller steps would not help"


def test_a_step_that_breaks_the_ceiling_ends_the_task_and_the_next_one_is_refused() -> None:
    resident = 90 * MIB
    ceiling = MemoryCeiling(100, lambda: resident)
    ceiling.check_step("b", 32)
    resident = 130 * MIB
    with pytest.raises(MemoryError, match="with 32 examples a step the process uses 130 MiB"):
        ceiling.check_step("b", 32)
    resident = 60 * MIB  # it was freed
    with pytest.raises(MemoryError, match="with 32 examples a step the process used 130 MiB"):
        ceiling.check_task("b", 32, 0, 0)
    ceiling.check_task("b", 8, 0, 0)
    ceiling.check_task("another", 32, 0, 0)


def test_all_examples_in_one_step_are_said_so() -> None:
    with pytest.raises(MemoryError, match="with all examples in one step the process uses"):
        MemoryCeiling(32, lambda: 40 * MIB).check_step("b", 0)


def test_where_the_system_does_not_say_the_limit_is_refused(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path) is None
    with pytest.raises(ValueError, match="this system does not say"):
        MemoryCeiling(100, lambda: None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_memory_that_is_written_is_resident() -> None:
    before = resident_bytes()
    block = np.ones(64 * MIB, np.uint8)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    # Other threads and the garbage collector change some MiB meanwhile.
    assert 48 * MIB < after - before < 96 * MIB
    del block
