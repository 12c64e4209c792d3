"""Stands between a device and its coordinator: ``man_in_the_middle.py PORT URL HOW``.

It has the device train a bundle of its own: ``changed``: it writes that one's hash into each task,
signed or not; ``stripped``: it also tells the coordinator that the device asks for no signature.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

from fleetlearn_protocol.messages import PROTOCOL_NAME
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

PORT, URL, HOW = int(sys.argv[1]), sys.argv[2], sys.argv[3]
PROTOCOLS = [Subprotocol(PROTOCOL_NAME)]


def to_coordinator(frame: str) -> str:
    message = json.loads(frame)
    if HOW == "stripped" and message["type"] == "check-in":
        message["trusts"], message["challenge"] = [], None
    return json.dumps(message)


def to_device(frame: str) -> str:
    return re.sub(r'(\\?"bundle\\?":\\?")[0-9a-f]{64}', r"\g<1>" + "0" * 64, frame)


async def relay(device: ServerConnection) -> None:
    async with connect(URL, subprotocols=PROTOCOLS, compression=None, max_size=None) as coordinator:
        up = asyncio.create_task(pass_on(device, coordinator, to_coordinator))
        await pass_on(coordinator, device, to_device)
        up.cancel()


async def pass_on(
    source: ServerConnection | ClientConnection, target: ServerConnection | ClientConnection, change
) -> None:  # type: ignore[no-untyped-def]
    try:
        async for frame in source:
            await target.send(change(frame) if isinstance(frame, str) else frame)
    except ConnectionClosed:
        pass
    await target.close(source.close_code or 1000)


async def main() -> None:
    async with serve(
        relay, "127.0.0.1", PORT, subprotocols=PROTOCOLS, compression=None, max_size=None
    ) as server:
        await server.serve_forever()


asyncio.run(main())
