"""Target: bytes before the page's port: HTTP requests, and what is none. No socket; a folder of
files."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from functools import cache
from pathlib import Path

from fleetlearn_coordinator.conversation.limits import Bucket
from fleetlearn_coordinator.network.page_listener import PageListener
from fleetlearn_coordinator.network.static_files import StaticFolder
from fleetlearn_coordinator.plan.service_settings import Limits

SECRET = b"what nobody may read"


class _Transport:
    def set_write_buffer_limits(self, high: int) -> None:
        pass


class _Writer:
    """Takes all that is written."""

    def __init__(self) -> None:
        self.written = b""
        self.transport = _Transport()

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _folder() -> Path:
    """A page, and beside it what is not to be read."""
    folder = Path(tempfile.mkdtemp())
    (folder / "page" / "assets").mkdir(parents=True)
    (folder / "page" / "index.html").write_bytes(b"<p>hello")
    (folder / "page" / "assets" / "a-0123abcd.js").write_bytes(b"1;\n" * 50_000)
    (folder / "page" / "assets" / "a-0123abcd.js.gz").write_bytes(b"packed")
    (folder / "page" / ".hidden").write_bytes(SECRET)
    (folder / "page" / "out").symlink_to("../secret")
    (folder / "secret").write_bytes(SECRET)
    return folder


@cache
def _listener() -> PageListener:
    found = PageListener(
        StaticFolder(_folder() / "page"), {"status.json": lambda: b"{}"}, tls=None, limits=Limits()
    )
    found._requests = found._bytes = Bucket(1e12, 1e12, 0.0)
    return found


def page(data: bytes) -> None:
    """The bytes of a connection. What is answered is HTTP, and nothing that is secret."""
    _loop().run_until_complete(_talk(data))


async def _talk(data: bytes) -> None:
    reader, writer = asyncio.StreamReader(), _Writer()
    reader.feed_data(data)
    reader.feed_eof()
    useful = await _listener()._talk(reader, writer)  # type: ignore[arg-type]
    assert SECRET not in writer.written
    assert not writer.written or writer.written.startswith(b"HTTP/1.1 "), writer.written[:100]
    assert not useful or writer.written


def stop() -> None:
    """End the threads, close the event loop, and remove the folder."""
    if not _listener.cache_info().currsize:  # no input was played
        return
    _loop().run_until_complete(_listener().close())
    _loop().close()
    shutil.rmtree(_folder())
    for made in (_loop, _listener, _folder):
        made.cache_clear()
