"""A device that takes the round's model and sends an update: one that was made beforehand, or what
a function makes of the model.

It is written as an application would write it, on ``websockets`` and the protocol package.
_raw_devices.py has thousands of such devices at a fraction of the cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.encodings import FAMILIES, FLOAT32, Encoding, find_encoding
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk, unpack_chunk
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    Accepted,
    CheckIn,
    ComeBack,
    Content,
    Fetch,
    Grant,
    Part,
    Report,
    Task,
    Uploaded,
    Waiting,
    Welcome,
    decode_from_coordinator,
    encode,
)
from fleetlearn_protocol.vector import Vector
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

EXAMPLES = 100
"""How many examples every device says that it has."""


class Update(NamedTuple):
    """The bytes that a device sends, and their description in its report."""

    content: bytes
    part: Part


def make_update(size: int, seed: int = 0, encoding: Encoding = FLOAT32) -> Update:
    """Return a plausible update of ``size`` parameters."""
    update = np.random.default_rng(seed).standard_normal(size, np.float32) * np.float32(1e-3)
    return describe(update, seed, encoding)


def describe(update: Vector, seed: int = 0, encoding: Encoding = FLOAT32) -> Update:
    """Return an update, float32 (n,), as it is sent."""
    content = encoding.encode(update, seed).tobytes()
    return Update(content, encoding.part("update", content))


def report(task: Task, update: Update) -> Report:
    """Return a report that claims one epoch over the device's examples."""
    return Report(
        task=task.task,
        round=task.round,
        parts=(update.part,),
        examples=EXAMPLES,
        steps=1,
        epochs=1.0,
        complete=True,
        loss=1.0,
    )


@dataclass
class Moments:
    """When things happened in one round, by ``time.perf_counter``."""

    first_task: float = float("inf")
    last_uploaded: float = 0.0
    last_accepted: float = 0.0
    accepted: int = 0


class Log(dict[int, Moments]):
    """Round -> its moments, over all devices of this process."""

    def __missing__(self, round: int) -> Moments:
        return self.setdefault(round, Moments())


async def take_part(
    url: str,
    device: str,
    update: Update | Callable[[bytearray], Update],
    log: Log,
    opened: Callable[[int], None] = lambda round: None,
    **headers: str,
) -> None:
    """Be ``device`` until the coordinator says that training is finished. ``update``: what it sends
    in each round, or what makes that, in a thread, of the model's bytes. ``opened`` hears of each
    round's first task. ``headers``: of the handshake, such as a credential.

    Raises RuntimeError where the coordinator refuses something or sends the wrong bytes.
    """
    async with connect(
        url,
        subprotocols=[Subprotocol(PROTOCOL_NAME)],
        compression=None,
        max_size=1 << 20,
        additional_headers=headers,
    ) as connection:
        check_in = CheckIn(
            PROTOCOL_VERSION, device, EXAMPLES, software="benchmark", encodings=FAMILIES
        )
        await connection.send(encode(check_in))
        task: Task | None = None
        ready = update if isinstance(update, Update) else None
        async for message in connection:
            assert isinstance(message, str), "bulk came without being asked for"
            match decode_from_coordinator(message):
                case Task() as task:
                    moments = log[task.round]
                    if moments.first_task == float("inf"):
                        moments.first_task = time.perf_counter()
                        opened(task.round)
                    await connection.send(encode(Fetch(task.vector("model").sha256)))
                case Content(transfer, _, size):
                    if (content := await _receive(connection, transfer, size)) is None:
                        return
                    assert task is not None
                    if callable(update):
                        ready = await asyncio.to_thread(update, content)
                    assert ready is not None
                    await connection.send(encode(report(task, ready)))
                case Grant(name, transfer, offset):
                    assert task is not None
                    assert ready is not None
                    most = (
                        CHUNK_BYTES - CHUNK_BYTES % find_encoding(ready.part.encoding).block_bytes
                    )
                    for start in range(offset, len(ready.content), most):
                        await connection.send(
                            pack_chunk(transfer, start, ready.content[start : start + most])
                        )
                    await connection.send(encode(Uploaded(name)))
                    log[task.round].last_uploaded = time.perf_counter()
                case Accepted():
                    if task is not None:  # else it answers a report that was sent again
                        log[task.round].last_accepted = time.perf_counter()
                        log[task.round].accepted += 1
                        task = None
                case Waiting(name) if task is not None and ready is not None and name == task.task:
                    await connection.send(encode(report(task, ready)))  # its place is another's
                case ComeBack():
                    return
                case Welcome() | Waiting():
                    pass
                case other:
                    raise RuntimeError(f"{device}: the coordinator sent {other}")


async def _receive(connection: ClientConnection, transfer: int, size: int) -> bytearray | None:
    """Return what comes. None: training is finished meanwhile, as it may be in asynchronous
    rounds."""
    content = bytearray(size)
    received = 0
    while received < size:
        message = await connection.recv()
        if isinstance(message, str):
            if isinstance(decode_from_coordinator(message), ComeBack):
                return None
            raise RuntimeError(f"{message!r} came instead of a chunk")
        chunk = unpack_chunk(message)
        if (chunk.transfer, chunk.offset) != (transfer, received):
            raise RuntimeError(f"chunk {chunk[:2]} came; ({transfer}, {received}) was due")
        content[received : received + len(chunk.payload)] = chunk.payload
        received += len(chunk.payload)
    return content
