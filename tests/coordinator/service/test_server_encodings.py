"""Updates in other encodings than float32, over real connections."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.sent_models import make_forms
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.service.training_run import run_models
from fleetlearn_protocol import Code
from fleetlearn_protocol.deltas import apply_delta
from fleetlearn_protocol.encodings import FAMILIES, FLOAT16, FLOAT32, Encoding, find_encoding
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    Evaluation,
    Failed,
    Grant,
    Held,
    Refused,
    Reply,
    Task,
    Uploaded,
)
from fleetlearn_protocol.vector import digest
from peers import BUFFERED, SIZE, Connect, Peer, PlanMaker, fleet, report_of


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, with pytest's arguments."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


VECTOR = np.linspace(-1, 3, SIZE, dtype=np.float32)


async def upload(peer: Peer, task: Task, content: memoryview, encoding: Encoding) -> object:
    """Report the bytes, send them, and return the coordinator's answer."""
    await peer.send(
        msgspec.structs.replace(report_of(task, VECTOR), parts=(encoding.part("update", content),))
    )
    grant = await peer.expect(Grant)
    most = 131072 // encoding.block_bytes * encoding.block_bytes
    for offset in range(grant.offset, len(content), most):
        await peer.send(pack_chunk(grant.transfer, offset, content[offset : offset + most]))
    await peer.send(Uploaded(task.task))
    return await peer.receive()


async def joined(join: Connect, name: str, held: Held | None = None, **stated: Any) -> Peer:
    """Return a device that knows all encodings, checked in."""
    peer = await join(name, check_in=False)
    await peer.check_in(held, encodings=FAMILIES, **stated)
    return peer


async def exactly(peer: Peer, task: Task) -> None:
    """Do the task, and report in float32."""
    assert isinstance(await upload(peer, task, FLOAT32.encode(VECTOR), FLOAT32), Accepted)


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "int8", "int4", "topk-0.3", "topk-0.3-int8"]
)
@run_async
async def test_a_round_in_the_plan_s_encoding(make_plan: PlanMaker, name: str) -> None:
    """A device that does not know it is asked for float32. The mean is that of what the bytes
    mean."""
    encoding = find_encoding(name)
    async with fleet(make_plan(encoding__up=name)) as (coordinator, join):
        before = coordinator.run.models.newest.model.copy()
        new, old = await joined(join, "new"), await join("old")
        asked, exact = await new.task(), await old.task()
        assert (asked.parts, exact.parts) == ({"update": name}, {"update": "float32"})
        content = encoding.encode(VECTOR, asked.seed)
        assert isinstance(await upload(new, asked, content, encoding), Accepted)
        assert isinstance(await upload(old, exact, FLOAT32.encode(VECTOR), FLOAT32), Accepted)
        await until(lambda: coordinator.engine.version == 1)
        decoded = encoding.decode(content, SIZE).astype(np.float64)
        np.testing.assert_array_equal(
            coordinator.run.models.newest.model,
            (before + (decoded + VECTOR.astype(np.float64)) / 2).astype(np.float32),
        )


@run_async
async def test_a_device_that_comes_back_with_less_is_asked_for_less(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(encoding__up="int8", round__goal=1)) as (_, join):
        peer = await joined(join, "a")
        assert (await peer.task()).parts == {"update": "int8"}
        older = await join("a")  # an older SDK, with the same state directory
        task = await older.task()
        assert task.parts == {"update": "float32"}
        assert isinstance(await upload(older, task, FLOAT32.encode(VECTOR), FLOAT32), Accepted)


@run_async
async def test_float32_is_taken_and_other_encodings_are_not(make_plan: PlanMaker) -> None:
    """A device may have been asked for float32 before it was updated, while it held the update."""
    async with fleet(make_plan(encoding__up="int8")) as (_, join):
        a, b = await joined(join, "a"), await joined(join, "b")
        first, second = await a.task(), await b.task()
        assert isinstance(await upload(a, first, FLOAT32.encode(VECTOR), FLOAT32), Accepted)
        int4 = find_encoding("int4").part("update", find_encoding("int4").encode(VECTOR))
        await b.send(msgspec.structs.replace(report_of(second, VECTOR), parts=(int4,)))
        refused = await b.expect(Refused)
        assert (
            refused.text
            == "a report of the parts update (int4) came; the task asked for update (int8)"
        )


@run_async
async def test_an_update_outlives_the_coordinator_in_its_encoding(make_plan: PlanMaker) -> None:
    """Accepted, and added to the sum by the next process."""
    encoding, plan = find_encoding("topk-0.3-int8"), make_plan(encoding__up="topk-0.3-int8")
    contents = []
    async with fleet(plan) as (coordinator, join):
        a, b = await joined(join, "a"), await joined(join, "b")
        task, _ = await a.task(), await b.task()
        contents.append(encoding.encode(VECTOR, task.seed))
        assert isinstance(await upload(a, task, contents[0], encoding), Accepted)
    async with fleet(plan) as (coordinator, join):
        before = coordinator.run.models.newest.model.copy()
        b = await joined(join, "b")
        task = await b.task()
        contents.append(encoding.encode(VECTOR, task.seed))
        assert isinstance(await upload(b, task, contents[1], encoding), Accepted)
        await until(lambda: coordinator.engine.version == 1)
        total = sum(encoding.decode(content, SIZE).astype(np.float64) for content in contents)
        np.testing.assert_array_equal(
            coordinator.run.models.newest.model, (before + total / 2).astype(np.float32)
        )


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("int8", {0: b"\x00\x00\xc0\x7f"}, Code.NOT_FINITE),
        ("int4", {0: b"\x00\x00\x80\xff"}, Code.NOT_FINITE),
        ("topk-0.3", {0: b"\xff\xff"}, Code.BAD_ENCODING),
        ("float16", {0: b"\x00\x7c"}, Code.NOT_FINITE),
    ],
)
@run_async
async def test_bytes_that_no_encoder_writes_end_the_task(
    make_plan: PlanMaker, name: str, change: dict[int, bytes], code: Code
) -> None:
    encoding = find_encoding(name)
    async with fleet(make_plan(encoding__up=name, round__goal=1)) as (coordinator, join):
        hostile = await joined(join, "a")
        task = await hostile.task()
        content = bytearray(encoding.encode(VECTOR))
        for place, these in change.items():
            content[place : place + len(these)] = these
        refused = await upload(hostile, task, memoryview(content), encoding)
        assert isinstance(refused, Refused)
        assert refused.code is code
        assert coordinator.engine.causes() == {f"rejected: {code}": 1}
        other = await joined(join, "b")
        second = await other.task()
        assert isinstance(await upload(other, second, encoding.encode(VECTOR), encoding), Accepted)


@run_async
async def test_the_model_travels_as_float16_to_devices_that_know_it(make_plan: PlanMaker) -> None:
    """Evaluations too. The coordinator's own model stays float32."""
    async with fleet(make_plan(encoding__down="float16", round__goal=1, evaluation__every=1)) as (
        coordinator,
        join,
    ):
        new = await joined(join, "new", exchanges=("evaluation",))
        await exactly(new, await new.task())
        task = await new.receive()
        model = coordinator.run.models.newest.model
        assert not np.equal(FLOAT16.decode(FLOAT16.encode(model)), model).all()
        assert task.vectors == (FLOAT16.reference("model", model),)
        assert await new.fetch(task.vectors[0].sha256) == FLOAT16.encode(model)
        old = await join("old")
        while not isinstance(task, Task):
            await new.send(
                Reply(task.task, "evaluation", fields_of(Evaluation(10, 1.0, {"accuracy": 5.0})))
            )
            await new.expect(Accepted)
            task = await new.task()
        await new.send(Failed(task.task, "stopping"))
        exact = await old.task()
        assert exact.vectors == (FLOAT32.reference("model", model),)
        assert await old.fetch(exact.vectors[0].sha256) == model.tobytes()


@run_async
async def test_a_model_that_float16_cannot_hold_travels_as_float32(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(encoding__down="float16", round__goal=1)) as (coordinator, join):
        a = await joined(join, "a")
        task = await a.task()
        assert isinstance(await upload(a, task, FLOAT32.encode(1e5 * VECTOR), FLOAT32), Accepted)
        task = await a.task()
        assert task.vectors == (FLOAT32.reference("model", coordinator.run.models.newest.model),)


@run_async
async def test_an_older_model_is_served_as_float16_while_a_task_needs_it(
    make_plan: PlanMaker,
) -> None:
    """Of asynchronous rounds; over a restart too."""
    plan = make_plan(encoding__down="float16", **BUFFERED)
    async with fleet(plan) as (coordinator, join):
        a, b, c = [await joined(join, name) for name in "abc"]
        slow, others = await a.task(), [await b.task(), await c.task()]
        first = coordinator.run.models.newest.model.copy()
        await exactly(b, others[0])
        await exactly(c, others[1])
        await until(lambda: coordinator.engine.version == 1)
        assert slow.vectors == (FLOAT16.reference("model", first),)
        assert await a.fetch(slow.vectors[0].sha256) == FLOAT16.encode(first)
    async with fleet(plan) as (coordinator, join):
        a = await joined(join, "a")
        again = await a.task()
        assert (again.task, again.vectors) == (slow.task, slow.vectors)
        assert await a.fetch(slow.vectors[0].sha256) == FLOAT16.encode(first)


@pytest.mark.parametrize("down", ["float16", "delta"])
def test_forms_of_a_large_model_are_made_in_another_thread(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch, down: str
) -> None:
    threads = []

    def noting(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return make_forms(*arguments)

    async def rounds() -> None:
        async with fleet(make_plan(encoding__down=down, round__goal=1)) as (coordinator, join):
            a = await joined(join, "a")
            for version in range(3):
                task = await a.task()
                assert (task.vectors[0].delta is not None) == (down == "delta" and version > 0)
                await exactly(a, task)
            await until(lambda: coordinator.engine.version == 3)

    monkeypatch.setattr(server, "LARGE_MODEL", 0)
    monkeypatch.setattr(run_models, "make_forms", noting)
    asyncio.run(rounds())
    assert threads == [True, False, False, False], "the first one's at the start"


@run_async
async def test_a_model_is_offered_as_the_difference_from_the_one_that_the_device_has(
    make_plan: PlanMaker,
) -> None:
    """On the same connection, on a later one, and from another process; from no model that is older
    than two."""
    plan = make_plan(encoding__down="delta", round__goal=1, round__over_selection=4)
    models = []
    async with fleet(plan) as (coordinator, join):
        a = await join("a")
        for version in range(3):
            task = await a.task()
            (reference,), model = task.vectors, coordinator.run.models.newest.model
            assert reference.sha256 == digest(model)
            if version:
                assert reference.delta is not None
                assert reference.delta.base == digest(models[-1])
                content = await a.fetch(reference.delta.sha256)
                assert len(content) == reference.delta.size < model.nbytes
                assert apply_delta(models[-1].tobytes(), content) == model.tobytes()
            else:
                assert reference.delta is None
            models.append(model.copy())
            await exactly(a, task)
        assert (await a.task()).vectors[0].delta is not None
        for held, base in (
            (models[1], digest(models[1])),
            (models[0], None),
            (np.zeros(3, np.float32), None),
        ):
            peer = await joined(join, f"b{held[0]}", models=(digest(held),))
            (reference,) = (await peer.task()).vectors
            assert (reference.delta and reference.delta.base) == base
    async with fleet(plan) as (coordinator, join):
        a = await joined(join, "a", models=(digest(models[2]),))
        (reference,) = (await a.task()).vectors
        assert reference.delta is not None
        content = await a.fetch(reference.delta.sha256)
        assert (
            apply_delta(models[2].tobytes(), content)
            == coordinator.run.models.newest.model.tobytes()
        )


@run_async
async def test_a_top_k_task_names_the_task_whose_residual_it_goes_on_from(
    make_plan: PlanMaker,
) -> None:
    """The last one that counted, over a restart too; with another kind of encoding none, and none
    after it."""
    encoding = find_encoding("topk-0.3")
    plan = make_plan(encoding__up=encoding.name, round__goal=1)
    async with fleet(plan) as (_, join):
        a = await joined(join, "a")
        first = await a.task()
        assert first.kept is None
        assert isinstance(await upload(a, first, encoding.encode(VECTOR), encoding), Accepted)
        assert (await a.task()).kept == first.task
    async with fleet(plan) as (_, join):
        assert (await (await joined(join, "a")).task()).kept == first.task
    async with fleet(make_plan(encoding__up="int8", round__goal=1)) as (_, join):
        assert (await (await joined(join, "a")).task()).kept is None
    async with fleet(plan) as (_, join):
        assert (await (await joined(join, "a")).task()).kept is None
