"""Chunks over real sockets: most are handled as they are read, some wait in a queue behind other
messages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.network.connection import DeviceConnection
from fleetlearn_coordinator.network.driver import ConnectionDriver
from fleetlearn_protocol import Code
from fleetlearn_protocol.frames import pack_chunk, pack_chunks
from fleetlearn_protocol.messages import MAX_REFUSALS, Accepted, Grant, Refused, Uploaded
from peers import PlanMaker, fleet, report_of, update_of
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

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
            a.connection.transport.write(
                frame(TEXT, b"{}") + frame(BINARY, pack_chunk(7, 0, bytes(4)))
            )
        codes = [(await a.expect(Refused)).code for _ in range(10)]
        assert codes == 5 * [Code.BAD_MESSAGE, Code.OUT_OF_TURN]


@run_async
async def test_what_belongs_to_a_connection_is_freed_when_it_ends(make_plan: PlanMaker) -> None:
    """However it ends. The garbage collector runs rarely: the memory of thousands would stay, some
    of it for ever."""
    async with fleet(make_plan()) as (coordinator, join):
        host = coordinator.host
        gc.collect()
        gc.disable()
        try:
            leaves, vanishes, breaks_the_protocol, is_sent_away = [
                await join(name) for name in "abcd"
            ]
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
            kinds = (DeviceConnection, ConnectionDriver, Conversation, ServerProtocol)
            assert [each for each in gc.get_objects() if type(each) in kinds] == []
        finally:
            gc.enable()
            no_websocket.close()


def test_two_processes_that_speak_as_one_device_are_named(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with fleet(make_plan()) as (coordinator, join):
            first = await join("roof-7")
            second = await join("roof-7")
            assert await first.closed() == 1008
            third = await join("roof-7")
            assert await second.closed() == 1008
            while len(coordinator.host.connections) > 1:
                await asyncio.sleep(0.01)
            assert not third.connection.close_code

    asyncio.run(asyncio.wait_for(test(), 30))
    (line,) = (text for text in caplog.messages if "two processes" in text)
    assert line.startswith(
        "device roof-7: two processes speak as this device, from 127.0.0.1 and from 127.0.0.1: "
        "each ends"
    )


def test_a_device_that_connects_again_is_not_taken_for_two(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its network has changed: the connection before is open here, and nobody is at its other
    end."""

    async def test() -> None:
        async with fleet(make_plan()) as (coordinator, join):
            first = await join("roof-7")
            first.connection.transport.pause_reading()
            await join("roof-7")
            first.connection.transport.abort()
            while len(coordinator.host.connections) > 1:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))
    assert "two processes" not in caplog.text


@pytest.mark.parametrize(("version", "who"), [(0, "device"), (7, "coordinator")])
def test_another_version_of_the_protocol_is_named_once(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture, version: int, who: str
) -> None:
    caplog.set_level("INFO", "fleetlearn")

    async def test() -> None:
        async with fleet(make_plan()) as (_, join):
            for _ in range(3):
                peer = await join("roof-7", check_in=False)
                await peer.send(
                    f'{{"type":"check-in","protocol":{version},"device":"roof-7","examples":10}}'
                )
                assert (await peer.expect(Refused)).code == Code.BAD_VERSION

    asyncio.run(asyncio.wait_for(test(), 30))
    (line,) = (text for text in caplog.messages if "of the protocol" in text)
    assert line == (
        "device (not checked in, at 127.0.0.1): roof-7 was refused: the device speaks version "
        f"{version} of the protocol, the coordinator versions 1 to 3; update the {who}'s fleetlearn"
    )


def test_a_websocket_of_another_protocol_is_named(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")

    async def test() -> None:
        async with fleet(make_plan()) as (coordinator, _):
            with pytest.raises(InvalidStatus, match="400"):
                await connect(coordinator.host.address, subprotocols=[Subprotocol("fleetlearn.v7")])

    asyncio.run(asyncio.wait_for(test(), 30))
    assert (
        "a connection of 127.0.0.1 was refused: it is no WebSocket of this protocol (subprotocols "
        "offered: fleetlearn.v7; expected: fleetlearn.v1). A device with another version of "
        "fleetlearn, or another program, connects there"
    ) in caplog.messages
