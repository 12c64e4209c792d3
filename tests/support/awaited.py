"""For tests that are coroutines: each runs in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Return a test that pytest can call."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def within() -> None:
            await test(*arguments, **named)

        asyncio.run(within())

    return run
