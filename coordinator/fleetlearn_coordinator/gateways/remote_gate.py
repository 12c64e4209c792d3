"""Who may connect to a gateway on another machine: the engine process knows, and is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from websockets.datastructures import Headers

from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.network.gate import RefusalError, certified_by, offered_by
from fleetlearn_coordinator.storage.identities import Known, hash_of

AWAY = "the coordinator cannot look credentials up now; try again later"


class EngineAsked(Protocol):
    """The engine process, as far as it is asked here: distant_link.py."""

    def say(self, message: wire.ToEngine) -> None:
        """Say this to the engine process, if it is there."""


class RemoteGate:
    """A ``Doorkeeper``. Nobody is let in while the engine process is away, unless everybody is."""

    engine: EngineAsked
    """To be set before ``began``."""

    def __init__(self) -> None:
        self._knows: bool | None = None
        """Whether devices have to be enrolled. None: the engine process has not said so yet."""
        self._is_there = False
        self._question = 0
        self._asked: dict[int, Pending[Known | RefusalError | None]] = {}
        self._enrolled: wire.EnrolledNow | None = None
        """What the engine process said that nobody has looked at."""

    # The engine process

    def began(self, knows: bool, devices: Iterable[str]) -> None:
        """The engine process is there. ``devices``: those that were let in, and are connected."""
        self._knows, self._is_there = knows, True
        self.changed(devices)

    def changed(self, devices: Iterable[str]) -> None:
        """Devices were enrolled or revoked."""
        if self._knows:
            self.engine.say(wire.AskEnrolled(tuple(devices)))

    def lost(self, now: float) -> None:
        """The engine process is away."""
        self._is_there = False
        asked, self._asked = self._asked, {}
        for pending in asked.values():
            pending.answer(RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, AWAY), now)

    def heard(
        self, message: wire.DeviceKnown | wire.DeviceUnknown | wire.EnrolledNow, now: float
    ) -> None:
        """The engine process answers."""
        if isinstance(message, wire.EnrolledNow):
            self._enrolled = message
            return
        pending = self._asked.pop(message.question, None)
        if pending is None:
            return
        if isinstance(message, wire.DeviceKnown):
            pending.answer(Known(message.device, message.tags, message.enrolled), now)
        else:
            status = HTTPStatus(message.status)
            pending.answer(RefusalError(status, message.text, message.cause), now)

    # As the listener sees it

    def check(
        self, headers: Headers, certificate: Mapping[str, Any] | None, count: Callable[[str], None]
    ) -> Pending[Known | RefusalError | None] | None:
        if self._knows is False:
            return None
        if not self._is_there:
            raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, AWAY)
        offered = offered_by(headers)
        secrets = (offered.credential, offered.token, offered.next)
        credential, token, after = (str(hash_of(each)) if each else "" for each in secrets)
        certified = certified_by(certificate) if certificate else None
        self._question += 1
        pending: Pending[Known | RefusalError | None] = Pending()
        self._asked[self._question] = pending
        self.engine.say(
            wire.AskKnown(self._question, credential, offered.device, token, after, certified)
        )
        return pending

    def look(self) -> Callable[[Known], bool] | None:
        found, self._enrolled = self._enrolled, None
        if found is None:
            return None
        asked, enrolled = {*found.asked}, found.enrolled
        return lambda known: (
            known.device not in asked or enrolled.get(known.device) == known.enrolled
        )
