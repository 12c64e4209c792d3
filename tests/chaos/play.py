"""Plays a schedule: a fleet is started, disturbed, left alone, stopped, and looked at."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fleetlearn_coordinator import read_status

from tests.chaos.checks import (
    check_effects,
    check_ends,
    check_logs,
    check_model,
    check_resources,
    check_updates,
    device_events,
    ended,
)
from tests.chaos.fault_kinds import Abilities, Event
from tests.chaos.fleet import Fleet
from tests.chaos.machines import Machines
from tests.chaos.schedule import Schedule

TICK = 0.02
"""Seconds between two looks at the processes."""
MORE = 3
"""Models that must be made once there are no faults any more."""
PATIENCE = 150.0
"""Seconds for these, and for the first model: more than a round's deadline."""
ENDS = 20
"""Ends of processes in a time without faults after which nobody waits any longer."""
STOPPING = {"gateway": 60.0, "coordinator": 60.0, "device": 45.0}
"""Seconds from SIGTERM to the end of a process."""


class Outcome(NamedTuple):
    """What came of a schedule."""

    problems: Sequence[str]
    """What did not hold; empty: nothing."""
    done: Sequence[Event]
    """The faults that happened: those of processes that were away did not."""
    versions: int
    updates: int
    packets: dict[str, int]


class Play:
    """One schedule, being played."""

    def __init__(self, fleet: Fleet, schedule: Schedule, say: Callable[[str], None]) -> None:
        self._fleet, self._schedule, self._say = fleet, schedule, say
        self._done: list[Event] = []
        self._ends: list[tuple[float, int, Event]] = []
        """What is to be undone, and when."""
        self._last = time.monotonic()

    def go(self) -> tuple[list[str], list[Event]]:
        """Play it. Returns what did not hold, and the faults that happened."""
        fleet = self._fleet
        fleet.start()
        if not self._models(1):
            ends = "; ".join(map(ended, fleet.ends[:3]))
            return [f"no model within {PATIENCE:.0f} s, without any fault. {ends}"], []
        fleet.began = time.monotonic()
        waiting = sorted(self._schedule.events, key=lambda event: event.at)
        while fleet.now() < self._schedule.seconds and not self._finished():
            while waiting and waiting[0].at <= fleet.now():
                self._begin(waiting.pop(0))
            self._tick()
        fleet.all_go_on()
        fleet.machines.mend_all()
        self._ends.clear()
        problems = []
        before = self._version()
        if not self._finished() and not self._models(before + MORE):
            problems.append(
                f"no {MORE} models in {PATIENCE:.0f} s without faults: it stands at {before}, now "
                f"{self._version()}"
            )
        problems += check_resources(fleet)
        problems += self._stop()
        return problems, self._done

    def _tick(self) -> None:
        now = time.monotonic()
        self._fleet.machines.tick(now - self._last)
        self._last = now
        while self._ends and self._ends[0][0] <= self._fleet.now():
            self._end(heapq.heappop(self._ends)[2])
        self._fleet.tick()
        time.sleep(TICK)

    def _begin(self, event: Event) -> None:
        fleet, machines, target = self._fleet, self._fleet.machines, event.target
        happened = True
        match event.kind:
            case "kill" | "kill-part":
                happened = fleet.kill(target, event.seconds)
            case "stop":
                happened = fleet.stop(target)
            case "replace":
                happened = fleet.replace_gateways(target)
            case "pause":
                happened = fleet.pause(target)
            case "power":
                happened = fleet.lose_power(target, event.seconds)
            case "full":
                machines.fill(target)
            case "step":
                machines.step(target, **event.value)
            case "drift":
                machines.let_drift(target, event.value)
            case "reset":
                machines.disturb(target, {"reset": True})
            case "cut":
                machines.disturb(target, {"loss": 1.0})
            case "one-way":
                machines.disturb(target, {"loss": 1.0, **event.value})
            case _:
                machines.disturb(target, event.value)
        self._say(f"{event}{'' if happened else '  (it was away)'}")
        if happened:
            self._done.append(event._replace(at=round(fleet.now(), 3)))
            end = fleet.now() + event.seconds
            heapq.heappush(self._ends, (end, len(self._done), event))

    def _end(self, event: Event) -> None:
        fleet, machines, target = self._fleet, self._fleet.machines, event.target
        match event.kind:
            case "kill" | "kill-part" | "stop" | "step" | "power" | "replace":
                pass
            case "pause":
                fleet.go_on(target)
            case "full":
                machines.free(target)
            case "drift":
                machines.end_drift(target, event.value)
            case "reset":
                machines.mend(target, {"reset": True})
            case "cut":
                machines.mend(target, {"loss": 1.0})
            case "one-way":
                machines.mend(target, {"loss": 1.0, **event.value})
            case _:
                machines.mend(target, event.value)

    def _version(self) -> int:
        try:
            return read_status(self._fleet.data).version
        except Exception:  # not there yet, or its store is away
            return 0

    def _finished(self) -> bool:
        """Whether the run has met its stop rule: its coordinator then ends by itself."""
        part = self._fleet.parts["coordinator"]
        return part.process is not None and part.process.poll() == 0 and part.ended_by is None

    def _models(self, version: int) -> bool:
        """Wait for a version of the model. Returns whether it came."""
        until, look, before = time.monotonic() + PATIENCE, 0.0, len(self._fleet.ends)
        while time.monotonic() < until and not self._finished():
            self._tick()
            if len(self._fleet.ends) - before > ENDS:
                return False  # it ends again and again
            if time.monotonic() > look:
                if self._version() >= version:
                    return True
                look = time.monotonic() + 0.5
        return self._finished()

    def _stop(self) -> list[str]:
        """End coordinators, then devices, in order. Returns what did not end so."""
        fleet, problems = self._fleet, []
        for names, kind in (
            (fleet.scenario.gateways_elsewhere, "gateway"),
            (fleet.scenario.coordinators, "coordinator"),
            (fleet.scenario.names, "device"),
        ):
            for name, status in fleet.end(names, STOPPING[kind]).items():
                if status is None:
                    problems.append(f"{name} did not end within {STOPPING[kind]:.0f} s of SIGTERM")
                elif status:
                    said = fleet.run.log(name)[-600:]
                    problems.append(f"{name} ended with status {status} after SIGTERM: {said}")
        return problems


def play(
    schedule: Schedule,
    folder: Path,
    abilities: Abilities,
    bundles: dict[str, Path],
    warm: Path,
    shim: Path | None,
    mistake: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Play a schedule in an empty folder, which has all logs and data afterwards."""
    scenario = schedule.scenario
    folder.mkdir(parents=True)
    schedule.write(folder / "schedule.jsonl")
    machines = Machines(folder, abilities, scenario, shim)
    with machines:
        fleet = Fleet(folder, scenario, machines, bundles[scenario.bundle], warm, mistake)
        try:
            problems, done = Play(fleet, schedule, say).go()
            if not done and problems:
                return Outcome(problems, done, 0, 0, {})
            fleet.tick()
            events = device_events(fleet)
            problems += check_logs(fleet)
            problems += check_ends(fleet, done)
            problems += check_effects(fleet, done)
            problems += check_updates(fleet, done, events)
            problems += check_model(fleet)
            versions = read_status(fleet.data).version
            told = sum(event.get("event") == "update-accepted" for event in events)
        finally:
            fleet.close()
    (folder / "problems.json").write_text(json.dumps(problems, indent=1))
    return Outcome(problems, done, versions, told, dict(machines.counts))
