"""What administrators can ask over HTTP: the endpoints, who may use them, and what each does.

Everything here works as the commands do, from outside: it reads databases and files and writes what
is wanted there, and the coordinator takes it up within a second. So no request touches the event
loop's state, and an operation survives ``kill -9``. Each operation is one row of the audit log,
with the administrator's name.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from fleetlearn_protocol.errors import Code, FleetError, in_words
from msgspec import Meta

from fleetlearn_coordinator.dashboard.page_api import PageApi, check_csrf
from fleetlearn_coordinator.network.admin_listener import AdminListener, Request, Stream
from fleetlearn_coordinator.network.gate import MOST_TAGS, NAME, public_keys
from fleetlearn_coordinator.network.http_port import RefusedError
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings, Tls
from fleetlearn_coordinator.service.canary.about import ALONE, CanaryAsked
from fleetlearn_coordinator.service.canary.acts import DONE, act_on
from fleetlearn_coordinator.service.canary.begin import begin_canary
from fleetlearn_coordinator.service.canary.canary_views import canary_views
from fleetlearn_coordinator.service.canary.decision import Action
from fleetlearn_coordinator.service.live_page import RUN_TOPIC, AdministratorSessions, LivePage
from fleetlearn_coordinator.service.several.operations import Operations, Verb, operating
from fleetlearn_coordinator.service.status import read_status
from fleetlearn_coordinator.service.training_run.evaluation_request import (
    ask_to_evaluate,
    refuse_private,
)
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_coordinator.service.views.device_search import FITS, DeviceSearch
from fleetlearn_coordinator.service.views.event_views import RunEvents
from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_coordinator.storage.administrators import Administrator, Administrators, Role
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.identities import RUN
from fleetlearn_coordinator.storage.runs import Population, WantedRun

logger = logging.getLogger("fleetlearn.coordinator")

VERSION = "v1"
WATCH = "watch"
"""The key of a request's query that asks for a stream."""
NDJSON = "application/x-ndjson"
LOOK = 1.0
"""Seconds between two looks for a stream."""
LAST, MOST_LAST = 20, 1000
"""Rows of a list that are answered by default, and at most."""
VERBS: dict[str, Verb] = {
    "pause": "paused",
    "resume": "resumed",
    "drain": "drained",
    "stop": "stopped",
}
"""The last word of an operation's path -> the operation."""
BUNDLES, MODELS = (".bundle", ".zip"), (".safetensors",)
"""What the names of bundles, and of files with a model, end with."""
Labels = Annotated[
    tuple[Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")], ...], Meta(max_length=MOST_TAGS)
]
Body = TypeVar("Body")


class TokenAsked(msgspec.Struct, forbid_unknown_fields=True):
    """A token to enrol devices with."""

    uses: Annotated[int, Meta(ge=1, le=10**6)] = 1
    hours: Annotated[float, Meta(ge=0.01, le=24 * 366.0)] = 24.0
    tags: Labels = ()
    runs: Labels = ()
    """The only runs that its devices may serve. Empty: any."""


class RunAsked(msgspec.Struct, forbid_unknown_fields=True):
    """A run to be added, and which devices serve it."""

    name: str
    plan: Annotated[str, Meta(min_length=1, max_length=1000)]
    """Its plan's file, below the folder that has the folder of runs."""
    tags: Labels = ()
    tiers: Labels = ()
    runtimes: Labels = ()
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class RollBackAsked(msgspec.Struct, forbid_unknown_fields=True):
    """A version to go back to."""

    version: Annotated[int, Meta(ge=0, le=2**53)]


class Asked(NamedTuple):
    """A request, by whom, and the parts of its path that stand for names."""

    request: Request
    who: Administrator
    names: tuple[str, ...]
    administrators: Administrators

    def body(self, kind: type[Body]) -> Body:
        """Return the request's body. Raises RefusedError."""
        try:
            return msgspec.json.decode(self.request.body or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body: {error}") from None

    def last(self) -> int:
        """Return how many rows are asked for. Raises RefusedError."""
        given = self.request.query.get("last", str(LAST))
        if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= MOST_LAST:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"last = {given!r} was given; it takes 1 to {MOST_LAST}"
            )
        return int(given)

    def log(self, what: str, about: dict[str, Any]) -> None:
        """Write the operation's row of the audit log."""
        self.administrators.log(time.time(), what, {**about, "who": self.who.name})


class Route(NamedTuple):
    """An endpoint."""

    method: str
    path: str
    """Below ``/v1/``; ``*`` stands for a name."""
    role: Role
    do: Callable[[Asked], Any]


class AdminApi:
    """The endpoints of one coordinator. Safe to call from any thread."""

    def __init__(self, service: ServiceSettings, identities: Path, plan: Plan | None) -> None:
        """``identities``: the service's. ``plan``: the one that is served; None: the service's runs
        are."""
        self._service, self._identities, self._plan = service, identities, plan
        self._of_thread = threading.local()
        self._search = DeviceSearch()
        self._routes = [
            Route("GET", "status", "view", self._status),
            Route("GET", "runs", "view", self._list_runs),
            Route("GET", "runs/*", "view", self._run),
            Route("GET", "runs/*/rounds", "view", self._rounds),
            Route("GET", "runs/*/rounds/*", "view", self._turns),
            Route("GET", "runs/*/events", "view", self._events),
            Route("GET", "runs/*/models", "view", self._models),
            Route("GET", "devices", "view", self._devices),
            Route("GET", "devices/*", "view", self._device),
            Route("GET", "audit", "view", self._audit),
            Route("POST", "tokens", "operate", self._token),
            Route("POST", "devices/*/revoke", "operate", self._revoke),
            Route("POST", "runs", "operate", self._add),
            *(Route("POST", f"runs/*/{word}", "operate", self._change) for word in VERBS),
            Route("POST", "runs/*/remove", "operate", self._remove),
            Route("GET", "canaries", "view", self._canaries),
            Route("GET", "runs/*/canary", "view", self._canaries),
            Route("POST", "runs/*/canary", "operate", self._begin_canary),
            *(
                Route("POST", f"runs/*/canary/{action}", "operate", self._act_on_canary)
                for action in DONE
            ),
            Route("POST", "runs/*/roll-back", "operate", self._roll_back),
            Route("POST", "runs/*/evaluate", "operate", self._evaluate),
        ]

    def identify(self, request: Request) -> Administrator:
        """Return who sends a request: whose token it has, or who signed in on the page. Raises
        RefusedError."""
        if not request.token and not request.cookie:
            text = (
                "who asks? Send the header Authorization: Bearer TOKEN, with an administrator's "
                "token"
            )
            raise RefusedError(HTTPStatus.UNAUTHORIZED, text)
        with refusals():
            administrators, now = self.administrators(), time.time()
            if request.token:
                who = administrators.find_administrator(request.token, now)
                lacks = "this token is not known here, or it has expired"
            else:
                who = administrators.find_session(request.cookie, now)
                lacks = "nobody is signed in here any more"
        if who is None:
            raise RefusedError(HTTPStatus.UNAUTHORIZED, lacks)
        if not request.token and request.method != "GET":
            check_csrf(request)
        return who

    def answer(self, request: Request) -> Any:
        """Return what is answered, as JSON; a ``Stream`` where the request has ``watch``. Raises
        RefusedError."""
        who = self.identify(request)
        with refusals():
            route, names = self._find(request)
            if route.role == "operate" and who.role != "operate":
                raise RefusedError(
                    HTTPStatus.FORBIDDEN, f"{who.name} may view; this needs the role operate"
                )
            asked = Asked(request, who, names, self.administrators())
            if route.method == "GET" and WATCH in request.query:
                return self._watch(route, asked)
            return route.do(asked)

    def _watch(self, route: Route, asked: Asked) -> Stream:
        """Return a stream of the route's answer: a line of JSON each time it changes."""
        if route.do == self._events:
            events = RunEvents(self._views(asked).place(*asked.names))
            return Stream(lambda: self._lines(asked, lambda _: events.look() or None), NDJSON)
        before = b""

        def look(again: Asked) -> Any:
            nonlocal before
            found = route.do(again)
            content = msgspec.json.encode(found)
            if content == before:
                return None
            before = content
            return found

        return Stream(lambda: self._lines(asked, look), NDJSON)

    async def _lines(
        self, asked: Asked, look: Callable[[Asked], Any]
    ) -> AsyncGenerator[bytes, None]:
        """Yield what ``look`` returns once a second, as a line of JSON; an empty line where that is
        None, which finds out who is gone. Ends where the administrator may not look any more."""

        def look_again() -> Any:
            who = self.identify(asked.request)
            again = asked._replace(who=who, administrators=self.administrators())
            with refusals():
                return look(again)

        with suppress(RefusedError):
            while True:
                content = await asyncio.to_thread(look_again)
                yield b"\n" if content is None else msgspec.json.encode(content) + b"\n"
                await asyncio.sleep(LOOK)

    def administrators(self) -> Administrators:
        """Return this thread's connection to the database."""
        if not hasattr(self._of_thread, "administrators"):
            self._of_thread.administrators = Administrators(self._identities)
        found: Administrators = self._of_thread.administrators
        return found

    def _find(self, request: Request) -> tuple[Route, tuple[str, ...]]:
        for route in self._routes:
            wanted = (VERSION, *route.path.split("/"))
            pairs = list(zip(wanted, request.path, strict=False))
            is_path = len(wanted) == len(request.path) and all(
                each in ("*", given) for each, given in pairs
            )
            if is_path and route.method == request.method:
                return route, tuple(given for each, given in pairs if each == "*")
        paths = ", ".join(f"{route.method} /{VERSION}/{route.path}" for route in self._routes)
        raise RefusedError(
            HTTPStatus.NOT_FOUND,
            f"there is no {request.method} /{'/'.join(request.path)}; there are: {paths}",
        )

    # Runs

    @contextmanager
    def _operating(self, asked: Asked) -> Iterator[Operations]:
        """Open the host's runs. Raises RefusedError where one plan is served."""
        if self._plan is not None:
            text = (
                "this coordinator serves one plan: it can be evaluated and rolled back, and is "
                "ended by a signal"
            )
            raise RefusedError(HTTPStatus.BAD_REQUEST, text)
        with operating(self._service, asked.who.name) as operations:
            yield operations

    def _wanted(self) -> list[WantedRun]:
        if self._plan is not None:
            return []
        with operating(self._service) as operations:
            return operations.runs.runs()

    def _plan_of(self, asked: Asked) -> tuple[str, Plan]:
        """Return the name and the plan of the run that is asked for. Raises RefusedError,
        PlanError."""
        return self.find_plan(*asked.names)

    def find_plan(self, name: str) -> tuple[str, Plan]:
        """Return a run's name and its plan. Raises RefusedError, FleetError."""
        if self._plan is not None and name == self._plan.name:
            return name, self._plan
        wanted = self._wanted()
        for run in wanted:
            if run.name == name:
                return name, Plan.load(run.plan)
        names = ", ".join(run.name for run in wanted) if self._plan is None else self._plan.name
        raise RefusedError(
            HTTPStatus.NOT_FOUND, f"there is no run called {name}; there are: {names or 'none'}"
        )

    def _views(self, asked: Asked) -> LocalViews:
        return LocalViews(service=self._service, plan=self._plan, identities=asked.administrators)

    def _status(self, asked: Asked) -> Any:
        return self._views(asked).host()

    def _list_runs(self, asked: Asked) -> Any:
        return self._views(asked).runs()

    def _run(self, asked: Asked) -> Any:
        return self._views(asked).run(*asked.names, last=asked.last())

    def _rounds(self, asked: Asked) -> Any:
        return self._views(asked).rounds(*asked.names, last=asked.last())

    def _turns(self, asked: Asked) -> Any:
        name, number = asked.names
        if not re.fullmatch("open|[0-9]{1,12}", number):
            text = f"{number!r} is no round: a number, or open"
            raise RefusedError(HTTPStatus.BAD_REQUEST, text)
        return self._views(asked).turns(name, None if number == "open" else int(number))

    def _events(self, asked: Asked) -> Any:
        return RunEvents(self._views(asked).place(*asked.names)).look()

    def _models(self, asked: Asked) -> Any:
        gone = "gone" in asked.request.query
        return self._views(asked).models(*asked.names, gone=gone, most=MOST_LAST)

    def _add(self, asked: Asked) -> Any:
        body = asked.body(RunAsked)
        with self._operating(asked) as operations:
            path = _below(operations, "plan", body.plan, (".toml",))
            operations.add(
                body.name, path, Population(body.tags, body.tiers, body.runtimes, body.share)
            )
        return {"name": body.name, "wanted": "running"}

    def _change(self, asked: Asked) -> Any:
        (name,), verb = asked.names, VERBS[asked.request.path[-1]]
        with self._operating(asked) as operations:
            operations.change(name, verb)
            return {"name": name, "wanted": operations.find(name).wanted}

    def _remove(self, asked: Asked) -> Any:
        (name,) = asked.names
        with self._operating(asked) as operations:
            operations.remove(name)
        return {"name": name, "removed": True}

    def _canaries(self, asked: Asked) -> Any:
        if asked.names:
            self._views(asked).place(*asked.names)
        if self._plan is not None:
            return []
        with operating(self._service) as operations:
            return canary_views(operations.runs, *asked.names)

    def _begin_canary(self, asked: Asked) -> Any:
        (name,), body = asked.names, asked.body(CanaryAsked)
        if self._plan is not None:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{self._plan.file} {ALONE}")
        with self._operating(asked) as operations:
            for key, kinds in (("plan", (".toml",)), ("bundle", BUNDLES), ("model", MODELS)):
                given = getattr(body, key)
                if given and not (key == "model" and given.isdecimal()):
                    path = str(_below(operations, key, given, kinds))
                    body = msgspec.structs.replace(body, **{key: path})
            begun = begin_canary(operations, name, body)
        return {"name": begun.name, "of": name, "remark": begun.remark}

    def _act_on_canary(self, asked: Asked) -> Any:
        (name,) = asked.names
        action: Action = asked.request.path[-1]  # type: ignore[assignment]
        with self._operating(asked) as operations:
            return {"name": act_on(operations, name, action), "what": DONE[action]}

    def _roll_back(self, asked: Asked) -> Any:
        version = asked.body(RollBackAsked).version
        name, plan = self._plan_of(asked)
        if self._plan is None:
            with self._operating(asked) as operations:
                operations.roll_back(name, version)
        else:
            ask_to_roll_back(plan.data_dir, version, asked.who.name)
        return {"name": name, "version": version}

    def _evaluate(self, asked: Asked) -> Any:
        name, plan = self._plan_of(asked)
        read_status(plan.data_dir, since=2**62)  # it has a data directory
        refuse_private(plan.data_dir)
        asked.log("evaluation", {"run": name})
        ask_to_evaluate(plan.data_dir)
        return {"name": name}

    # Devices

    def _devices(self, asked: Asked) -> Any:
        query = asked.request.query
        offset, state = query.get("offset", "0"), query.get("state", "")
        if not re.fullmatch("[0-9]{1,9}", offset) or state not in FITS:
            text = (
                f"offset = {offset!r} and state = {state!r} were given; offset takes a number, and "
                f"state one of: {', '.join(filter(None, FITS))}"
            )
            raise RefusedError(HTTPStatus.BAD_REQUEST, text)
        return self._views(asked).device_page(
            self._search,
            search=query.get("search", ""),
            state=state,
            offset=int(offset),
            most=asked.last(),
        )

    def _device(self, asked: Asked) -> Any:
        return self._views(asked).device(*asked.names)

    def _audit(self, asked: Asked) -> Any:
        return self._views(asked).audit(asked.last())

    def _token(self, asked: Asked) -> Any:
        body, now = asked.body(TokenAsked), time.time()
        until, keys = now + 3600 * body.hours, public_keys(self._service.signing_keys)
        tags = (*body.tags, *(RUN + name for name in body.runs))
        token = asked.administrators.make_token(body.uses, until, tags, now, asked.who.name)
        return {"token": ".".join([token, *keys]), "until": until}

    def _revoke(self, asked: Asked) -> Any:
        (device,) = asked.names
        tls = self._service.tls
        certified = tls is not None and tls.clients is not None
        found = asked.administrators.revoke(
            device, time.time(), certified=certified, who=asked.who.name
        )
        if not found and not certified:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"no device called {device} is enrolled")
        return {"device": device, "revoked": True}


def _below(operations: Operations, key: str, given: str, kinds: tuple[str, ...]) -> Path:
    """Return a file of the coordinator's machine that a request names: below the folder that has
    the folder of runs. Raises RefusedError. Nothing else may be opened: closing a database's file
    would take its locks away (storage/identities.py)."""
    base = operations.runs.path.parent.parent.resolve()
    path = base if "\0" in given else (base / given).resolve()
    if not path.is_relative_to(base) or path.suffix not in kinds:
        ends = " or ".join(kinds)
        text = f"{key} = {given!r} is not a file below {base} whose name ends in {ends}"
        raise RefusedError(HTTPStatus.BAD_REQUEST, text)
    return path


@contextmanager
def refusals() -> Iterator[None]:
    """Let what goes wrong in the block be answered. Raises RefusedError."""
    try:
        yield
    except (StoreUnavailableError, OSError) as error:  # busy, or a full disk
        raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, in_words(error, file=True)) from None
    except FleetError as error:
        unknown = error.code == Code.UNKNOWN_CONTENT
        status = HTTPStatus.NOT_FOUND if unknown else HTTPStatus.BAD_REQUEST
        raise RefusedError(status, error.text) from None


@asynccontextmanager
async def administrators_port(
    service: ServiceSettings, host: RunHost, plan: Plan | None = None
) -> AsyncIterator[LivePage | None]:
    """Listen on the administrators' port, if the service file has one, until the block is left.
    ``plan``: as for ``AdminApi``. Yields the port's page, to which the runs are to be added; None:
    there is no such port. Raises FleetError (the files of TLS cannot be used), OSError (the address
    cannot be listened on)."""
    if service.admin is None or service.identities is None:
        yield None
        return
    # Administrators have tokens: whatever the devices' port asks of its peers, this one asks for no
    # certificate.
    tls = (
        None
        if service.tls is None
        else Tls(certificate=service.tls.certificate, key=service.tls.key)
    )
    live, api = LivePage(host), AdminApi(service, service.identities, plan)
    page = PageApi(
        api.answer,
        api.identify,
        lambda: AdministratorSessions(api.administrators()),
        live.feed,
        secure=tls is not None,
        about={"several": plan is None},
        find_topic=lambda topic: _find_topic(topic, api, live),
    )
    listener = AdminListener(page.answer, tls, browsers=True)
    address = await listener.listen(service.admin.host, service.admin.port)
    logger.info("administrators: %s", address)
    live.begin()
    try:
        yield live
    finally:
        await live.end()
        await listener.close()


def _find_topic(topic: str, api: AdminApi, live: LivePage) -> None:
    """Let a run that is not served be looked at, if the topic is one's. Raises RefusedError."""
    if topic.startswith(RUN_TOPIC):
        with refusals():
            live.make_topic(*api.find_plan(topic.removeprefix(RUN_TOPIC)))
