"""The virtual driver of the coordinator's engine: a queue of events, instead of sockets and clocks.

The engine hears of each event as the websocket server would tell it. A round costs what its cohort
costs, however large the population is: see ``connections.py`` and ``device_tasks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.round_summary import deciding, describe_dropped
from fleetlearn_coordinator.rounds.commands import (
    FAILED,
    Abandon,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    ExchangeClosed,
    ExchangeOpened,
    Finish,
    Opened,
    RegionEnded,
    SendAway,
    Unanswered,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from fleetlearn_coordinator.service.observers import (
    ExchangeSummarised,
    Observer,
    RoundEnded,
    RunEvent,
)
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet import selection
from fleetlearn_simulator.fleet.connections import Connections
from fleetlearn_simulator.fleet.coordinator import SimulatedCoordinator
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from fleetlearn_simulator.fleet.device_tasks import DeviceTasks, WriteLines
from fleetlearn_simulator.fleet.events import Event, EventQueue
from fleetlearn_simulator.fleet.exchanges import DeviceExchanges
from fleetlearn_simulator.fleet.kept_by_devices import KeptByDevices
from fleetlearn_simulator.fleet.poisson_sampling import sampling_of
from fleetlearn_simulator.fleet.returns import Returns
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, LocalSettings
from fleetlearn_simulator.training.held_out_loss import held_out_loss
from fleetlearn_simulator.training.kept_rows import NO_FILES, KeptRows, RowFile

NEXT_LOOK = 86400.0
"""Seconds until a device without examples would look for some again."""
MAX_BACK_OFF = 30.0
"""Seconds in which all devices connect again after the coordinator's restart. Their delays are
uniform."""
MAX_ABANDONED_ROUNDS_IN_A_ROW = 1000
"""When this many rounds were abandoned one after the other, the simulation ends."""
MAX_SECONDS_WITHOUT_ROUND = 366 * 86400.0
"""When no round ended for this long, the simulation ends."""
REPORTED_CAUSES = ("straggler", "out-of-time")
"""Causes that the device tells the coordinator. With any other cause the device vanishes without a
word."""


class Fleet:
    """A population of devices and their coordinator, in virtual time."""

    def __init__(
        self,
        scenario: Scenario,
        bundles: Sequence[Bundle],
        source: Source,
        backend: Backend,
        local: LocalSettings,
        log: WriteLines,
        files: KeptRows[RowFile] = NO_FILES,
        residuals: RowFile | None = None,
    ) -> None:
        """``bundles``: one, or those of the plan's family in its order. ``log``: writes lines of
        the event log. ``files``, ``residuals``: for what devices keep."""
        self.scenario, self._log = scenario, log
        self.events = EventQueue()
        self.connections = Connections(scenario, self.events)
        kept = None
        if any((*files, residuals)):
            kept = KeptByDevices(files, scenario.population.size, residuals)
        held_out = held_out_loss(scenario, bundles[0], source)
        self.coordinator = SimulatedCoordinator(scenario, bundles, backend, kept, held_out)
        self.tasks = DeviceTasks(
            scenario, bundles, source, local, self.events, self.connections, self.coordinator, log
        )
        self.exchanges = DeviceExchanges(self.tasks, self.events)
        self.sampling = sampling_of(scenario)
        """Who takes part in each round, where that is Poisson sampling. Else the devices that are
        connected, of which the engine chooses."""
        self.finished: str | None = None
        """Why the simulation is over; None: it is not."""
        self.next_tick = 0.0
        """When the engine's next tick is due."""
        self._unheard: list[Event] = []
        """Ends of tasks while the coordinator was down."""
        self.observers: list[Observer] = []
        """Who is told what happens, by the events of a coordinator's run: what the engine commands,
        and the summaries of rounds and exchanges. Updates and answers that count are told by these
        summaries, not one by one, and of connections nothing. An observer that raises ends the
        simulation."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called when a round's model is made, before the engine knows of it. Only tasks that
        outlive their round run then."""
        for time in scenario.coordinator.crashes:
            self.events.expect(time, "crash")
        self.returns = (
            Returns(scenario, self.events) if scenario.plan.pace.connected is not None else None
        )
        """With pace steering: when devices check in. Else those that are to be connected are
        drawn."""
        self.events.expect(0.0, "fill" if self.returns is None else "window")

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self.events.now

    @property
    def engine(self) -> Engine:
        return self.coordinator.engine

    @property
    def model(self) -> Vector:
        return self.coordinator.model

    @property
    def history(self) -> list[dict[str, Any]]:
        """The summaries of the rounds."""
        return self.coordinator.history

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The summaries of the evaluations."""
        return self.exchanges.summaries[EVALUATION]

    def advance(self) -> bool:
        """Let the next thing happen. Returns whether the simulation goes on."""
        if self.finished is not None:
            return False
        wake = None if self.coordinator.down else self.engine.wake_at()
        self.next_tick = inf if wake is None else max(wake, self.now)
        due = self.events.heap[0].time if self.events.heap else inf
        if min(due, self.next_tick) > self.coordinator.last_end + MAX_SECONDS_WITHOUT_ROUND:
            without = len(self.connections.without_examples)
            why = "too few devices are online at a time"
            if self.engine.selection.limited:
                why = waits_for(self.engine, self.now)
            if without:
                why = f"{why}, and {without} of those that were drawn have no examples"
            self.finished = f"no round began for a year: {why}"
        elif due <= self.next_tick:
            event = self.events.pop()
            HANDLERS[event.kind](self, event)
        else:
            self.events.now = self.next_tick
            self.carry_out(self.engine.tick(self.now))
        return self.finished is None

    def _tell(self, events: Sequence[RunEvent]) -> None:
        for observer in self.observers if events else ():
            observer(events)

    def _note(self, event: str, **more: Any) -> None:
        """Write a line of the event log."""
        self._log([{"time": self.now, "event": event, **more}])

    def state(self, devices: Sequence[int]) -> None:
        """Tell the coordinator what these devices state of themselves."""
        selection.state(self.engine, self.scenario, self.tasks.source, devices)

    # What happens to devices

    def _fill(self, event: Event) -> None:
        """Let devices that are online check in, while connections are free."""
        if self.sampling is not None:
            self._connect_sample(self.sampling.draw(self.engine))
            return
        if not self.coordinator.down:
            arriving = self.connections.arriving(self.engine.leases)
            has_examples = self._has_examples([device for device, _ in arriving])
            arriving = [row for row, has in zip(arriving, has_examples, strict=True) if has]
            self.state([device for device, _ in arriving])
            for device, end in arriving:
                self.connections.connected[device] = end
                self.events.expect(end, "leave", device)
                self._check_in(device)
        self.connections.refill_expected = False
        self.connections.expect_refill(self.coordinator.last_end)

    def _connect_sample(self, devices: Sequence[int]) -> None:
        """Let the devices check in that were drawn for the next round, and no others. Each round's
        leave before the next ones are drawn."""
        if not all(self._has_examples(devices)):
            raise SimulatorError(
                'privacy.sampling = "poisson": devices without examples cannot take part when '
                "they are drawn. Give each device examples (data.examples)"
            )
        self.connections.connected = dict.fromkeys(devices, inf)
        self.state(devices)
        for device in devices:
            self._check_in(device)

    def _disconnect_sample(self) -> None:
        """Let the devices of the round that is over leave, and expect the next ones."""
        for device in self.connections.connected:
            self.engine.disconnect(name_of(device), self.now)
        self.connections.connected = {}
        self.events.expect(self.now, "fill")

    def _leave(self, event: Event) -> None:
        """The device goes offline."""
        if self.connections.connected.get(event.device) == event.time:
            self._vanish(event.device, "offline")

    def _vanish(self, device: int, cause: str) -> None:
        """The device and its task are gone without a word."""
        self.tasks.lose(device, cause)
        self.exchanges.lose(device)
        self.connections.connected.pop(device, None)
        self.connections.away.pop(device, None)
        if self.returns is not None:
            self.returns.leave(device)
        self.connections.expect_refill(self.coordinator.last_end)
        if not self.coordinator.down:
            self.carry_out(self.engine.disconnect(name_of(device), self.now))
            selection.forget(self.engine, device)

    def _back(self, event: Event) -> None:
        """The device connects again after the coordinator's restart."""
        if self.connections.away.get(event.device) == event.time and not self.coordinator.down:
            del self.connections.away[event.device]
            self._check_in(event.device)

    def _check_in(self, device: int) -> None:
        name = name_of(device)
        self.exchanges.join(name)
        self.carry_out(self.engine.check_in(name, None, self.now))

    def _connect_again(self, device: int) -> None:
        """The device has failed its task: it closes the connection, and connects again at once."""
        if device in self.connections.connected:
            self.carry_out(self.engine.disconnect(name_of(device), self.now))
            if device in self.connections.connected:
                self._check_in(device)

    def _begin_window(self, event: Event) -> None:
        """Look ahead at what devices will do."""
        assert self.returns is not None
        self.returns.begin_window(self.connections.connected)

    def _return(self, event: Event) -> None:
        """The device checks in: the time is over that it was told, or it is online again."""
        returns, device = self.returns, event.device
        assert returns is not None
        if not returns.is_due(device, event.time):
            return
        if self.coordinator.down:
            returns.postpone(device, MAX_BACK_OFF)
        elif self.engine.has_task(name_of(device)):  # it would get the same task again
            returns.postpone(device, self.scenario.plan.round.grace + MAX_BACK_OFF)
        elif not all(self._has_examples([device])):
            returns.postpone(device, NEXT_LOOK)
        else:
            self.connections.connected[device] = returns.arrive(device)
            self._check_in(device)

    def _has_examples(self, devices: Sequence[int]) -> list[bool]:
        """Return which of these devices have examples. A device without any does not connect, as a
        real one does not: there is nothing that it could do. It is counted in the summary."""
        examples = self.tasks.source.examples(np.array(devices, np.int64)).tolist()
        without = {device for device, count in zip(devices, examples, strict=True) if not count}
        self.connections.without_examples |= without
        return [count > 0 for count in examples]

    def _send_away(self, name: str, after: float) -> None:
        """The device leaves, as it is told."""
        assert self.returns is not None
        device = device_of(name)
        self.connections.away.pop(device, None)
        self.returns.send_away(device, after, self.connections.connected.pop(device))

    def _task_ends(self, event: Event) -> None:
        """A task ends on its device, unless it ended before. With it may end the tasks that end
        next."""
        tasks, row = event.tasks, event.row
        assert tasks is not None
        if self.tasks.is_running(tasks, row):
            cause = tasks.cause[row]
            if self.tasks.waits_to_upload(tasks, row):
                if not self._unreachable(event):
                    self.tasks.upload(tasks, row)
            elif cause and cause not in REPORTED_CAUSES:
                self._vanish(event.device, cause)
            elif not self._unreachable(event):
                if not cause:
                    self.tasks.report(event, self.next_tick, self.carry_out)
                    return
                self.tasks.give_up(tasks, row, self.carry_out)
                self._connect_again(event.device)
        self.tasks.expect_next(tasks, row + 1)

    def _answered(self, event: Event) -> None:
        """A device has answered what it was asked in an exchange, or vanishes before."""
        running, device = self.exchanges.due(event.device, event.time), event.device
        if running is None:
            return
        back = self.connections.away.get(device, 0.0)
        if self.coordinator.down:
            back = self.now + self.scenario.coordinator.restart + MAX_BACK_OFF
        if running.cause:
            self._vanish(device, running.cause)
        elif back > self.now:
            self.exchanges.delay(device, back)
        elif self.exchanges.accept(device):
            name = name_of(device)
            self.carry_out(self.engine.count_answer(name, running.task, self.now))
        else:
            name = name_of(device)
            self.carry_out(self.engine.end(name, running.task, f"{FAILED}diverged", self.now))
            self._connect_again(device)

    def _unreachable(self, event: Event) -> bool:
        """Return whether the device cannot tell the coordinator now. It tells it later then."""
        if self.coordinator.down:
            self._unheard.append(event)
            return True
        back = self.connections.away.get(event.device)
        if back is not None and back > self.now:
            assert event.tasks is not None
            self.tasks.expect_alone(event.tasks, event.row, back)
            return True
        return False

    # What happens to the coordinator

    def _crash(self, event: Event) -> None:
        """The coordinator's process dies. Accepted updates and the tasks of devices are safe on its
        disk."""
        if not self.coordinator.down:
            self.coordinator.down = True
            self._note("crash")
            self.events.expect(self.now + self.scenario.coordinator.restart, "restart")

    def _restart(self, event: Event) -> None:
        """The coordinator is there again. Each device connects again after a delay of its own."""
        self._note("restart")
        commands = self.coordinator.restart(self.now)
        connected, away = self.connections.connected, self.connections.away
        luck = keyed_random.uniform(
            self.scenario.seed, "back off", np.array([*connected], np.int64), self.engine.round
        )
        for device, delay in zip(connected, (MAX_BACK_OFF * luck).tolist(), strict=True):
            away[device] = self.now + delay
            self.events.expect(self.now + delay, "back", device)
        unheard, self._unheard = self._unheard, []
        for later in unheard:
            assert later.tasks is not None
            self.tasks.expect_alone(later.tasks, later.row, away.get(later.device, self.now))
        self.carry_out(commands)

    # What the engine commands

    def carry_out(self, commands: Iterable[Command]) -> None:
        waiting = list(commands)
        while waiting:
            batch, waiting = waiting, []
            assigned: list[Assign] = []
            asked: list[Ask] = []
            closed: list[ExchangeClosed] = []
            told: list[RunEvent] = []
            for command in batch:
                told.append(command)
                if asked and isinstance(command, Commit | Unanswered):
                    # A checkpoint has all that was asked; what has begun may end at once.
                    self.exchanges.ask(asked)
                    asked = []
                match command:
                    case Assign():
                        # A device that was lost, and is given its task again, begins it again.
                        if not self._is_at(command):
                            assigned.append(command)
                    case Opened(number, goal):
                        self.coordinator.begin_round(number, self.now, self.tasks.rounds_running)
                        self.tasks.begin_round()
                        own = {} if goal is None else {"goal": goal}
                        self._note(
                            "opened", round=number, connected=len(self.connections.connected), **own
                        )
                    case Ended(device, task, _, cause):
                        self.tasks.end(device_of(device), task, cause)
                    case RegionEnded(number, region, is_done, reports, why):
                        self._note(
                            "region-ended",
                            round=number,
                            region=region,
                            done=is_done,
                            reports=reports,
                            why=why,
                        )
                    case CancelTask():
                        pass  # the task has ended on its device already
                    case SendAway(device, after):
                        self._send_away(device, after)
                    case Commit(number, dropped, regions):
                        self._tell(told)
                        told = []
                        waiting = self._commit(number, dropped, regions)
                    case Abandon(number, dropped, text):
                        told.append(self._abandon(number, dropped, text))
                        if self.finished is not None:
                            self._tell(told)
                            return
                    case Ask():
                        asked.append(command)
                    case ExchangeOpened():
                        self.exchanges.open(command)
                    case Unanswered(device, task):
                        self.exchanges.lose(device_of(device), task)
                    case ExchangeClosed():
                        told.append(self._close_exchange(command))
                        closed.append(command)
                    case Finish(reason):
                        self.finished = reason
            self._tell(told)
            if assigned:
                self.tasks.assign(assigned)
            if asked:
                self.exchanges.ask(asked)
            for ended in closed:  # after all else: it may end tasks that were just given
                waiting += self.exchanges.stop_by(ended)

    def _is_at(self, given: Assign) -> bool:
        """Return whether the device has the task already."""
        return given.again and self.tasks.has(device_of(given.device), given.task)

    def _commit(
        self, number: int, dropped: dict[str, int], regions: tuple[str, ...] | None
    ) -> list[Command]:
        why = self.exchanges.why_not_unmasked(number)
        if why is not None:
            return self.engine.give_up_commit(why, dropped, self.now)
        summary = self.coordinator.commit(
            number, dropped, self.now, len(self.connections.connected), regions
        )
        self._tell([RoundEnded(number, "committed", self.engine.version + 1, summary, "")])
        self._note("committed", round=number, change=summary["change"])
        if self.sampling is not None:
            self.sampling.check(number, len(self.engine.accepted))
            self._disconnect_sample()
        self.before_commit()
        return self.engine.committed(
            self.now,
            change=summary["change"],
            metrics=self.metrics_of(summary),
            done=self.coordinator.done,
        )

    def metrics_of(self, summary: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of a round that may stop the run."""
        plan = self.scenario.plan
        return deciding(summary, plan.round.minimum) if plan.stop.measured_by == "round" else {}

    def _close_exchange(self, command: ExchangeClosed) -> ExchangeSummarised:
        number, version, _, valid, kind, phase = command
        summary = self.exchanges.close(command)
        return ExchangeSummarised(kind, number, phase, version, valid, summary)

    def _abandon(self, number: int, dropped: dict[str, int], text: str) -> RoundEnded:
        connected = len(self.connections.connected)
        summary = self.coordinator.abandon(number, dropped, self.now, connected)
        self._note("abandoned", round=number, text=text)
        if self.sampling is not None:
            self.sampling.check(number, summary["reports"])
        if (abandoned := self.coordinator.abandoned_in_a_row) >= MAX_ABANDONED_ROUNDS_IN_A_ROW:
            # The tasks' ends say why: devices that fail, or are lost.
            last = f"the last one: {text}; dropped: {describe_dropped(summary)}"
            self.finished = f"{abandoned} rounds one after the other were abandoned; {last}"
        return RoundEnded(number, "abandoned", self.engine.version, summary, text)


HANDLERS: dict[str, Callable[[Fleet, Event], None]] = {
    "fill": Fleet._fill,
    "leave": Fleet._leave,
    "window": Fleet._begin_window,
    "return": Fleet._return,
    "tasks": Fleet._task_ends,
    "answered": Fleet._answered,
    "crash": Fleet._crash,
    "restart": Fleet._restart,
    "back": Fleet._back,
}
