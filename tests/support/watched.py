"""For tests of the live page: a coordinator with an administrators' port, in an event loop of
another thread, devices that speak by hand, and somebody who asks over HTTP as a browser does."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.service.several_runs import hosting
from fleetlearn_coordinator.storage.administrators import Administrators, Role
from fleetlearn_protocol.messages import PROTOCOL_NAME, CheckIn, Welcome
from live_schema import check_event
from peers import Peer
from processes import wait_for
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

Result = TypeVar("Result")
logger = logging.getLogger("fleetlearn.coordinator")


class Watched:
    """A coordinator that serves a plan, or the runs of a folder."""

    def __init__(self, folder: Path, plan: Plan | None, **service: Any) -> None:
        """``folder``: of identities and, without a plan, of the runs."""
        settings = {"port": 0, "identities": "ids", "admin": {"port": 0}, **service}
        settings |= {} if plan is not None else {"runs": "runs"}
        self.service = ServiceSettings.read(settings, folder)
        self.plan, self.folder = plan, folder
        self.address = ""
        """Of the administrators' port, as a URL."""
        self.server: Any = None
        """The run's server, or the host's runs."""
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        serves = hosting(self.service) if self.plan is None else running(self.plan, self.service)
        async with AsyncExitStack() as self._stack:
            self.server = await self._stack.enter_async_context(serves)  # type: ignore[arg-type]
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Watched:
        self.identities = Administrators(self.folder / "ids")
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            self._thread.start()
            self._ready.wait(30)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)
        if self._error is not None:
            raise self._error
        (said,) = (line for line in lines if line.startswith("administrators: "))
        self.address = said.split()[-1]
        return self

    def __exit__(self, *_: object) -> None:
        """May be called again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    # People

    def token(self, name: str, role: Role = "operate", until: float | None = None) -> str:
        """Return the token of a new administrator."""
        return self.identities.add(name, role, until, time.time())

    # Devices

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Do something in the coordinator's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def join(self, name: str, tags: tuple[str, ...] = (), **stated: Any) -> Peer:
        """Enrol a device with these tags, and connect it. ``stated``: what it says of itself."""
        secret, now = f"{name}-{'s' * 43}"[:43], time.time()
        token = self.identities.make_token(1, now + 1000, tags, now)
        self.identities.enrol(name, secret, token, now)
        return self.do(self._join(name, secret, **stated))

    async def _join(self, name: str, secret: str, **stated: Any) -> Peer:
        host = self.server.host
        connection = await connect(
            host.address,
            subprotocols=[Subprotocol(PROTOCOL_NAME)],
            additional_headers={"Authorization": f"Bearer {secret}"},
            compression=None,
            max_size=None,
        )
        self._stack.callback(connection.transport.abort)
        peer = Peer(name, connection)
        await peer.send(CheckIn(1, name, 10, **stated))
        await peer.expect(Welcome)
        return peer


class Browser:
    """Somebody who asks as a browser does that shows the page."""

    def __init__(self, address: str) -> None:
        self.place = urlsplit(address)
        self.cookie = self.csrf = ""

    def send(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[HTTPResponse, bytes]:
        """Send a request and read the whole answer."""
        connection, response = self.open(method, path, body, **headers)
        content = response.read()
        connection.close()
        return response, content

    def open(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection(self.place.netloc, timeout=20)
        own = {"Origin": f"http://{self.place.netloc}", "Sec-Fetch-Site": "same-origin"}
        own |= {"Cookie": self.cookie} if self.cookie else {}
        own |= {"X-CSRF-Token": self.csrf} if self.csrf else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {**own, **named})
        return connection, connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and what JSON the answer has."""
        response, content = self.send(method, path, body, **headers)
        return response.status, json.loads(content)

    def sign_in(self, token: str) -> Any:
        response, content = self.send("POST", "/v1/session", {"token": token})
        assert response.status == 200, content
        self.cookie = (response.getheader("Set-Cookie") or "").partition(";")[0]
        answer = json.loads(content)
        self.csrf = answer["csrf"]
        return answer

    @contextmanager
    def look(self, *topics: str) -> Iterator[Look]:
        """Look at topics until the block is left."""
        connection, response = self.open("GET", f"/v1/live?topics={','.join(topics)}")
        assert response.status == 200, response.read()
        try:
            yield Look(response)
        finally:
            response.close()
            connection.close()


class Look:
    """What a viewer makes of the events, as the page does. Each is held to its schema."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self.values: dict[str, dict[str, Any]] = {}
        self.lists: dict[str, dict[str, list[Any]]] = {}
        self.ended: set[str] = set()
        self.is_over = False

    def next(self) -> None:
        """Read the next event."""
        while not (line := self._response.readline()).startswith(b"data: "):
            if not line:
                self.is_over = True
                return
        content = json.loads(line.removeprefix(b"data: "))
        check_event(content)
        topic = content["topic"]
        if content.get("ended"):
            self.ended.add(topic)
        elif "values" in content:
            self.values[topic], self.lists[topic] = content["values"], content["lists"]
        else:
            self.values[topic] |= content["set"]
            for key in content["gone"]:
                del self.values[topic][key]
            for name, rows in content["add"].items():
                self.lists[topic][name] += rows

    def until(self, condition: Any, what: str = "what the viewer waits for") -> None:
        """Read events until the condition holds."""

        def holds() -> bool:
            if condition():
                return True
            self.next()
            return bool(condition())

        wait_for(holds, what)
