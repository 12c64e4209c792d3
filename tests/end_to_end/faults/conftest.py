"""Processes whose calls on files can be made to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import compile_shim
from warm_processes import warm_server


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("warm")
    with warm_server(folder, compile_shim(folder)) as address:
        yield address
