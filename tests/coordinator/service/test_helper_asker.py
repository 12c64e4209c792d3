"""A served run and a real helper on a socket: when it is asked, that nobody waits for its answer,
and what people are told meanwhile."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import several as several_runs
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service import helper_asker, server
from fleetlearn_coordinator.service.monitoring.gauges import run_gauges
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.messages import Accepted, Grant, Uploaded
from listening_helper import HelperFolder
from masked_peers import CAN_MASK, masked_upload
from peers import SIZE, Peer, PlanMaker, fleet, update_of
from several import run_async as in_folder
from several import several


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, with pytest's arguments."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_asker, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(helper_asker, "LONGEST_PAUSE", 0.02)


@pytest.fixture
def helper(tmp_path: Path) -> HelperFolder:
    folder = tmp_path / "helper"
    folder.mkdir()
    return HelperFolder(folder, "abc")


async def train(peer: Peer, value: float, size: int = SIZE) -> None:
    """Do a task: mask the update, report it and send it. ``size``: elements of the model."""
    upload = masked_upload(await peer.task(), peer.name, update_of(value, size))
    await peer.send(upload.report)
    grant = await peer.expect(Grant)
    for chunk in pack_chunks(grant.transfer, upload.content, grant.offset):
        await peer.send(chunk)
    await peer.send(Uploaded(grant.task))
    await peer.expect(Accepted)


async def closed(join: Any) -> list[Peer]:
    """Two devices report, and the round is closed."""
    peers = [await join(name, check_in=False) for name in "ab"]
    for peer in peers:
        await peer.check_in(privacy=CAN_MASK)
    for peer in peers:
        await train(peer, 0.5)
    return peers


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def gauges(coordinator: RunServer) -> dict[str, float]:
    found = run_gauges("test", coordinator, coordinator.live())
    return {name: float(sample.value) for name, sample in found}  # type: ignore[arg-type]


def tries(coordinator: RunServer) -> int:
    assert coordinator.run.mask_sums is not None
    return coordinator.run.mask_sums.tries


@run_async
async def test_the_helper_is_asked_again_until_it_is_there(
    make_plan: PlanMaker, helper: HelperFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile the run says why there is no model, and says so once in the log."""
    caplog.set_level(logging.INFO)
    async with fleet(make_plan(**helper.plan_settings())) as (coordinator, join):
        assert "its rounds wait for their helper" in caplog.text
        peers = await closed(join)
        await until(lambda: tries(coordinator) > 3)
        assert coordinator.engine.phase is Phase.COMMITTING
        waits = coordinator.live()["waits_for"]
        assert "round 1 waits for the helper's sum of the masks of its 2 updates" in waits
        assert "Connect call failed" in waits or "refused" in waits
        assert caplog.text.count("round 1 waits for the sum of its masks") == 1
        assert gauges(coordinator)["fleetlearn_helper_tries"] > 3
        with helper.listening():
            await until(lambda: coordinator.engine.version == 1)
            assert (await peers[0].task()).round == 2
        assert gauges(coordinator)["fleetlearn_helper_tries"] == 0
    assert "round 1: the helper has answered" in caplog.text


@pytest.mark.parametrize("large", [False, True])
@run_async
async def test_a_restart_asks_at_once(
    make_plan: PlanMaker, helper: HelperFolder, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """A large model is made in another thread once the helper has answered."""
    if large:
        monkeypatch.setattr(server, "LARGE_MODEL", 0)
    plan = make_plan(**helper.plan_settings())
    async with fleet(plan) as (coordinator, join):
        await closed(join)
    with helper.listening():
        async with fleet(plan) as (coordinator, _):
            await until(lambda: coordinator.engine.version == 1)


@run_async
async def test_a_helper_that_never_answers_stops_neither_roll_backs_nor_the_end(
    make_plan: PlanMaker, helper: HelperFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and says nothing, for far longer than this test lasts."""
    monkeypatch.setattr("fleetlearn_coordinator.service.helper_check.TIMEOUT", 0.05)
    plan = make_plan(**helper.plan_settings())
    with helper.listening():
        async with fleet(plan) as (coordinator, join):
            await closed(join)
            await until(lambda: coordinator.engine.version == 1)
    with closing(socket.create_server(("127.0.0.1", helper.port))) as silent:
        silent.listen()
        async with fleet(plan) as (coordinator, join):
            await closed(join)
            await until(lambda: coordinator.engine.phase is Phase.COMMITTING)
            await until(lambda: "helper" in {each.name for each in threading.enumerate()})
            ask_to_roll_back(plan.data_dir, 0, "test")
            coordinator.look_for_request()
            await until(lambda: coordinator.engine.version == 2)
            await closed(join)
            await until(lambda: coordinator.engine.phase is Phase.COMMITTING)
        # Its end has not waited for the threads, which still wait for the helper.
        assert "helper" in {each.name for each in threading.enumerate()}


@run_async
async def test_the_next_round_opens_by_the_clock(
    make_plan: PlanMaker, helper: HelperFolder
) -> None:
    """It waits for a third device to gather, and nothing but the clock wakes it."""
    with helper.listening():
        plan = make_plan(**helper.plan_settings(round__goal=3, round__gather=0.3))
        async with fleet(plan) as (coordinator, join):
            peers = await closed(join)
            await until(lambda: coordinator.engine.version == 1)
            assert (await peers[0].task()).round == 2


@in_folder
async def test_one_of_several_runs_waits_and_the_others_go_on(folder: Path) -> None:
    """A run whose helper is another one than its plan says does not begin, and says why."""
    (folder / "helper").mkdir()
    helper = HelperFolder(folder / "helper", "ab")
    async with several(folder) as host:
        masked = await host.add("masked", **helper.plan_settings())
        peers = [await host.join(name, privacy=CAN_MASK) for name in "ab"]
        for peer in peers:
            await train(peer, 0.5, several_runs.SIZE)
        await until(lambda: tries(masked) > 2)
        plain = await host.add("plain", round__goal=1)
        await host.hosted.look()
        asked = {asyncio.ensure_future(peer.task()): peer for peer in peers}
        first, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        (task,) = first
        assert host.of(task.result()) == "plain", "the device is free for it meanwhile"
        await asked[task].upload(task.result(), update_of(0.5, several_runs.SIZE))
        for each in waiting:
            each.cancel()
        assert (plain.engine.version, masked.engine.version) == (1, 0)
        with helper.listening():
            await until(lambda: masked.engine.version == 1)
            with pytest.raises(KeyError):
                await host.add("wrong", **helper.plan_settings(secure__key="9" * 64))
        assert "has the key" in host.row("wrong").failed


@run_async
async def test_an_error_that_is_no_answer_ends_the_run(
    make_plan: PlanMaker, helper: HelperFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("a mistake of ours")

    with helper.listening():
        async with fleet(make_plan(**helper.plan_settings())) as (coordinator, join):
            monkeypatch.setattr(helper_asker, "ask_for_sum", broken)
            await closed(join)
            with pytest.raises(RuntimeError, match="a mistake of ours"):
                await coordinator.done
