"""`serve --gateways`, all of whose processes are replaced twice, one after the other, while devices
train and upload: no device fails, and the model is the undisturbed run's."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    Accepted,
    Cancel,
    ComeBack,
    Grant,
    Held,
    Refused,
    Task,
    Uploaded,
)
from gateway_processes import check_model, part_of, serve, write_run
from peers import Peer, report_of
from processes import Processes
from random_kills import update_for
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

SLOW = 0.5
"""Seconds that a slow device takes for a chunk of its update."""


class Fleet:
    """Devices that train for a while, and upload slowly. Whatever goes wrong ends the test, but the
    end of a connection with the code 1001: then a device connects again, and goes on."""

    def __init__(self, url: str, count: int, size: int) -> None:
        self.url, self.size = url, size
        self.names = [f"device-{number}" for number in range(count)]
        self.acknowledged: list[str] = []
        self.moved: Counter[str] = Counter()
        """What devices were doing when they were sent to another gateway."""
        self.went_on: list[int] = []
        """The offsets at which uploads went on, on another connection."""
        self.slow_uploads = asyncio.Event()
        """Set when a slow upload begins."""

    async def take_part(self, number: int) -> None:
        device = Device(self, number)
        while not await device.connect():
            await asyncio.sleep(0.1)


class Device:
    """One of them. Its task outlives its connections."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.name = fleet, f"device-{number}"
        self.slow = number % 2 == 0
        """Whether it uploads slowly, rather than trains slowly."""
        self.trains = 1.0 if self.slow else 2.0 * number
        """Seconds."""
        self.held: Task | None = None
        self.doing = "waiting"

    async def connect(self) -> bool:
        """Take part on one connection. Returns whether the training is finished."""
        try:
            async with connect(
                self.fleet.url,
                subprotocols=[Subprotocol(PROTOCOL_NAME)],
                compression=None,
                max_size=None,
            ) as connection:
                peer, held = Peer(self.name, connection), self.held
                await peer.check_in(None if held is None else Held(held.task, held.round))
                if held is not None:
                    await self.report(peer, held)
                while not isinstance(message := await next_message(peer), ComeBack):
                    await self.go_on(peer, message)
                assert message.reason == "finished", message
                return True
        except ConnectionClosed as error:
            if error.rcvd is None or error.rcvd.code != 1001:
                raise
            self.fleet.moved[self.doing] += 1
            return False

    async def report(self, peer: Peer, task: Task) -> None:
        await peer.send(report_of(task, update_for(task.task, self.fleet.size)))

    async def go_on(self, peer: Peer, message: Any) -> None:
        match message:
            case Task(task) if self.held is not None and task == self.held.task:
                pass  # said again: the engine process does not know yet that it is here
            case Task():
                self.held, self.doing = message, "training"
                await peer.fetch(message.vectors[0].sha256)
                await asyncio.sleep(self.trains)
                await self.report(peer, message)
            case Grant(task):
                self.doing = "uploading"
                if self.slow:
                    self.fleet.slow_uploads.set()
                if message.offset:
                    self.fleet.went_on.append(message.offset)
                data = update_for(task, self.fleet.size).tobytes()
                for chunk in pack_chunks(message.transfer, data, message.offset):
                    await peer.send(chunk)
                    await asyncio.sleep(SLOW if self.slow else 0.0)
                await peer.send(Uploaded(task))
            case Accepted(task):
                self.fleet.acknowledged.append(task)
                self.held, self.doing = None, "waiting"
            case Refused() | Cancel():
                raise AssertionError(f"a task is lost: {message}")


async def next_message(peer: Peer) -> Any:
    while True:
        try:
            return await peer.receive()
        except TimeoutError:  # other devices take their time
            continue


async def knock(url: str, knocks: list[int]) -> None:
    """Connect again and again, as a device does that comes: each connection is taken in."""
    while True:
        try:
            async with connect(url, subprotocols=[Subprotocol(PROTOCOL_NAME)]):
                knocks[0] += 1
        except ConnectionClosed as error:  # taken in, and sent on
            if error.rcvd is None or error.rcvd.code != 1001:
                raise
        await asyncio.sleep(0.05)


async def replace_all(run: Processes, supervisor: Any, fleet: Fleet, times: int) -> None:
    """Have all processes replaced, this many times, each time in the middle of a round."""
    for _ in range(times):
        fleet.slow_uploads.clear()
        await fleet.slow_uploads.wait()
        before = {each.pid for each in part_of(supervisor, "fleetlearn_coordinator")}
        supervisor.send_signal(signal.SIGUSR1)
        while before & {each.pid for each in part_of(supervisor, "fleetlearn_coordinator")}:
            assert supervisor.poll() is None, run.log("coordinator")
            await asyncio.sleep(0.1)


@pytest.mark.slow
def test_all_processes_are_replaced_twice(run: Processes, tmp_path: Path) -> None:
    rounds, count, size = 4, 10, 2**20
    file, url = write_run(tmp_path, rounds, count, size)
    fleet = Fleet(url, count, size)
    knocks = [0]

    async def test() -> None:
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            supervisor = serve(run, file, 2)
            while len(part_of(supervisor, "gateway")) < 2:
                await asyncio.sleep(0.05)
            devices = [group.create_task(fleet.take_part(number)) for number in range(count)]
            knocking = group.create_task(knock(url, knocks))
            await replace_all(run, supervisor, fleet, 2)
            knocking.cancel()
            await asyncio.wait(devices)
            await asyncio.to_thread(supervisor.wait)
            assert supervisor.returncode == 0, run.log("coordinator")

    asyncio.run(test())
    print(dict(fleet.moved), fleet.went_on, knocks)
    assert knocks[0] > 50
    assert fleet.moved.keys() >= {"training", "uploading"}
    assert fleet.went_on, "an upload goes on at another gateway"
    check_model(tmp_path, file, fleet, rounds)  # type: ignore[arg-type]
    log = run.log("coordinator")
    assert log.count("is replaced") == 2, "the engine process, twice"
    assert "ERROR" not in log, log
    assert "connections are cut" not in log.replace("and 0 connections are cut", ""), log
