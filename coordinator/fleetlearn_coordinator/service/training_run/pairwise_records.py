"""The exchanges of pairwise masks in a run: what devices are asked, which answers count, and the
sum of the masks of a round's updates."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.exchanges import content_of, fields_of
from fleetlearn_protocol.messages import MODEL, MOST_NEIGHBOURS, Reply, Task, VectorReference
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
from fleetlearn_protocol.secure.roster import read_roster
from fleetlearn_protocol.secure.task_terms import pairwise_about

from fleetlearn_coordinator.aggregation.modular_sum import UnmaskError
from fleetlearn_coordinator.plan.pairwise_rules import graph_for
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import Ask, ExchangeOpened
from fleetlearn_coordinator.rounds.waiting_words import named
from fleetlearn_coordinator.secure.pairwise_session import (
    Circle,
    KeyRules,
    WrongAnswerError,
    check_shares,
    check_unmasking,
    circle_of,
    keys_in,
    sealed_for,
    shares_question,
    sum_of_masks,
    unmasking_question,
)
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.exchange_records import (
    ExchangeCommand,
    ExchangeRecords,
)
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_coordinator.storage.store import Store

SEED = "pairwise_seed"
"""Of the metadata: the run's random number, from which the circles of its rounds follow."""


class PairwiseRecords(ExchangeRecords):
    """What a run knows of its sessions beside the engine. Only the last one is kept."""

    def __init__(self, plan: Plan, members: Members, store: Store) -> None:
        super().__init__(PAIRWISE, store.ledger)
        assert plan.secure is not None
        assert plan.secure.mode == "pairwise"
        seed = store.ledger.get(SEED)
        if seed is None:
            seed = secrets.token_hex(32)
            self.rows.append(Metadata(SEED, seed))
        self._seed, self._run = bytes.fromhex(str(seed)), store.run
        self._secure = plan.secure
        path = plan.secure.roster
        self._roster = None if path is None else dict(read_roster(path))
        self._series = 0 if self.saved is None else self.saved.number
        """The round that the session is for."""
        self._survivors: frozenset[str] = frozenset()
        """The devices whose masked updates count, from phase 3 on."""
        if self.saved is not None and self.saved.phase == UNMASKING:
            self._survivors = frozenset(self.saved.members or ())
        self._taken = {key for answer in self._keys.values() for key in keys_in(answer)}
        self._circle: Circle | None = None

    @property
    def _rules(self) -> KeyRules:
        return KeyRules(self._run, self._series, self._roster)

    @property
    def _keys(self) -> dict[str, PairwiseAnswer]:
        return self.answers[KEYS - 1] if self.answers else {}

    @property
    def _shares(self) -> dict[str, PairwiseAnswer]:
        return self.answers[SHARES - 1]

    @property
    def circle(self) -> Circle:
        """Who is whose neighbour; phase 1 is over."""
        if self._circle is None:
            self._circle = circle_of(self._rules, self._seed, self._keys, self._graph)
        return self._circle

    def _graph(self, devices: int) -> Degrees:
        """Return how many neighbours each device has in a circle of ``devices``."""
        try:
            return graph_for(self._secure, devices)
        except ValueError:
            # The plan's rules were checked for its fewest and most devices, and hold for nearly all
            # numbers in between. Else as many as can be: what they hide is sure, and where devices
            # are lost the round may be abandoned.
            degree = min(devices - 1, MOST_NEIGHBOURS)
            return Degrees(degree, 2 * degree // 3 + 1)

    # What devices are asked and answer

    def summary(self, *, valid: bool) -> dict[str, Any]:
        if not valid or len(self.answers) != KEYS:
            return {}
        around = self.circle.neighbours[self.circle.order[0]]
        return {"neighbours": len(around), "threshold": self.circle.threshold}

    def row_of(self, command: ExchangeCommand, at: float) -> Row | None:
        if isinstance(command, ExchangeOpened):
            self._series = command.number
            if command.phase == KEYS:
                self._circle, self._survivors = None, frozenset()
                self._taken.clear()
            elif command.phase == UNMASKING:
                self._survivors = frozenset(command.members or ())
        return super().row_of(command, at)

    def content(self, lease: Ask) -> dict[str, Any]:
        return fields_of(self._question(lease.device, lease.phase))

    def _question(self, device: str, phase: int) -> PairwiseQuestion:
        if phase == KEYS:
            return PairwiseQuestion(self._series)
        if phase == SHARES:
            return shares_question(self.circle, device)
        return unmasking_question(self.circle, self._shares, self._survivors, device)

    def answer_row(self, device: str, message: Reply) -> Row:
        try:
            self._check(device, content_of(message))
        except WrongAnswerError as error:
            text = f"{PAIRWISE} {self._series}, phase {len(self.answers)}: {device}: {error}"
            raise ProtocolError(Code.BAD_MESSAGE, text) from None
        return super().answer_row(device, message)

    def _check(self, device: str, answer: PairwiseAnswer) -> None:
        match len(self.answers):
            case 1:
                self._rules.check(device, answer, self._taken)
            case 2:
                check_shares(self.circle, device, answer)
            case phase:
                check_unmasking(self._question(device, phase), answer)

    def keep(self, device: str, message: Reply) -> None:
        super().keep(device, message)
        if len(self.answers) == KEYS:
            self._taken.update(keys_in(self._keys[device]))

    # What the round's tasks and its model need

    @property
    def session(self) -> str:
        """The session's name, 64 hexadecimal digits."""
        return self.circle.session.hex()

    def sealed_for(self, device: str) -> dict[str, str]:
        """Return the neighbours that a device of the round masks its update with, and what each
        sealed for it."""
        return sealed_for(self.circle, self._shares, device)

    def task_of(self, shared: Task, model: str) -> Task:
        """Return what all tasks of the round say alike. shared: what all of the run do. model:
        SHA-256 of the model that they begin from."""
        vectors = (VectorReference(MODEL, model, 1, FLOAT32.name),)
        return msgspec.structs.replace(shared, round=self._series, vectors=vectors)

    def masks(self, task: Task, size: int, log: RunLog) -> Words:
        """Return the sum of the masks of the round's updates, uint32, (``size``,). ``task``: as
        ``task_of`` returns. In any thread, while no exchange is open. Raises UnmaskError where a
        secret cannot be put together."""
        about = pairwise_about(task, size)
        _, shares, unmasking = self.answers
        try:
            found = sum_of_masks(self.circle, shares, self._survivors, unmasking, size, about)
        except ValueError as error:
            raise UnmaskError(str(error)) from None
        if found.liars:
            log.warning(
                "round %d: %s told wrong shares, which were left out: the sum is right without "
                "them",
                self._series,
                named(found.liars),
            )
        return found.masks
