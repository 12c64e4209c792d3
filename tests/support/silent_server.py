"""For tests: a WebSocket server that takes handshakes and says nothing."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.server import serve
from websockets.typing import Subprotocol


@asynccontextmanager
async def silent_server(
    tls: Path | None = None, *, asks: bool = False, **options: Any
) -> AsyncIterator[int]:
    """Yield its port. ``tls``: folder of its certificate, key and CA. ``asks``: it asks devices for
    certificates of that CA. ``options``: websockets' own."""

    async def handle(connection: Any) -> None:
        await connection.wait_closed()

    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "certificate.pem", tls / "key.pem")
        if asks:
            context.load_verify_locations(tls / "ca.pem")
            context.verify_mode = ssl.CERT_REQUIRED
    options.setdefault("subprotocols", [Subprotocol("fleetlearn.v1")])
    async with serve(handle, "127.0.0.1", 0, ssl=context, close_timeout=0.1, **options) as server:
        yield next(iter(server.sockets)).getsockname()[1]
