"""How a gateway ends in an orderly way: its devices go on at another one.

No device waits for long, and all do not come at once: their connections end a few at a time, with
the close code 1001 ("connect again"), on which a device connects again within half a second, and
goes on with its task. What is being transferred may come to its end; what does not goes on at
another gateway from the bytes that are here.
"""

from __future__ import annotations

import asyncio
import logging

from fleetlearn_coordinator.gateways.gateway_host import GatewayHost
from fleetlearn_coordinator.network.driver import ConnectionDriver

logger = logging.getLogger("fleetlearn.coordinator")

TRANSFER_PATIENCE = 10.0
"""Seconds that transfers have to come to their end."""
CHECK_IN_PATIENCE = 2.0
"""Seconds that newcomers have to check in."""
DRAIN_TIMEOUT = 20.0
"""Seconds after which the connections that are left are ended all at once."""
PACE = 1000.0
"""Connections that are ended in a second: what another process takes in beside its other work.
More, where there are so many that they would not all leave in TRANSFER_PATIENCE seconds."""
TURN = 0.05
"""Seconds between looks."""


async def drain(host: GatewayHost, hurried: asyncio.Event) -> None:
    """Accept no more connections, and have the devices go on at other gateways. Returns when all
    have left, after DRAIN_TIMEOUT seconds at the latest, or when ``hurried`` is set."""
    loop = asyncio.get_running_loop()
    host.accept_no_more()
    began, count = loop.time(), len(host.devices)
    pace = max(PACE, len(host.connections) / TRANSFER_PATIENCE)
    ended: set[ConnectionDriver] = set()
    waited, allowed = 0.0, 0.0
    while (there := _made(host)) and waited < DRAIN_TIMEOUT and not hurried.is_set():
        allowed = min(allowed, 0.0) + pace * TURN
        for driver in there:
            if allowed >= 1.0 and driver not in ended and may_go(host, driver, waited):
                driver.connection.end(1001, "connect again", reading=True)
                ended.add(driver)
                allowed -= 1.0
        await asyncio.sleep(TURN)
        waited = loop.time() - began
    if count:
        text = "%d devices go on at other gateways; this took %.1f s, and %d connections are cut"
        logger.info(text, count, waited, len(there))


def _made(host: GatewayHost) -> list[ConnectionDriver]:
    """Return the connections without those whose TLS handshake is under way."""
    return [driver for driver in host.connections if driver.connection.made]


def may_go(host: GatewayHost, driver: ConnectionDriver, waited: float) -> bool:
    """Return whether a connection can be ended now, ``waited`` seconds after the gateway began to
    drain."""
    conversation = driver.conversation
    if conversation.asks:
        return False  # the engine process is about to answer, such as that an update is saved
    if conversation.device is None:
        return waited >= CHECK_IN_PATIENCE
    upload = conversation.upload
    arrives = upload is not None and not host.uploads.places.waits(upload)
    return not (arrives or conversation.fetching) or waited >= TRANSFER_PATIENCE
