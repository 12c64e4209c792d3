"""Which region a device is in follows from the gateway that it is connected to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_protocol.messages import CheckIn, Welcome
from gateways import GatewayFleet
from msgspec.structs import replace
from peers import fleet, plan_text, update_of, write_test_bundle

SETTINGS: dict[str, Any] = {
    "round__goal": None,
    "round__minimum": None,
    "round__over_selection": None,
    "round__gather": 10.0,
    "round__grace": 30.0,
    "stop__rounds": 2,
    "regions__each": {"goal": 1, "over_selection": 1},
    "regions__named": {"north": {}, "south": {}},
}


def plan_of(folder: Path, name: str, **settings: Any) -> Plan:
    return Plan.parse(plan_text(Path("test.bundle"), name, **settings), folder)


async def with_gateways(plan: Plan) -> None:
    """Two gateways of two regions, and a device at each. The northern one moves after a round: it
    is then a southern one, and takes the place of the other."""
    behind = GatewayFleet(plan, 2)
    for number, region in enumerate(("north", "south")):
        behind.settings = replace(behind.settings, region=region)
        await behind.begin_gateway(number)
    behind.settings = replace(behind.settings, region=None)
    await behind.begin_engine()
    try:
        north = await behind.join("a", 0)
        south = await behind.join("b", 1)
        for peer, value in ((north, 1.0), (south, 2.0)):
            await peer.do_round(update_of(value))
        task = await north.task()
        regions = {
            device: terms.region for device, terms in behind.server.engine.book.terms.items()
        }
        assert regions == {"a": "north", "b": "south"}
        await north.upload(task, update_of(3.0))
        await south.do_round(update_of(4.0))
        await asyncio.wait_for(asyncio.shield(behind.server.done), 30)
    finally:
        await behind.close()


async def without_gateways(plan: Plan) -> None:
    async with fleet(plan) as (server, join):
        peers = [await join(name) for name in ("a", "b")]
        for values in ((1.0, 2.0), (3.0, 4.0)):
            for peer, value in zip(peers, values, strict=True):
                await peer.do_round(update_of(value))
        await asyncio.wait_for(asyncio.shield(server.done), 30)


def test_a_device_is_in_its_gateway_s_region(tmp_path: Path) -> None:
    write_test_bundle(tmp_path / "test.bundle")
    asyncio.run(with_gateways(plan_of(tmp_path, "run", **SETTINGS)))
    own = {key: value for key, value in SETTINGS.items() if not key.startswith("regions__")}
    flat = own | {"round__goal": 2, "round__minimum": 2, "round__over_selection": 1}
    asyncio.run(without_gateways(plan_of(tmp_path, "flat", **flat)))
    models = [read_model(tmp_path / name)[1].tobytes() for name in ("run", "flat")]
    assert models[0] == models[1]
    rounds = read_status(tmp_path / "run").rounds
    both = {name: {"reports": 1, "done": True} for name in ("north", "south")}
    assert [row.summary["regions"] for row in rounds] == [both, both]


def test_the_region_of_a_machine_without_gateways_is_in_its_service_file(tmp_path: Path) -> None:
    write_test_bundle(tmp_path / "test.bundle")

    async def welcome(**service: Any) -> str:
        async with fleet(plan_of(tmp_path, "run", **SETTINGS), **service) as (_, join):
            peer = await join("a", check_in=False)
            await peer.send(CheckIn(1, "a", 10, newest_protocol=99))
            return str((await peer.expect(Welcome)).ineligible)

    assert "none of the plan's regions" in asyncio.run(welcome())
    assert "none of the plan's regions" in asyncio.run(welcome(region="mars"))
    assert asyncio.run(welcome(region="north")) == ""
