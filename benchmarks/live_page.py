"""What the live page costs a coordinator beside its metrics: the rounds of ``rounds.py``, watched
and not watched.

In turns: a coordinator as it is, and one with an administrators' port, with a metrics' port that is
scraped each second, and with two viewers of the page's stream of events. One viewer reads; the
other does not, and comes back each few seconds, as the coordinator drops it. Half of the repeats
begin with the one coordinator, half with the other. The devices of both have credentials, as the
page needs identities. The default updates are small: what is done for each report weighs most then.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import _servers
from fleetlearn_coordinator.storage.administrators import Administrators
from monitoring import MONITORED, compare, scraped

RUN = "benchmark"
"""The plan's name (_servers.py)."""
DEAD_LIFE = 5.0
"""Seconds for which a dead viewer's connection is open, before it connects once more."""
DOCUMENTS = 2
"""Documents that a viewer is told at first: the host's and the run's."""
START = 30.0
"""Seconds in which that happens."""
SMALL = 4096
"""Bytes of a dead viewer's receive buffer: what it does not read soon waits in the coordinator."""


class Viewers:
    """Two viewers of one coordinator, until ``end``."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._place = host, port
        self._request = (
            f"GET /v1/live?topics=host,run/{RUN} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        ).encode()
        self._ended = threading.Event()
        self.look = threading.Event()
        """The live viewer has the documents of host and run."""
        self.were_sent_away = False
        """Whether the coordinator ended the live viewer's stream."""
        self._threads = [threading.Thread(target=each) for each in (self._read, self._stall)]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def _stream(self, **options: int) -> Iterator[socket.socket]:
        with socket.socket() as connection:
            for name, value in options.items():
                connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
            connection.settimeout(0.5)
            connection.connect(self._place)
            connection.sendall(self._request)
            yield connection

    def _read(self) -> None:
        events = 0
        with self._stream() as connection:
            while not self._ended.is_set():
                with suppress(TimeoutError):
                    content = connection.recv(1 << 16)
                    if not content:
                        self.were_sent_away = True
                        return
                    events += content.count(b"data: ")
                if events >= DOCUMENTS:
                    self.look.set()

    def _stall(self) -> None:
        self.look.wait(START)
        while not self._ended.is_set():
            with self._stream(SO_RCVBUF=SMALL):
                self._ended.wait(DEAD_LIFE)

    def end(self) -> None:
        """Close both connections."""
        self._ended.set()
        for thread in self._threads:
            thread.join()


def sign_in(server: _servers.Server) -> tuple[str, str]:
    """Return where a coordinator's page is, and the token of a new administrator who may look.
    Raises RuntimeError where there is no page."""
    match = re.search(r"administrators: (http://\S+)", server.log.read_text())
    if match is None:
        raise RuntimeError(f"{server.log} does not say where administrators connect")
    administrators = Administrators(server.log.parent / "identities")
    token = administrators.add("viewer", "view", None, time.time())
    administrators.close()
    return match.group(1), token


@contextmanager
def watched(server: _servers.Server) -> Iterator[None]:
    """Scrape a coordinator's metrics and look at its page until the block is left. Raises
    RuntimeError where the page's stream said nothing."""
    address, token = sign_in(server)
    place = urlsplit(address)
    assert place.hostname is not None
    assert place.port is not None
    with scraped(server):
        viewers = Viewers(place.hostname, place.port, token)
        try:
            if not viewers.look.wait(START):
                raise RuntimeError(f"the page told its viewer nothing within {START:.0f} s")
            yield
        finally:
            viewers.end()
    if viewers.were_sent_away:
        raise RuntimeError("the page sent its live viewer away")


if __name__ == "__main__":
    compare(__doc__, "watched", watched, {**MONITORED, "admin": "{port = 0}"}, enrolled=True)
