"""Where a run's bus is on NATS, and how a process keeps a connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, in_words

from fleetlearn_coordinator.gateways.nats_line import BusError, NatsLine, open_line
from fleetlearn_coordinator.gateways.nats_subjects import Subjects, subjects_of
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.plan.bus_settings import NatsSettings
from fleetlearn_coordinator.plan.service_settings import ServiceSettings

RETRY = 0.1, 2.0
"""Seconds between tries to connect to a server: at first, and at most."""
REMIND = 30.0
"""Seconds between two warnings that say the same."""


class NatsPlace(NamedTuple):
    """Where a run's bus is."""

    addresses: str
    settings: NatsSettings
    subjects: Subjects


def place_of(service: ServiceSettings, run: str) -> NatsPlace | None:
    """Return where the bus of a run is, by the name of its plan; None: the service has none."""
    if service.bus is None:
        return None
    settings = service.nats or NatsSettings()
    return NatsPlace(service.bus, settings, subjects_of(settings.prefix, run))


async def check_place(place: NatsPlace, name: str) -> None:
    """Connect once. Raises BusError where another try would end in the same way; a server that is
    not there may come."""
    try:
        line = await open_line(place.addresses, name, place.settings)
    except BusError as error:
        if error.code is not Code.BUSY:
            raise
    else:
        await line.close()


async def try_place(place: NatsPlace, gateway: str | None) -> str:
    """Connect, and look whether this process may hear what it must. Returns what was found, for
    people. ``gateway``: a gateway's name; None: for an engine process. Raises BusError."""
    base = place.subjects
    heard = [base.hello("*"), base.up("*", "*", "*")]
    if gateway is not None:
        heard = [base.engine, base.welcome(gateway), base.down(gateway, "*", "*")]
    line = await open_line(place.addresses, "fleetlearn doctor", place.settings)
    try:
        for subject in heard:
            await line.subscribe(subject, lambda subject, content: None)
        await line.flush()
        if line.over.is_set():
            raise BusError(Code.BAD_MESSAGE, f"{line.address}: {line.why}: {line.cause}")
        return f"{line.address}: NATS {line.version}; may hear {', '.join(heard)}"
    finally:
        await line.close()


async def stay_connected(
    place: NatsPlace, name: str, speak: Callable[[NatsLine], Awaitable[None]]
) -> None:
    """Connect again and again, until cancelled. ``name``: for the server's own lists. ``speak``:
    uses each connection until it is over."""
    loop = asyncio.get_running_loop()
    pause, longest = RETRY
    said, said_at = "", 0.0
    while True:
        try:
            line = await open_line(place.addresses, name, place.settings)
        except BusError as error:
            why = same = error.text
        else:
            began = loop.time()
            try:
                await speak(line)
            except Exception as error:  # a server that went away while it was asked
                logger.debug("the bus: %s", in_words(error))
            finally:
                await line.close()
            why = same = ""
            if line.is_denied:
                same = "denied"  # the server names another subject each time
                why = (
                    f"the NATS server does not allow what is needed ({line.cause}): give the user "
                    "of [nats] the permissions of docs/operate/nats.md, or mend run and name in "
                    "[gateway]"
                )
            elif loop.time() - began > longest:
                pause = RETRY[0]
        if not why:
            said = ""
        elif same != said or loop.time() - said_at > REMIND:
            logger.warning("the bus: %s. It is tried again", why)
            said, said_at = same, loop.time()
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)


async def end_task(task: asyncio.Task[None]) -> None:
    """End a task that uses a connection. nats-py may take a cancellation for its own: it is said
    again."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
