"""A coordinator over its administrators' port: what commands see and do from anywhere."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from fleetlearn_protocol.errors import Code, FleetError, in_words

from fleetlearn_coordinator.commands.exits import NoAnswerError, NotAllowedError
from fleetlearn_coordinator.service.views.records import (
    AuditView,
    CanaryView,
    DevicePage,
    DeviceView,
    EventView,
    HostView,
    OperationView,
    RoundView,
    RunGlance,
    RunView,
    TokenView,
    TurnsView,
    Version,
)

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.canary.about import CanaryAsked
    from fleetlearn_coordinator.service.canary.decision import Action

TIMEOUT = 20.0
"""Seconds to wait for an answer."""
MOST_ROWS = 1000
"""Rows that the port answers at most."""
VERBS = {"paused": "pause", "resumed": "resume", "drained": "drain", "stopped": "stop"}
SOON = "within a second"
Found = TypeVar("Found")


class RemoteTarget:
    """The same as ``LocalTarget``, asked over HTTP. Every method may raise NoAnswerError,
    NotAllowedError and FleetError with what the coordinator answers."""

    def __init__(self, url: str, token: str, ca: Path | None) -> None:
        """``url``: of the port, without a path. ``ca``: PEM, the CA of its certificate; None: the
        system's."""
        self.where, self._token, self._ca = url, token, ca
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            text = f"{url} is no address of an administrators' port, such as https://fleet:8766"
            raise FleetError(Code.BAD_MESSAGE, text)
        self._host, self._port = parts.hostname, parts.port or 8766
        self._tls = parts.scheme == "https"

    def greet(self) -> None:
        """Find out whether a coordinator answers."""
        self._get("runs", list[RunGlance])

    # The views

    def host(self) -> HostView:
        return self._get("status", HostView)

    def runs(self) -> list[RunGlance]:
        return self._get("runs", list[RunGlance])

    def run(self, name: str | None = None, *, last: int | None = None) -> RunView:
        return self._get(self._run(name), RunView, last=_rows(last))

    def rounds(self, name: str | None = None, *, last: int | None = None) -> list[RoundView]:
        return self._get(f"{self._run(name)}/rounds", list[RoundView], last=_rows(last))

    def turns(self, name: str | None = None, number: int | None = None) -> TurnsView:
        which = "open" if number is None else str(number)
        return self._get(f"{self._run(name)}/rounds/{which}", TurnsView)

    def models(self, name: str | None = None, *, gone: bool = False) -> list[Version]:
        query = {"gone": ""} if gone else {}
        return self._get(f"{self._run(name)}/models", list[Version], **query)

    def canaries(self, name: str | None = None) -> list[CanaryView]:
        path = "canaries" if name is None else f"{self._run(name)}/canary"
        return self._get(path, list[CanaryView])

    def devices(self, name: str | None = None) -> list[DeviceView]:
        """Return all devices, or the one of this name. The port answers a page of them at a
        time."""
        found: dict[str, DeviceView] = {}
        offset = 0
        while True:
            query = {"search": name or "", "offset": str(offset), "last": _rows(None)}
            page = self._get("devices", DevicePage, **query)
            # A device that is enrolled meanwhile moves those after it to the next page.
            found |= {row.device: row for row in page.devices}
            offset += len(page.devices)
            if offset >= page.matching or not page.devices:
                return [row for row in found.values() if name in (None, row.device)]

    def audit(self, last: int) -> list[AuditView]:
        return self._get("audit", list[AuditView], last=_rows(last))

    # What goes on: one connection that stays open

    def watch_host(self) -> Iterator[HostView]:
        return self._watch("status", HostView)

    def watch_run(self, name: str | None, last: int) -> Iterator[RunView]:
        return self._watch(self._run(name), RunView, last=_rows(last))

    def events(self, name: str | None) -> Iterator[list[EventView]]:
        newest = -inf  # a new connection is told of the last rounds once more
        for found in self._watch(f"{self._run(name)}/events", list[EventView]):
            yield [event for event in found if event.at > newest]
            newest = max((event.at for event in found), default=newest)

    # What people do

    def change(self, name: str, verb: str) -> OperationView:
        self._post(f"{self._run(name)}/{VERBS[verb]}", {})
        return OperationView(verb, name, SOON)

    def begin_canary(self, of: str, asked: CanaryAsked) -> OperationView:
        done = self._post(f"{self._run(of)}/canary", msgspec.to_builtins(asked))
        return OperationView("canary began", done["name"], SOON, remark=done["remark"])

    def act_on_canary(self, name: str, action: Action) -> OperationView:
        done = self._post(f"{self._run(name)}/canary/{action}", {})
        return OperationView(done["what"], done["name"], SOON)

    def roll_back(self, name: str | None, version: int) -> OperationView:
        name = self._name(name)
        self._post(f"{self._run(name)}/roll-back", {"version": version})
        return OperationView("rolled back", name, SOON, version)

    def evaluate(self, name: str | None) -> OperationView:
        name = self._name(name)
        self._post(f"{self._run(name)}/evaluate", {})
        return OperationView("evaluation", name, SOON)

    def enrol(
        self, uses: int, hours: float, tags: tuple[str, ...], runs: tuple[str, ...]
    ) -> TokenView:
        body = {"uses": uses, "hours": hours, "tags": tags, "runs": runs}
        return msgspec.convert(self._post("tokens", body), TokenView)

    def revoke(self, device: str) -> OperationView:
        self._post(f"devices/{quote(device, safe='')}/revoke", {})
        return OperationView("revoked", device, SOON)

    # HTTP

    def _name(self, name: str | None) -> str:
        """Return the name; None: of the one run there is."""
        if name is None:
            names = [run.name for run in self.runs()]
            if len(names) != 1:
                there = ", ".join(names) or "none"
                text = f"which run? Name one; there are: {there}"
                raise FleetError(Code.UNKNOWN_CONTENT, text)
            (name,) = names
        return name

    def _run(self, name: str | None) -> str:
        """Return the path of a run; None: of the one there is."""
        return f"runs/{quote(self._name(name), safe='')}"

    def _get(self, path: str, kind: type[Found], **query: str) -> Found:
        connection = self._ask("GET", f"{path}?{urlencode(query)}" if query else path)
        try:
            return msgspec.json.decode(connection.body(), type=kind)
        finally:
            connection.close()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        connection = self._ask("POST", path, msgspec.json.encode(body))
        try:
            return msgspec.json.decode(connection.body())
        finally:
            connection.close()

    def _watch(self, path: str, kind: type[Found], **query: str) -> Iterator[Found]:
        """Yield what is there now, and again whenever it is something else. The port ends a
        connection after some minutes; the next one follows at once."""
        while True:
            connection = self._ask("GET", f"{path}?{urlencode({**query, 'watch': ''})}")
            try:
                for line in connection.lines():
                    if line.strip():
                        yield msgspec.json.decode(line, type=kind)
            except (OSError, http.client.HTTPException) as error:
                text = f"the coordinator at {self.where} does not answer any more"
                raise NoAnswerError(Code.BUSY, f"{text}: {in_words(error)}") from None
            finally:
                connection.close()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> _Answer:
        try:
            if self._tls:
                context = ssl.create_default_context(cafile=self._ca)
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=TIMEOUT, context=context
                )
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)
            headers = {"Authorization": f"Bearer {self._token}"}
            connection.request(method, f"/v1/{path}", body, headers)
            answer = _Answer(connection, connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(
                Code.BUSY, f"no coordinator answers at {self.where}: {in_words(error)}"
            ) from None
        if answer.response.status != http.HTTPStatus.OK:
            answer.fail(self.where)
        return answer


class _Answer:
    """An answer whose head is there."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._connection, self.response = connection, response

    def body(self) -> bytes:
        return self.response.read()

    def lines(self) -> Iterator[bytes]:
        while line := self.response.readline():
            yield line

    def close(self) -> None:
        self._connection.close()

    def fail(self, where: str) -> None:
        """Raise what the coordinator answered."""
        status, content = self.response.status, self.response.read()
        self.close()
        try:
            text = msgspec.json.decode(content, type=dict[str, str])["error"]
        except (msgspec.DecodeError, KeyError):
            text = f"{where} answers {status}: is this an administrators' port?"
        kind = NotAllowedError if status in (401, 403) else FleetError
        raise kind(Code.BAD_MESSAGE, text)


def _rows(last: int | None) -> str:
    return str(MOST_ROWS if last is None else min(last, MOST_ROWS))
