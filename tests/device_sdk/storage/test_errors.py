"""What the operating system says becomes advice."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fleetlearn_device.storage.errors import DiskFullError, StateError, os_errors_as_state_errors


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only"), (errno.EACCES, "permissions")],
)
def test_what_the_system_says_becomes_advice(number: int, advice: str) -> None:
    with (
        pytest.raises(StateError, match=advice) as caught,
        os_errors_as_state_errors(Path("/somewhere")),
    ):
        raise OSError(number, os.strerror(number), "/somewhere/partial/x")
    assert isinstance(caught.value, DiskFullError) == (number == errno.ENOSPC)
