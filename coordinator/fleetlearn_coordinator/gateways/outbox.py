"""What one side of a bus says in one turn of the event loop, until it is sent as one batch."""

from __future__ import annotations

from msgspec.structs import replace

from fleetlearn_coordinator.gateways.wire import (
    BytesIn,
    BytesOut,
    GatewayFigures,
    StepsOf,
    ToEngine,
)


class GatewayOutbox:
    """A gateway's messages for the engine process, in order. Of what is said again and again, the
    steps and bytes of a device's task and the figures of the gateway, one message is kept, with the
    newest figures."""

    def __init__(self) -> None:
        self._messages: list[ToEngine] = []
        self._places: dict[tuple[object, ...], int] = {}
        """What a message is about -> its place, for messages that a later one replaces."""

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: ToEngine) -> None:
        """Say this, after what was said before."""
        match message:
            case StepsOf(connection, task):
                self._put(("steps", connection, task), message)
            case BytesIn(connection, task, end, size):
                key = ("in", connection, task)
                place = self._places.get(key)
                if place is not None:
                    earlier = self._messages[place]
                    assert isinstance(earlier, BytesIn)
                    message = BytesIn(connection, task, end, size + earlier.size)
                self._put(key, message)
            case BytesOut(connection, sha256, end, size):
                key = ("out", connection, sha256)
                place = self._places.get(key)
                if place is not None:
                    before = self._messages[place]
                    assert isinstance(before, BytesOut)
                    message = BytesOut(connection, sha256, end, size + before.size)
                self._put(key, message)
            case GatewayFigures():
                place = self._places.get(("figures",))
                if place is not None:
                    last = self._messages[place]
                    assert isinstance(last, GatewayFigures)
                    message = replace(message, lag=max(message.lag, last.lag))
                self._put(("figures",), message)
            case _:
                self._messages.append(message)

    def _put(self, key: tuple[object, ...], message: ToEngine) -> None:
        place = self._places.get(key)
        if place is None:
            self._places[key] = len(self._messages)
            self._messages.append(message)
        else:
            self._messages[place] = message

    def take(self) -> list[ToEngine]:
        """Return what was said since the last call."""
        messages, self._messages = self._messages, []
        self._places.clear()
        return messages
