"""The floor that rounds.py compares with: ``websockets`` and numpy alone, nothing checked and
nothing kept.

The server sends the model to everybody as one message, takes one message from each, adds them up by
weight, and goes on with the mean: no protocol, no hash, no disk, no selection.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve


async def run_server(devices: int, size: int, rounds: int) -> None:
    """Serve ``rounds`` rounds to the first ``devices`` connections, then wait to be ended."""
    connections: list[ServerConnection] = []
    everybody, forever = asyncio.Event(), asyncio.Event()

    async def keep(connection: ServerConnection) -> None:
        connections.append(connection)
        if len(connections) == devices:
            everybody.set()
        await forever.wait()

    async with serve(
        keep, "127.0.0.1", 0, compression=None, max_size=None, ping_interval=None
    ) as server:
        print(
            f"listening on ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", flush=True
        )
        await everybody.wait()
        model, product = np.zeros((2, size), np.float32)
        for _ in range(rounds):
            total = np.zeros(size, np.float32)
            content = model.tobytes()
            await asyncio.gather(
                *(turn(connection, content, total, product) for connection in connections)
            )
            model += total / np.float32(devices)
        await forever.wait()


async def turn(
    connection: ServerConnection,
    content: bytes,
    total: NDArray[np.float32],
    product: NDArray[np.float32],
) -> None:
    """Do one device's part in one round."""
    await connection.send(content)
    update = await connection.recv()
    assert isinstance(update, bytes)
    np.multiply(np.frombuffer(update, np.float32), np.float32(1), out=product)
    np.add(total, product, out=total)


async def take_part(url: str, content: bytes, rounds: int, received: Callable[[int], None]) -> None:
    """Be one device. ``received`` is told the number, from 1, of each round whose model has
    come."""
    async with connect(url, compression=None, max_size=None, ping_interval=None) as connection:
        for round in range(1, rounds + 1):
            await connection.recv()
            received(round)
            await connection.send(content)


if __name__ == "__main__":
    asyncio.run(run_server(*map(int, sys.argv[1:4])))
