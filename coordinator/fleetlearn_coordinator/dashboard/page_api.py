"""What the page asks beside the administrators' own endpoints: its files, who is signed in, and
what happens now. Safe to call from any thread.

Somebody who signs in with a token gets a cookie that no script can read, and a CSRF token that is
made from it. The page asks with both, and has the administrator's role. So each view of the page is
an endpoint that programs may ask too.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec

from fleetlearn_coordinator.dashboard.live_feed import Feed, Viewer
from fleetlearn_coordinator.dashboard.page_files import find_file
from fleetlearn_coordinator.network.admin_listener import HttpContent, Request, Stream, json_content
from fleetlearn_coordinator.network.http_port import RefusedError

MOST_TOPICS = 4
"""Documents that one viewer looks at."""
SESSION_PATH = ("v1", "session")
RECHECK = 10
"""Messages between two looks at whether a viewer is still signed in: about 5 s."""


class SignedIn(NamedTuple):
    """Who has a session."""

    name: str
    role: str


class Sessions(Protocol):
    """Who is signed in. Each method is called in any thread."""

    def begin(self, token: str) -> tuple[str, SignedIn] | None:
        """Return the secret of a new session, and whose it is. None: the token is nobody's."""

    def find(self, secret: str) -> SignedIn | None:
        """Return whose session this is, or None."""

    def end(self, secret: str) -> None:
        """Forget a session. Harmless where there is none."""


class TokenGiven(msgspec.Struct, forbid_unknown_fields=True):
    """An administrator's token."""

    token: str


def csrf_of(secret: str) -> str:
    """Return the CSRF token of a session: who has no cookie cannot make it."""
    return hmac.digest(secret.encode(), b"fleetlearn csrf", "sha256").hex()


def check_csrf(request: Request) -> None:
    """Refuse a change that a page asks for without the CSRF token of its session. Raises
    RefusedError."""
    if not hmac.compare_digest(csrf_of(request.cookie).encode(), request.csrf.encode()):
        text = "the header X-CSRF-Token is missing or is of another session; load the page again"
        raise RefusedError(HTTPStatus.FORBIDDEN, text)


class PageApi:
    """The page's part of the administrators' port. What it does not know it asks of ``ask``."""

    def __init__(
        self,
        ask: Callable[[Request], Any],
        identify: Callable[[Request], object],
        sessions: Callable[[], Sessions],
        feed: Feed,
        *,
        secure: bool,
        about: dict[str, Any],
        find_topic: Callable[[str], None] = lambda topic: None,
    ) -> None:
        """``ask``: answers all other requests, and checks who asks. ``identify``: raises
        RefusedError where whoever sends a request may not look. ``sessions``: returns what this
        thread may use. ``secure``: whether the port has TLS. ``about``: what the page is told of
        the coordinator. ``find_topic``: called in other threads, before a viewer looks at a topic,
        which may be made then."""
        self._ask, self._identify, self._sessions, self._feed = ask, identify, sessions, feed
        self._secure, self._about, self._find_topic = secure, about, find_topic

    def answer(self, request: Request) -> Any:
        """Return what is answered. Raises RefusedError."""
        path = request.path
        if path == ("",) or path[0] == "page":
            if request.method != "GET":
                raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "the page's files take GET")
            return find_file(path, request.known)
        if path == SESSION_PATH and request.method == "GET":
            who = self._sessions().find(request.cookie) if request.cookie else None
            return self._describe(who, request.cookie)
        if path == SESSION_PATH and request.method == "POST":
            return self._sign_in(request)
        if path == (*SESSION_PATH, "end") and request.method == "POST":
            return self._sign_out(request)
        if path == ("v1", "live") and request.method == "GET":
            return self._look(request)
        return self._ask(request)

    def _describe(self, who: SignedIn | None, secret: str) -> dict[str, Any]:
        if who is None:
            return {"name": None}
        return {"name": who.name, "role": who.role, "csrf": csrf_of(secret), **self._about}

    def _sign_in(self, request: Request) -> HttpContent:
        try:
            given = msgspec.json.decode(request.body, type=TokenGiven)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body: {error}") from None
        found = self._sessions().begin(given.token.strip())
        if found is None:
            text = "this token is not known here, or it has expired"
            raise RefusedError(HTTPStatus.UNAUTHORIZED, text)
        secret, who = found
        return self._with_cookie(request, secret, self._describe(who, secret))

    def _sign_out(self, request: Request) -> HttpContent:
        check_csrf(request)
        self._sessions().end(request.cookie)
        return self._with_cookie(request, "", {"name": None})

    def _with_cookie(self, request: Request, secret: str, answer: dict[str, Any]) -> HttpContent:
        """Return the answer with the page's cookie. An empty one is removed by the browser. The
        cookie ends with the browser, or with the session."""
        cookie = f"{request.cookie_name}={secret}; Path=/; HttpOnly; SameSite=Strict"
        cookie += "; Secure" * self._secure + "; Max-Age=0" * (not secret)
        return json_content(answer, headers=[("Set-Cookie", cookie)])

    def _look(self, request: Request) -> Stream:
        """Return the stream of the topics that are asked for: ``?topics=host,run/NAME``."""
        self._identify(request)
        topics = request.query.get("topics", "host").split(",")
        if len(topics) > MOST_TOPICS:
            text = f"{len(topics)} topics were asked for; {MOST_TOPICS} at most may be"
            raise RefusedError(HTTPStatus.BAD_REQUEST, text)
        for topic in topics:
            self._find_topic(topic)
        return Stream(lambda: self._events(topics, request))

    async def _events(self, topics: list[str], request: Request) -> AsyncGenerator[bytes, None]:
        viewer: Viewer = self._feed.join(topics)
        try:
            # How long a browser waits before it asks again.
            yield b"retry: 1000\n\n"
            sent = 0
            while (message := await viewer.next()) is not None:
                sent += 1
                if sent % RECHECK == 0:
                    await asyncio.to_thread(self._identify, request)
                yield message
        except RefusedError:  # signed out, or removed
            return
        finally:
            self._feed.leave(viewer)
