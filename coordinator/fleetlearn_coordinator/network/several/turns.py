"""Which run each device serves, on a host with several: one task at a time, of whichever run wants
the device, in turn.

A device that has no task waits in all runs that it fits. The first one that gives it a task takes
it out of the others before anything else happens (``Turns.claim``), so no two runs give a device a
task. When the task ends, the device is offered to the other runs first
(``Turns.offer_freed_devices``). What is done for a task depends on the number of runs, not of
devices.

A synchronous run needs many devices at a time. So that the others do not take them away one by one,
a device that becomes free is kept for the run that has been gathering for longest, if enough
devices are connected that fit that run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from fleetlearn_protocol.errors import MAX_TEXT, Code
from fleetlearn_protocol.messages import Cancel, CheckIn, ComeBack, FromCoordinator

from fleetlearn_coordinator.conversation.port import RunPort
from fleetlearn_coordinator.network.driver import ServedRun

PLACED_TOGETHER = 256
"""Devices that are offered to the runs before other connections have their turn: some 10 ms."""


@dataclass(slots=True, eq=False)
class SharedRun:
    """A run of the host."""

    served: ServedRun
    port: RunPort
    fitting: int = 0
    """How many connected devices fit it."""
    kept: dict[str, None] = field(default_factory=dict)
    """Devices that wait for this run alone while it gathers. The order is the order in which they
    came."""


class ServingConnection(Protocol):
    """A device's connection, as the runs see it that it serves one after the other."""

    def serve(self, run: ServedRun, port: RunPort, *, is_first: bool) -> None:
        """From now on the device serves this run. ``is_first``: for the first time on this
        connection: it may fetch what the first task needs."""

    @property
    def uploading(self) -> str | None:
        """The task whose update is on its way here. None: there is none, or another process
        knows."""


@dataclass(slots=True, eq=False)
class SharedDevice:
    """A connected device, and which runs it has to do with."""

    driver: ServingConnection
    check_in: CheckIn
    """What it says of itself, without the update that it brought."""
    fits: set[SharedRun]
    """The runs that it may have tasks of."""
    allowed: set[SharedRun] = field(default_factory=set)
    """The runs for whose bundles it has a budget."""
    waits: dict[SharedRun, None] = field(default_factory=dict)
    """The runs that know it as connected: those that it waits for or, if it has a task, the task's
    run alone."""
    serves: SharedRun | None = None
    """The run that gave it its task."""
    last: SharedRun | None = None
    """The run that it served last."""
    declined: dict[SharedRun, float] = field(default_factory=dict)
    """Run that has devices enough -> when the device is offered to it again. Until the device's
    next task."""

    @property
    def name(self) -> str:
        return self.check_in.device


class Turns:
    """The runs of a host, and the devices that are connected to it. Times are seconds of the event
    loop."""

    def __init__(self, tell: Callable[[str, FromCoordinator], None]) -> None:
        """``tell``: sends to a device, if it is connected."""
        self._tell, self._loop = tell, asyncio.get_running_loop()
        self.runs: list[SharedRun] = []
        self.devices: dict[str, SharedDevice] = {}
        self._gathering: dict[SharedRun, float] = {}
        """Run that needs more devices to open a round -> when the host began, or will begin, to
        keep devices for it. Devices are kept for the first of these runs whose time has come."""
        self._free: deque[str] = deque()
        """Devices that are to be offered to the runs."""
        self._placing = False
        self._first = 0
        """Where the next device that has served no run yet begins to ask."""

    # The runs

    def add(self, served: ServedRun, port: RunPort) -> SharedRun:
        """Add a run. ``reopen`` offers the devices to it, once it is ready for them."""
        run = SharedRun(served, port)
        self.runs.append(run)
        for device in self.devices.values():
            if not port.unfit(device.check_in):
                device.fits.add(run)
                run.fitting += 1
        return run

    def drop(self, run: SharedRun, text: str) -> None:
        """The run is over, for now or for good: its devices serve the others. ``text`` says why,
        for people."""
        self.runs.remove(run)
        self._gathering.pop(run, None)
        for device in self.devices.values():
            if device.serves is run:
                task = device.driver.uploading or run.port.task_of(device.name)
                if task is not None:
                    self._tell(device.name, Cancel(task, Code.NOT_WANTED, text[:MAX_TEXT]))
                device.serves = None
            self._stop_waiting(run, device)
            device.declined.pop(run, None)
            device.fits.discard(run)
            device.allowed.discard(run)
            if device.last is run:
                device.last = None
        self._offer_kept_devices(run)
        self._place_some()

    def close(self, run: SharedRun) -> None:
        """The run wants no devices for now. Those that have its tasks go on."""
        self._gathering.pop(run, None)
        for device in self.devices.values():
            if run in device.waits and device.serves is not run:
                self._withdraw(run, device, forget=False)
                self._stop_waiting(run, device)
        self._offer_kept_devices(run)
        self._place_some()

    def reopen(self, run: SharedRun) -> None:
        """The run wants devices from now on."""
        self._free.extend(device.name for device in self.devices.values() if device.serves is None)
        self.offer_freed_devices(run)

    def refit(self, run: SharedRun) -> None:
        """The run is for other devices from now on. Those that have its tasks go on with them."""
        for device in self.devices.values():
            fits = not run.port.unfit(device.check_in)
            if fits == (run in device.fits):
                continue
            if fits:
                device.fits.add(run)
                run.fitting += 1
                if device.serves is None:
                    self._free.append(device.name)
                continue
            device.fits.discard(run)
            run.fitting -= 1
            if run in device.waits and device.serves is not run:
                self._withdraw(run, device, forget=False)
                self._stop_waiting(run, device)
        self._place_some()

    def of_task(self, task: str) -> SharedRun | None:
        """Return the run that gave this task, if it is served here."""
        prefix = task.partition("-")[0]
        return next((run for run in self.runs if run.port.task_prefix == prefix), None)

    # The devices

    def join(self, device: SharedDevice, check_in: CheckIn) -> None:
        """The device was welcomed. ``check_in`` is all that it said."""
        name, held = device.name, check_in.held
        earlier = self.devices.pop(name, None)
        if earlier is not None:  # another connection spoke for it
            for run in earlier.waits:
                if run is not earlier.serves:
                    self._withdraw(run, earlier, forget=False)
            self._forget(earlier)
        self.devices[name] = device
        for run in device.fits:
            run.fitting += 1
        own = None if held is None else self.of_task(held.task)
        if own is not None:
            self._offer(own, device, check_in)
        for run in list(self.runs):
            if device.serves is None and run is not own and run.port.task_of(name) is not None:
                self._offer(run, device)
        for run in list(device.waits):
            if device.serves is None and not (run in device.fits and run.port.open_to_devices):
                self._withdraw(run, device)
        self._free.append(name)
        self._place_some()

    def leave(self, device: SharedDevice, now: float) -> None:
        """The device's connection is gone."""
        if self.devices.get(device.name) is device:
            del self.devices[device.name]
            self._forget(device)
            for run in list(device.waits):
                self.ask_run(run, lambda run=run: run.port.leave(device.name, now))  # type: ignore[misc]

    def _forget(self, device: SharedDevice) -> None:
        for run in device.fits:
            run.fitting -= 1
        for run in device.waits:
            run.kept.pop(device.name, None)

    # What a run decides

    def claim(self, run: SharedRun, names: Iterable[str]) -> None:
        """The run has given these devices tasks, or they go on with one: they wait for no other run
        any more."""
        for name in names:
            device = self.devices.get(name)
            if device is None or device.serves is run:
                continue
            if device.serves is not None:
                raise RuntimeError(f"device {name} has a task of {device.serves.port.name} already")
            device.serves = run
            device.driver.serve(run.served, run.port, is_first=run not in device.allowed)
            device.allowed.add(run)
            device.declined.clear()
            for other in list(device.waits):
                if other is not run:
                    self._withdraw(other, device)
            run.kept.pop(name, None)

    def offer_freed_devices(self, run: SharedRun) -> None:
        """Offer the devices whose tasks of this run ended to the other runs, and keep devices for
        the run if it gathers them. Called after each event of the run, once its devices were
        told."""
        for name in run.port.take_freed():
            device = self.devices.get(name)
            if device is None or device.serves is not run or run.port.task_of(name) is not None:
                continue  # it is gone, or it measures now
            device.serves, device.last = None, run
            self._withdraw(run, device)
            self._free.append(name)
        if run.port.gathers:
            self._gathering.setdefault(run, self._loop.time())
        elif self._gathering.pop(run, None) is not None:
            self._offer_kept_devices(run)
        self._place_some()

    def decline(self, run: SharedRun, name: str, after: float) -> None:
        """The run has devices enough without this one for ``after`` seconds. It leaves if no other
        run wants it."""
        device = self.devices.get(name)
        if device is not None:
            device.waits.pop(run, None)
            run.kept.pop(name, None)
            device.declined[run] = self._loop.time() + after
            self._free.append(name)

    def sweep(self) -> None:
        """Keep no devices, for a while, for a run that has not gathered enough within the time that
        any task takes: the others would wait for ever. And offer devices again to runs that had
        enough of them."""
        longest = max((run.port.patience for run in self.runs), default=0.0)
        now = self._loop.time()
        for run, since in list(self._gathering.items()):
            if now - since > longest:
                del self._gathering[run]  # behind the others
                self._gathering[run] = now + longest
                self._offer_kept_devices(run)
        for device in self.devices.values():
            if device.declined and device.waits and device.serves is None:
                past = [run for run, until in device.declined.items() if until <= now]
                for run in past:
                    del device.declined[run]
                if past:
                    self._free.append(device.name)
        self._place_some()

    def ask_run(self, run: SharedRun, act: Callable[[], None]) -> None:
        """Ask something of the run. An exception ends this run; the others go on."""
        try:
            act()
        except Exception as error:
            run.served.failed(error)

    # Offers

    def _place_some(self) -> None:
        """Offer free devices to the runs. What the runs decide may free others."""
        if self._placing:
            return
        self._placing = True
        try:
            for _ in range(PLACED_TOGETHER):
                if not self._free:
                    return
                device = self.devices.get(self._free.popleft())
                if device is not None and device.serves is None:
                    self._place(device)
        finally:
            self._placing = False
        if self._free:
            self._loop.call_soon(self._place_some)

    def _place(self, device: SharedDevice) -> None:
        """Offer the device to the runs that it fits, one after the other, until one gives it a
        task."""
        order = [
            run
            for run in self._in_turn(device)
            if run in device.fits and run not in device.declined
        ]
        order = [run for run in order if run.port.open_to_devices]
        first = next(
            (
                run
                for run, since in self._gathering.items()
                if run in order and self._keeps(run, since)
            ),
            None,
        )
        if first is not None:
            self._offer(first, device)
            if device.serves is None and first in device.waits and self._needs(first, device):
                first.kept[device.name] = None
                return
        for run in order:
            if device.serves is None:
                self._offer(run, device)
        if device.serves is None and not device.waits and device.declined:
            after = max(0.0, min(device.declined.values()) - self._loop.time())
            self._tell(device.name, ComeBack(after, "no-task"))

    def _needs(self, run: SharedRun, device: SharedDevice) -> bool:
        return run.port.gathers > 0 and run.port.may_serve(device.name)

    def _keeps(self, run: SharedRun, since: float) -> bool:
        return run.fitting >= run.port.gathers > 0 and since <= self._loop.time()

    def _in_turn(self, device: SharedDevice) -> Iterator[SharedRun]:
        """Return the runs, from the one behind the run that the device served last."""
        if device.last is not None:
            begin = self.runs.index(device.last) + 1
        else:
            begin = self._first = (self._first + 1) % max(1, len(self.runs))
        return iter(self.runs[begin:] + self.runs[:begin])

    def _offer(self, run: SharedRun, device: SharedDevice, check_in: CheckIn | None = None) -> None:
        """Let the device wait in the run, which may give it a task at once."""
        if run in device.waits or run not in self.runs:
            return
        device.waits[run] = None
        now = self._loop.time()
        self.ask_run(run, lambda: run.port.join(check_in or device.check_in, now))
        if run in device.waits and run.port.task_of(device.name) is not None:
            self.claim(run, [device.name])  # it goes on with the task that it has

    def _withdraw(self, run: SharedRun, device: SharedDevice, *, forget: bool = True) -> None:
        now = self._loop.time()
        self.ask_run(run, lambda: run.port.withdraw(device.name, now))
        if forget:
            device.waits.pop(run, None)
            run.kept.pop(device.name, None)

    def _stop_waiting(self, run: SharedRun, device: SharedDevice) -> None:
        """The device waits for the run no more. Where it waits for none now, it is offered to the
        others, or told to come back."""
        if run in device.waits:
            del device.waits[run]
            if not device.waits:
                run.kept.pop(device.name, None)
                self._free.append(device.name)

    def _offer_kept_devices(self, run: SharedRun) -> None:
        """Offer the devices that were kept for the run to the others."""
        self._free.extend(run.kept)
        run.kept.clear()
