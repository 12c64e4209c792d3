"""Attacks that send too much: frames, messages, handshakes, connections. Each runs until ``stop`` is set.

``address`` is the coordinator's ws:// URL.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

from _raw_peer import BINARY, CONTINUATION, PING, TEXT, RawPeer, frame, open_stream, text
from fleetlearn_protocol.messages import (
    Content,
    Failed,
    Fetch,
    Heartbeat,
    Part,
    Report,
    Task,
    VectorReference,
    decode_from_coordinator,
)

Attack = Callable[[str, asyncio.Event], Awaitable[None]]
CONNECTIONS = 4
"""Connections of each attack, unless it says otherwise."""


async def again_and_again(
    address: str, stop: asyncio.Event, once: Callable[[RawPeer], Awaitable[None]], connections: int = CONNECTIONS
) -> None:
    """Do ``once`` on several connections at a time. A connection that has ended is followed by a new one."""

    async def one() -> None:
        while True:
            try:
                peer = await RawPeer.connect(address)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            with suppress(OSError, asyncio.IncompleteReadError):
                await once(peer)
            peer.abort()

    tasks = [asyncio.ensure_future(one()) for _ in range(connections)]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _flood(address: str, stop: asyncio.Event, data: bytes, *, check_in: bool = True, read: bool = True) -> None:
    """Send the same frames as fast as they are taken."""

    async def once(peer: RawPeer) -> None:
        if check_in:
            await peer.check_in()
        reading = asyncio.ensure_future(peer.swallow()) if read else None
        try:
            while True:
                await peer.send(data)
        finally:
            if reading is not None:
                reading.cancel()

    await again_and_again(address, stop, once)


async def unread_pings(address: str, stop: asyncio.Event) -> None:
    """Pings whose pongs are not read."""
    await _flood(address, stop, 500 * frame(PING, bytes(125)), read=False)


async def pings(address: str, stop: asyncio.Event) -> None:
    """Pings whose pongs are read."""
    await _flood(address, stop, 500 * frame(PING, b"x"))


async def heartbeats(address: str, stop: asyncio.Event) -> None:
    await _flood(address, stop, 500 * text(Heartbeat()))


async def failures(address: str, stop: asyncio.Event) -> None:
    """``failed`` of a task that never was."""
    await _flood(address, stop, 500 * text(Failed("t1-1", "diverged", "x" * 1000)))


async def garbage(address: str, stop: asyncio.Event) -> None:
    """Send what is no message. Each is refused and logged."""
    await _flood(address, stop, 500 * frame(TEXT, b"{" * 1000), check_in=False)


async def chunks(address: str, stop: asyncio.Event) -> None:
    """Chunks that were never granted."""
    await _flood(address, stop, frame(BINARY, b"\1" + bytes(3) + b"\1" + bytes(1 << 17)))


async def small_chunks(address: str, stop: asyncio.Event) -> None:
    await _flood(address, stop, 500 * frame(BINARY, b"\1" + bytes(3) + b"\1" + bytes(15)))


async def fragments(address: str, stop: asyncio.Event) -> None:
    """A message without an end, in empty fragments."""

    async def once(peer: RawPeer) -> None:
        await peer.check_in()
        await peer.send(frame(TEXT, b"{", fin=False))
        while True:
            await peer.send(500 * frame(CONTINUATION, fin=False))

    await again_and_again(address, stop, once)


async def oversize(address: str, stop: asyncio.Event) -> None:
    """Send a message of 8 GiB, as far as the coordinator reads it."""

    async def once(peer: RawPeer) -> None:
        await peer.send(b"\x82\xff" + (1 << 33).to_bytes(8, "big") + bytes(4))
        while True:
            await peer.send(bytes(1 << 16))

    await again_and_again(address, stop, once)


async def _with_tasks(address: str, stop: asyncio.Event, data: Callable[[Task, int], bytes]) -> None:
    """Send one message after another about the latest task, read everything."""

    async def once(peer: RawPeer) -> None:
        await peer.check_in()
        model = VectorReference("model", "0" * 64, 4, "float32")
        task = Task("t1-1", 1, "0" * 64, (model,), {"update": "float32"}, {}, 1, 1, 1, 1.0)  # no task that was given

        async def listen() -> None:
            nonlocal task
            while True:
                message = await peer.hear()
                if isinstance(message, Task):
                    task = message

        listening = asyncio.ensure_future(listen())
        try:
            for number in itertools.count():
                await peer.send(data(task, number))
                await asyncio.sleep(0)
        finally:
            listening.cancel()

    await again_and_again(address, stop, once)


async def reports(address: str, stop: asyncio.Event) -> None:
    """Report the own task again and again, each time with another update."""

    def report(task: Task, number: int) -> bytes:
        part = Part("update", "float32", task.vector("model").size, number % 2**32)
        return text(Report(task.task, task.round, (part,), 1, 1, 1.0, True, 1.0))

    await _with_tasks(address, stop, report)


async def fetches(address: str, stop: asyncio.Event) -> None:
    """Fetch the round's model again and again."""
    await _with_tasks(address, stop, lambda task, number: text(Fetch(task.vector("model").sha256)))


async def whole_fetches(address: str, stop: asyncio.Event) -> None:
    """Fetch the round's model again and again, each time to its end."""

    async def once(peer: RawPeer) -> None:
        await peer.check_in()
        model, left = "", 0
        while True:
            opcode, payload = await peer.receive()
            message = decode_from_coordinator(payload.decode()) if opcode == TEXT else None
            if isinstance(message, Task):
                model = message.vector("model").sha256
            elif isinstance(message, Content):
                left = message.size
            elif opcode == BINARY:
                left -= len(payload) - 16
            if model and left == 0 and not isinstance(message, Content):
                left = -1
                await peer.send(text(Fetch(model)))

    await again_and_again(address, stop, once)


async def handshakes(address: str, stop: asyncio.Event) -> None:
    """Connections that end after the handshake."""

    async def once(peer: RawPeer) -> None:
        pass

    await again_and_again(address, stop, once, 32)


async def returns(address: str, stop: asyncio.Event) -> None:
    """Devices that check in, leave and return."""
    names = itertools.count()

    async def once(peer: RawPeer) -> None:
        await peer.check_in(f"returns-{next(names) % 16}")

    await again_and_again(address, stop, once, 32)


async def idle(address: str, stop: asyncio.Event) -> None:
    """Some thousand connections that say nothing, not even in HTTP."""

    async def hold() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await open_stream(address)
                with suppress(OSError):
                    await reader.read()
                writer.transport.abort()
            await asyncio.sleep(0.05)

    tasks = [asyncio.ensure_future(hold()) for _ in range(3000)]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


ATTACKS: tuple[Attack, ...] = (
    unread_pings, pings, heartbeats, failures, garbage, chunks, small_chunks, fragments, oversize, reports, fetches,
    whole_fetches, handshakes, returns, idle,
)  # fmt: skip
