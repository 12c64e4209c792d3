"""For tests: networks as people have them, on loopback alone: names, addresses that never answer,
proxies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest


def give_names(
    monkeypatch: pytest.MonkeyPatch, names: Mapping[str, Sequence[tuple[str, int | None]]]
) -> list[str]:
    """Let names be found: name -> (IP address, port, or None for the port that is asked for).
    Others are not found.

    Returns the names that are looked up, as they are.
    """
    asked: list[str] = []

    def find(host: str, port: Any, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        try:
            found = names[host]
        except KeyError:
            return real(host, port, *_, **__) if host[-1].isdigit() or ":" in host else missing()
        rows = []
        for address, own in found:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            end = (0, 0) if family == socket.AF_INET6 else ()
            rows.append(
                (family, socket.SOCK_STREAM, 6, "", (address, port if own is None else own, *end))
            )
        return rows

    def missing() -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", find)
    return asked


@contextmanager
def black_hole(address: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port of this machine where no connection is ever answered: its queue is full, and
    stays so."""
    with ExitStack() as held:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = held.enter_context(socket.socket(family))
        listening.bind((address, 0))
        listening.listen(0)
        place = listening.getsockname()
        for _ in range(64):
            filling = held.enter_context(socket.socket(family))
            filling.settimeout(0.2)
            try:
                filling.connect(place)
            except TimeoutError:
                break
        else:
            pytest.skip("the system takes connections beyond the queue of a listening socket")
        yield place[1]


class Proxy:
    """An HTTP proxy on 127.0.0.1. It connects CONNECT requests to ``target``, whatever they ask
    for."""

    def __init__(self, target: int, answer: bytes) -> None:
        self.target, self.answer = target, answer
        self.port = 0
        self.requests: list[str] = []
        """All that was said to it, up to the first empty line of each connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client."""
        try:
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self.answer)
            if b" 200 " in self.answer:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
                await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
        finally:
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(2**16):
            writer.write(content)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def http_proxy(
    target: int = 9, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n"
) -> AsyncIterator[Proxy]:
    """A proxy that leads to port ``target`` of this machine, or gives another answer than that it
    does."""
    proxy = Proxy(target, answer)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.port = server.sockets[0].getsockname()[1]
        yield proxy
