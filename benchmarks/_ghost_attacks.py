"""Attacks by ghosts: devices that check in, take tasks and never report.

Each attack runs ``GHOSTS`` of them against the coordinator at ``address`` until ``stop`` is set.
Ghosts send nothing that the protocol forbids, and not more often than it asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    Cancel,
    CheckIn,
    Heartbeat,
    Task,
    Welcome,
    decode_from_coordinator,
    encode,
)
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

GHOSTS = 54
"""Nine for each of six honest devices."""
BEAT = 0.8
"""A heartbeat is sent at this part of the interval that the coordinator allows."""
PAUSE = 0.5
"""Seconds for which a ghost that returns is there with its task, and then away."""
BACK_OFF = 0.5
"""Seconds until a ghost whose connection was ended connects again."""
Ghost = Callable[[ClientConnection], Awaitable[None]]


async def ghosts_beating(address: str, stop: asyncio.Event) -> None:
    """Ghosts that send heartbeats and never make a step."""
    await _run_ghosts(address, stop, "beating", _beat)


async def ghosts_returning(address: str, stop: asyncio.Event) -> None:
    """Ghosts that, with a task, break the connection after half a second and are back half a second
    later, repeatedly."""
    await _run_ghosts(address, stop, "returning", _return)


async def ghosts_lying(address: str, stop: asyncio.Event) -> None:
    """Their heartbeats say that they make steps."""
    await _run_ghosts(address, stop, "lying", _lie)


async def _run_ghosts(address: str, stop: asyncio.Event, kind: str, ghost: Ghost) -> None:
    ghosts = [
        asyncio.create_task(_stay(address, f"ghost-{kind}-{number:02}", ghost))
        for number in range(GHOSTS)
    ]
    try:
        await stop.wait()
    finally:
        for one in ghosts:
            one.cancel()
        await asyncio.gather(*ghosts, return_exceptions=True)


async def _stay(address: str, name: str, ghost: Ghost) -> None:
    """Run one ghost. It connects again whenever its connection has ended."""
    while True:
        try:
            protocol = Subprotocol(PROTOCOL_NAME)
            async with connect(
                address, subprotocols=[protocol], compression=None, max_size=None
            ) as connection:
                await connection.send(encode(CheckIn(PROTOCOL_VERSION, name, 10)))
                await ghost(connection)
        except (OSError, WebSocketException, TimeoutError):
            pass
        await asyncio.sleep(BACK_OFF)


async def _beat(connection: ClientConnection, *, lie: bool = False) -> None:
    loop, interval, steps = asyncio.get_running_loop(), 1.0, 0
    task: str | None = None
    due = loop.time() + interval
    while True:
        try:
            async with asyncio.timeout_at(due):
                message = await connection.recv()
        except TimeoutError:
            steps += lie
            await connection.send(encode(Heartbeat(task, steps if task is not None else 0)))
            due = loop.time() + interval
            continue
        match decode_from_coordinator(message) if isinstance(message, str) else None:
            case Welcome(heartbeat=heartbeat):
                interval = BEAT * heartbeat
                due = loop.time() + interval
            case Task(task=given):
                task, steps = given, 0
            case Cancel(task=over) if over == task:
                task = None


async def _lie(connection: ClientConnection) -> None:
    await _beat(connection, lie=True)


async def _return(connection: ClientConnection) -> None:
    await _until_task(connection)
    await asyncio.sleep(PAUSE)
    connection.transport.abort()


async def _until_task(connection: ClientConnection) -> None:
    """Send heartbeats until a task is there."""
    interval = 1.0
    while True:
        try:
            async with asyncio.timeout(interval):
                message = await connection.recv()
        except TimeoutError:
            await connection.send(encode(Heartbeat()))
            continue
        match decode_from_coordinator(message) if isinstance(message, str) else None:
            case Welcome(heartbeat=heartbeat):
                interval = BEAT * heartbeat
            case Task():
                return
