"""What one peer can cost the coordinator: bytes sent by hand over real sockets, and counters
instead of clocks."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.conversation import limits
from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.conversation.limits import Bucket
from fleetlearn_coordinator.network import connection as connections
from fleetlearn_coordinator.network import listener, process_settings
from fleetlearn_coordinator.network.connection import DeviceConnection
from fleetlearn_coordinator.network.frame_counter import FrameCounter
from fleetlearn_coordinator.network.peer_log import FewLines
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import (
    MAX_REFUSALS,
    CheckIn,
    ComeBack,
    Failed,
    Fetch,
    Heartbeat,
    Refused,
)
from peers import PlanMaker, fleet, plan_text, serving, update_of
from processes import processes, status_of, wait_for
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin, Subprotocol

from benchmarks._raw_peer import BINARY, CONTINUATION, PING, TEXT, RawPeer, frame, open_stream, text

Test = Callable[..., Coroutine[Any, Any, None]]


WIRES: list[RawPeer] = []
"""Of the test that runs; all are cut off at its end."""


async def knock(address: str) -> RawPeer:
    """A connection without any request."""
    WIRES.append(RawPeer(*await open_stream(address)))
    return WIRES[-1]


async def wire_to(address: str) -> RawPeer:
    """A WebSocket connection that has not checked in."""
    WIRES.append(await RawPeer.connect(address))
    return WIRES[-1]


async def bounded(test: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(30):
            return await test
    finally:
        while WIRES:
            WIRES.pop().abort()
        await asyncio.sleep(0)  # so that the aborts are carried out


def run_async(test: Test) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own."""

    def run(make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(bounded(test(make_plan, monkeypatch)))

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def send_until_ended(wire: RawPeer, data: bytes) -> None:
    """Send the same bytes as long as the connection is there."""
    with suppress(OSError):
        while True:
            await wire.send(data)
            await asyncio.sleep(0)


async def attacker(
    coordinator: RunServer, name: str = "attacker"
) -> tuple[RawPeer, DeviceConnection]:
    """A peer that has checked in, and the coordinator's end of it."""
    wire = await wire_to(coordinator.host.address)
    await wire.check_in(name)
    await until(lambda: name in coordinator.host.devices)
    return wire, coordinator.host.devices[name].connection


# Web pages


@run_async
async def test_a_web_page_is_refused_unless_the_plan_names_it(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    async with serving(
        make_plan(), origins=["https://good.example", "http://localhost:8000"]
    ) as coordinator:
        protocols = [Subprotocol("fleetlearn.v1")]
        for origin in (
            "https://evil.example",
            "https://good.example:8000",
            "http://good.example",
            "null",
            "",
        ):
            with pytest.raises(InvalidStatus) as caught:
                await connect(
                    coordinator.host.address, subprotocols=protocols, origin=Origin(origin)
                )
            response = caught.value.response
            assert response.status_code == 403
            assert response.body is not None
            assert b"origins, in the coordinator's service file" in response.body
        for origin in ("https://good.example", "http://localhost:8000"):
            async with connect(
                coordinator.host.address, subprotocols=protocols, origin=Origin(origin)
            ):
                pass
        async with connect(coordinator.host.address, subprotocols=protocols):  # a device is no page
            pass
    async with serving(make_plan()) as coordinator:
        with pytest.raises(InvalidStatus, match="403"):
            await connect(
                coordinator.host.address,
                subprotocols=protocols,
                origin=Origin("https://good.example"),
            )


# Memory


@run_async
async def test_pongs_that_nobody_reads_are_bounded(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """Nothing is read from the peer while they pile up, and the peer is ended when that does not
    change."""
    patch.setattr(limits, "MESSAGE_RATE", 1e9)
    patch.setattr(listener, "MESSAGE_RATE", 1e9)
    patch.setattr(connections, "BYTE_RATE", 1e9)
    async with serving(make_plan()) as coordinator:
        wire, theirs = await attacker(coordinator)
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        driver = coordinator.host.devices["attacker"]
        largest = 0
        while theirs.stalled is None:
            wire.writer.write(100 * frame(PING, bytes(125)))
            await asyncio.sleep(0)
            largest = max(largest, theirs.transport.get_write_buffer_size())
        assert not theirs.transport.is_reading()
        assert largest <= limits.WRITE_PAUSE + limits.FRAMES_PER_TURN * 127
        assert driver.overdue(theirs.stalled + 29.0, 1e9) is None
        patch.setattr("fleetlearn_coordinator.network.driver.SEND_TIMEOUT", -1.0)
        await until(lambda: not coordinator.host.devices)


@run_async
async def test_a_peer_that_reads_again_is_read_from_again(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(listener, "MESSAGE_RATE", 1e9)
    patch.setattr(connections, "BYTE_RATE", 1e9)
    async with serving(make_plan()) as coordinator:
        wire, theirs = await attacker(coordinator)
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while theirs.stalled is None:
            wire.writer.write(100 * frame(PING, bytes(125)))
            await asyncio.sleep(0)
        wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
        reading = asyncio.ensure_future(wire.swallow())
        await until(lambda: theirs.transport.is_reading() and theirs.stalled is None)
        reading.cancel()


@run_async
async def test_a_message_has_a_bounded_number_of_fragments(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(listener, "MESSAGE_RATE", 1e9)
    async with serving(make_plan()) as coordinator:
        wire, theirs = await attacker(coordinator)
        empty = frame(CONTINUATION, fin=False)
        await wire.send(frame(TEXT, b"{", fin=False) + (limits.MAX_FRAGMENTS - 2) * empty)
        await wire.send(frame(CONTINUATION, b"}"))
        assert isinstance(await hear(wire, Refused), Refused)  # "{}" is no message
        await wire.send(frame(TEXT, b"{", fin=False) + limits.MAX_FRAGMENTS * empty)
        await until(lambda: not coordinator.host.devices)
        assert theirs.protocol.close_sent is not None
        assert theirs.protocol.close_sent.code == 1009


@run_async
async def test_an_endless_fragmented_message_is_bounded_in_bytes(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(listener, "MESSAGE_RATE", 1e9)
    patch.setattr(connections, "BYTE_RATE", 1e9)
    async with serving(make_plan()) as coordinator:
        wire, theirs = await attacker(coordinator)
        await wire.send(frame(TEXT, bytes(1000), fin=False))
        await send_until_ended(wire, frame(CONTINUATION, bytes(10_000), fin=False))
        assert theirs.protocol.close_sent is not None
        assert theirs.protocol.close_sent.code == 1009
        assert theirs._frames.fragments <= limits.LARGEST_MESSAGE // 10_000 + limits.FRAMES_PER_TURN


@run_async
async def test_a_request_that_does_not_end_is_cut_off(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    async with serving(make_plan()) as coordinator:
        wire = await knock(coordinator.host.address)
        wire.writer.write(b"GET / HTTP/1.1\r\nX: " + limits.HANDSHAKE_BYTES * b"x")
        assert await read_to_end(wire.reader) == b""


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def hear(wire: RawPeer, kind: type) -> Any:
    while not isinstance(message := await wire.hear(), kind):
        pass
    return message


# Fairness


@run_async
async def test_a_message_waits_for_a_few_of_each_other_connection(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """However many wait, FRAMES_PER_TURN of one connection are handled, then it is the turn of the
    others."""
    patch.setattr(listener, "MESSAGE_RATE", 1e9)
    handled: list[str] = []
    handle = Conversation._handle

    def note(self: Conversation, message: str | bytes) -> None:
        handled.append(self.device or "")
        handle(self, message)

    async with serving(make_plan()) as coordinator:
        wire, theirs = await attacker(coordinator)
        honest, ours = await attacker(coordinator, "honest")
        theirs.messages.tokens = ours.messages.tokens = 1e9
        patch.setattr(Conversation, "_handle", note)
        # both are in the sockets before the first is handled
        wire.writer.write(1000 * text(Heartbeat()))
        honest.writer.write(20 * text(Heartbeat()))
        await until(lambda: handled.count("honest") == 20)
    last = len(handled) - handled[::-1].index("honest")
    turns = [len(list(run)) for _, run in itertools.groupby(handled[:last])]
    assert max(turns) <= limits.FRAMES_PER_TURN
    assert last <= 2 * (20 + limits.FRAMES_PER_TURN)


@pytest.mark.parametrize(
    "data",
    [
        text(Heartbeat()),
        frame(PING, b"x"),
        text(Failed("t1-1", "diverged")),
        frame(CONTINUATION + 10),
    ],
    ids=["heartbeats", "pings", "failed", "pongs"],
)
def test_frames_beyond_the_budget_are_not_read(make_plan: PlanMaker, data: bytes) -> None:
    """A clock that stands still, and no task: exactly the burst is handled, and the socket is not
    read from."""

    async def test() -> None:
        async with serving(make_plan(round__minimum=2)) as coordinator:
            wire, theirs = await attacker(coordinator)
            theirs.messages.rate = 1e-9
            left = int(theirs.messages.tokens)
            assert left <= limits.MESSAGE_BURST
            seen = CountingFeed(theirs)
            wire.writer.write(5000 * data)
            await until(lambda: theirs.messages.tokens < 1)
            for _ in range(20):
                await asyncio.sleep(0)
            assert seen.frames == left
            assert not theirs.transport.is_reading()
            wire.abort()

    asyncio.run(bounded(test()))


class CountingFeed:
    """Counts the frames that websockets is given on a connection."""

    def __init__(self, connection: DeviceConnection) -> None:
        self.frames = 0
        receive, counter = connection.protocol.receive_data, FrameCounter()

        def count(data: bytes | bytearray) -> None:
            self.frames += counter.advance(bytes(data), 0, 10**9, 10**9)[1]
            receive(data)

        connection.protocol.receive_data = count  # type: ignore[method-assign]


@run_async
async def test_bytes_beyond_the_budget_are_not_read(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(connections, "BYTE_RATE", 1e-9)
    async with serving(make_plan(round__minimum=2)) as coordinator:
        wire, theirs = await attacker(coordinator)
        theirs.incoming.tokens = 500_000.0
        chunk = frame(BINARY, b"\1" + bytes(3) + b"\1" + bytes(11 + 100_000))
        for _ in range(100):
            wire.writer.write(chunk)
        await until(lambda: theirs.incoming.tokens < 1 and not theirs.transport.is_reading())
        refusals = coordinator.host.devices["attacker"].conversation._refusals
        assert refusals <= 500_000 // 100_000 + limits.RECEIVE // 100_000 + 1
        wire.abort()


@run_async
async def test_who_stays_over_the_budget_is_told_once_and_ended(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(connections, "PATIENCE", 1.0)
    async with serving(make_plan()) as coordinator:
        wire, theirs = await attacker(coordinator)
        theirs.messages.tokens = 1.0
        wire.writer.write(1000 * text(Heartbeat()))
        refused = await hear(wire, Refused)
        assert (refused.code, refused.task) == (Code.BUSY, None)
        opcode, payload = await wire.receive()
        assert (opcode, int.from_bytes(payload[:2], "big")) == (8, 1008)
        assert not theirs.transport.is_reading()
        await until(lambda: not coordinator.host.connections)


@run_async
async def test_a_device_at_work_is_never_slowed(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """60 rounds of a device that needs no time to train: its budgets never run out, since tasks
    renew them."""
    waits: list[float] = []
    budget = DeviceConnection._budget
    patch.setattr(
        DeviceConnection, "_budget", lambda self: waits.append(wait := budget(self)) or wait
    )
    patch.setattr(listener, "MESSAGE_RATE", 1e-9)
    patch.setattr(connections, "BYTE_RATE", 1e-9)
    patch.setattr(connections, "DOWNLOAD_RATE", 1e-9)
    async with fleet(make_plan(round__goal=1)) as (_, join):
        a = await join("a")
        for number in range(60):
            task = await a.task()
            await a.fetch(task.vector("model").sha256)
            await a.upload(task, update_of(number / 1000))
    assert len(waits) > 60
    assert not any(waits)


@run_async
async def test_a_device_that_fetches_too_much_waits(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(connections, "DOWNLOAD_RATE", 1e-9)
    async with fleet(make_plan(round__minimum=2)) as (coordinator, join):
        a = await join("a")
        size, budget = (
            coordinator.run.models.newest.model.nbytes,
            coordinator.host.devices["a"].connection.downloads.tokens,
        )
        whole = int(budget // size)
        for _ in range(whole):
            await a.fetch(coordinator.run.models.newest.digest)
        await until(lambda: coordinator.host.devices["a"].download is None)
        sent = coordinator.run.bytes_down
        await a.send(Fetch(coordinator.run.models.newest.digest))
        await a.send("{}")
        await a.expect(Refused)  # the fetch was handled before, and has not begun
        assert coordinator.host.devices["a"].download is not None
        assert coordinator.run.bytes_down == sent
        coordinator.host.devices["a"].connection.allow(0, size, 2 * size)


# The end of a connection


@run_async
async def test_after_too_many_refusals_nothing_is_read_or_handled(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(listener, "MESSAGE_RATE", 1e9)
    async with serving(make_plan()) as coordinator:
        wire, theirs = await attacker(coordinator)
        conversation = coordinator.host.devices["attacker"].conversation
        wire.writer.write(100 * frame(TEXT, b"{}"))
        await until(lambda: conversation.over)
        assert conversation._refusals == MAX_REFUSALS + 1
        assert not theirs.transport.is_reading()
        for _ in range(MAX_REFUSALS + 1):
            await hear(wire, Refused)
        opcode, _ = await wire.receive()
        assert opcode == 8
        await until(lambda: not coordinator.host.connections)
        assert conversation._refusals == MAX_REFUSALS + 1


@run_async
async def test_what_websockets_ends_is_not_read_on(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    for data in (
        b"\x82\xff" + (1 << 33).to_bytes(8, "big") + bytes(4),
        frame(3),
        frame(TEXT, b"\xff\xfe") + frame(PING),
    ):
        async with serving(make_plan()) as coordinator:
            wire, theirs = await attacker(coordinator)
            await wire.send(data)
            await until(lambda theirs=theirs: theirs.protocol.close_sent is not None)  # type: ignore[misc]
            wire.writer.write(bytes(1000))
            await until(lambda theirs=theirs: not theirs.transport.is_reading())  # type: ignore[misc]
            wire.abort()


# The log


def test_lines_are_counted_beyond_a_few(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("fleetlearn.test.few")
    few = FewLines(rate=1e-9, burst=3)
    logger.addFilter(few)
    with caplog.at_level(logging.INFO, logger.name):
        for number in range(10):
            logger.info("line %d %s", number, "x" * 10_000)
        assert len(caplog.messages) == 3
        assert max(map(len, caplog.messages)) <= limits.LONGEST_LINE + 3
        few.bucket.tokens = 1.0
        logger.info("again")
    assert caplog.messages[-1] == "again (and 7 more lines about connections, left out)"


def test_a_connection_has_few_lines(make_plan: PlanMaker, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(make_plan()) as coordinator:
            wire, theirs = await attacker(coordinator)
            conversation = coordinator.host.devices["attacker"].conversation
            theirs.messages.tokens = 1e9
            wire.writer.write(
                500 * text(Failed("t1-1", "diverged", "x" * 1000)) + frame(TEXT, b"{}")
            )
            await until(lambda: conversation._refusals == 1)
            wire.abort()
            await until(lambda: not coordinator.host.connections)

    with caplog.at_level(logging.INFO, "fleetlearn"):
        asyncio.run(bounded(test()))
    lines = [line for line in caplog.messages if "device attacker" in line]
    assert len(lines) <= limits.LINES_OF_A_CONNECTION + 2
    assert any("more lines about its connection were left out" in line for line in lines)


# Places and descriptors


@run_async
async def test_connections_that_do_not_check_in_are_bounded(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """The ninth waits to be accepted; devices that have checked in take none of the places."""
    patch.setattr(process_settings, "NEWCOMERS", 8)
    async with fleet(make_plan()) as (coordinator, join):
        await join("a")
        await join("b")
        idle = [await wire_to(coordinator.host.address) for _ in range(8)]
        waiting = asyncio.ensure_future(wire_to(coordinator.host.address))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert len(coordinator.host.connections) == 10
        idle.pop().abort()
        idle.append(await waiting)
        for wire in idle:
            wire.abort()


@run_async
async def test_who_does_not_check_in_in_time_is_ended(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr("fleetlearn_coordinator.conversation.conversation.CHECK_IN_TIMEOUT", 0.0)
    async with serving(make_plan()) as coordinator:
        await wire_to(coordinator.host.address)
        await until(lambda: not coordinator.host.connections)
        # not even a request came
        assert await read_to_end((await knock(coordinator.host.address)).reader) == b""


@run_async
async def test_short_lives_are_accepted_at_a_rate(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(listener, "SHORT_LIFE_RATE", 1e-9)
    patch.setattr(listener, "SHORT_LIFE_BURST", 5)
    async with serving(make_plan()) as coordinator:
        for _ in range(5):
            wire = await wire_to(coordinator.host.address)
            wire.abort()
            await until(lambda: not coordinator.host.connections)
        waiting = asyncio.ensure_future(wire_to(coordinator.host.address))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()


@run_async
async def test_devices_that_come_after_the_end_are_not_counted(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(listener, "SHORT_LIFE_RATE", 1e-9)
    patch.setattr(listener, "SHORT_LIFE_BURST", 5)
    async with fleet(make_plan(stop__rounds=1, round__goal=1)) as (coordinator, join):
        await (await join("a")).do_round(update_of(1.0))
        assert await coordinator.done
        for number in range(10):
            late = await join(f"late-{number}", check_in=False)
            await late.send(CheckIn(1, late.name, 10))
            assert (await late.expect(ComeBack)).reason == "finished"
            assert await late.closed() == 1000


def test_the_descriptors_are_shared_out() -> None:
    def places(limit: int, devices: int, files: int) -> process_settings.DescriptorShares:
        code = (
            "import resource as r; from fleetlearn_coordinator.network import process_settings;"
            f"r.setrlimit(r.RLIMIT_NOFILE, ({limit}, {limit}));"
            f"print(*process_settings.places({devices}, files={files}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        return process_settings.DescriptorShares(*map(int, done.stdout.split()))

    assert places(1024, 20_000, 64) == (1024, 1024 - 128 - 64 - limits.OTHER_FILES, 128)
    assert places(1024, 100, 64) == (1024, 100, 128)
    assert places(128, 100, 64).devices < 1


def limited(plan: Path, limit: int) -> list[str]:
    code = f"import resource as r, runpy, sys; r.setrlimit(r.RLIMIT_NOFILE, ({limit}, {limit})); "
    code += (
        "sys.argv.insert(1, 'serve'); runpy.run_module('fleetlearn_coordinator', "
        "run_name='__main__')"
    )
    return ["-c", code, str(plan)]


def test_too_few_descriptors_for_a_round_are_an_error(tmp_path: Path, bundle_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(bundle_path, tmp_path / "run", round__goal=500))
    done = subprocess.run(
        [sys.executable, *limited(plan, 512)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    for words in (
        "may open 512 files (RLIMIT_NOFILE)",
        "max_connections = 20000",
        "ulimit -n",
        "500 devices",
    ):
        assert words in said


def test_at_the_limit_of_descriptors_the_process_goes_on(tmp_path: Path, bundle_path: Path) -> None:
    """More sockets than it may open knock; a device that was there before does its rounds, and
    later ones come in."""
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(bundle_path, tmp_path / "run", round__goal=1))
    with processes(tmp_path) as run:
        process = run.coordinator(plan, *limited(plan, 256))
        wait_for(
            lambda: bool((s := status_of(tmp_path / "run")) and s.running and s.address),
            "the coordinator",
        )
        status = status_of(tmp_path / "run")
        assert status is not None
        host, port = str(status.address).removeprefix("ws://").split(":")
        knocking = [socket.create_connection((host, int(port))) for _ in range(300)]
        wait_for(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) > 40, "connections")  # noqa: PTH208
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 200  # noqa: PTH208
        for one in knocking:
            one.close()

        async def work() -> None:
            async with asyncio.timeout(30):
                wire = await wire_to(str(status.address))
                await wire.check_in("late")
                wire.abort()

        asyncio.run(bounded(work()))
        assert process.poll() is None
        assert "warning" in run.log("coordinator").lower()
        assert run.log("coordinator").count("\n") < 30


def test_without_a_descriptor_for_it_a_connection_waits(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """EMFILE from accept: one line, no spinning, and the connection is accepted when there is a
    descriptor again."""

    async def test() -> None:
        async with serving(make_plan()) as coordinator:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            mine = socket.socket()
            mine.setblocking(False)
            hoard = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
            try:
                with suppress(OSError):  # until there is none left
                    while True:
                        hoard.append(os.open(os.devnull, os.O_RDONLY))
                host, port = coordinator.host.address.removeprefix("ws://").split(":")
                await asyncio.get_running_loop().sock_connect(mine, (host, int(port)))
                await until(
                    lambda: any("no connection can be accepted" in line for line in caplog.messages)
                )
                for _ in range(100):
                    await asyncio.sleep(0)
            finally:
                for one in hoard:
                    os.close(one)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            mine.send(b"GET / HTTP/1.1\r\n\r\n")
            assert (await asyncio.get_running_loop().sock_recv(mine, 100)).startswith(
                b"HTTP/1.1 426"
            )
            mine.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(bounded(test()))
    assert sum("no connection can be accepted" in line for line in caplog.messages) == 1
    assert len(caplog.messages) < 10


# Stopping


def test_a_stop_takes_five_seconds_at_most_whatever_peers_do(
    tmp_path: Path, bundle_path: Path
) -> None:
    """Some do not read what fills their buffers, some go on sending, some are in the handshake."""
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(bundle_path, tmp_path / "run", round__goal=30))

    async def attack(address: str, pid: int) -> float:
        stuck = [await wire_to(address) for _ in range(6)]
        for wire in stuck:
            await wire.check_in()
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        files = json.loads((bundle_path / "manifest.json").read_text())["files"]
        fetch = text(Fetch(files["graphs/train.onnx"]["sha256"]))
        for wire in stuck[:3]:
            wire.writer.write(100 * fetch)
        for wire in stuck[3:]:
            wire.writer.write(100_000 * frame(PING, bytes(125)))
        await wire_to(address)
        await knock(address)
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGTERM)
        begin = time.monotonic()
        while process.poll() is None:
            await asyncio.sleep(0.01)
        took = time.monotonic() - begin
        for wire in stuck:
            wire.abort()
        return took

    with processes(tmp_path) as run:
        process = run.coordinator(plan)
        wait_for(
            lambda: bool((s := status_of(tmp_path / "run")) and s.running and s.address),
            "the coordinator",
        )
        status = status_of(tmp_path / "run")
        assert status is not None
        took = asyncio.run(bounded(attack(str(status.address), process.pid)))
        assert process.returncode == 0, run.log("coordinator")
        assert took <= 5.0


# The parts


def test_the_counter_finds_the_ends_of_frames_however_they_are_cut() -> None:
    small = [frame(TEXT, b"a" * size) for size in (0, 1, 125, 126, 300)]
    large = [frame(BINARY, bytes(limits.LARGE_FRAME)), frame(BINARY, bytes(70_000))]
    data = b"".join([*small, *large, *small])
    for cut in (1, 2, 3, 7, 1000, len(data)):
        counter, counted = FrameCounter(), 0
        for begin in range(0, len(data), cut):
            piece = data[begin : begin + cut]
            end, more = counter.advance(piece, 0, 10**9, 10**9)
            assert end == len(piece)
            counted += more
        assert counted == 2 * len(small)
    counter, at, ends = FrameCounter(), 0, []
    while at < len(data):
        at, _ = counter.advance(data, at, 1, 10**9)
        ends.append(at)
    assert ends == [sum(map(len, [*small, *large, *small][: n + 1])) for n in range(12)]


def test_a_bucket_fills_at_its_rate_up_to_its_burst() -> None:
    bucket = Bucket(rate=2.0, burst=10.0, now=0.0)
    bucket.tokens -= 10
    assert bucket.wait(0.0, 4) == 2.0
    assert bucket.wait(0.5) == 0.0
    bucket.wait(100.0)
    assert bucket.tokens == 10.0
    bucket.raise_to(30)
    bucket.wait(200.0)
    assert bucket.tokens == 30.0
