"""A vertical run without I/O: the engine, the parties' machines, and linear parts in float64.

The world carries commands out, message by message, and a side can be killed between any two of
them: it then has what it kept, and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from fleetlearn_coordinator.service.vertical import engine as coordinator
from fleetlearn_coordinator.service.vertical.engine import KeptRun, VerticalEngine
from fleetlearn_device.vertical import party_machine as device
from fleetlearn_device.vertical.party_machine import PartyMachine
from fleetlearn_protocol.manifest import Cut, Input
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.alignment import (
    digest_of,
    hash_rows,
    hashes_as_bytes,
    read_membership,
)
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays
from fleetlearn_protocol.vertical.messages import (
    PartyActivations,
    PartyJoin,
    PartyRows,
    PartyState,
    VerticalTerms,
)
from fleetlearn_protocol.vertical.schedule import rows_of_step

KEY = b"k" * 32
LR = np.float32(0.1)
PARTIES = ("bank", "shop")
BUNDLES = {"bank": "a" * 64, "shop": "b" * 64}
CUTS = [Cut(name, Input(f"activations_{name}", "float32", (1,)), BUNDLES[name]) for name in PARTIES]
TARGETS = (Input("y", "float32", ()),)


def terms(**more: Any) -> VerticalTerms:
    given = {"steps": 12, "batch_size": 4, "checkpoint_every": 3, "encoding": "float32", **more}
    return VerticalTerms(run="run", part=1, targets=(), seed=5, hyper={}, **given)


class WorldParty:
    """One party: a linear bottom of two features, h = x w."""

    def __init__(self, name: str, ids: list[str], x: Any, y: Any = None) -> None:
        hashes = hash_rows(ids, KEY)
        order = np.argsort(hashes)
        self.name, self.hashes, self.x = name, hashes[order], x[order].astype(np.float32)
        self.y = None if y is None else y[order].astype(np.float32)
        self.shift = 0
        """Planted: how many rows the party is off."""
        self.kept: dict[int, Any] = {0: np.zeros(x.shape[1], np.float32)}
        self.kept_rows: Any = None
        self.start()

    def start(self) -> None:
        """The process begins: it has what it kept."""
        self.machine = PartyMachine()
        self.weights = self.kept[0]
        self.terms: Any = None
        self.ended = ""

    def rows(self, step: int) -> Any:
        chosen = np.flatnonzero(self.kept_rows)
        rows = rows_of_step(step, len(chosen), self.terms.batch_size, self.terms.seed)
        return chosen[(rows + self.shift) % len(chosen)]

    def do(self, command: Any) -> list[tuple[Any, bytes]]:
        """Carry a command out. Returns what is said."""
        match command:
            case device.Say(message):
                return [(message, b"")]
            case device.TakeTerms(terms):
                self.terms = terms
            case device.SayState():
                known = self.kept_rows is not None
                alignment = digest_of(self.hashes[self.kept_rows]) if known else None
                kept = tuple(sorted(self.kept)) if known else (0,)
                return [(PartyState(len(self.hashes), alignment, kept), b"")]
            case device.SayRows():
                content = hashes_as_bytes(self.hashes)
                return [(PartyRows(len(content), checksum(content)), content)]
            case device.KeepCommonRows(message, content):
                self.kept_rows = read_membership(content, len(self.hashes))
                assert digest_of(self.hashes[self.kept_rows]) == message.digest
            case device.LoadBottom(step):
                self.weights = self.kept[step]
            case device.SayActivations(attempt, step):
                rows = self.rows(step)
                arrays = [(f"activations_{self.name}", self.x[rows] @ self.weights[:, None])]
                if self.terms.targets:
                    arrays.append(("y", self.y[rows]))
                parts, content = encode_arrays(arrays, self.terms.encoding)
                said = PartyActivations(attempt, step, digest_of(self.hashes[rows]), parts)
                return [(said, content)]
            case device.StepBottom(message, content):
                rows = self.rows(message.step)
                row = [Input("gradient", "float32", (1,))]
                (g,) = decode_arrays(message.arrays, content, row, len(rows), "float32")
                gradient = (self.x[rows] * g).mean(0, dtype=np.float32)
                self.weights = self.weights - LR * gradient
            case device.KeepBottom(step):
                kept = {one: part for one, part in self.kept.items() if one < step}
                newest = sorted(kept)[-1:]
                self.kept = {0: self.kept[0], **{one: kept[one] for one in newest}}
                self.kept[step] = self.weights
            case device.EndParty(refused):
                self.ended = refused or "finished"
        return []


class World:
    """The coordinator and two parties, with the messages that are on the way."""

    def __init__(self, parties: list[WorldParty], **more: Any) -> None:
        self.parties = {party.name: party for party in parties}
        self.terms = terms(**more)
        self.kept = KeptRun()
        self.tops: dict[int, Any] = {0: np.float32(0.0)}
        self.failed = ""
        self.losses: dict[int, float] = {}
        self.steps = 0
        """Commands and messages that were handled."""
        self.up: dict[str, deque[Any]] = {}
        self.down: dict[str, deque[Any]] = {}
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """The process begins: it has what it kept. All connections are new."""
        checkpoints = tuple(sorted(one for one in self.tops if one))
        self.kept = self.kept._replace(checkpoints=checkpoints)
        self.engine = VerticalEngine(self.terms, CUTS, TARGETS, "bank", self.kept)
        self.top = self.tops[0]
        for name in self.parties:
            self.connect(name)

    def connect(self, name: str) -> None:
        """A party begins a connection, with what it is."""
        self.parties[name].start()
        self.up[name], self.down[name] = deque(), deque()
        self.up[name].append((PartyJoin(1, name, BUNDLES[name]), b""))

    def kill(self, name: str) -> None:
        """A party's process dies, and is started again. What was on the way is lost."""
        if name == "coordinator":
            self.start_coordinator()
            return
        self.up[name], self.down[name] = deque(), deque()
        self.carry_out(self.engine.left(name))
        self.connect(name)

    def go(self, kill_at: dict[int, str] | None = None, most: int = 10_000) -> None:
        """Handle messages until none is on the way. kill_at: how many were handled -> who dies."""
        deaths = dict(kill_at or {})
        while self.steps < most:
            died = deaths.pop(self.steps, None)
            if died is not None:
                self.kill(died)
            name = next((one for one in self.parties if self.up[one]), None)
            if name is not None:
                message, content = self.up[name].popleft()
                self.steps += 1
                if isinstance(message, PartyJoin):
                    self.carry_out(self.engine.joined(name, message))
                else:
                    self.carry_out(self.engine.said(name, message, content))
                continue
            name = next((one for one in self.parties if self.down[one]), None)
            if name is None:
                return
            message, content = self.down[name].popleft()
            self.steps += 1
            party = self.parties[name]
            for command in party.machine.received(message, content):
                self.up[name].extend(party.do(command))

    def carry_out(self, commands: Any) -> None:
        waiting = [*commands]
        while waiting:
            waiting = [*self.do(waiting.pop(0)), *waiting]

    def do(self, command: Any) -> Any:
        match command:
            case coordinator.TellParty(party, message, content):
                self.down[party].append((message, content))
            case coordinator.LoadTop(step):
                self.top = self.tops[step]
            case coordinator.StepTop(step, _, _, (bank, shop, y)):
                error = (bank + shop)[:, 0] + self.top - y
                gradient = (2 * error)[:, None].astype(np.float32)
                self.top = self.top - LR * np.float32(2 * error.mean(dtype=np.float32))
                loss = float((error**2).mean())
                assert self.losses.setdefault(step, loss) == loss, "other bits than the first time"
                return self.engine.top_done(step, [gradient, gradient], loss)
            case coordinator.KeepTop(step):
                older = sorted(one for one in self.tops if 0 < one < step)[-1:]
                self.tops = {one: self.tops[one] for one in (0, *older)}
                self.tops[step] = self.top
            case coordinator.KeepAlignment(digest, rows, _):
                self.kept = self.kept._replace(alignment=digest, rows=rows)
            case coordinator.FinishRun():
                self.kept = self.kept._replace(finished=True)
            case coordinator.StopRun(text):
                self.failed = text
        return []

    def trained(self) -> list[float]:
        """Return all weights that are kept last."""
        kept = [self.parties[name].kept for name in PARTIES] + [self.tops]
        newest = [parts[max(parts)] for parts in kept]
        return [float(value) for part in newest for value in np.atleast_1d(part)]


def two_parties(rows: int = 14) -> list[WorldParty]:
    """Return two parties with some rows in common, in other orders."""
    random = np.random.default_rng(1)
    x, ids = random.normal(size=(rows, 4)), [f"row {number}" for number in range(rows)]
    y = x @ np.array([1.0, -2.0, 0.5, 0.3])
    other = random.permutation(np.arange(2, rows))
    return [
        WorldParty("bank", ids[:-1], x[:-1, :2], y[:-1]),
        WorldParty("shop", [ids[row] for row in other], x[other, 2:]),
    ]
