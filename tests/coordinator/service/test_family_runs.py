"""A run with two models, served to devices that speak the protocol by hand."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
from family_plans import LARGE, RAM, SMALL, family_plan
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.deltas import apply_delta
from fleetlearn_protocol.encodings import FLOAT16
from fleetlearn_protocol.messages import (
    Accepted,
    CheckIn,
    Question,
    Refused,
    Reply,
    SharedModel,
    Task,
    Welcome,
)
from fleetlearn_protocol.vector import Vector, digest
from peers import BUFFERED, Connect, Peer, fleet, report_of, update_of

SIZES = {"large": LARGE, "small": SMALL}
Test = Callable[[Path], None]


def in_loop(test: Callable[[Path], Coroutine[None, None, None]]) -> Test:
    """Run a test in an event loop of its own."""

    @wraps(test)
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    return run


ALL = {"round__goal": 2, "round__minimum": 2, "round__gather": 30.0, "round__grace": 30.0}
"""Rounds of both devices."""


async def join_with(join: Connect, name: str, memory: int | None, **stated: object) -> Peer:
    peer = await join(name, check_in=False)
    await peer.check_in(memory=memory, **stated)
    return peer


async def join_both(join: Connect, **stated: object) -> tuple[Peer, Peer]:
    """A device that fits the large model, and one that does not."""
    return await join_with(join, "a", RAM, **stated), await join_with(join, "b", RAM - 1, **stated)


def initial(folder: Path, member: str) -> Vector:
    return open_bundle(folder / f"{member}.bundle").parameters()


async def fetched(peer: Peer, task: Task) -> Vector:
    (model,) = task.vectors
    return np.frombuffer(await peer.fetch(model.sha256), np.float32)


@in_loop
async def test_each_device_trains_the_member_that_fits_it(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, **ALL, stop__rounds=2)
    async with fleet(plan) as (server, join):
        peers = dict(zip(SIZES, await join_both(join), strict=True))
        for round in (1, 2):
            for value, (member, peer) in enumerate(peers.items(), 1):
                task = await peer.task()
                bundle = open_bundle(tmp_path / f"{member}.bundle")
                assert (task.bundle, task.round) == (bundle.sha256, round)
                manifest = await peer.fetch(bundle.sha256)
                assert manifest == (bundle.path / "manifest.json").read_bytes()
                model = await fetched(peer, task)
                moved = np.float32((round - 1) * value)
                assert model.tobytes() == (bundle.parameters() + moved).tobytes()
                answer = await peer.upload(task, update_of(value, SIZES[member]))
                assert isinstance(answer, Accepted)
        await server.done
        assert server.live()["members"] == {"large": 0, "small": 0}
    with closing(sqlite3.connect(plan.data_dir / DATABASE)) as db:
        assert {*db.execute("SELECT device, member FROM tasks")} == {("a", "large"), ("b", "small")}
    version, model = read_model(plan.data_dir)
    expected = [initial(tmp_path, "large") + 1 + 1, initial(tmp_path, "small") + 2 + 2]
    assert (version, model.tobytes()) == (2, np.concatenate(expected).astype("f4").tobytes())
    summary = read_status(plan.data_dir).rounds[-1].summary
    assert summary["reports"] == 2
    assert summary["members"]["large"]["reports"] == summary["members"]["small"]["reports"] == 1
    assert summary["members"]["small"]["change"] == pytest.approx(2 * SMALL**0.5)


@in_loop
async def test_a_device_that_fits_no_member_is_told_why(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, **ALL, tags={"small": ["tiny"]})
    async with fleet(plan) as (server, join):
        peer = await join("c", check_in=False)
        await peer.send(CheckIn(1, "c", 10, newest_protocol=4))
        welcome: Welcome = await peer.expect(Welcome)
        assert welcome.ineligible == (
            f"no model of this run fits the device: large needs {RAM} bytes of RAM, and the device "
            "does not say what it has; small needs the tag tiny"
        )
        assert server.unable == 1
        fits = await join_with(join, "d", 0, tags=("tiny",))
        await join_with(join, "e", RAM)
        assert (await fits.task()).bundle == open_bundle(tmp_path / "small.bundle").sha256


@in_loop
async def test_an_update_of_another_member_s_size_is_refused(tmp_path: Path) -> None:
    async with fleet(family_plan(tmp_path, **ALL)) as (_, join):
        large, small = await join_both(join)
        task = await small.task()
        await small.send(report_of(task, update_of(1.0, LARGE)))
        refused: Refused = await small.expect(Refused)
        assert (refused.code, f"take {4 * SMALL}" in refused.text) == ("wrong-length", True)
        assert isinstance(await large.upload(await large.task(), update_of(1.0, LARGE)), Accepted)


@in_loop
async def test_a_task_keeps_its_member_over_a_restart(tmp_path: Path) -> None:
    """Also where its device says otherwise by then; its next task follows what it says."""
    plan = family_plan(tmp_path, **ALL, stop__rounds=2)
    async with fleet(plan) as (_, join):
        large, small = await join_both(join)
        first, other = await large.task(), await small.task()
        assert isinstance(await large.upload(first, update_of(1.0, LARGE)), Accepted)
    async with fleet(plan) as (server, join):
        small = await join_with(join, "b", RAM)
        again = await small.task()
        assert (again.task, again.bundle) == (other.task, other.bundle)
        large = await join_with(join, "a", RAM)
        assert isinstance(await small.upload(again, update_of(2.0, SMALL)), Accepted)
        assert (await small.task()).bundle == (await large.task()).bundle == first.bundle
        assert server.engine.version == 1
    model = read_model(plan.data_dir)[1]
    assert model[:LARGE].tobytes() == (initial(tmp_path, "large") + np.float32(1)).tobytes()
    assert model[LARGE:].tobytes() == (initial(tmp_path, "small") + np.float32(2)).tobytes()


@in_loop
async def test_an_older_model_of_a_member_is_served_from_the_store(tmp_path: Path) -> None:
    """A device that came back has to fetch the model that its task began from, two versions
    later. Another device has moved the member on meanwhile."""
    plan = family_plan(tmp_path, **{**BUFFERED, "round__goal": 1}, stop__rounds=9)
    async with fleet(plan) as (server, join):
        small, other = await join_with(join, "b", 0), await join_with(join, "c", 0)
        begun = await small.task()
        for _ in range(2):
            await other.do_round(update_of(1.0, SMALL))
        await other.task()
        again = await join_with(join, "b", RAM - 1)
        task = await again.task()
        assert (task.task, server.engine.version) == (begun.task, 2)
        assert (await fetched(again, task)).tobytes() == initial(tmp_path, "small").tobytes()
        assert isinstance(await again.upload(task, update_of(1.0, SMALL)), Accepted)
    summary = read_status(plan.data_dir).rounds[-1].summary
    assert summary["staleness"]["max"] == 2
    assert summary["members"]["small"]["staleness"]["max"] == 2


@in_loop
async def test_nothing_is_kept_of_a_device_that_left(tmp_path: Path) -> None:
    async with fleet(family_plan(tmp_path, **ALL)) as (server, join):
        large, small = await join_both(join)
        policy = server.run.members.policy
        assert (policy.member_of("a"), policy.member_of("b")) == ("large", "small")
        await small.task()
        await small.connection.close()
        async with asyncio.timeout(10):
            while "b" in server.host.devices:
                await asyncio.sleep(0)
        with pytest.raises(KeyError):
            policy.member_of("b")
        assert policy.member_of("a") == "large"
        del large


@in_loop
async def test_members_travel_as_differences_from_their_own_models(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, **ALL, encoding__down="delta", stop__rounds=3)
    async with fleet(plan) as (_, join):
        peers = dict(zip(SIZES, await join_both(join), strict=True))
        for value, (member, peer) in enumerate(peers.items()):
            await peer.do_round(update_of(value, SIZES[member]))
        for member, peer in peers.items():
            task = await peer.task()
            (model,) = task.vectors
            assert model.delta is not None
            assert model.delta.base == digest(initial(tmp_path, member))
            delta = await peer.fetch(model.delta.sha256)
            made = apply_delta(initial(tmp_path, member).tobytes(), delta)
            assert digest(made) == model.sha256


@in_loop
async def test_members_travel_as_float16(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, **ALL, encoding__down="float16", stop__rounds=3)
    async with fleet(plan) as (_, join):
        for member, peer in zip(
            SIZES, await join_both(join, encodings=("float32", "float16")), strict=True
        ):
            (model,) = (await peer.task()).vectors
            assert model.encoding == "float16"
            content = await peer.fetch(model.sha256)
            assert content == bytes(FLOAT16.encode(initial(tmp_path, member)))


@in_loop
async def test_devices_measure_the_member_that_they_train(tmp_path: Path) -> None:
    evaluation = {"evaluation__every": 1, "evaluation__devices": 2, "evaluation__minimum": 2}
    plan = family_plan(tmp_path, **ALL, **evaluation, stop__rounds=1)
    async with fleet(plan) as (server, join):
        peers = dict(zip(SIZES, await join_both(join, exchanges=("evaluation",)), strict=True))
        for member, peer in peers.items():
            await peer.do_round(update_of(1.0, SIZES[member]))
        for number, (member, peer) in enumerate(peers.items(), 1):
            asked: Question = await peer.expect(Question)
            assert asked.bundle == open_bundle(tmp_path / f"{member}.bundle").sha256
            (model,) = asked.vectors
            newest = (initial(tmp_path, member) + np.float32(1)).tobytes()
            assert await peer.fetch(model.sha256) == newest
            content = {"examples": 10, "loss_sum": 10.0 * number, "metric_sums": {}}
            await peer.send(Reply(asked.task, "evaluation", content))
            await peer.expect(Accepted)
        await server.done
    (evaluated,) = read_status(plan.data_dir).evaluations
    assert evaluated.summary["metrics"] == {"loss": 1.5}
    assert evaluated.summary["members"] == {
        "large": {"devices": 1, "metrics": {"loss": 1.0}},
        "small": {"devices": 1, "metrics": {"loss": 2.0}},
    }
    assert [*evaluated.summary["tiers"]] == [""]


@in_loop
async def test_a_device_that_takes_no_part_is_given_the_member_that_fits_it(
    tmp_path: Path,
) -> None:
    plan = family_plan(tmp_path, **ALL, models__give=True)
    async with fleet(plan) as (_, join):
        for member, memory in (("large", RAM), ("small", None)):
            peer = await join(member, check_in=False)
            await peer.send(CheckIn(1, member, 10, newest_protocol=4, wants="model", memory=memory))
            welcome: Welcome = await peer.expect(Welcome)
            assert isinstance(welcome.newest, SharedModel)
            assert welcome.newest.bundle == open_bundle(tmp_path / f"{member}.bundle").sha256
            content = await peer.fetch(welcome.newest.model.sha256)
            assert content == initial(tmp_path, member).tobytes()


@in_loop
async def test_a_data_directory_is_of_its_family_alone(tmp_path: Path) -> None:
    """Also in the order of its members: the vector on the disk is in that order."""
    plan = family_plan(tmp_path, **ALL)
    async with fleet(plan):
        pass
    turned = family_plan(tmp_path, order=["small", "large"], **ALL)
    with pytest.raises(
        StoreError, match="holds the run of another family of models, or in another order"
    ):
        async with fleet(turned):
            pass
