"""Attacks that send too much, or what is not true: frames and messages. Each runs until ``stop`` is
set.

``address`` is the coordinator's ws:// URL.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from _raw_peer import BINARY, CONTINUATION, PING, TEXT, RawPeer, frame, text
from fleetlearn_protocol.messages import (
    Content,
    Evaluation,
    Failed,
    Fetch,
    Heartbeat,
    Part,
    Report,
    Task,
    Uploaded,
    VectorReference,
    decode_from_coordinator,
)

Attack = Callable[[str, asyncio.Event], Awaitable[None]]
CONNECTIONS = 4
"""Connections of each attack, unless it says otherwise."""


async def again_and_again(
    address: str,
    stop: asyncio.Event,
    once: Callable[[RawPeer], Awaitable[None]],
    connections: int = CONNECTIONS,
    **headers: str,
) -> None:
    """Do ``once`` on several connections at a time. A connection that has ended is followed by a
    new one."""

    async def one() -> None:
        while True:
            try:
                peer = await RawPeer.connect(address, **headers)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            try:
                with suppress(OSError, asyncio.IncompleteReadError):
                    await once(peer)
            finally:
                peer.abort()

    tasks = [asyncio.ensure_future(one()) for _ in range(connections)]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _flood(
    address: str, stop: asyncio.Event, data: bytes, *, check_in: bool = True, read: bool = True
) -> None:
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


async def json_bombs(address: str, stop: asyncio.Event) -> None:
    """Text that costs a careless reader much: nested deeply, long numbers, many keys, many escapes,
    too long."""
    texts = (
        b"[" * 60_000,
        b'{"type":' * 7_000,
        b'{"type": "heartbeat", "steps": ' + b"9" * 60_000 + b"}",
        b'{"type": "heartbeat", "steps": 1e' + b"9" * 60_000 + b"}",
        b'{"type": "heartbeat"'
        + b"".join(b', "k%d": 1' % number for number in range(5_000))
        + b"}",
        b'{"type": "failed", "task": "t", "code": "diverged", "text": "'
        + 10_000 * rb"\ud83d"
        + b'"}',
        b'{"type": "heartbeat", "x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"type": "heartbeat"}' + b" " * 200_000,
    )
    await _flood(address, stop, b"".join(frame(TEXT, text) for text in texts))


async def deflate_bombs(address: str, stop: asyncio.Event) -> None:
    """Ask for compression, and send 16 MiB in 16 KiB, as if it had been granted."""
    packer = zlib.compressobj(wbits=-15)
    bomb = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_SYNC_FLUSH)
    # the reserved bit 1: compressed (RFC 7692)
    data = bytes([0xC0 | TEXT]) + frame(TEXT, bomb[:-4])[1:]

    async def once(peer: RawPeer) -> None:
        while True:
            await peer.send(data)

    offer: dict[str, Any] = {
        "Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"
    }
    await again_and_again(address, stop, once, **offer)


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


async def _with_tasks(
    address: str, stop: asyncio.Event, data: Callable[[Task, int], bytes]
) -> None:
    """Send one message after another about the latest task, read everything."""

    async def once(peer: RawPeer) -> None:
        await peer.check_in()
        model = VectorReference("model", "0" * 64, 4, "float32")
        # no task that was given
        task = Task("t1-1", 1, "0" * 64, (model,), {"update": "float32"}, {}, 1, 1, 1, 1.0)

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


async def replays(address: str, stop: asyncio.Event) -> None:
    """Report the own task, tasks before it and other devices' tasks again and again, and say that
    all was uploaded."""

    def report(task: Task, number: int) -> bytes:
        size = task.vector("model").size
        prefix, _, last = task.task.rpartition("-")
        name = f"{prefix}-{max(1, int(last) + number % 9 - 4)}"
        again = Report(
            name,
            max(0, task.round - number % 3),
            (Part("update", "float32", size, 0),),
            1,
            1,
            1.0,
            True,
            1.0,
        )
        return text(again) + text(Uploaded(name))

    await _with_tasks(address, stop, report)


async def lies(address: str, stop: asyncio.Event) -> None:
    """Reports of what cannot be, one after the other: examples, steps, epochs, losses, metrics,
    sizes, parts."""
    claims: tuple[dict[str, Any], ...] = (
        {"examples": 2**31},
        {"steps": 2**31},
        {"epochs": 1e6},
        {"loss": 1e30},
        {"loss": -1e30},
        {"metrics": {f"m{number}": 1e30 for number in range(64)}},
        {"evaluation": Evaluation(2**31, -1e30, {"accuracy": 1e30})},
        {"seconds": 366 * 86400.0},
        {"parts": tuple(Part(f"p{number}", "float32", 2**30, 0) for number in range(8))},
        {"parts": (Part("update", "float32", 4, 0),)},
        {"parts": (Part("update", "int4", 2**33, 0),)},
        {"round": 2**31},
    )

    def report(task: Task, number: int) -> bytes:
        part = Part("update", "float32", task.vector("model").size, number % 2**32)
        fields: dict[str, Any] = {
            "round": task.round,
            "parts": (part,),
            "examples": 10,
            "steps": 1,
            "epochs": 1.0,
            "loss": 1.0,
        }
        return text(
            Report(task=task.task, complete=True, **(fields | claims[number % len(claims)]))
        )

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


ATTACKS: tuple[Attack, ...] = (
    unread_pings,
    pings,
    heartbeats,
    failures,
    garbage,
    json_bombs,
    deflate_bombs,
    chunks,
    small_chunks,
    fragments,
    oversize,
    reports,
    replays,
    lies,
    fetches,
    whole_fetches,
)
