"""One connection between two peers: frames in both directions, with bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from fleetlearn_protocol.errors import Code, ProtocolError, clip
from fleetlearn_protocol.frames import Buffer, pack_chunks
from fleetlearn_protocol.peer_messages import (
    FromPeer,
    PeerModel,
    PeerRefusal,
    decode_from_peer,
    encode_for_peer,
)
from websockets.asyncio.connection import Connection as Socket
from websockets.exceptions import ConnectionClosed

from fleetlearn_device.driver.connection import printable
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.peers.model_frames import ArrivedModel, IncomingModel

log = logging.getLogger("fleetlearn.device")

CLOSE = 2.0
"""Seconds for what is queued to go out before a connection is closed."""
SEND = 60.0
"""Seconds after which a connection is aborted whose other end takes nothing. The keepalive does not
end one whose write buffer is full."""


class PeerLink:
    """A connection to the neighbour whose certificate it showed."""

    def __init__(self, socket: Socket, neighbour: str, incoming: IncomingModel) -> None:
        self.socket, self.neighbour = socket, neighbour
        self.greeted = False
        """The neighbour's hello was accepted."""
        self.why_ended = ""
        self._closing = False
        self._incoming = incoming
        self._outgoing: asyncio.Queue[Iterable[str | bytes]] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())
        self._transfer = 0

    def send(self, message: FromPeer) -> None:
        """Send a message, after all that was sent before."""
        self._outgoing.put_nowait([encode_for_peer(message)])

    def send_model(self, number: int, encoding: str, content: Buffer, crc32: int) -> None:
        """Send a model, after all that was sent before. The content must not change."""
        self._transfer += 1
        view = memoryview(content).cast("B")
        model = PeerModel(number, self._transfer, encoding, view.nbytes, crc32)
        self._outgoing.put_nowait([encode_for_peer(model)])
        self._outgoing.put_nowait(pack_chunks(self._transfer, view))

    async def receive(self) -> FromPeer | ArrivedModel | None:
        """Return the next message or complete model; None at the connection's end. Raises
        ProtocolError."""
        while True:
            try:
                frame = await self.socket.recv()
            except ConnectionClosed as error:
                self.why_ended = self.why_ended or printable(str(error))
                return None
            if isinstance(frame, bytes):
                if not self.greeted:
                    raise ProtocolError(Code.OUT_OF_TURN, "a chunk came before the hello")
                # A large model's checks take a while; other neighbours go on meanwhile.
                arrived = await asyncio.to_thread(self._incoming.chunk, frame)
                if arrived is not None:
                    return arrived
                continue
            message = decode_from_peer(frame)
            if not isinstance(message, PeerModel):
                return message
            if not self.greeted:
                raise ProtocolError(Code.OUT_OF_TURN, "a model was announced before the hello")
            self._incoming.begin(message)

    def refuse(self, error: ProtocolError) -> None:
        """Tell the neighbour that it broke the protocol."""
        self.send(PeerRefusal("protocol", clip(error.text)))

    async def close(self, code: int = 1000) -> None:
        """Send what is queued, and close."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with timeout(CLOSE):
                await self._outgoing.join()
        self._writer.cancel()
        try:
            async with timeout(CLOSE):
                await self.socket.close(code)
        except TimeoutError:
            self.socket.transport.abort()

    async def _write(self) -> None:
        """Send what is queued, in order."""
        try:
            while True:
                frames = await self._outgoing.get()
                for frame in frames:
                    async with timeout(SEND):
                        await self.socket.send(frame)
                self._outgoing.task_done()
        except (TimeoutError, ConnectionClosed) as error:
            if isinstance(error, TimeoutError):
                self.why_ended = f"{self.neighbour} took nothing for {SEND:g} s"
                self.socket.transport.abort()
            while True:  # nobody waits for what cannot be sent any more
                self._outgoing.task_done()
                await self._outgoing.get()
