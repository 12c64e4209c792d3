"""tests/support/memory_search.py finds what is in a live process and in files: the tests that find
nothing there count on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from marked_update import BITS, CLIP, marked_update, marked_words, traces_of
from memory_search import PART, files_below, found_in, memory_of

HOLDS = """
import sys
kept = bytes.fromhex(sys.stdin.readline())
far = bytearray({far}) + kept
del kept
print("ready", flush=True)
sys.stdin.readline()
"""
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="memory is read from /proc"
)


@pytest.mark.parametrize("far", [1, PART - 7])
def test_what_a_live_process_holds_is_found(far: int) -> None:
    """Also where it lies across the end of a part that is read at a time."""
    wanted = bytes(range(100, 132))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS.format(far=far)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(wanted.hex() + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        looked_for = {"it": wanted, "another": bytes(range(32, 64))}
        assert found_in(memory_of(process.pid), looked_for) == {"it"}
        process.stdin.write("\n")  # it goes on
        process.stdin.close()
        assert process.wait(20) == 0


def test_what_files_hold_is_found(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / ".hidden").write_bytes(bytes(1000) + b"found")
    assert found_in(files_below(tmp_path), {"it": b"found", "no": b"lost"}) == {"it"}


def test_a_marked_update_is_on_the_grid() -> None:
    """The rounding of the fixed point changes nothing of it, whatever is drawn."""
    from fleetlearn_protocol.secure.fixed_point import to_words

    update = marked_update("a", 650)
    for fraction in (0.001, 0.999):
        words = to_words(update, CLIP, BITS, np.full(650, fraction))
        np.testing.assert_array_equal(words, marked_words("a", 650))
    assert len(traces_of("a", np.zeros(650, np.float32))) == 8
