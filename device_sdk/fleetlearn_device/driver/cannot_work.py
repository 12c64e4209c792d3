"""Tells the coordinator why this device cannot work at all: its page is where somebody sees that,
and not on a device that nobody stands beside."""

from __future__ import annotations

import os
from contextlib import suppress

from fleetlearn_protocol.command_line import installed_version
from fleetlearn_protocol.errors import FleetError, clip
from fleetlearn_protocol.messages import PROTOCOL_NAME, PROTOCOL_VERSION, CheckIn, encode
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from fleetlearn_device.driver.address import Address, Enrolment
from fleetlearn_device.driver.connection import DirectConnect
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.way import Way, open_way
from fleetlearn_device.storage.credential import was_let_in
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory, state_folder

SECONDS = 10.0
"""For all of it: the process is about to end."""


async def tell_cannot_work(
    address: Address, state_dir: str | os.PathLike[str], error: str, seconds: float = SECONDS
) -> bool:
    """Check in once, with what keeps the device from doing any task. Returns whether the
    coordinator answered; what goes wrong meanwhile is less than what is told.

    Only a device that a coordinator has let in before does so: nobody waits for another. One that
    another process speaks for does not either.
    """
    try:
        if not was_let_in(state_folder(state_dir)):
            return False
        directory = StateDirectory(state_dir)
    except (StateError, OSError):
        return False
    way: Way | None = None
    try:
        with suppress(OSError, WebSocketException, EOFError, FleetError, StateError):
            async with timeout(seconds):
                way = await open_way(parse_uri(address.url), seconds, 0)
                async with DirectConnect(
                    address.url,
                    ssl=address.tls,
                    additional_headers=Enrolment(directory.path, directory.device, None).headers(),
                    subprotocols=[Subprotocol(PROTOCOL_NAME)],
                    compression=None,
                    **way.options(),
                ) as socket:
                    software = f"fleetlearn {installed_version()}"
                    check_in = CheckIn(
                        PROTOCOL_VERSION,
                        directory.device,
                        examples=1,
                        software=software,
                        error=clip(error),
                    )
                    await socket.send(encode(check_in))
                    await socket.recv()
                    return True
        return False
    finally:
        if way is not None:
            way.close()
        directory.close()
