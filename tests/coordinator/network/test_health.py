"""Who watches a process asks its devices' port how it is: load balancers, Kubernetes, nginx."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fleetlearn_coordinator.gateways import engine_link
from fleetlearn_coordinator.storage.identities import Identities
from gateways import gateway_fleet
from peers import PlanMaker, serving


async def get(address: str, path: str) -> tuple[int, str]:
    """Return status and body of a plain request."""
    place = urlsplit(address)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body.decode()


def test_a_coordinator_is_well_and_ready_for_whoever_asks(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    Identities(tmp_path / "ids").close()

    async def test() -> None:
        async with serving(make_plan(), identities=str(tmp_path / "ids")) as coordinator:
            address = coordinator.host.address
            assert await get(address, "/healthz") == (200, "ok\n")
            assert await get(address, "/readyz") == (200, "ok\n")
            assert (await get(address, "/"))[0] == 401
            assert (await get(address, "/readyz/more"))[0] == 401

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_gateway_is_ready_once_the_engine_process_knows_it(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine process is away it stays ready: others would be as bad. One that is refused
    is not."""
    monkeypatch.setattr("fleetlearn_coordinator.gateways.gateway.REFUSED_RETRY", 0.05)

    async def test() -> None:
        async with gateway_fleet(make_plan(), 1) as behind:
            gateway = behind.gateways[0]
            assert await get(gateway.address, "/readyz") == (200, "ok\n")
            await behind.end_engine()
            assert await get(gateway.address, "/readyz") == (200, "ok\n")
            with monkeypatch.context() as newer:
                newer.setattr(engine_link, "OLDEST", engine_link.WIRE + 1)
                newer.setattr(engine_link, "WIRE", engine_link.WIRE + 1)
                beginning = asyncio.create_task(behind.begin_engine())
                while not gateway.link.refused:
                    await asyncio.sleep(0.01)
                assert await get(gateway.address, "/readyz") == (503, "service unavailable\n")
                assert await get(gateway.address, "/healthz") == (200, "ok\n")
            await beginning
            assert await get(gateway.address, "/readyz") == (200, "ok\n")

    asyncio.run(asyncio.wait_for(test(), 30))
