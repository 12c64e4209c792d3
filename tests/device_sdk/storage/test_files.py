"""Bytes that are written are counted, as the kernel counts them too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_device.storage.files import WRITTEN, allocate, write_durably


def test_what_is_written_is_counted(tmp_path: Path) -> None:
    before = WRITTEN.count
    write_durably(tmp_path / "a", b"12345", memoryview(bytes(100)))
    assert WRITTEN.count - before == 105


def test_room_that_the_file_system_holds_is_not_written(tmp_path: Path) -> None:
    before = WRITTEN.count
    allocate(tmp_path / "a", 10_000)
    assert WRITTEN.count - before in (0, 10_000)  # where there is no posix_fallocate


WRITES = """
import sys
from pathlib import Path
from fleetlearn_device.storage.files import WRITTEN, write_durably

def kernel():
    rows = Path("/proc/self/io").read_text().split()
    return int(rows[rows.index("write_bytes:") + 1])

before = kernel()
for number in range(16):
    write_durably(Path(sys.argv[1]) / f"file-{number}", bytes(300_000))
print(WRITTEN.count, kernel() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/io")
def test_the_count_is_the_kernel_s(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(tmp_path)], check=True, capture_output=True, text=True
    )
    own, kernel = map(int, done.stdout.split())
    assert own == 16 * 300_000
    if not kernel:
        pytest.skip("the temporary folder is in memory")
    # whole pages, and what the file system notes of the folder
    assert own <= kernel <= 1.2 * own
