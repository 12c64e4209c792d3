"""Which version of the protocol a connection speaks (PROTOCOL.md, section 10).

| version | since | what it added |
|---|---|---|
| 1 | fleetlearn 0.1 | |
| 2 | fleetlearn 0.2 | the values of a model's buffers travel as the part ``buffers`` |
| 3 | fleetlearn 0.3 | the learning rate may change from step to step within a task |
"""

from __future__ import annotations

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, CheckIn

SEPARATE_BUFFERS = 2
"""The first version whose devices train models with buffers (BatchNorm's statistics)."""
STEP_SCHEDULES = 3
"""The first version whose devices know a task's `schedule`."""


def agreed_version(
    check_in: CheckIn, oldest: int = OLDEST_PROTOCOL_VERSION, newest: int = PROTOCOL_VERSION
) -> int:
    """Return the newest version that the device and a coordinator of these versions both speak.

    Raises ProtocolError: bad-version where there is none, and the text says whose fleetlearn to
    update; bad-message where the device's newest version is below its oldest.
    """
    device_oldest, device_newest = check_in.protocol, check_in.newest_protocol
    if device_newest is None:
        device_newest = device_oldest
    if device_newest < device_oldest:
        raise ProtocolError(
            Code.BAD_MESSAGE,
            f"newest_protocol is {device_newest}; expected at least protocol, {device_oldest}",
        )
    if device_newest < oldest or newest < device_oldest:
        older = "device" if device_newest < oldest else "coordinator"
        raise ProtocolError(
            Code.BAD_VERSION,
            f"the device speaks {_named(device_oldest, device_newest)} of the protocol, the "
            f"coordinator {_named(oldest, newest)}; update the {older}'s fleetlearn",
        )
    return min(device_newest, newest)


def check_chosen(version: int) -> None:
    """Raise ProtocolError (bad-version) unless this device speaks the version that a coordinator
    chose."""
    if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        spoken = _named(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
        raise ProtocolError(
            Code.BAD_VERSION,
            f"the coordinator chose version {version} of the protocol; this device speaks {spoken}",
        )


def _named(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
