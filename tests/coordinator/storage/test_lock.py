"""The lock of a data directory: one coordinator, and whoever looks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.lock import LOCK, is_locked, lock


def test_looking_never_keeps_a_coordinator_from_starting(tmp_path: Path) -> None:
    """Processes look all the time; each start succeeds, and a second one beside it is refused all
    the same."""
    look = (
        "import sys\nfrom pathlib import Path\nfrom fleetlearn_coordinator.storage.lock import "
        "is_locked\n"
    )
    loop = "print(flush=True)\nwhile True: is_locked(Path(sys.argv[1]))\n"
    lookers = [
        subprocess.Popen(
            [sys.executable, "-c", look + loop, tmp_path / LOCK], stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        for process in lookers:
            assert process.stdout is not None
            process.stdout.readline()
        for _ in range(100):
            os.close(lock(tmp_path / LOCK))
        held = lock(tmp_path / LOCK)
        assert is_locked(tmp_path / LOCK)
        with pytest.raises(StoreError, match="in use by another coordinator"):
            lock(tmp_path / LOCK)
        os.close(held)
    finally:
        for process in lookers:
            process.kill()
            process.communicate()
    assert not is_locked(tmp_path / LOCK)


def test_a_directory_without_a_lock_file_is_not_locked(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / LOCK)
    assert not (tmp_path / LOCK).exists()
