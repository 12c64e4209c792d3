"""A plugin of pytest: the coordinators of ``peers.fleet`` and ``several.several`` are behind two
gateways, to which devices connect in turn. tests/coordinator/gateways/test_other_suites.py uses
it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import count
from typing import Any


def pytest_sessionstart() -> None:
    # late: conftest.py sets what is read when numpy is imported
    import peers
    import several
    from gateways import gateway_fleet, several_behind_gateways

    @asynccontextmanager
    async def fleet(plan: Any, **service: Any) -> Any:
        async with gateway_fleet(plan, 2, **service) as behind:
            numbers = count()

            async def join(name: str, *, check_in: bool = True, held: Any = None) -> Any:
                return await behind.join(name, next(numbers) % 2, check_in=check_in, held=held)

            yield behind.server, join

    peers.fleet = fleet
    several.several = several_behind_gateways
