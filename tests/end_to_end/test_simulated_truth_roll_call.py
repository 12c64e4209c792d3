"""An exchange of three phases that only tests have, by a run's server with real sockets and in the
simulator: the same devices are drawn, asked and lost, with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.rounds.commands import (
    Ask,
    ExchangeClosed,
    ExchangeOpened,
    Unanswered,
)
from fleetlearn_coordinator.rounds.random_draws import shuffled
from fleetlearn_coordinator.service.observers import ExchangeSummarised, Observer, RunEvent
from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CheckIn,
    Question,
    Reply,
    Welcome,
)
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from line_bundle import write_line_bundle
from peers import Peer, fleet, plan_text
from roll_call import PHASES, ROLL_CALL, RollCall, closed_phases
from simulated_roll_call import has_roll_calls, simulated_phases
from virtual import make_fleet, make_scenario

SIX = [name_of(number) for number in range(6)]
ALWAYS = 1e6
GRACE = 5.0


def when_to_leave(leaves: Mapping[str, int]) -> dict[str, float]:
    """Return the second in which each device leaves, in the simulator: one after its phase opens.
    An answer takes two seconds. A device that has left is lost after the grace period; in the first
    phase another one is asked then in its place."""
    opens, found = 0.0, dict[str, float]()
    for phase in range(1, PHASES + 1):
        gone = [name for name, own in leaves.items() if own == phase]
        found |= dict.fromkeys(gone, opens + 1.0)
        opens += 2.0 if not gone else 1.0 + GRACE + 2.0 * (phase == 1)
    return found


async def _take_part(peer: Peer, leaves: int | None) -> None:
    """Answer as a device does, until the phase in which it vanishes."""
    while True:
        question = await peer.expect(Question)
        if question.phase == leaves:
            peer.connection.transport.abort()
            return
        told = content_of(question).who.values()
        number = sum(told) if question.phase > 1 else device_of(peer.name)
        await peer.send(Reply(question.task, ROLL_CALL, {"number": number}))
        assert await peer.receive() == Accepted(question.task)


async def served(
    plan: Plan, leaves: Mapping[str, int], observer: Observer
) -> list[tuple[Any, ...]]:
    """Return how each phase closed. ``leaves``: device -> the phase in which it vanishes."""
    async with fleet(plan) as (coordinator, join), asyncio.timeout(60), asyncio.TaskGroup() as all_:
        coordinator.run.observers.add(observer)
        devices = []
        for name in SIX:
            peer: Peer = await join(name, check_in=False)
            await peer.send(
                CheckIn(1, name, 10, exchanges=(ROLL_CALL,), newest_protocol=PROTOCOL_VERSION)
            )
            await peer.expect(Welcome)
            devices.append(all_.create_task(_take_part(peer, leaves.get(name))))
        now = coordinator.clock.now()
        coordinator._carry_out(coordinator.engine.request_exchange(ROLL_CALL, now), now)
        while coordinator.engine.exchanges[ROLL_CALL].is_open:
            await asyncio.sleep(0)
        for device in devices:
            device.cancel()
        coordinator.end()
    return closed_phases(plan.data_dir)


def simulated(
    folder: Path, bundle: Path, leaves: Mapping[str, int], observer: Observer
) -> list[tuple[Any, ...]]:
    """The same in virtual time. One device more comes much later, so that no round begins."""
    ends = when_to_leave(leaves)
    rows = "".join(f"{at},0,{ends.get(name, ALWAYS)}\n" for at, name in enumerate(SIX))
    (folder / "trace.csv").write_text(
        f"device,on,off\n{rows}{len(SIX)},{2 * ALWAYS},{3 * ALWAYS}\n"
    )
    scenario = make_scenario(
        folder,
        bundle,
        len(SIX) + 1,
        availability={"kind": "trace", "file": "trace.csv"},
        tiers={"device": {"latency": 1.0, "download": 1e12, "upload": 1e12}},
        plan__round={"goal": 7, "minimum": 7, "grace": GRACE},
    )
    virtual = make_fleet(scenario)
    virtual.observers.append(observer)
    assert virtual.advance()
    virtual.carry_out(virtual.engine.request_exchange(ROLL_CALL, virtual.now))
    while virtual.engine.exchanges[ROLL_CALL].is_open:
        assert virtual.advance(), virtual.finished
    return simulated_phases(virtual.exchanges.summaries[ROLL_CALL])


def told(events: Sequence[RunEvent]) -> list[tuple[Any, ...]]:
    """Return what observers hear of the exchanges, without times and the runs' own prefixes."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        match event:
            case Ask(device, task, number, version, _, again, kind, phase):
                found.append(("ask", device, _place(task), number, version, again, kind, phase))
            case Unanswered(device, task, cause, kind):
                found.append(("unanswered", device, _place(task), cause, kind))
            case ExchangeOpened() | ExchangeClosed():
                found.append(event)
            case ExchangeSummarised(summary=summary):
                common = {key: summary[key] for key in ("devices", "dropped", "who")}
                found.append(event._replace(summary=common))
    return found


def _place(task: str) -> str:
    return task[task.rindex("r") :]


@pytest.mark.parametrize("in_phases", [(), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)])
def test_a_roll_call_ends_as_with_a_real_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_phases: tuple[int, ...]
) -> None:
    """Four of six devices are asked, and one of them vanishes in each of these phases."""
    has_roll_calls(monkeypatch, RollCall(devices=4, minimum=1, deadline=30.0))
    bundle = write_line_bundle(tmp_path / "line.bundle").path
    settings = {"round__goal": 7, "round__minimum": 7, "round__grace": 0.05, "local__lr": 0.1}
    plan = Plan.parse(plan_text(bundle, tmp_path / "data", **settings), tmp_path)
    drawn = shuffled(plan.engine_settings(15.0).seed, 1, SIX, ROLL_CALL)
    leaves = dict(zip(drawn, in_phases, strict=False))
    seen, observed = list[RunEvent](), list[RunEvent]()
    real = asyncio.run(served(plan, leaves, seen.extend))
    assert simulated(tmp_path, bundle, leaves, observed.extend) == real
    assert told(observed) == told(seen)
    assert len(told(seen)) >= 3 * PHASES + sum(map(len, (row[2] for row in real)))
    assert [(phase, valid) for phase, valid, *_ in real] == [(1, True), (2, True), (3, True)]
    lost = [row[3] for row in real]
    assert lost == [{"lost": 1} if phase in in_phases else {} for phase in range(1, PHASES + 1)]
    fifth_is_asked = 1 in in_phases
    assert (drawn[4] in real[0][2]) == fifth_is_asked
