"""A bus on this machine: whole batches, in order, between processes of one user."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.gateways.local_bus import (
    LENGTH,
    LONGEST_BATCH,
    LONGEST_PATH,
    connect_locally,
    listen_locally,
)


class Side:
    """Whoever speaks on one end."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.why: str | None = None
        self.bus: Any = None

    def speak_on(self, bus: Any) -> Side:
        self.bus = bus
        return self

    def received(self, batch: bytes) -> None:
        self.heard.append(batch)

    def lost(self, why: str) -> None:
        assert self.why is None, "once"
        self.why = why

    def writable(self) -> None:
        """Nothing waits."""


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


async def pair(path: Path) -> tuple[Side, Side, Any]:
    engine, gateway = Side(), Side()
    server = await listen_locally(path, engine.speak_on)
    await connect_locally(path, gateway.speak_on)
    await until(lambda: engine.bus is not None)
    return engine, gateway, server


def test_batches_come_whole_and_in_order(tmp_path: Path) -> None:
    """Also large ones, and where the path is longer than systems allow."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    path = folder / "gateways.sock"
    assert len(str(path)) > LONGEST_PATH

    async def test() -> None:
        engine, gateway, server = await pair(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        batches = [bytes([number % 256]) * (number**3) for number in range(120)]
        for batch in batches:
            gateway.bus.send(batch)
        engine.bus.send(b"back")
        await until(lambda: len(engine.heard) == len(batches) and gateway.heard)
        assert engine.heard == batches
        assert gateway.heard == [b"back"]
        gateway.bus.send(b"last")
        gateway.bus.close()
        await until(lambda: engine.why is not None and gateway.why is not None)
        assert engine.heard[-1] == b"last"
        gateway.bus.send(b"nobody hears this")
        server.close()

    asyncio.run(test())


def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gateways.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()

    async def test() -> None:
        engine, gateway, server = await pair(path)
        gateway.bus.close()
        await until(lambda: engine.why is not None)
        server.close()

    asyncio.run(test())


def test_a_process_of_another_user_is_not_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetlearn_coordinator.gateways.local_bus.peer_user", lambda one: 12345)

    async def test() -> None:
        engine = Side()
        server = await listen_locally(tmp_path / "s", engine.speak_on)
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(LENGTH.pack(4) + b"four")
        async with asyncio.timeout(10):
            while not writer.is_closing():
                await asyncio.sleep(0.002)
                writer.write(b"x")
        assert engine.bus is None
        server.close()

    asyncio.run(test())


def test_what_is_no_batch_ends_the_bus(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Side()
        server = await listen_locally(tmp_path / "s", engine.speak_on)
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(LENGTH.pack(LONGEST_BATCH + 1))
        await until(lambda: engine.why is not None)
        assert not engine.heard
        writer.close()
        server.close()

    asyncio.run(test())
