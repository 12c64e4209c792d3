"""For tests: a coordinator with an event loop of its own, in another thread, that can die as by
SIGKILL.

What dies is all that the coordinator has: its tasks, its connections, its loop. The store
(memory_storage.py) stays, as a disk does, and nothing that the dead one still tries reaches it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.service.server import RunServer
from memory_storage import KilledError, MemoryStorage


class CoordinatorThread:
    """A coordinator of a plan whose run is in memory. Dies or ends by itself."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.address: str | None = None
        """Where it listens; None: nowhere, not yet or not any more."""
        self.server: RunServer
        """For a look at it from outside, once it listens."""
        self.killed = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    async def _serve(self) -> None:
        async with running(self._plan, ServiceSettings.read({"port": 0})) as server:
            self.server, self.address = server, server.host.address
            await asyncio.wait({server.done})
            await server.stop("")
            server.done.result()

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(_unless_killed)
        try:
            loop.run_until_complete(self._serve())
        except KilledError:
            self.killed = True
        except BaseException as error:
            self.error = error
        finally:
            self.address = None
            _end(loop)


def _unless_killed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The tasks of a dead coordinator end with KilledError, which nobody asks for."""
    if not isinstance(context.get("exception"), KilledError):
        loop.default_exception_handler(context)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Let the sockets be closed at once, as those of a process that is killed, and give up all
    tasks."""
    for transport in [*getattr(loop, "_transports").values()]:  # noqa: B009
        transport.abort()
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        with suppress(KilledError):  # it went on for a step, and asked the store for something
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    is_shut = False
    while not is_shut:
        with suppress(KilledError):  # the thread of a slow store has died too, and says so
            loop.run_until_complete(loop.shutdown_default_executor())
            is_shut = True
    loop.close()


def kill_at(
    monkeypatch: pytest.MonkeyPatch, point: Any, turn: int, storage: MemoryStorage
) -> Callable[[], bool]:
    """Let the coordinator die at this ``dying.Point``, the ``turn``-th time that it comes by.
    Returns whether it did."""
    original: Callable[..., Any] = getattr(point.owner, point.function)
    calls = 0

    def die() -> None:
        storage.kill()
        raise KilledError

    def replacement(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        counts = point.counts(*arguments)
        calls += counts
        if counts and calls == turn and not point.after:
            die()
        result = original(*arguments, **named)
        if counts and calls == turn and point.after:
            die()
        return result

    monkeypatch.setattr(point.owner, point.function, replacement)
    return lambda: calls >= turn
