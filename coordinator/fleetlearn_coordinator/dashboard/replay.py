"""The live page over records alone: a run whose coordinator is down, or a simulation. It shows and
changes nothing, on this machine's own address.

Whoever started it gets a link with a token, as there are no administrators here.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from http import HTTPStatus
from secrets import token_urlsafe
from typing import Any, NamedTuple

from fleetlearn_coordinator.dashboard.live_feed import Feed, Topic
from fleetlearn_coordinator.dashboard.page_api import PageApi, SignedIn
from fleetlearn_coordinator.dashboard.run_history import RunHistory
from fleetlearn_coordinator.network.admin_listener import AdminListener, Request
from fleetlearn_coordinator.network.http_port import RefusedError

HOST = "127.0.0.1"
MOST_SESSIONS = 100
RUN_TOPIC = "run/"
"""What the name of a run's topic begins with."""
READER = SignedIn("you", "view")


class ReplayedRun(NamedTuple):
    """What is known of a run that nobody serves here."""

    values: dict[str, Any]
    """As the page is told of a run (service/live_run.py)."""
    history: RunHistory
    glance: dict[str, Any]
    """What the list of runs shows."""


class OneToken:
    """The sessions of whoever has the one token, which is made for this process."""

    def __init__(self) -> None:
        self.token = token_urlsafe(32)
        self._secrets: list[str] = []

    def begin(self, token: str) -> tuple[str, SignedIn] | None:
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        secret = token_urlsafe(32)
        self._secrets = [*self._secrets, secret][-MOST_SESSIONS:]
        return secret, READER

    def find(self, secret: str) -> SignedIn | None:
        known = [hmac.compare_digest(secret.encode(), each.encode()) for each in self._secrets]
        return READER if any(known) else None

    def end(self, secret: str) -> None:
        self._secrets = [each for each in self._secrets if each != secret]

    def identify(self, request: Request) -> SignedIn:
        """Return who sends a request. Raises RefusedError."""
        if request.token:
            found = READER if hmac.compare_digest(request.token, self.token) else None
        else:
            found = self.find(request.cookie)
        if found is None:
            text = "open the link that the command printed: it has a token"
            raise RefusedError(HTTPStatus.UNAUTHORIZED, text)
        return found


async def serve_replay(
    title: str,
    runs: Mapping[str, ReplayedRun],
    read: Callable[[tuple[str, ...], Mapping[str, str]], Any],
    *,
    port: int,
    announce: Callable[[str], None],
    **about: Any,
) -> None:
    """Serve the page until the task is cancelled.

    Args:
        title: What is shown, for people.
        runs: By name.
        read: Returns what is answered to a GET below ``/v1/``, from the path's parts and the query.
            Called in other threads. Raises RefusedError.
        port: TCP port; 0: any.
        announce: Called with the link, once the port listens.
        about: What the page is told besides: ``devices``, ``models`` (whether there are such
            places), ``virtual`` (whether times are seconds since the run's begin).

    Raises OSError where the port cannot be listened on.
    """
    sessions, feed = OneToken(), Feed()
    for name, run in runs.items():
        feed.add(_topic(RUN_TOPIC + name, run.values, run.history))
    glances = {RUN_TOPIC + name: run.glance for name, run in runs.items()}
    feed.add(Topic("host", lambda: {"time": 0.0, **glances}, {}))

    def answer(request: Request) -> Any:
        sessions.identify(request)
        if request.method != "GET" or request.path[0] != "v1":
            text = "records are shown here, and cannot be changed"
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, text)
        return read(request.path[1:], request.query)

    page = PageApi(
        answer,
        sessions.identify,
        lambda: sessions,
        feed,
        secure=False,
        about={"replay": True, "title": title, **about},
    )
    listener = AdminListener(page.answer, None, browsers=True)
    address = await listener.listen(HOST, port)
    try:
        announce(f"{address}/#token={sessions.token}")
        await asyncio.get_running_loop().create_future()
    finally:
        await listener.close()


def _topic(name: str, values: dict[str, Any], history: RunHistory) -> Topic:
    return Topic(name, lambda: values, history.lists)
