"""What ends a vertical run's server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fleetlearn_coordinator.service.vertical.serve import PartyServer
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.messages import PartyGradients


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


def test_a_message_that_cannot_be_said_ends_the_run() -> None:
    """It ended the task that sent it, which nobody waited for: all sides waited for ever."""
    server = PartyServer.__new__(PartyServer)
    server._sending, server._sockets = {}, {"bank": object()}  # type: ignore[dict-item]
    part = ArrayPart("gradient", "float32", 0, 0)

    async def tell() -> None:
        await server._tell("bank", PartyGradients(1, 0, (part,), 5e30), b"")

    with pytest.raises(ProtocolError, match="loss"):
        asyncio.run(tell())
