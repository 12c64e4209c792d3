"""What devices of a run with [secure] are told and asked, over real connections, and what of their
reports is kept."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.observers import MessageRefused, RunEvent
from fleetlearn_coordinator.service.server import NOT_SHOWN
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import SavedReport
from fleetlearn_protocol.encodings import MASKED
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    CheckIn,
    Grant,
    Held,
    Refused,
    SecureTask,
    Task,
    TaskFinished,
    TaskWeighing,
    Uploaded,
    Welcome,
)
from fleetlearn_protocol.secure.helper_messages import RefusalName
from fleetlearn_protocol.secure.task_terms import terms_of
from masked_peers import CAN_MASK, SECURE, MaskedUpload, masked_upload, otherwise
from peers import BUFFERED, SIZE, Peer, PlanMaker, fleet, report_of, update_of
from several import run_async as in_folder
from several import several

KEY = SECURE["secure__key"]
CHUNK = 120_000
"""Bytes of a chunk: whole words, of 3 bytes or of 4."""
STALE = BUFFERED | SECURE | {"round__minimum": 2}
"""Asynchronous: two updates make a model, and three tasks run."""


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, with pytest's arguments."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def masking(join: Any, name: str) -> Peer:
    """A device that can mask, checked in."""
    peer: Peer = await join(name, check_in=False)
    await peer.check_in(privacy=CAN_MASK)
    return peer


async def send(peer: Peer, upload: MaskedUpload) -> Any:
    """Report and send it; returns the coordinator's answer."""
    await peer.send(upload.report)
    grant = await peer.receive()
    if not isinstance(grant, Grant):
        return grant
    for start in range(grant.offset, len(upload.content), CHUNK):
        content = upload.content[start : start + CHUNK]
        await peer.send(pack_chunk(grant.transfer, start, content))
    await peer.send(Uploaded(grant.task))
    return await peer.receive()


async def welcome(peer: Peer) -> Welcome:
    await peer.send(CheckIn(1, peer.name, 10, privacy=CAN_MASK))
    return await peer.expect(Welcome)


REFUSED = (
    "the helper refused this device's last update: unknown-device; give its operator the line that "
    "`fleetlearn-device public-key` prints"
)


@run_async
async def test_a_device_that_the_helper_refused_is_told_when_it_checks_in(
    make_plan: PlanMaker,
) -> None:
    async with asyncio.timeout(30), fleet(make_plan(**SECURE)) as (coordinator, join):
        sums = coordinator.run.mask_sums
        assert sums is not None
        sums.refusals.refuse(["a"], RefusalName.UNKNOWN_DEVICE)
        sums.refusals.refuse(["b"], RefusalName.DEVICE_TWICE)  # its owner can do nothing
        said = {name: (await welcome(await join(name, check_in=False))).warning for name in "abc"}
        assert said == {"a": REFUSED, "b": "", "c": ""}


@in_folder
async def test_on_a_host_with_several_runs_the_run_is_named(folder: Path) -> None:
    async with several(folder) as host:
        masked = await host.add("masked", **SECURE, round__goal=2)
        await host.add("plain", round__goal=1)
        await host.hosted.look()
        assert masked.run.mask_sums is not None
        masked.run.mask_sums.refusals.refuse(["a"], RefusalName.UNKNOWN_DEVICE)
        peers = [await host.connect(name) for name in "ab"]
        assert [(await welcome(peer)).warning for peer in peers] == [f"masked: {REFUSED}", ""]


def saved(plan: Plan) -> dict[str, SavedReport]:
    """Device -> its report in the ledger."""
    with closing(find_storage(plan.data_dir).open_ledger(power=False, any_thread=False)) as ledger:
        return {row.device: row for row in ledger.unfinished(0).reports}


@run_async
async def test_a_task_says_how_its_update_is_masked(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(**SECURE)) as (coordinator, join):
        a = await masking(join, "a")
        await masking(join, "b")
        task = await a.task()
        assert (task.clip, task.parts) == (300.0, {"update": "masked"})
        assert task.secure == SecureTask("helper", 2, 20, helper=KEY)
        assert task.vector("model").encoding == "float32", "all devices sign one hash"
        assert coordinator.run.tasks.mask_terms() == terms_of(task, SIZE + 1)


@run_async
async def test_a_task_without_secure_says_nothing_of_it(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1)) as (coordinator, join):
        task = await (await join("a")).task()
        assert (task.secure, task.clip) == (None, None)
        with pytest.raises(ValueError, match=r"has no \[secure\]"):
            coordinator.run.tasks.mask_terms()


@run_async
async def test_devices_that_cannot_mask_are_given_no_task(make_plan: PlanMaker) -> None:
    """A device of an earlier version does not say that it can."""
    async with fleet(make_plan(**SECURE)) as (coordinator, join):
        old = await join("old", check_in=False)
        await old.send(CheckIn(1, "old", 10, privacy=("clip", "local-noise")))
        assert "cannot mask its update" in (await old.expect(Welcome)).ineligible
        able = [await masking(join, name) for name in "ab"]
        assert {(await peer.task()).round for peer in able} == {1}
        assert {*coordinator.engine.leases} == {"a", "b"}


SHORT = {"secure__bits": 12}


@run_async
async def test_devices_that_do_not_know_short_words_are_given_no_task_with_them(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(**SECURE | SHORT)) as (coordinator, join):
        old = await join("old", check_in=False)
        known = ("float32", "masked")
        await old.send(CheckIn(1, "old", 10, privacy=CAN_MASK, encodings=known))
        assert "updates travel as masked24" in (await old.expect(Welcome)).ineligible
        able = [await join(name, check_in=False) for name in "ab"]
        for peer in able:
            await peer.check_in(privacy=CAN_MASK, encodings=(*known, "masked24"))
        for task in [await peer.task() for peer in able]:
            assert (task.parts, task.secure.bits) == ({"update": "masked24"}, 12)
        assert {*coordinator.engine.leases} == {"a", "b"}


@run_async
async def test_short_words_come_in_three_bytes_each_and_are_kept_over_a_restart(
    make_plan: PlanMaker,
) -> None:
    plan = make_plan(round__goal=3, **SECURE | SHORT)
    known = {"privacy": CAN_MASK, "encodings": ("masked", "masked24")}
    async with fleet(plan) as (_, join):
        peers = [await join(name, check_in=False) for name in "abc"]
        for peer in peers:
            await peer.check_in(**known)
        tasks = [await peer.task() for peer in peers]
        sent = [
            masked_upload(task, name, update_of(0.5))
            for task, name in zip(tasks[:2], "ab", strict=True)
        ]
        assert len(sent[0].content) == 3 * (SIZE + 1)
        wrong = otherwise(sent[0], parts=(MASKED.part("update", bytes(4 * (SIZE + 1))),))
        await peers[2].send(otherwise(wrong, task=tasks[2].task).report)
        assert not isinstance(await peers[2].receive(), Grant), "words of 4 bytes"
        assert isinstance(await send(peers[0], sent[0]), Accepted)
    async with fleet(plan) as (coordinator, join):
        words = coordinator.run.reports.round.sums.to_tensors()["words"]
        np.testing.assert_array_equal(words, words_from_bytes(sent[0].content, 3))


@run_async
async def test_an_owner_s_demand_for_secure_aggregation_is_heard(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1)) as (_, join):
        a = await join("a", check_in=False)
        await a.send(CheckIn(1, "a", 10, privacy=(*CAN_MASK, "secure-required")))
        assert "this run's plan has no [secure]" in (await a.expect(Welcome)).ineligible


@run_async
async def test_what_the_helper_needs_is_kept_over_a_restart(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=3, **SECURE)
    async with fleet(plan) as (_, join):
        peers = [await masking(join, name) for name in "abc"]
        tasks = [await peer.task() for peer in peers]
        sent = masked_upload(tasks[0], "a", update_of(0.5))
        assert isinstance(await send(peers[0], sent), Accepted)
    row = saved(plan)["a"]
    assert row.report == sent.report
    async with fleet(plan) as (coordinator, join):
        assert coordinator.engine.has_counted("a", tasks[0].task)
        words = coordinator.run.reports.round.sums.to_tensors()["words"]
        np.testing.assert_array_equal(words, np.frombuffer(sent.content, "<u4"))
        b = await masking(join, "b")
        again: Task = await b.task()
        assert (again.task, again.secure) == (tasks[1].task, tasks[1].secure)
        assert coordinator.run.tasks.mask_terms() == terms_of(again, SIZE + 1)
        assert terms_of(again, SIZE + 1) == terms_of(tasks[0], SIZE + 1)


@pytest.mark.parametrize(
    "fields",
    [{"sealed": None}, {"signature": None}, {"loss": 0.5}, {"examples": 10}],
    ids=lambda fields: next(iter(fields)),
)
@run_async
async def test_a_report_that_cannot_be_added_or_tells_too_much_ends_its_task(
    make_plan: PlanMaker, fields: dict[str, Any]
) -> None:
    plan = make_plan(round__goal=3, **SECURE)
    async with fleet(plan) as (coordinator, join):
        peers = [await masking(join, name) for name in "abc"]
        task, *_ = [await peer.task() for peer in peers]
        refused = await send(
            peers[0], otherwise(masked_upload(task, "a", update_of(0.5)), **fields)
        )
        assert isinstance(refused, Refused)
        assert refused.code is Code.BAD_MESSAGE
        assert f"`{next(iter(fields))}`" in refused.text
        assert coordinator.engine.causes() == {"rejected: bad-message": 1}
        assert coordinator.engine.accepted == {}
    assert saved(plan) == {}


@run_async
async def test_an_update_that_is_not_masked_is_refused(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(**SECURE)) as (_, join):
        a = await masking(join, "a")
        await masking(join, "b")
        await a.send(report_of(await a.task(), update_of(0.5)))
        assert (await a.expect(Refused)).code is Code.WRONG_PARTS


@run_async
async def test_a_device_is_told_what_its_staleness_leaves(make_plan: PlanMaker) -> None:
    """b's update counts with the factor that b was told, as b has multiplied before it masked."""
    async with fleet(make_plan(**STALE)) as (coordinator, join):
        a, b = [await masking(join, name) for name in "ab"]
        first, slow = await a.task(), await b.task()
        assert slow.secure is not None
        assert slow.secure.least_factor == pytest.approx(21**-0.5)
        await b.send(TaskFinished(slow.task))
        assert await b.expect(TaskWeighing) == TaskWeighing(slow.task, 1.0)
        coordinator.engine.version += 2  # what two commits do, which need a helper
        await b.send(TaskFinished(slow.task))
        assert (await b.expect(TaskWeighing)).factor == pytest.approx(3**-0.5)
        await a.send(TaskFinished(slow.task))
        assert (await a.expect(Refused)).task == slow.task
        assert isinstance(await send(a, masked_upload(first, "a", update_of(0.5))), Accepted)
        await a.send(TaskFinished(first.task))
        assert await a.expect(Accepted) == Accepted(first.task)


@run_async
async def test_no_factor_is_told_where_no_update_can_be_stale(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(**SECURE)) as (coordinator, join):
        a = await masking(join, "a")
        await masking(join, "b")
        await a.send(TaskFinished((await a.task()).task))
        assert "has no `secure.least_factor`" in (await a.expect(Refused)).text
        assert coordinator.engine.causes() == {"rejected: bad-message": 1}


@pytest.mark.parametrize(
    "changed",
    [{"local__lr": 0.01}, {"local__epochs": 2}, {"secure__minimum": 3}, {"secure__key": "c" * 64}],
    ids=lambda changed: next(iter(changed)),
)
@run_async
async def test_what_was_signed_under_another_plan_is_given_up(
    make_plan: PlanMaker, changed: dict[str, Any]
) -> None:
    """The helper would not add it to what devices sign from now on."""
    settings = {"round__goal": 3, **SECURE, "round__minimum": 3, "secure__minimum": 2}
    async with fleet(make_plan(**settings)) as (_, join):
        peers = [await masking(join, name) for name in "abc"]
        tasks = [await peer.task() for peer in peers]
        sent = masked_upload(tasks[0], "a", update_of(0.5))
        assert isinstance(await send(peers[0], sent), Accepted)
    async with fleet(make_plan(**settings | changed)) as (coordinator, join):
        assert coordinator.engine.leases == coordinator.engine.accepted == {}
        b = await masking(join, "b")
        await b.send(masked_upload(tasks[1], "b", update_of(0.5)).report)
        assert (await b.expect(Refused)).task == tasks[1].task
    with closing(
        find_storage(make_plan(**settings).data_dir).open_ledger(power=False, any_thread=False)
    ) as ledger:
        assert [row.device for row in ledger.unfinished(0).reports] == []


@in_folder
async def test_a_device_of_several_runs_is_told_its_factor_by_the_run_of_its_task(
    folder: Path,
) -> None:
    async with several(folder) as host:
        await host.add("a", **STALE)
        await host.add("b")
        peers = [await host.join(name, privacy=CAN_MASK) for name in ("d", "e", "f")]
        tasks = [await peer.task() for peer in peers]
        peer, task = next(
            (peer, task) for peer, task in zip(peers, tasks, strict=True) if host.of(task) == "a"
        )
        await peer.send(TaskFinished(task.task))
        assert await peer.expect(TaskWeighing) == TaskWeighing(task.task, 1.0)
        await peer.connection.close()
        await host.want("a", "stopped")
        back = await host.join(peer.name, held=Held(task.task, task.round), privacy=CAN_MASK)
        await back.send(TaskFinished(task.task))
        while not isinstance(answer := await back.receive(), Refused):
            assert host.of(answer) == "b", "a task of the other run may come first"
        assert (answer.code, answer.task) == (Code.STALE_ROUND, task.task)


@run_async
async def test_what_a_refused_report_tells_is_shown_to_its_device_alone(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with fleet(make_plan(**SECURE)) as (coordinator, join):
        seen = list[RunEvent]()
        coordinator.run.observers.add(seen.extend)
        a = await masking(join, "a")
        await masking(join, "b")
        told = masked_upload(await a.task(), "a", update_of(0.5))
        refused = await send(a, otherwise(told, loss=0.123456))
        assert "0.123456" in refused.text
        (event,) = [each for each in seen if isinstance(each, MessageRefused)]
        assert (event.code, event.text) == (Code.BAD_MESSAGE, NOT_SHOWN)
    assert "0.123456" not in caplog.text
