"""A coordinator that stands by: what it waits for, and what it does not."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import TypeVar

import pytest
from fleetlearn_coordinator.service import standby
from fleetlearn_coordinator.service.standby import serve_when_free
from fleetlearn_coordinator.storage.errors import (
    StoreAwayError,
    StoreError,
    StoreUnavailableError,
)
from fleetlearn_protocol import Code

T = TypeVar("T")
BUSY = StoreError(Code.BUSY, "in use by another coordinator")
AWAY = StoreAwayError(Code.BUSY, "the server is away")
TAKEN = OSError(errno.EADDRINUSE, "address in use")
OTHERS = (
    StoreError(Code.WRONG_HASH, "damaged"),
    StoreUnavailableError(Code.BUSY, "the disk is full"),
    OSError(errno.EACCES, "not allowed"),
    ValueError("a mistake"),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "LOOK", 0.001)


def stand_by(looks: list[bool | Exception], ends: list[str | Exception]) -> tuple[str | None, int]:
    """Stand by until the looks are over, and then be told to stop. Each look says whether another
    serves; each time that this one serves, it ends so. Returns what came out, and how often it
    served."""
    served = 0

    async def run() -> str | None:
        stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        left = iter(looks)

        def is_locked() -> bool:
            found = next(left, None)
            if found is None:
                loop.call_soon_threadsafe(lambda: stopped.done() or stopped.set_result("SIGTERM"))
                return True
            return outcome(found)

        async def serve() -> str:
            nonlocal served
            served += 1
            return outcome(ends[served - 1])

        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(serve_when_free(is_locked, serve, stopped), 30)

    return asyncio.run(run()), served


def outcome(what: T | Exception) -> T:
    if isinstance(what, Exception):
        raise what
    return what


def test_it_serves_once_nobody_else_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert stand_by([True, True, True, False], ["finished"]) == ("finished", 1)
    assert caplog.messages == ["standing by: another coordinator serves the run"], "it is said once"


def test_it_stands_by_again_after_what_passes(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[bool | Exception] = [AWAY, AWAY, False, True, False, False, False]
    with caplog.at_level(logging.WARNING):
        assert stand_by(looks, [BUSY, AWAY, TAKEN, "finished"]) == ("finished", 4)
    others = "standing by: another coordinator serves the run"
    assert [message.partition(" [")[0] for message in caplog.messages[:2]] == [
        "standing by: the server is away",
        others,
    ]
    assert "address in use" in caplog.messages[-1]


def test_it_ends_when_it_is_told_to() -> None:
    assert stand_by([True, True], []) == (None, 0)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", [lambda error: ([error], []), lambda error: ([False], [error])])
def test_what_does_not_pass_is_raised(
    error: Exception, where: Callable[[Exception], tuple[list[bool | Exception], list[Exception]]]
) -> None:
    looks, ends = where(error)
    with pytest.raises(type(error)):
        stand_by(looks, [*ends])
