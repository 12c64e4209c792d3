"""The page for people: its port, and what it is told of the run. Public counts only, and nothing
that names a device.

As the administrators' API does, this reads what observers recorded of the run (live_state.py): no
request touches the event loop's state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.network.admin_listener import MOST_VIEWERS
from fleetlearn_coordinator.network.page_listener import DESCRIPTORS, Document, PageListener
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.network.static_files import StaticFolder
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import Page, ServiceError, ServiceSettings, Tls
from fleetlearn_coordinator.service.views.run_views import RunPlace, glance
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.runs import Runs

logger = logging.getLogger("fleetlearn.coordinator")

STATUS, PAGE = "status.json", "page.json"
HISTORY = 100
"""Rounds that the page is told of: the last ones."""
FRESH = 1.0
"""Seconds for which one answer does for all who ask."""


class PublicRun(NamedTuple):
    """The run that the page is about."""

    name: str
    plan: Plan
    paused: bool
    """Whether people want it to rest."""


class PublicStatus:
    """Makes ``status.json``. Safe to call from any thread."""

    def __init__(
        self, find_run: Callable[[], PublicRun], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``find_run``: raises FleetError where the run is not there."""
        self._find_run, self._clock = find_run, clock
        self._lock = threading.Lock()
        self._made = b""
        self._until = -1.0
        self._run: str | None = None
        """The random name of the run that ``_history`` is of: another one may come under the same
        name."""
        self._read_until = 0
        self._history: list[dict[str, Any]] = []

    def __call__(self) -> bytes:
        """Return the document, at most FRESH seconds old. Raises FleetError (the records cannot be
        read), OSError."""
        with self._lock:
            if self._clock() >= self._until:
                self._made = msgspec.json.encode(self._look())
                self._until = self._clock() + FRESH
            return self._made

    def _look(self) -> dict[str, Any]:
        name, plan, paused = self._find_run()
        now = glance(RunPlace(name, plan.data_dir))
        with find_storage(plan.data_dir).read_ledger() as ledger:
            run = ledger.metadata().get("run")
            if run != self._run:
                self._run, self._history = run, []
                self._read_until = max(0, ledger.last_round() - HISTORY - 1)
            rounds = ledger.closed_rounds(self._read_until + 1)
        for number, outcome, _, _, summary in rounds:
            self._read_until = number
            metrics = summary["metrics"]
            # The page's table has a private run's rounds too, without what was measured.
            shown = plan.hides_devices or metrics.keys() & {"loss", "accuracy"}
            if outcome == "committed" and shown:
                row = {
                    "loss": metrics.get("loss"),
                    "accuracy": metrics.get("accuracy"),
                    "devices": summary["reports"],
                }
                self._history.append({"round": number, **row})
        self._history = self._history[-HISTORY:]
        resting = paused or not now.running
        return {
            "run": name,
            "state": "finished" if now.finished else "paused" if resting else "running",
            "round": now.round,
            "rounds": plan.stop.rounds,
            "reports": now.accepted,
            "goal": now.goal,
            "connected": now.connected,
            "private": plan.hidden_metrics,
            "history": self._history,
        }


def run_of_page(service: ServiceSettings, plan: Plan | None) -> PublicRun:
    """Return the run that the service's page is about. ``plan``: the one that is served; None: the
    service's runs are. Raises FleetError where there is no such run, or its plan cannot be read."""
    if plan is not None:
        return PublicRun(plan.name, plan, False)
    assert service.page is not None
    assert service.runs is not None
    with closing(Runs(service.runs)) as runs:
        found = [run for run in runs.runs() if run.name == service.page.run]
    if not found:
        raise ServiceError(
            Code.UNKNOWN_CONTENT, f"page.run = {service.page.run}: there is no such run"
        )
    return PublicRun(found[0].name, Plan.load(found[0].plan), found[0].wanted != "running")


def page_settings(service: ServiceSettings, page: Page, devices_port: int, page_port: int) -> bytes:
    """Return ``page.json``. ``devices_port``, ``page_port``: where the coordinator and its page
    listen.

    It says who may connect too: a browser does not tell a page why a connection was refused."""
    return msgspec.json.encode(
        {
            "coordinator": page.coordinator or f":{devices_port}",
            "status": STATUS,
            "title": page.title,
            "about": page.about,
            "task": page.task,
            "invites": service.identities is not None,
            "pages": {"origins": service.own_origins, "port": page_port},
        }
    )


def join_link(service: ServiceSettings, token: str) -> str:
    """Return the link by which a person joins. The token is behind a "#": browsers send that to no
    server.

    Raises ServiceError where the service has no page, or its address is not known."""
    page = service.page
    if page is None:
        raise ServiceError(
            Code.BAD_MESSAGE, "the service file has no [page]: there is nothing to link to"
        )
    address = page.address
    if address is None:
        host = page.host or service.host
        if not page.port or host in ("0.0.0.0", "::"):
            text = (
                f'page.host = "{host}" and page.port = {page.port} are no address: add '
                'page.address = "https://..."'
            )
            raise ServiceError(Code.BAD_MESSAGE, text)
        host = f"[{host}]" if ":" in host else host
        address = f"{'http' if service.tls is None else 'https'}://{host}:{page.port}"
    return f"{address}/#token={quote(token, safe='')}"


def page_descriptors(service: ServiceSettings) -> int:
    """Return how many files and sockets the page's port, and the viewers of the administrators'
    page, may have open."""
    viewers = 0 if service.admin is None else MOST_VIEWERS
    return viewers + (0 if service.page is None else DESCRIPTORS)


@asynccontextmanager
async def page_port(
    service: ServiceSettings, host: RunHost, plan: Plan | None = None
) -> AsyncIterator[None]:
    """Listen on the page's port, if the service file has one, until the block is left. ``host``:
    listens already. ``plan``: as for ``run_of_page``. Raises FleetError (the folder has no page,
    the files of TLS cannot be used), OSError (the address cannot be listened on)."""
    page = service.page
    if page is None:
        yield
        return
    devices_port = urlsplit(host.address).port or 0
    status = PublicStatus(lambda: run_of_page(service, plan))
    # Whatever the devices' port asks of its peers, this one asks for no certificate.
    tls = (
        None
        if service.tls is None
        else Tls(certificate=service.tls.certificate, key=service.tls.key)
    )
    documents: dict[str, Document] = {
        PAGE: lambda: page_settings(service, page, devices_port, urlsplit(address).port or 0),
        STATUS: status,
    }
    listener = PageListener(
        StaticFolder(page.folder),
        documents,
        tls=tls,
        limits=service.limits,
        proxies=service.proxies,
        downloads="" if service.contents is None else service.contents.source,
    )
    address = await listener.listen(page.host or service.host, page.port)
    host.allow_page(urlsplit(address).port or 0)
    logger.info("page: %s", address)
    try:
        yield
    finally:
        await listener.close()
