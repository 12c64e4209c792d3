"""A run whose rounds have regions, served to devices that speak the protocol by hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.service.monitoring.gauges import run_gauges
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import Accepted, Cancel, CheckIn, Grant, Uploaded, Welcome
from fleetlearn_protocol.vector import Vector
from peers import SIZE, fleet, plan_text, report_of, write_test_bundle

Test = Callable[[Path], None]
ROUNDS = 3
NORTH, SOUTH = ("n1", "n2", "n3"), ("s1", "s2")
NO_ROUND: dict[str, Any] = {"round__goal": None, "round__minimum": None}
REGIONS: dict[str, Any] = {
    **NO_ROUND,
    "round__over_selection": None,
    "round__gather": 10.0,
    "round__grace": 30.0,
    "server__optimizer": "adam",
    "server__lr": 0.05,
    "stop__rounds": ROUNDS,
    "regions__each": {"over_selection": 1},
    "regions__named": {
        "north": {"devices": ["n*"], "goal": 3, "minimum": 2},
        "south": {"devices": ["s*"], "goal": 2, "minimum": 2, "deadline": 20.0},
    },
}


def in_loop(test: Callable[[Path], Coroutine[None, None, None]]) -> Test:
    @wraps(test)
    def run(tmp_path: Path) -> None:
        write_test_bundle(tmp_path / "test.bundle")
        asyncio.run(test(tmp_path))

    return run


def plan_of(folder: Path, name: str = "run", **settings: Any) -> Plan:
    return Plan.parse(plan_text(Path("test.bundle"), name, **(REGIONS | settings)), folder)


def update_of(round: int, device: str) -> Vector:
    random = np.random.default_rng([round, *device.encode()])
    return random.normal(size=SIZE).astype(np.float32)


async def whole_run(plan: Plan, devices: tuple[str, ...] = (*NORTH, *SOUTH)) -> None:
    async with fleet(plan) as (server, join):
        peers = [await join(name) for name in devices]
        for round in range(1, ROUNDS + 1):
            for peer in peers:
                await peer.do_round(update_of(round, peer.name))
        await asyncio.wait_for(asyncio.shield(server.done), 30)


def models_of(folder: Path, name: str = "run") -> list[bytes]:
    return [read_model(folder / name, version)[1].tobytes() for version in (ROUNDS - 1, ROUNDS)]


@in_loop
async def test_the_model_is_that_of_rounds_without_regions_bit_for_bit(tmp_path: Path) -> None:
    await whole_run(plan_of(tmp_path))
    text = plan_text(Path("test.bundle"), "flat", **flat_settings())
    await whole_run(Plan.parse(text, tmp_path))
    assert models_of(tmp_path) == models_of(tmp_path, "flat")
    rounds = read_status(tmp_path / "run").rounds
    assert [row.summary["regions"] for row in rounds] == [
        {"north": {"reports": 3, "done": True}, "south": {"reports": 2, "done": True}}
    ] * ROUNDS


def flat_settings() -> dict[str, Any]:
    own = {key: value for key, value in REGIONS.items() if not key.startswith("regions")}
    return own | {"round__goal": 5, "round__minimum": 5, "round__over_selection": 1}


@in_loop
async def test_a_region_that_fails_contributes_nothing(tmp_path: Path) -> None:
    """South has one report at its deadline of two that it needs: the model is north's alone."""
    named = {
        "north": {"devices": ["n*"], "goal": 3, "minimum": 3},
        "south": {"devices": ["s*"], "goal": 2, "minimum": 2, "deadline": 0.6},
    }
    plan = plan_of(tmp_path, regions__named=named, stop__rounds=1)
    async with fleet(plan) as (server, join):
        peers = {name: await join(name) for name in (*NORTH, *SOUTH)}
        await peers["s1"].do_round(update_of(1, "s1"))
        await peers["s2"].task()
        cancelled = await peers["s2"].expect(Cancel)
        assert "region south of round 1 is over: its deadline has passed" in cancelled.text
        gauges = {
            (name, *sample.labels[1:]): sample.value
            for name, sample in run_gauges("r", server, server.live())
            if name.startswith("fleetlearn_region")
        }
        assert gauges["fleetlearn_region_goal", "north"] == 3
        assert gauges["fleetlearn_region_reports", "south"] == 1
        assert gauges["fleetlearn_region_devices", "north", "training"] == 3
        assert gauges["fleetlearn_region_devices", "south", "training"] == 0
        for name in NORTH:
            await peers[name].do_round(update_of(1, name))
        await asyncio.wait_for(asyncio.shield(server.done), 30)
    (only,) = read_status(tmp_path / "run").rounds
    assert only.summary["reports"] == 3
    assert only.summary["regions"]["south"] == {"reports": 1, "done": False}
    assert only.summary["dropped"] == {"late": 1}
    alone = plan_of(tmp_path, "alone", regions__named={"north": named["north"]}, stop__rounds=1)
    async with fleet(alone) as (server, join):
        for name in NORTH:
            peers[name] = await join(name)
        for name in NORTH:
            await peers[name].do_round(update_of(1, name))
        await asyncio.wait_for(asyncio.shield(server.done), 30)
    digests = [read_model(tmp_path / name, 1)[1].tobytes() for name in ("run", "alone")]
    assert digests[0] == digests[1]


@in_loop
async def test_a_restart_goes_on_with_the_regions(tmp_path: Path) -> None:
    """The coordinator ends twice in a round: with one region over, and when all have reported but
    one."""
    plan = plan_of(tmp_path)
    async with fleet(plan) as (_, join):
        peers = {name: await join(name) for name in (*NORTH, *SOUTH)}
        for name in SOUTH:
            await peers[name].do_round(update_of(1, name))
        await peers["n1"].do_round(update_of(1, "n1"))
    async with fleet(plan) as (_, join):
        peers = {name: await join(name) for name in NORTH}
        await peers["n2"].do_round(update_of(1, "n2"))
    async with fleet(plan) as (server, join):
        peers = {name: await join(name) for name in (*NORTH, *SOUTH)}
        await peers["n3"].do_round(update_of(1, "n3"))
        for round in range(2, ROUNDS + 1):
            for peer in peers.values():
                await peer.do_round(update_of(round, peer.name))
        await asyncio.wait_for(asyncio.shield(server.done), 30)
    await whole_run(plan_of(tmp_path, "whole"))
    assert models_of(tmp_path) == models_of(tmp_path, "whole")


@in_loop
async def test_a_failed_region_stays_failed_over_a_restart(tmp_path: Path) -> None:
    named = {
        "north": {"devices": ["n*"], "goal": 2, "minimum": 2},
        "south": {"devices": ["s*"], "goal": 2, "minimum": 2, "deadline": 0.5},
    }
    plan = plan_of(tmp_path, regions__named=named, stop__rounds=1)
    async with fleet(plan) as (_, join):
        peers = {name: await join(name) for name in ("n1", "n2", *SOUTH)}
        await peers["s1"].do_round(update_of(1, "s1"))
        await peers["s2"].task()
        await peers["s2"].expect(Cancel)
    async with fleet(plan) as (server, join):
        peers = {name: await join(name) for name in ("n1", "n2", *SOUTH, "s3")}
        assert sorted(server.engine.leases) == ["n1", "n2"]
        for name in ("n1", "n2"):
            await peers[name].do_round(update_of(1, name))
        await asyncio.wait_for(asyncio.shield(server.done), 30)
    (only,) = read_status(tmp_path / "run").rounds
    assert only.summary["regions"]["south"] == {"reports": 1, "done": False}
    assert only.summary["reports"] == 2


@in_loop
async def test_a_device_of_no_region_is_told_so(tmp_path: Path) -> None:
    async with fleet(plan_of(tmp_path)) as (_, join):
        peer = await join("x1", check_in=False)
        await peer.send(CheckIn(1, "x1", 10, newest_protocol=99))
        welcome = await peer.expect(Welcome)
        assert welcome.ineligible == "it is in none of the plan's regions ([regions])"


@in_loop
async def test_another_plan_s_regions_cannot_take_up_an_open_round(tmp_path: Path) -> None:
    async with fleet(plan_of(tmp_path)) as (_, join):
        peers: list[Any] = [await join(name) for name in (*NORTH, *SOUTH)]
        await peers[0].do_round(update_of(1, "n1"))
    renamed = {"nord": {"devices": ["n*"], "goal": 3}, "south": {"devices": ["s*"], "goal": 2}}
    with pytest.raises(
        StoreError, match="round 1 is open and has tasks of regions north; the plan"
    ):
        async with fleet(plan_of(tmp_path, regions__named=renamed)):
            pass
    with pytest.raises(StoreError, match="the plan has none now"):
        async with fleet(
            Plan.parse(plan_text(Path("test.bundle"), "run", **flat_settings()), tmp_path)
        ):
            pass


@in_loop
async def test_the_log_says_how_each_region_ended(tmp_path: Path) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("fleetlearn.coordinator")
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.INFO
    try:
        await whole_run(plan_of(tmp_path))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    said = [each.getMessage() for each in records]
    assert said.count("region north of round 1 is done with 3 reports: it has its goal") == 1
    assert any("reports of regions: north 3, south 2" in each for each in said)


@in_loop
async def test_what_a_device_of_a_failed_region_keeps_does_not_count(tmp_path: Path) -> None:
    """What a top-k encoding left of an update is kept for the device's next task, unless the update
    did not count."""
    encoding = find_encoding("topk-0.3")
    named = {
        "north": {"devices": ["n*"], "goal": 1},
        "south": {"devices": ["s*"], "goal": 2, "minimum": 2, "deadline": 0.4},
    }
    settings = {"regions__named": named, "regions__minimum": 1, "round__gather": 0.05}
    plan = plan_of(tmp_path, **settings, encoding__up=encoding.name)
    async with fleet(plan) as (_, join):
        peers = []
        for name in ("n1", "s1"):
            peers.append(await join(name, check_in=False))
            await peers[-1].check_in(encodings=(encoding.name.partition("-")[0],))
        first = [await peer.task() for peer in peers]
        for peer, task in zip(peers, first, strict=True):
            content = encoding.encode(update_of(1, peer.name))
            await peer.send(
                report_of(task, update_of(1, peer.name), parts=(encoding.part("update", content),))
            )
            grant = await peer.expect(Grant)
            await peer.send(pack_chunk(grant.transfer, 0, content))
            await peer.send(Uploaded(task.task))
            await peer.expect(Accepted)
        kept = [(await peer.task()).kept for peer in peers]
        assert kept == [first[0].task, None]
