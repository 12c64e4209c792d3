"""A split run without I/O: the engine, the devices' machines, and linear parts in float32.

The model is y = x w + b: the bottom is w (two features), the top b. The world carries commands out,
message by message, and a side can be killed between any two of them: it then has what it kept, and
nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from fleetlearn_coordinator.service.vertical import rounds_engine as coordinator
from fleetlearn_coordinator.service.vertical.engine import FinishRun, StopRun, TellParty
from fleetlearn_coordinator.service.vertical.round_model import RoundSum, WholeModel
from fleetlearn_coordinator.service.vertical.rounds_engine import RoundsEngine
from fleetlearn_device.vertical import party_machine as device
from fleetlearn_device.vertical import rounds_machine
from fleetlearn_device.vertical.rounds_machine import RoundsMachine
from fleetlearn_protocol.manifest import Cut, Input
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays, read_bottom
from fleetlearn_protocol.vertical.messages import (
    PartyActivations,
    PartyJoin,
    PartyState,
    SplitBegin,
    SplitBottom,
    SplitTerms,
    VerticalFinished,
)
from fleetlearn_protocol.vertical.schedule import rows_of_step

BUNDLE = "d" * 64
CUT = Cut("device", Input("activations_device", "float32", (1,)), BUNDLE)
TARGETS = (Input("y", "float32", ()),)
LR = np.float32(0.1)
NAMES = ("a", "b", "c")


def run_terms(*, turns: bool) -> SplitTerms:
    return SplitTerms("run", 1, TARGETS, 5, 4, {}, "float32", turns)


def rounds_engine(**more: Any) -> RoundsEngine:
    given = {"turns": False, "rounds": 4, "round_steps": 3, "bottom_size": 2, **more}
    names = given.pop("names", NAMES)
    return RoundsEngine(run_terms(turns=given["turns"]), CUT, names, **given)


class WorldDevice:
    """One device: a linear bottom of two features, h = x w."""

    def __init__(self, name: str, rows: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.name = name
        self.x = random.normal(size=(rows, 2)).astype(np.float32)
        self.y = (self.x @ np.array([1.0, -2.0]) + 0.5).astype(np.float32)
        self.start()

    def start(self) -> None:
        """The process begins: it has kept nothing."""
        self.machine = RoundsMachine()
        self.w = np.zeros(2, np.float32)
        self.terms: Any = None
        self.ended = ""

    def batch(self, step: int) -> Any:
        terms = self.terms
        return rows_of_step(step, len(self.x), terms.batch_size, terms.seed)

    def do(self, command: Any) -> list[tuple[Any, bytes]]:
        """Carry a command out. Returns what is said."""
        match command:
            case device.EndParty(refused):
                self.ended = refused or "finished"
            case rounds_machine.TakeSplitTerms(terms):
                self.terms = terms
            case device.SayState():
                return [(PartyState(len(self.x), None, ()), b"")]
            case rounds_machine.TakeBottom(_, content):
                self.w = read_bottom(content, 2)
            case device.SayActivations(attempt, step):
                rows = self.batch(step)
                arrays = [(CUT.activations.name, self.x[rows] @ self.w[:, None])]
                parts, content = encode_arrays([*arrays, ("y", self.y[rows])], "float32")
                return [(PartyActivations(attempt, step, None, parts), content)]
            case device.StepBottom(message, content):
                rows = self.batch(message.step)
                expected = [Input("gradient", "float32", (1,))]
                (g,) = decode_arrays(message.arrays, content, expected, len(rows), "float32")
                self.w = self.w - LR * (self.x[rows] * g).mean(0, dtype=np.float32)
            case rounds_machine.SayBottom(attempt):
                content = self.w.tobytes()
                return [(SplitBottom(attempt, len(content), checksum(content)), content)]
        return []


def three_devices() -> list[WorldDevice]:
    """Return devices of unlike many rows: 9, 5 and 3, fewer than a batch."""
    return [WorldDevice(*row) for row in (("a", 9, 1), ("b", 5, 2), ("c", 3, 3))]


def step_of_top(bias: Any, h: Any, y: Any) -> tuple[Any, Any, float]:
    """Return the top after a step of the squared error, its gradient for h, and the loss."""
    error = h[:, 0] + bias - y
    gradient = (2 * error)[:, None].astype(np.float32)
    after = bias - LR * np.float32(2 * error.mean(dtype=np.float32))
    return after, gradient, float((error**2).mean())


def initial() -> WholeModel:
    empty = np.zeros(0, np.float32)
    return WholeModel(np.zeros(2, np.float32), empty, np.zeros(1, np.float32), empty)


class RoundsWorld:
    """The coordinator and three devices, with the messages that are on the way."""

    def __init__(self, **more: Any) -> None:
        self.more = more
        self.devices = {one.name: one for one in three_devices()}
        self.kept: dict[int, WholeModel] = {0: initial()}
        self.finished = False
        self.failed = ""
        self.handled = 0
        """Messages that were handled."""
        self.skipped: list[str] = []
        self.dropped: list[str] = []
        self.weights: list[dict[str, int]] = []
        """Of each round that was closed: device -> rows that count."""
        self.up: dict[str, deque[Any]] = {}
        self.down: dict[str, deque[Any]] = {}
        self.away: set[str] = set()
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """The process begins: it has what it kept. All connections are new."""
        step = max(self.kept)
        more = {"step": step, "phase": "finished" if self.finished else "waiting", **self.more}
        self.engine = rounds_engine(**more)
        self.model = self.kept[step]
        self.sum = self.new_sum()
        self.open: dict[str, int] = {}
        self.tops: dict[str, Any] = {}
        self.weights = self.weights[:step]
        for name in self.devices:
            self.connect(name)

    def new_sum(self) -> RoundSum:
        return RoundSum(self.model, carries_state=self.engine.turns)

    def connect(self, name: str) -> None:
        """A device begins a connection, with nothing."""
        self.devices[name].start()
        self.up[name], self.down[name] = deque(), deque()
        if name not in self.away:
            self.up[name].append((PartyJoin(1, name, BUNDLE), b""))

    def kill(self, name: str) -> None:
        """A process dies, and is started again unless it is ``away``. What was on the way is
        lost."""
        if name == "coordinator":
            self.start_coordinator()
            return
        if name == "top":
            self.tops = {}
            self.carry_out(self.engine.top_lost())
            return
        self.carry_out(self.engine.left(name))
        self.connect(name)

    def go(self, kill_at: dict[int, str] | None = None, most: int = 10_000) -> None:
        """Handle messages until none is on the way. kill_at: how many were handled -> who dies."""
        deaths = dict(kill_at or {})
        while self.handled < most:
            died = deaths.pop(self.handled, None)
            if died is not None:
                self.kill(died)
            name = next((one for one in self.devices if self.up[one]), None)
            if name is not None:
                message, content = self.up[name].popleft()
                self.handled += 1
                if isinstance(message, PartyJoin):
                    self.carry_out(self.engine.joined(name, message))
                else:
                    self.carry_out(self.engine.said(name, message, content))
                continue
            name = next((one for one in self.devices if self.down[one]), None)
            if name is None:
                return
            message, content = self.down[name].popleft()
            self.handled += 1
            one = self.devices[name]
            for command in one.machine.received(message, content):
                self.up[name].extend(one.do(command))

    def wait(self) -> bool:
        """Time passes in which nothing happens. Returns whether the run gives something up."""
        if self.engine.waits_for is None:
            return False
        self.carry_out(self.engine.waited())
        return True

    def carry_out(self, commands: Any) -> None:
        waiting = [*commands]
        while waiting:
            waiting = [*self.do(waiting.pop(0)), *waiting]

    def do(self, command: Any) -> Any:
        match command:
            case TellParty(name, message, content):
                self.down[name].append((message, content))
                if isinstance(message, VerticalFinished):
                    self.finished = True
            case coordinator.BeginDevice(name, attempt, number, step, steps):
                self.tops[name] = self.model.top[0]
                content = self.model.bottom.tobytes()
                told = SplitBegin(attempt, number, step, steps, len(content), checksum(content))
                return [TellParty(name, told, content)]
            case coordinator.StepCopy(name, attempt, _, _, (h, y)):
                self.tops[name], gradient, loss = step_of_top(self.tops[name], h, y)
                return self.engine.copy_done(name, attempt, gradient, loss)
            case coordinator.AddDevice(name, _, bottom, _, rows):
                top = np.array([self.tops[name]], np.float32)
                self.sum.add(self.model._replace(bottom=bottom, top=top), rows)
                self.open[name] = rows
                return self.engine.added(name)
            case coordinator.CloseRound(number, keep):
                self.model, self.open, closed = self.sum.mean(), {}, self.open
                self.weights.append(closed)
                self.sum = self.new_sum()
                if keep:
                    self.kept[number] = self.model
            case coordinator.SkipTurn(name, number, keep):
                self.skipped.append(name)
                if keep:
                    self.kept[number] = self.model
            case coordinator.DropDevice(name):
                self.dropped.append(name)
            case FinishRun():
                self.finished = True
            case StopRun(text):
                self.failed = text
        return []

    def trained(self) -> list[float]:
        """Return all weights that are kept last."""
        newest = self.kept[max(self.kept)]
        return [*newest.bottom.tolist(), *newest.top.tolist()]
