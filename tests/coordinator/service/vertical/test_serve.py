"""What ends a vertical run's server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fleetlearn_coordinator.service.vertical.serve import PartyServer


class FullDisk(PartyServer):
    """A server whose first event meets a full disk."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def _next_event(self) -> Any:
        raise OSError("no space left on device")


def test_an_error_that_is_no_partys_ends_the_run_and_is_not_kept_silent() -> None:
    """It ended the task that handles what parties say, and nothing else: the process stayed, told
    systemd that it was alive, and answered nobody."""

    async def serve() -> None:
        server = FullDisk()
        with pytest.raises(OSError, match="no space left"):
            await server._handle_events()
        assert server.over.is_set()

    asyncio.run(serve())
