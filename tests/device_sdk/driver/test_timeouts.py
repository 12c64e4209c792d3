"""``timeout`` where Python is 3.10: the same as asyncio's own, which the newer ones have."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from fleetlearn_device.driver import timeouts


def module_of(python: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the module as this Python would."""
    monkeypatch.setattr(sys, "version_info", (*python, 0))
    spec = importlib.util.spec_from_file_location("timeouts", timeouts.__file__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.undo()
    return found


@pytest.fixture(params=[(3, 10), (3, 11)])
def timeout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    found = module_of(request.param, monkeypatch)
    assert (found.timeout is asyncio.timeout) == (request.param == (3, 11))
    return found.timeout  # type: ignore[no-any-return]


def test_what_takes_too_long_is_cancelled(timeout: Callable[..., Any]) -> None:
    cancelled = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def test() -> None:
        for seconds in (0.001, 0.0, -1.0):
            with pytest.raises(TimeoutError):
                async with timeout(seconds):
                    await wait()
        await asyncio.sleep(0)  # nothing is left of it

    asyncio.run(test())
    assert len(cancelled) == 3


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_what_is_quick_goes_through(timeout: Callable[..., Any], seconds: float | None) -> None:
    async def test() -> str:
        async with timeout(seconds):
            await asyncio.sleep(0)
            return "done"

    assert asyncio.run(test()) == "done"


def test_errors_and_cancellation_from_outside_stay_what_they_are(
    timeout: Callable[..., Any],
) -> None:
    async def fail() -> None:
        async with timeout(60.0):
            raise KeyError("a")

    async def wait(begun: asyncio.Event) -> None:
        async with timeout(60.0):
            begun.set()
            await asyncio.Event().wait()

    async def test() -> None:
        with pytest.raises(KeyError):
            await fail()
        begun = asyncio.Event()
        task = asyncio.create_task(wait(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(test())
