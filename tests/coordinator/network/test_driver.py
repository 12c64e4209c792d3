"""Chunks over real sockets: most are handled as they are read, some wait in a queue behind other messages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.network.connection import Connection
from fleetlearn_coordinator.network.driver import Driver
from fleetlearn_protocol import Code
from fleetlearn_protocol.frames import pack_chunk, pack_chunks
from fleetlearn_protocol.messages import MAX_REFUSALS, Accepted, Grant, Refused, Uploaded
from peers import PlanMaker, fleet, report_of, update_of
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol

from benchmarks._raw_peer import BINARY, TEXT, frame, open_stream


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


@run_async
async def test_what_belongs_to_a_connection_is_freed_when_it_ends(make_plan: PlanMaker) -> None:
    """However it ends. The garbage collector runs rarely: the memory of thousands would stay, some of it for ever."""
    async with fleet(make_plan()) as (coordinator, join):
        host = coordinator.host
        gc.collect()
        gc.disable()
        try:
            leaves, vanishes, breaks_the_protocol, is_sent_away = [await join(name) for name in "abcd"]
            _, no_websocket = await open_stream(host.address)
            no_websocket.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await leaves.connection.close()
            vanishes.connection.transport.abort()
            breaks_the_protocol.connection.transport.write(b"\xff\xff" + bytes(12))
            for _ in range(MAX_REFUSALS + 1):
                is_sent_away.connection.transport.write(frame(TEXT, b"{}"))
            with suppress(ConnectionClosed):
                while True:
                    await is_sent_away.connection.recv()
            while host.connections:
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # the transports' last call
            kinds = (Connection, Driver, Conversation, ServerProtocol)
            assert [each for each in gc.get_objects() if type(each) in kinds] == []
        finally:
            gc.enable()
            no_websocket.close()
