"""A connection to a NATS server. It is never repaired: as soon as a message may be lost, it is
over, and whoever needs another one opens it."""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_protocol.errors import Code, FleetError, in_words

from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.plan.bus_settings import NatsSettings

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

CONNECT = 5
"""Seconds in which a server has to answer."""
PING = 5
"""Seconds between looks whether the server is there. After two without an answer it is not."""
END = 2.0
"""Seconds in which what was said has to be with the server, where the connection is closed."""
LONGEST = 2**20
"""Bytes of a message at most, where the server allows more: NATS advises against more."""


class BusError(FleetError):
    """The bus cannot be used, or not now. The text says why to people."""


class NatsLine:
    """A connection, which ``open_line`` opens."""

    def __init__(self, address: str) -> None:
        self.address = address
        """Of its server."""
        self.over = asyncio.Event()
        """Set once messages may be lost."""
        self.why = "the connection to the NATS server broke"
        self.cause = ""
        """What went wrong last, as nats-py says it."""
        self.is_denied = False
        """Whether the server does not allow what is needed."""
        self._client: Client
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._something = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def open(self, name: str, settings: NatsSettings) -> None:
        """Connect. Raises what ``open_line`` names, in the words of nats-py."""
        from nats.aio.client import Client

        logging.getLogger("asyncio").addFilter(_is_news)
        self._client = client = Client()
        await client.connect(
            servers=[self.address],
            name=name,
            error_cb=self._note,
            disconnected_cb=self._ended,
            closed_cb=self._ended,
            allow_reconnect=False,
            connect_timeout=CONNECT,
            reconnect_time_wait=0,
            max_reconnect_attempts=1,
            ping_interval=PING,
            max_outstanding_pings=2,
            no_echo=True,
            tls=_tls_context(self.address, settings),
            **_credentials(client, self.address, settings),
        )
        _check_encrypted(client, self.address)
        self._writer = asyncio.get_running_loop().create_task(self._write())

    @property
    def longest(self) -> int:
        """Bytes of a message at most."""
        return min(int(self._client.max_payload), LONGEST)

    @property
    def version(self) -> str:
        """The server's version."""
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    async def subscribe(self, subject: str, heard: Callable[[str, bytes], None]) -> None:
        """Have ``heard`` called with the subject and the content of each message from now on."""

        async def take(message: Msg) -> None:
            if not self.over.is_set():
                heard(message.subject, message.data)

        # Without limits: where one were reached, nats-py would drop messages.
        await self._client.subscribe(subject, cb=take, pending_msgs_limit=0, pending_bytes_limit=0)

    async def flush(self) -> None:
        """Wait until the server has what was subscribed to, and has said what it does not allow.
        Raises what nats-py does."""
        # nats-py's ping overtakes what its buffer has. The first answer says that the buffer was
        # written, the second that the server has read it.
        for _ in range(2):
            await self._client.flush(timeout=CONNECT)

    def publish(self, subject: str, content: bytes) -> None:
        """Send a message, after those before. Nothing is sent once the line is over."""
        if not self.over.is_set():
            self._unsent.append((subject, content))
            self._all_sent.clear()
            self._something.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._something.wait()
                while self._unsent:
                    subject, content = self._unsent.popleft()
                    await self._client.publish(subject, content)
                self._something.clear()
                self._all_sent.set()
        except Exception as error:
            self.end(in_words(error))

    def end(self, why: str) -> None:
        """Messages may be lost from now on."""
        if not self.over.is_set():
            self.why = why
            self.over.set()

    async def _ended(self) -> None:
        self.end(f"{self.why}: {self.cause}" if self.cause else self.why)

    async def _note(self, error: Exception) -> None:
        self.cause = in_words(error).removeprefix("nats: ")
        if "permissions violation" in self.cause.lower():
            self.is_denied = True
            self.end("the NATS server does not allow what is needed")

    async def close(self) -> None:
        """End the connection, once what was said is with the server."""
        try:
            async with asyncio.timeout(END):
                if self._unsent and not self.over.is_set():
                    await self._all_sent.wait()
                self.over.set()
                if self._writer is not None:
                    self._writer.cancel()
                await self._client.close()
        except Exception as error:  # a server that is not there
            logger.debug("the NATS connection could not be closed in order: %s", in_words(error))
        self.over.set()


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of asyncio's log says something. nats-py makes it say this at the end
    of each connection with TLS."""
    return "returning true from eof_received()" not in record.getMessage()


async def open_line(addresses: str, name: str, settings: NatsSettings) -> NatsLine:
    """Connect to the first of the servers that answers.

    ``addresses``: as ``ServiceSettings.bus``. ``name``: for the server's own lists. Raises BusError
    (unknown-content: nats-py is missing; busy: no server answers; bad-message: it refuses).
    """
    try:
        from nats.errors import Error
    except ImportError:
        raise BusError(
            Code.UNKNOWN_CONTENT,
            "bus: nats-py is missing, which the bus needs. pip install 'fleetlearn[nats]'",
        ) from None
    refused: BusError | None = None
    why = ""
    for address in addresses.split(","):
        line = NatsLine(address)
        try:
            await line.open(name, settings)
            return line
        except BusError as error:
            refused = error
        except (Error, OSError, TimeoutError) as error:
            text = in_words(error).removeprefix("nats: ")
            if "authorization violation" in text.lower():
                refused = BusError(
                    Code.BAD_MESSAGE,
                    f"{address} refuses the credentials of [nats]: look at user, password_file, "
                    "token_file or credentials there, and at the server's own users",
                )
            elif isinstance(error, ssl.SSLCertVerificationError):
                refused = BusError(
                    Code.BAD_MESSAGE,
                    f"{address} has a certificate that is not trusted here "
                    f"({error.verify_message}): name its CA as nats.ca",
                )
            else:
                text = line.cause or text
                if text == "TimeoutError":
                    text = f"no NATS server has answered in {CONNECT} s"
                why = why or (
                    f"{address} cannot be reached now: {text}. Check that a NATS server listens "
                    "there, and bus in the service file"
                )
        await line.close()
    raise refused or BusError(Code.BUSY, why)


def _tls_context(address: str, settings: NatsSettings) -> ssl.SSLContext | None:
    """Return how TLS is spoken; None: not. Raises BusError where a file cannot be used."""
    if not address.startswith("tls://"):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.certificate is not None:
            context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise BusError(
            Code.BAD_MESSAGE,
            f"[nats]: ca, certificate or key cannot be used: {in_words(error)}",
        ) from None
    return context


def _check_encrypted(client: Client, address: str) -> None:
    """Raise BusError where the address asks for TLS, and there is none: somebody on the way may
    have taken it out of what the server said."""
    if address.startswith("tls://") and not client._server_info.get("tls_required"):
        raise BusError(
            Code.BAD_MESSAGE, f"{address}: the server does not speak TLS; no password was sent"
        )


def _credentials(client: Client, address: str, settings: NatsSettings) -> dict[str, Any]:
    """Return how the server is told who connects, as nats-py takes that. What is secret is read
    when it is needed, once it is certain that TLS is spoken where it was asked for."""

    def read(path: Path) -> str:
        _check_encrypted(client, address)
        try:
            return path.read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            text = f"[nats]: {path} cannot be read: {in_words(error)}"
            raise BusError(Code.BAD_MESSAGE, text) from None

    user, password_file = settings.user, settings.password_file
    if user is not None and password_file is not None:
        return {"user": user, "password": lambda: read(password_file)}
    if (token_file := settings.token_file) is not None:
        return {"token": lambda: read(token_file)}
    if (file := settings.credentials) is not None:
        return {
            "user_jwt_cb": lambda: bytearray(_block(read(file), "NATS USER JWT", file), "ascii"),
            "signature_cb": lambda nonce: _sign(nonce, _block(read(file), "USER NKEY SEED", file)),
        }
    return {}


def _block(text: str, kind: str, file: Path) -> str:
    """Return what a .creds file has between two lines of dashes."""
    _, found, rest = text.partition(f"-----BEGIN {kind}-----")
    lines = rest.split()
    if not found or not lines:
        raise BusError(
            Code.BAD_MESSAGE,
            f"[nats]: {file} has no {kind}: credentials is a file of `nsc generate creds`",
        )
    return lines[0]


def _sign(nonce: str, seed: str) -> bytes:
    """Return the signature (Ed25519, in base64) of what the server asked to sign. ``seed``: as NATS
    writes one: two bytes of what it is for, 32 bytes, a checksum of two, in base32."""
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        key = Ed25519PrivateKey.from_private_bytes(raw[2:34])
    except ValueError:
        text = "[nats]: the seed in the file of credentials is damaged"
        raise BusError(Code.BAD_MESSAGE, text) from None
    return base64.b64encode(key.sign(nonce.encode()))
