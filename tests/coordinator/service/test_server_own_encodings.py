"""Updates in own encodings, over real connections: who is asked for them, and which bytes are
refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import register
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_protocol import BlockFormat, Code, encodings, extensions
from fleetlearn_protocol.encodings import FAMILIES, FLOAT32, OWN_FAMILY, Encoding, find_encoding
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import Accepted, Grant, OwnEncoding, Refused, Task, Uploaded
from own_formats import as_own, signs
from peers import SIZE, Connect, Peer, PlanMaker, fleet, report_of

VECTOR = np.linspace(-1, 3, SIZE, dtype=np.float32)
PAIR: dict[str, Any] = {"round__goal": 2, "round__minimum": 2, "round__grace": 60.0}
KNOWS = {"encodings": (*FAMILIES, OWN_FAMILY), "functions": ("thin",)}


@pytest.fixture(autouse=True)
def thin() -> Iterator[None]:
    with extensions.apart():
        register("encoding", "thin", signs)
        yield


async def joined(join: Connect, name: str, **stated: Any) -> Peer:
    peer = await join(name, check_in=False)
    await peer.check_in(None, **stated)
    return peer


async def upload(peer: Peer, task: Task, content: Any, encoding: Encoding) -> object:
    """Report the bytes, send them, and return the coordinator's answer."""
    report = report_of(task, VECTOR)
    part = encoding.part("update", content)
    await peer.send(msgspec.structs.replace(report, parts=(part,)))
    answer = await peer.receive()
    if not isinstance(answer, Grant):
        return answer
    most = 4096 // encoding.block_bytes * encoding.block_bytes
    for offset in range(answer.offset, len(content), most):
        await peer.send(pack_chunk(answer.transfer, offset, content[offset : offset + most]))
    await peer.send(Uploaded(task.task))
    return await peer.receive()


def test_who_is_asked_for_it(make_plan: PlanMaker, caplog: pytest.LogCaptureFixture) -> None:
    """Who does not know the run's encoding is asked for float32, and the log says so once."""

    async def run() -> None:
        plan = make_plan(encoding__up="thin", encoding__parameters={"block": 64}, round__goal=4)
        async with fleet(plan) as (coordinator, join):
            before = coordinator.run.models.newest.model.copy()
            peers = [
                await joined(join, "new", **KNOWS),
                await joined(join, "old", encodings=FAMILIES),
                await joined(join, "other", **{**KNOWS, "functions": ("thick",)}),
                await joined(join, "web", functions=("thin",), software="web 1"),
            ]
            tasks = [await peer.task() for peer in peers]
            own = find_encoding(tasks[0].parts["update"])
            assert tasks[0].encoding == OwnEncoding("thin", {"block": 64.0})
            assert own.name.startswith("own-12-")
            for task in tasks[1:]:
                assert (task.parts["update"], task.encoding) == ("float32", None)
            content = own.encode(VECTOR)
            assert isinstance(await upload(peers[0], tasks[0], content, own), Accepted)
            for peer, task in zip(peers[1:], tasks[1:], strict=True):
                answer = await upload(peer, task, FLOAT32.encode(VECTOR), FLOAT32)
                assert isinstance(answer, Accepted)
            async with asyncio.timeout(10):
                while coordinator.engine.version == 0:
                    await asyncio.sleep(0.005)
            meant = own.decode(content, SIZE).astype(np.float64)
            mean = (meant + 3 * VECTOR.astype(np.float64)) / 4
            np.testing.assert_array_equal(
                coordinator.run.models.newest.model, (before + mean).astype(np.float32)
            )

    with caplog.at_level(logging.INFO, "fleetlearn.coordinator"):
        asyncio.run(run())
    said = [line for line in caplog.messages if "does not know encoding.up" in line]
    assert said == [
        'device old does not know encoding.up = "thin" (its owner allows no function; '
        "--allow-function thin=MODULE:FUNCTION allows it): it sends float32, and so does each "
        "device that does not know it"
    ]


@pytest.mark.parametrize(
    ("place", "value"), [(0, np.float32(-1)), (0, np.float32(np.nan)), (40, np.float32(-2))]
)
def test_bytes_that_it_cannot_read_are_refused(
    make_plan: PlanMaker, place: int, value: np.float32
) -> None:
    """The device's task fails, and the round is another device's."""

    async def run() -> None:
        plan = make_plan(encoding__up="thin", encoding__parameters={"block": 64}, round__goal=1)
        async with fleet(plan) as (coordinator, join):
            bad = await joined(join, "bad", **KNOWS)
            task = await bad.task()
            own = find_encoding(task.parts["update"])
            content = np.array(own.encode(VECTOR))
            scales = content[: -(own.size(SIZE) % 12) or None].reshape(-1, 12)[:, :4]
            scales[place] = np.frombuffer(value.tobytes(), np.uint8)
            answer = await upload(bad, task, content.data, own)
            assert isinstance(answer, Refused)
            assert answer.code == Code.BAD_ENCODING
            assert "encoding.up = 'thin' refuses the bytes: ValueError: a scale" in answer.text
            good = await joined(join, "good", **KNOWS)
            task = await good.task()
            assert isinstance(await upload(good, task, own.encode(VECTOR), own), Accepted)
            async with asyncio.timeout(10):
                while coordinator.engine.version == 0:
                    await asyncio.sleep(0.005)

    asyncio.run(run())


def test_another_size_or_encoding_is_refused_when_it_is_announced(make_plan: PlanMaker) -> None:
    async def run() -> None:
        async with fleet(make_plan(encoding__up="thin", round__goal=1)) as (_, join):
            for name, make in [
                ("short", lambda own: (own.encode(VECTOR)[:-1], own)),
                ("int8", lambda own: (find_encoding("int8").encode(VECTOR), find_encoding("int8"))),
            ]:
                peer = await joined(join, name, **KNOWS)
                task = await peer.task()
                own = find_encoding(task.parts["update"])
                assert isinstance(await upload(peer, task, *make(own)), Refused)

    asyncio.run(run())


def test_own_code_that_fails_costs_one_update(make_plan: PlanMaker) -> None:
    """An error of the function is its device's fault, as far as the run can know."""
    made = as_own("int8")

    def decode(content: Any, n: int) -> Any:
        if content[0, -1] == 77:
            raise RuntimeError("a mistake")
        return made.decode(content, n)

    def fails() -> BlockFormat:
        return BlockFormat(made.block, made.size, made.encode, decode)

    async def run() -> None:
        register("encoding", "fails", fails)
        async with fleet(make_plan(encoding__up="fails", round__goal=1)) as (coordinator, join):
            for name, byte in (("bad", 77), ("good", 1)):
                peer = await joined(join, name, **{**KNOWS, "functions": ("fails",)})
                task = await peer.task()
                own = find_encoding(task.parts["update"])
                content = np.array(own.encode(VECTOR))
                content[own.block_bytes - 1] = byte
                answer = await upload(peer, task, content.data, own)
                assert isinstance(answer, Refused if byte == 77 else Accepted)
            async with asyncio.timeout(10):
                while coordinator.engine.version == 0:
                    await asyncio.sleep(0.005)

    asyncio.run(run())


def test_a_start_reads_accepted_updates_again(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other parameters the accepted update cannot be read: the start says what to do, and
    loses nothing."""
    plans = [
        make_plan(encoding__up="thin", encoding__parameters={"block": block}, **PAIR)
        for block in (64, 128)
    ]

    async def accepted(name: str) -> int:
        async with fleet(plans[0]) as (coordinator, join):
            peer = await joined(join, name, **KNOWS)
            if name == "a":
                await joined(join, "b", **KNOWS)
            task = await peer.task()
            own = find_encoding(task.parts["update"])
            assert isinstance(await upload(peer, task, own.encode(VECTOR), own), Accepted)
            if name == "b":
                async with asyncio.timeout(10):
                    while coordinator.engine.version == 0:
                        await asyncio.sleep(0.005)
            version: int = coordinator.engine.version
            return version

    async def start(plan: Any) -> None:
        async with fleet(plan):
            pass

    assert asyncio.run(accepted("a")) == 0
    monkeypatch.setattr(encodings, "_own", {})  # as in another process
    with pytest.raises(StoreError) as refused:
        asyncio.run(start(plans[1]))
    assert "is not known in this process" in refused.value.text
    assert "start with those until its round is over" in refused.value.text
    assert asyncio.run(accepted("b")) == 1


def test_a_function_that_refuses_what_it_took_stops_the_start(make_plan: PlanMaker) -> None:
    good = [True]

    def fickle() -> BlockFormat:
        made = as_own("int8")

        def decode(content: Any, n: int) -> Any:
            return made.decode(content, n) if good[0] else None

        return BlockFormat(made.block, made.size, made.encode, decode)

    async def run() -> None:
        async with fleet(make_plan(encoding__up="fickle", **PAIR)) as (_, join):
            peers = [
                await joined(join, name, **{**KNOWS, "functions": ("fickle",)}) for name in "ab"
            ]
            peer = peers[0]
            task = await peer.task()
            own = find_encoding(task.parts["update"])
            assert isinstance(await upload(peer, task, own.encode(VECTOR), own), Accepted)

    register("encoding", "fickle", fickle)
    asyncio.run(run())
    good[0] = False
    with pytest.raises(StoreError, match="another version of the function"):
        asyncio.run(run())
