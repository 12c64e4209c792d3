"""Thousands of devices that train nothing, in one thread on raw sockets, at a fraction of the
coordinator's cost.

Received contents are thrown away in the kernel, and the frames that are sent were made beforehand.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from _raw_peer import BINARY, CLOSE, TEXT, masked_header
from _servers import credential_of
from _websocket_device import EXAMPLES, Log, Update, report
from fleetlearn_protocol.frames import CHUNK_BYTES, CHUNK_KIND, HEADER
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Content,
    Fetch,
    FromDevice,
    Grant,
    Refused,
    Task,
    Uploaded,
    Waiting,
    Welcome,
    decode_from_coordinator,
    encode,
)

SCRATCH = bytearray(1 << 20)
DISCARD = getattr(socket, "MSG_TRUNC", 0)
"""On Linux, received TCP data is thrown away in the kernel instead of copied (man 7 tcp)."""
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


def frames(content: bytes, transfer: int, offset: int) -> Iterator[bytes | memoryview]:
    """Yield an upload as pieces for the wire: small headers, and views into ``content``."""
    view = memoryview(content)
    for start in range(offset, len(content), CHUNK_BYTES):
        payload = view[start : start + CHUNK_BYTES]
        yield masked_header(BINARY, HEADER.size + len(payload)) + HEADER.pack(
            CHUNK_KIND, 0, 0, transfer, start
        )
        yield payload


@dataclass(slots=True, eq=False)
class Peer:
    """The connection of one device."""

    name: str
    socket: socket.socket
    events: int
    securing: bool = False
    """Whether its TLS handshake is still to be done."""
    open: bool = False
    """Whether the WebSocket handshake is done."""
    incoming: bytearray = field(default_factory=bytearray)
    skip: int = 0
    """Bytes of a chunk that are still to be thrown away."""
    outgoing: deque[bytes | memoryview] = field(default_factory=deque)
    fetched: int = 0
    """Bytes of the model that are still to come."""
    task: Task | None = None


class Fleet:
    """Devices on raw sockets. ``counts`` has how many connected, were welcomed, accepted, failed
    (by cause)."""

    def __init__(
        self,
        url: str,
        update: Update,
        rounds: int = 1,
        *,
        credentials: bool = False,
        ca: Path | None = None,
    ) -> None:
        """Take part in the first ``rounds`` rounds; 0: only connect. ``credentials``: show one at
        each connection. ``ca``: what certifies the coordinator, if it has TLS."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = (parts.hostname, parts.port)
        self.update, self.rounds = update, rounds
        self.counts: Counter[str] = Counter()
        self.log = Log()
        self.welcomed_at: list[float] = []
        self.peak_kernel = 0.0
        """MiB of TCP memory of the whole machine at its highest."""
        self.peers: set[Peer] = set()
        self._selector = selectors.DefaultSelector()
        self._credentials = credentials
        self._tls = None if ca is None else ssl.create_default_context(cafile=str(ca))

    def connect(self, count: int, per_source: int = 20_000) -> None:
        """Begin ``count`` connections at once, at most ``per_source`` from one loopback address
        (ports run out)."""
        for number in range(count):
            far = number // per_source
            self.connect_one(f"d{number}", f"127.0.0.{1 + far}" if far else None)

    def connect_one(self, name: str, source: str | None = None) -> None:
        """Begin the connection of a device. ``source``: the address that it comes from; None:
        any."""
        peer = Peer(name, socket.socket(), WRITE)
        peer.socket.setblocking(False)
        if source is not None:
            peer.socket.bind((source, 0))
        code = peer.socket.connect_ex(self.address)
        if code not in (0, errno.EINPROGRESS):
            self._fail(peer, f"connect: {os.strerror(code)}")
            return
        self.peers.add(peer)
        self._selector.register(peer.socket, WRITE, peer)

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Go on until ``until()`` is true. Raises TimeoutError after ``limit`` seconds, saying how
        far it came."""
        end = time.perf_counter() + limit
        look = 0.0
        while not until():
            now = time.perf_counter()
            if now > end:
                raise TimeoutError(f"after {limit} s: {dict(self.counts)}")
            if now > look:
                self.peak_kernel = max(self.peak_kernel, kernel_memory())
                look = now + 0.05
            for key, events in self._selector.select(0.1):
                peer: Peer = key.data
                try:
                    if events & WRITE or peer.securing:
                        self._writable(peer)
                    if events & READ and peer in self.peers:
                        self._readable(peer)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    # of a handshake, or while a record is incomplete
                    pass
                except OSError as error:
                    if peer in self.peers:  # else it was ended by what came before
                        self._fail(peer, error.strerror or str(error))

    def close(self) -> None:
        for peer in list(self.peers):
            self._end(peer)
        self._selector.close()

    def _end(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self._selector.unregister(peer.socket)
        peer.socket.close()

    def _fail(self, peer: Peer, cause: str) -> None:
        self.counts["failed"] += 1
        self.counts[f"failed: {cause}"] += 1
        self._end(peer)

    def _watch(self, peer: Peer, events: int) -> None:
        if peer.events != events:
            peer.events = events
            self._selector.modify(peer.socket, events, peer)

    # --- writing ---

    def _writable(self, peer: Peer) -> None:
        if not peer.open and not peer.outgoing and peer.events == WRITE:
            code = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, f"connect: {os.strerror(code)}")
            self.counts["connected"] += 1
            peer.outgoing.append(self._request(peer))
            if self._tls is not None:
                self._selector.unregister(peer.socket)
                peer.socket = self._tls.wrap_socket(
                    peer.socket, do_handshake_on_connect=False, server_hostname=self.address[0]
                )
                peer.securing, peer.events = True, READ
                self._selector.register(peer.socket, READ, peer)
        if peer.securing:
            assert isinstance(peer.socket, ssl.SSLSocket)
            peer.socket.do_handshake()
            peer.securing = False
        self._flush(peer)

    def _request(self, peer: Peer) -> bytes:
        lines = [
            "GET / HTTP/1.1",
            f"Host: {self.address[0]}:{self.address[1]}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Protocol: {PROTOCOL_NAME}",
        ]
        if self._credentials:
            lines += [
                f"Authorization: Bearer {credential_of(peer.name)}",
                f"Fleetlearn-Device: {peer.name}",
            ]
        return "\r\n".join([*lines, "", ""]).encode()

    def _send(self, peer: Peer, message: FromDevice) -> None:
        text = encode(message).encode()
        peer.outgoing.append(masked_header(TEXT, len(text)) + text)
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        outgoing = peer.outgoing
        try:
            while outgoing:
                if self._tls is None:
                    sent = peer.socket.sendmsg([outgoing[i] for i in range(min(16, len(outgoing)))])
                else:
                    sent = peer.socket.send(outgoing[0])
                while outgoing and sent >= len(outgoing[0]):
                    sent -= len(outgoing.popleft())
                if sent:
                    outgoing[0] = memoryview(outgoing[0])[sent:]
                    break
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        self._watch(peer, READ | WRITE if outgoing else READ)

    # --- reading ---

    def _readable(self, peer: Peer) -> None:
        try:
            while peer in self.peers:
                if peer.skip:
                    asked = min(peer.skip, len(SCRATCH))
                    got = peer.socket.recv_into(SCRATCH, asked, DISCARD if self._tls is None else 0)
                    peer.skip -= got
                    if got and not peer.skip:
                        self._bulk_done(peer)
                else:
                    asked = 4096
                    data = peer.socket.recv(asked)
                    got = len(data)
                    peer.incoming += data
                    self._parse(peer)
                if not got:
                    raise ConnectionResetError(errno.ECONNRESET, "closed by the coordinator")
                if got < asked:
                    return
        except BlockingIOError:
            pass

    def _parse(self, peer: Peer) -> None:
        data = peer.incoming
        if not peer.open:
            head, blank_line, rest = data.partition(b"\r\n\r\n")
            if not blank_line:
                return
            if not head.startswith(b"HTTP/1.1 101 "):
                raise ConnectionRefusedError(
                    errno.ECONNREFUSED, head.split(b"\r\n")[0].decode(errors="replace")
                )
            peer.open, peer.incoming = True, rest
            self._send(peer, CheckIn(PROTOCOL_VERSION, peer.name, EXAMPLES, software="benchmark"))
            data = rest
        while len(data) >= 2 and not peer.skip and peer in self.peers:
            opcode, size, head_size = data[0] & 15, data[1] & 127, 2
            if size >= 126:
                head_size = 4 if size == 126 else 10
                if len(data) < head_size:
                    return
                size = int.from_bytes(data[2:head_size])
            if opcode == BINARY:
                peer.fetched -= size - HEADER.size
                here = min(size, len(data) - head_size)
                peer.skip = size - here
                del data[: head_size + here]
                if not peer.skip:
                    self._bulk_done(peer)
                continue
            if len(data) < head_size + size:
                return
            body = bytes(data[head_size : head_size + size])
            del data[: head_size + size]
            if opcode == TEXT:
                self._hear(peer, body)
            elif opcode == CLOSE:
                raise ConnectionResetError(
                    errno.ECONNRESET, f"closed by the coordinator: {body[2:].decode()}"
                )

    def _bulk_done(self, peer: Peer) -> None:
        if not peer.fetched:
            assert peer.task is not None
            self._send(peer, report(peer.task, self.update))

    def _hear(self, peer: Peer, body: bytes) -> None:
        match decode_from_coordinator(body):
            case Welcome():
                self.counts["welcomed"] += 1
                self.welcomed_at.append(time.perf_counter())
            case Task() as task if task.round <= self.rounds:
                peer.task = task
                moments = self.log[task.round]
                moments.first_task = min(moments.first_task, time.perf_counter())
                self._send(peer, Fetch(task.vector("model").sha256))
            case Content(_, _, size, offset):
                peer.fetched = size - offset
            case Grant(name, transfer, offset):
                peer.outgoing.extend(frames(self.update.content, transfer, offset))
                self._send(peer, Uploaded(name))
            case Accepted(name) if peer.task is not None and peer.task.task == name:
                self.counts["accepted"] += 1
                self.log[peer.task.round].accepted += 1
                self.log[peer.task.round].last_accepted = time.perf_counter()
                peer.task = None  # a second answer, to a report that was sent again, does not count
            case Waiting(name) if peer.task is not None and peer.task.task == name:
                # Its place is another's: from now on nothing more of it is on its way.
                self.counts["waited"] += 1
                self._send(peer, report(peer.task, self.update))
            case ComeBack(_, reason):
                self.counts[f"told to come back: {reason}"] += 1
            case Refused(code) | Cancel(_, code):
                self._fail(peer, f"refused: {code}")


def kernel_memory() -> float:
    """MiB that the kernel holds for TCP, of the whole machine; 0 where it does not say."""
    try:
        with open("/proc/net/sockstat") as stream:  # noqa: PTH123
            line = next(line for line in stream if line.startswith("TCP:"))
    except (OSError, StopIteration):
        return 0.0
    return int(line.split()[-1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
