"""Chunks over real sockets: most are handled as they are read, some wait in a queue behind other messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fleetlearn_protocol import Code
from fleetlearn_protocol.frames import pack_chunk, pack_chunks
from fleetlearn_protocol.messages import Accepted, Grant, Refused, Uploaded
from peers import PlanMaker, fleet, report_of, update_of

from benchmarks._raw_peer import BINARY, TEXT, frame


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own."""

    def run(make_plan: PlanMaker) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test(make_plan)

        asyncio.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


@run_async
async def test_a_chunk_may_come_in_fragments(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1)) as (coordinator, join):
        a = await join("a")
        task, update = await a.task(), update_of(1.0)
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        first, *others = pack_chunks(grant.transfer, update.tobytes())
        await a.connection.send([first[:10], first[10:1000], first[1000:]])
        for chunk in others:
            await a.send(chunk)
        await a.send(Uploaded(task.task))
        assert await a.expect(Accepted) == Accepted(task.task)
        assert coordinator.engine.version == 1


@run_async
async def test_a_chunk_does_not_overtake_a_message(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (_, join):
        a = await join("a")
        await a.task()
        for _ in range(5):  # each pair arrives in one read
            a.connection.transport.write(frame(TEXT, b"{}") + frame(BINARY, pack_chunk(7, 0, bytes(4))))
        codes = [(await a.expect(Refused)).code for _ in range(10)]
        assert codes == 5 * [Code.BAD_MESSAGE, Code.OUT_OF_TURN]
