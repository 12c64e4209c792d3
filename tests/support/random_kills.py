"""For tests: a coordinator that is killed at random instants, and devices that live through it.

Real processes and sockets; the devices are connections of the test, which send an update that
follows from the task's name. So the model can be worked out from what the ledger says was accepted.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_coordinator.aggregation.weighing.norms import NOT_MEASURED, measure
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported
from fleetlearn_device.driver.address import Enrolment
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    Accepted,
    Cancel,
    ComeBack,
    Evaluation,
    FromCoordinator,
    Grant,
    Held,
    Refused,
    Task,
)
from fleetlearn_protocol.vector import Vector
from peers import SIZE, Peer, report_of, update_of
from processes import Processes
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

KILLS = 10
"""In each run. Most of the time goes into starting the coordinator once more than that."""
AWAY = 0.2
"""Seconds that a device stays away when it is told to come back later, at most."""
LONGEST = 0.25
"""Seconds from the first sign of life of a coordinator until it is killed, at most."""


def luck_of(task: str) -> float:
    """Return a number from 0 to 1 that follows from the task's name without the run's: the same
    task of another run has the same number."""
    return crc32(task.partition("-")[2].encode()) % 1000 / 1000


def update_for(task: str, size: int = SIZE) -> Vector:
    return update_of(luck_of(task), size)


class Devices:
    """Devices that take part until they are told to stop, through whatever deaths of their
    coordinator."""

    def __init__(
        self,
        url: str,
        names: Iterable[str],
        stated: Callable[[str], dict[str, Any]] = lambda name: {},
        reported: Callable[[str], dict[str, Any]] = lambda task: {},
        enrolments: Mapping[str, Enrolment] | None = None,
        size: int = SIZE,
        restless: float = 0.0,
        luck: random.Random | None = None,
    ) -> None:
        """``stated``: returns what a device says of itself. ``reported``: what the report of a task
        has, besides. ``enrolments``: says who each device is. ``size``: of the model. ``restless``:
        the share of messages after which a device breaks its connection, half of the time without
        its work; by ``luck``."""
        self.url, self.names, self.stated, self.reported, self.over = (
            url,
            list(names),
            stated,
            reported,
            False,
        )
        self.enrolments, self.size, self.restless = enrolments or {}, size, restless
        self.luck = luck or random.Random(0)
        self.acknowledged: list[str] = []
        self.alive = asyncio.Event()
        """Set by whatever comes from the coordinator."""

    async def take_part(self, name: str) -> None:
        held: Task | None = None
        enrolment = self.enrolments.get(name)
        while not self.over:
            pause = 0.02
            with suppress(OSError, WebSocketException, TimeoutError, AssertionError):
                async with connect(
                    self.url,
                    subprotocols=[Subprotocol(PROTOCOL_NAME)],
                    compression=None,
                    max_size=None,
                    additional_headers={} if enrolment is None else enrolment.headers(),
                ) as connection:
                    if enrolment is not None:
                        enrolment.accepted()
                    peer = Peer(name, connection)
                    await peer.check_in(
                        None if held is None else Held(held.task, held.round), **self.stated(name)
                    )
                    if held is not None:
                        await self._report(peer, held)
                    while not self.over:
                        message = await peer.receive()
                        self.alive.set()
                        if isinstance(message, ComeBack):
                            pause = min(message.after, AWAY)
                            break
                        held = await self._go_on(peer, held, message)
                        if self.luck.random() < self.restless:
                            connection.transport.abort()
                            held = held if self.luck.random() < 0.5 else None
                            break
            await asyncio.sleep(pause)

    async def _report(self, peer: Peer, task: Task) -> None:
        await peer.send(
            report_of(task, update_for(task.task, self.size), **self.reported(task.task))
        )

    async def _go_on(self, peer: Peer, held: Task | None, message: FromCoordinator) -> Task | None:
        """Answer a message. Returns the task whose update is not acknowledged."""
        match message:
            case Task():
                await self._report(peer, message)
                return message
            case Grant(task):
                await peer.send_update(message, update_for(task, self.size))
            case Accepted(task):
                self.acknowledged.append(task)
                return None
            case Refused() | Cancel():
                return None
        return held


async def kill_at_random(
    run: Processes,
    plan: Path,
    devices: Devices,
    luck: random.Random,
    kills: int = KILLS,
    least: int = 0,
) -> int:
    """Serve a plan to these devices, and kill its coordinator that many times; then stop it by
    SIGTERM, once ``least`` updates are acknowledged: on a busy machine few are between two kills.
    Returns how many times it was killed: fewer if the run finished before."""
    killed = 0
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        for name in devices.names:
            group.create_task(devices.take_part(name))
        for kill in range(kills + 1):
            process = run.coordinator(plan)
            devices.alive.clear()
            # the others are killed before they have said anything
            if kill == kills or luck.random() < 0.8:
                while not devices.alive.is_set() and process.poll() is None:
                    await asyncio.sleep(0.01)
            while kill == kills and len(devices.acknowledged) < least and process.poll() is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(luck.uniform(0, LONGEST))
            if process.poll() is None:
                killed += kill < kills
                process.send_signal(signal.SIGKILL if kill < kills else signal.SIGTERM)
            await asyncio.to_thread(process.wait)
            assert process.returncode in (0, -signal.SIGKILL), run.log("coordinator")
            if process.returncode == 0:
                break
        devices.over = True
    return killed


def by_hand(
    plan: Plan,
    rows: Sequence[tuple[str, int, int]],
    rounds: int,
    weight: int = 1,
    reported: Callable[[str], dict[str, Any]] = lambda task: {},
    meant: Callable[[Vector], Vector] = lambda update: update,
) -> Vector:
    """Return the model that these accepted updates make: (task, round, staleness). Each has this
    weight. ``reported``: as for ``Devices``. ``meant``: what the bytes of an update mean."""
    bundle = open_bundle(plan.bundle)
    aggregator, optimizer, weighing = (
        plan.aggregator(),
        plan.optimizer(bundle.manifest),
        plan.weighing(bundle.manifest),
    )
    model = bundle.parameters()[: bundle.manifest.size].copy()
    state, summary = optimizer.init(model), dict[str, Any]()
    for number in range(1, rounds + 1):
        total, reports, level = aggregator.init(len(model)), [], weighing.state_after(summary)
        for task, _, staleness in sorted(row for row in rows if row[1] == number):
            update, said = (
                meant(update_for(task, len(model))),
                {"steps": 5, "evaluation": Evaluation(10, 7.0), **reported(task)},
            )
            norms = (
                measure(ArrayUpdate(update), len(update)) if weighing.needs_norms else NOT_MEASURED
            )
            reports.append(Reported(weight, said["steps"], 0.5, norms).measured(said["evaluation"]))
            factor = plan.staleness_factor(staleness) * weighing.factor(reports[-1], level)
            aggregator.add(total, ArrayUpdate(update), weight, float(np.abs(update).max()), factor)
        model, state, _ = next_model(
            aggregator, total, optimizer, state, model, scale=weighing.scale(reports, level)
        )
        summary = weighing.summary(reports, {}, level)
    return model
