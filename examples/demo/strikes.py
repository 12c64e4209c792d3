"""What goes wrong in the demo, and when: devices and the coordinator die by SIGKILL, in the middle
of their work.

A device is chosen while its log says that it trains, or that its finished update is not
acknowledged yet. Killing it takes a moment, in which it may have gone on; so its log is read again
after its death, and only that counts. One that was not caught at it is started again at once, and
the hunt goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from fleetlearn_coordinator.service.status import read_tasks

from examples.demo.fleet import Device, Fleet, Phase, goal_of, start_coordinator
from examples.demo.processes import DemoError
from examples.demo.screen import Round

HUNT = 2.0
"""Seconds that one hunt lasts, before the demo looks at everything else again."""


@dataclass
class Kill:
    """One death of a device."""

    device: str
    round: int
    task: str
    phase: str
    """``training``; or ``uploading``: the update was finished, not yet acknowledged."""
    second: float
    """Since the coordinator's first start."""
    returned_in_round: int | None = None
    update: str | None = None
    """What became of a finished one: ``not sent``, ``accepted`` (mostly after its device came
    back), ``not wanted``."""


@dataclass
class CoordinatorKill:
    """The death of the coordinator in mid-round."""

    round: int
    second: float
    reports: int
    """Accepted before its death."""
    tasks_out: int
    down: float = 0.0
    """Seconds until it listened again."""


@dataclass
class Strikes:
    """The demo's schedule of kills, and their results. ``step`` is called again and again while the
    run goes on."""

    fleet: Fleet
    rounds: int
    devices: int
    """To be killed. The first half of them is started again."""
    began: float = field(default_factory=time.monotonic)
    kills: list[Kill] = field(default_factory=list)
    coordinator: CoordinatorKill | None = None
    missed: int = 0
    """Hunts that caught nobody."""
    explained: bool = False
    """Whether a fall of the accuracy after the coordinator's death was explained."""
    safe: dict[str, str] = field(default_factory=dict)
    """Task -> device of the reports that the coordinator had accepted when it was killed."""

    @property
    def first(self) -> int:
        return max(2, self.rounds // 5)

    @property
    def back(self) -> int:
        return max(self.first + 1, 2 * self.rounds // 5)

    @property
    def middle(self) -> int:
        return max(self.back + 1, self.rounds // 2)

    @property
    def second(self) -> int:
        return max(self.middle + 1, 7 * self.rounds // 10)

    @property
    def done(self) -> bool:
        return len(self.kills) == self.devices and self.coordinator is not None

    @property
    def to_return(self) -> int:
        """How many of the killed devices come back."""
        return self.devices // 2

    def step(self, committed: int) -> Iterator[str]:
        """Do what is due after this many committed rounds. Yields a line for each thing that
        happened."""
        yield from self._follow_returned()
        current = committed + 1
        if current >= self.first and len(self.kills) < self.to_return:
            yield from self._hunt_devices(self.to_return)
        if current >= self.back:
            yield from self._bring_back(current)
        if current >= self.middle and self.coordinator is None:
            yield from self._strike_coordinator()
        if current >= self.second and len(self.kills) < self.devices:
            yield from self._hunt_devices(self.devices)

    def _hunt_devices(self, until: int) -> Iterator[str]:
        deadline = time.monotonic() + HUNT
        self._await_fresh_round(deadline)
        while len(self.kills) < until and time.monotonic() < deadline:
            # By turns; and not for ever for one who uploads where that takes no time.
            phase = (Phase.TRAINING, Phase.UPLOADING)[(len(self.kills) + self.missed // 10) % 2]
            before = len(self.kills)
            yield from self._hunt(phase, min(deadline, time.monotonic() + 0.5))
            self.missed += len(self.kills) == before
        for kill in self.kills[: self.to_return]:
            if kill.update == "not sent" and kill.returned_in_round is None:
                self._return(self._device(kill.device), kill, kill.round)
                yield (
                    f"{kill.device} starts again at once: its finished update is still on its disk"
                )

    def _await_fresh_round(self, deadline: float) -> None:
        """Wait until a round has given out its tasks and had no report yet: then all that is to die
        may die in it."""
        while time.monotonic() < deadline:
            _, tasks = read_tasks(self.fleet.paths.run)
            if len(tasks) >= goal_of(len(self.fleet.devices)) and all(
                task.state == "assigned" for task in tasks
            ):
                return
            time.sleep(0.002)

    def _hunt(self, phase: Phase, deadline: float) -> Iterator[str]:
        fleet, spared = self.fleet, {kill.device for kill in self.kills}
        while time.monotonic() < deadline:
            fleet.read_logs()
            number, tasks = read_tasks(fleet.paths.run)
            open_tasks = {task.task for task in tasks}
            devices = [
                device
                for device in fleet.alive
                if device.phase is phase and device.name not in spared and device.task in open_tasks
            ]
            if not devices:
                time.sleep(0.001)
                continue
            # Not the one with most data: what it knows would be missed.
            victim = sorted(devices, key=lambda device: device.examples)[len(devices) // 2]
            fleet.kill(victim.child)
            victim.read_log()
            if (
                victim.phase not in (Phase.TRAINING, Phase.UPLOADING)
                or victim.task not in open_tasks
            ):
                yield f"{victim.name} was killed just after its work was done; it starts again"
                fleet.revive(victim)
                continue
            kill = Kill(victim.name, number, victim.task, victim.phase.value, self._now())
            kill.update = "not sent" if victim.phase is Phase.UPLOADING else None
            self.kills.append(kill)
            doing = "training" if victim.phase is Phase.TRAINING else "uploading its update"
            yield f"SIGKILL to {victim.name} while {doing} in round {kill.round}"
            return

    def _bring_back(self, current: int) -> Iterator[str]:
        for kill in self.kills[: self.to_return]:
            if kill.returned_in_round is None:
                self._return(self._device(kill.device), kill, current)
                yield f"{kill.device} starts again, with the state directory it left"

    def _return(self, device: Device, kill: Kill, current: int) -> None:
        kill.returned_in_round = current
        self.fleet.revive(device)

    def _follow_returned(self) -> Iterator[str]:
        """What became of the updates that killed devices had finished."""
        for kill in self.kills:
            if kill.returned_in_round is None or kill.update != "not sent":
                continue
            device = self._device(kill.device)
            if kill.task in device.accepted:
                kill.update = "accepted"
                yield (
                    f"{device.name} is back: the update it had finished before it was killed is "
                    "accepted"
                )
            elif device.phase is not Phase.STARTING and device.task != kill.task:
                kill.update = "not wanted"
                yield f"{device.name} is back: its round was over, its update not wanted any more"

    def _strike_coordinator(self) -> Iterator[str]:
        fleet, deadline = self.fleet, time.monotonic() + HUNT
        while time.monotonic() < deadline:
            number, tasks = read_tasks(fleet.paths.run)
            if sum(task.state == "accepted" for task in tasks) < 2:
                time.sleep(0.002)
                continue
            fleet.kill(fleet.coordinator)
            killed = time.monotonic()
            number, tasks = read_tasks(fleet.paths.run)
            reports = {task.task: task.device for task in tasks if task.state == "accepted"}
            out = sum(task.state == "assigned" for task in tasks)
            if number and reports and out:
                self.coordinator, self.safe = (
                    CoordinatorKill(number, self._now(), len(reports), out),
                    reports,
                )
                yield (
                    f"SIGKILL to the coordinator in round {number}: {len(reports)} reports in, "
                    f"{out} tasks out"
                )
            else:
                yield "the coordinator was killed between two rounds; it starts again"
            start_coordinator(fleet)
            if self.coordinator is not None:
                self.coordinator.down = round(time.monotonic() - killed, 2)
                yield (
                    f"the coordinator is up again after {self.coordinator.down:.1f} s: round "
                    f"{number} goes on"
                )
                return
            deadline = time.monotonic() + HUNT

    def check_round(self, number: int) -> None:
        """Look at a round that is over: were updates of the dead in it after all, and those
        accepted before the coordinator died? Raises DemoError where one of these is missing."""
        _, tasks = read_tasks(self.fleet.paths.run, number)
        accepted = {task.task for task in tasks if task.state == "accepted"}
        for kill in self.kills:
            if kill.task in accepted and kill.returned_in_round is None:
                kill.update = "accepted"  # only its acknowledgement was still to come
        if self.coordinator is None or self.coordinator.round != number:
            return
        if missing := sorted(set(self.safe) - accepted):
            raise DemoError(
                f"round {number} lost {missing}, accepted before the coordinator was killed"
            )

    def explain_fall(self, before: Round, now: Round) -> str:
        """Return a line for the first fall of the accuracy from the coordinator's death on, which a
        viewer would take for its consequence; empty where there is nothing to explain.
        ``check_round`` has looked at the round."""
        death = self.coordinator
        if death is None or self.explained or now.number < death.round or before.accuracy is None:
            return ""
        if now.accuracy is None or now.accuracy >= before.accuracy:
            return ""
        self.explained = True
        return (
            f"accuracy {before.accuracy:.1%} -> {now.accuracy:.1%}: not the crash (all "
            f"{death.reports} reports from before it count), but whose data this round was trained "
            "on"
        )

    def _device(self, name: str) -> Device:
        return next(device for device in self.fleet.devices if device.name == name)

    def _now(self) -> float:
        return round(time.monotonic() - self.began, 2)
