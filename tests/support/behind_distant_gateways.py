"""A plugin of pytest: as behind_gateways.py, with gateways on other machines: each has a folder of
its own, and speaks to the engine over a NATS server and an object store."""

from __future__ import annotations

from contextlib import ExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_END = ExitStack()


def pytest_sessionstart() -> None:
    # late: conftest.py sets what is read when numpy is imported
    import peers
    from gateways import distant_fleet, distant_place

    folder = Path(_END.enter_context(TemporaryDirectory()))
    place = _END.enter_context(distant_place(folder))

    @asynccontextmanager
    async def fleet(plan: Any, **service: Any) -> Any:
        async with distant_fleet(plan, place, 2, **service) as behind:
            numbers = count()

            async def join(name: str, *, check_in: bool = True, held: Any = None) -> Any:
                return await behind.join(name, next(numbers) % 2, check_in=check_in, held=held)

            yield behind.server, join

    @asynccontextmanager
    async def serving(plan: Any, **service: Any) -> Any:
        async with distant_fleet(plan, place, 1, **service) as behind:
            yield behind.server

    peers.fleet, peers.serving = fleet, serving


def pytest_sessionfinish() -> None:
    _END.close()
