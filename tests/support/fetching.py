"""For tests and benchmarks: a device that fetches its task's model, and does nothing with it."""

from __future__ import annotations

from fleetlearn_device.driver.http_fetch import http_parts
from fleetlearn_device.driver.timing import Timing
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.messages import (
    MODEL,
    PROTOCOL_NAME,
    CheckIn,
    Content,
    Fetch,
    Task,
    decode_from_coordinator,
    encode,
)
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol


async def fetch_model(
    url: str, device: str, *, http: bool = False, keep: bool = True
) -> tuple[bytes | int, str | None]:
    """Check in, take a task, and fetch its model. ``http``: by HTTP, if the coordinator names a
    URL. ``keep``: return the bytes; False: only how many. Returns them, and the URL."""
    kept, came, size, where = bytearray(), 0, -1, None
    async with connect(
        url,
        subprotocols=[Subprotocol(PROTOCOL_NAME)],
        compression=None,
        max_size=1 << 20,
        ping_interval=None,
        open_timeout=60,
    ) as connection:
        await connection.send(encode(CheckIn(1, device, 10)))
        while came != size:
            message = await connection.recv()
            parts: list[memoryview] = []
            if isinstance(message, bytes):
                parts = [unpack_chunk(message).payload]
            else:
                match decode_from_coordinator(message):
                    case Task() as task:
                        model = task.vector(MODEL)
                        size = model.size
                        await connection.send(encode(Fetch(model.sha256, http=http)))
                    case Content(url=str(there), size=whole):
                        where = there
                        async for part in http_parts(where, 0, whole, Timing()):
                            came += len(part)
                            kept += part if keep else b""
            for part in parts:
                came += len(part)
                kept += part if keep else b""
    return (bytes(kept) if keep else came), where
