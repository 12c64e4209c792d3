"""Devices of pairwise masks with their real sessions, for coordinators that do or do not cheat."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_coordinator.secure.pairwise_session import (
    Circle,
    KeyRules,
    MaskSum,
    circle_of,
    sealed_for,
    shares_question,
    sum_of_masks,
    unmasking_question,
)
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.training.pairwise_sessions import NeighbourRules, PairwiseSessions
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.messages import Question, SecureTask, Task, VectorReference
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.graph import Degrees
from fleetlearn_protocol.secure.pairwise_messages import (
    KEYS,
    PAIRWISE,
    SHARES,
    UNMASKING,
    PairwiseAnswer,
    PairwiseQuestion,
)
from fleetlearn_protocol.secure.task_terms import pairwise_about

RUN, SIZE = "0f1e", 4
TASK = Task(
    f"{RUN}-1-1",
    1,
    "bb" * 32,
    (VectorReference("model", "aa" * 32, 4 * (SIZE - 1), "float32"),),
    {"update": "masked"},
    {"lr": 0.1},
    1,
    8,
    7,
    60.0,
    clip=1.0,
    secure=SecureTask("pairwise", 2, 20, session="00" * 32),
)


class PairwiseFleet:
    """Devices, and what they told a coordinator in the session of one round."""

    def __init__(
        self, folder: Path, count: int = 6, degrees: Degrees | None = None, *, roster: bool = False
    ) -> None:
        self.folder, self.count, self.with_roster = folder, count, roster
        self.degrees = degrees or Degrees(count - 1, count // 2)
        self.names = [f"d{number}" for number in range(count)]
        self.own: dict[str, Ed25519PrivateKey] = {}
        for name in self.names:
            (folder / name).mkdir()
            self.own[name] = Ed25519PrivateKey.from_private_bytes(device_key(folder / name))
        self.roster = {name: key.public_key().public_bytes_raw() for name, key in self.own.items()}
        self.sessions: dict[str, PairwiseSessions] = {}
        self.restarts = 0
        for name in self.names:
            self.restart(name)
        self.begin(1)

    def restart(self, name: str, **owner: Any) -> None:
        """The device's process dies, and another one begins."""
        self.restarts += 1
        roster = self.roster if self.with_roster else None
        draw = Random(f"{name} {self.restarts}").randbytes
        wants = NeighbourRules(**{"roster": roster, **owner})
        self.sessions[name] = PairwiseSessions(name, self.folder / name, wants, draw)

    def begin(self, round: int) -> None:
        self.round = round
        self.keys: dict[str, PairwiseAnswer] = {}
        self.shares: dict[str, PairwiseAnswer] = {}
        self.sent: dict[str, Words] = {}
        self.plain: dict[str, Words] = {}
        self.unmasking: dict[str, PairwiseAnswer] = {}
        self._circle: Circle | None = None

    @property
    def circle(self) -> Circle:
        if self._circle is None:
            rules = KeyRules(RUN, self.round)
            self._circle = circle_of(rules, b"s" * 32, self.keys, lambda count: self.degrees)
        return self._circle

    def ask(self, name: str, phase: int, asked: PairwiseQuestion, turn: int = 1) -> PairwiseAnswer:
        task = f"{RUN}-p{asked.round}.{phase}-{name}-{turn}"
        return self.sessions[name].answer(Question(task, PAIRWISE, 9.0, phase, fields_of(asked)))

    def task(self, name: str, shares: Mapping[str, str], **changes: Any) -> Task:
        secure = {"session": self.circle.session.hex(), "shares": dict(shares)}
        secure |= changes.pop("secure", {})
        assert TASK.secure is not None
        replaced = msgspec.structs.replace(TASK.secure, **secure)
        task = f"{RUN}-{self.round}-{self.names.index(name) + 1}"
        fields = {"task": task, "round": self.round, "secure": replaced}
        return msgspec.structs.replace(TASK, **{**fields, **changes})

    # An honest coordinator

    def tell_keys(self, *names: str) -> None:
        for name in names or self.names:
            self.keys[name] = self.ask(name, KEYS, PairwiseQuestion(self.round))

    def tell_shares(self, *names: str) -> None:
        for name in names or self.names:
            self.shares[name] = self.ask(name, SHARES, shares_question(self.circle, name))

    def train(self, *names: str) -> None:
        for name in names or self.names:
            self.send(name, self.task(name, sealed_for(self.circle, self.shares, name)))

    def send(self, name: str, task: Task) -> None:
        words = np.arange(SIZE, dtype=np.uint32) + 1000 * (self.names.index(name) + 1)
        self.sent[name], self.plain[name] = self.sessions[name].masked(task, words), words

    def tell_unmasking(self, *names: str, survivors: Collection[str] = ()) -> None:
        for name in names or self.names:
            asked = unmasking_question(self.circle, self.shares, survivors or self.sent, name)
            self.unmasking[name] = self.ask(name, UNMASKING, asked)

    def sum(self) -> tuple[Words, Words, MaskSum]:
        """Return the sum of the updates without their masks, what it should be, and the masks."""
        about = pairwise_about(self.task(self.names[0], {}), SIZE)
        told = self.circle, self.shares, self.sent, self.unmasking
        found = sum_of_masks(*told, SIZE, about)
        zeros = np.zeros(SIZE, np.uint32)
        return sum(self.sent.values(), zeros) - found.masks, sum(self.plain.values(), zeros), found
