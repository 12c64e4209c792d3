"""An open state directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetlearn_device.storage.state_directory import StateDirectory


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()
