"""A coordinator's own run (``Run``, with its store) whose devices mask, and a helper beside it, in
which anything may die between any two steps. What must hold is checked as in
``disturbed_helper.py``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from disturbed_helper import MEMORY, BrokenPromiseError, DiedError, Disturbances, columns_of
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.rounds.commands import Assign, Command
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.training_run import mask_sum
from fleetlearn_coordinator.service.training_run.mask_sum import Answer, MaskQuestion
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.secure.masks import add_mask
from masked_fleet import CalledHelper, MaskedFleet, secure_settings
from masked_peers import MaskedUpload, masked_upload
from peers import SIZE, plan_text

DEVICES = tuple("abcdef")
MINIMUM = 3
ROUNDS = 2
CALM_STEPS = 300
CHANCES = {
    "coordinator dies": 0.08,
    "helper dies": 0.1,
    "report comes twice": 0.2,
    "device is gone": 0.03,
    "device is revoked": 0.02,
    "answer is lost": 0.4,
    "deadline": 0.12,
}
MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a refused device stays in the sum": lambda: patch.object(
        OpenRound, "subtract", lambda self, reports: None
    ),
    "an update is added twice": lambda: patch.object(OpenRound, "add", _add_twice),
    "one device less is asked for": lambda: patch.object(
        mask_sum.MaskSums, "_make_question", _one_less
    ),
}
"""Planted one at a time: each must be found."""
_add, _question = OpenRound.add, mask_sum.MaskSums._make_question


def _add_twice(self: OpenRound, reports: ReportColumns) -> None:
    for _ in range(2):
        _add(self, reports)


def _one_less(self: mask_sum.MaskSums) -> MaskQuestion:
    made = _question(self)
    rest = made.request.reports[1:]
    request = type(made.request)(*self.terms, reports=rest)
    return MaskQuestion(made.helper, request)


class RunRehearsal:
    """One run of two rounds. ``go`` raises BrokenPromiseError where something did not hold."""

    def __init__(self, seed: int, bundle: Path) -> None:
        self.disturbances = Disturbances(seed, CHANCES)
        self._bundle = bundle
        self._uploads: dict[str, MaskedUpload] = {}
        """Task -> what its device has in its outbox."""
        self._given: dict[str, Assign] = {}
        self._idle: set[str] = set()
        """Devices that checked in, with a task or without."""
        self._gone: set[str] = set()
        self._revoked: set[str] = set()
        self._sets: dict[frozenset[str], bytes] = {}
        self._seconds = 0.0
        self.committed = self.deaths = 0

    def go(self) -> list[tuple[str, str]]:
        """Let the rounds end. Returns how each ended, and why."""
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            self._folder = Path(folder)
            self.helper = CalledHelper(self._folder, DEVICES, MINIMUM)
            self.plan = self._plan()
            self.fleet = MaskedFleet(self.plan)
            try:
                self._go()
                return self._ended()
            finally:
                self.fleet.store.close()

    def _plan(self) -> Plan:
        random = self.disturbances.random
        settings = secure_settings(
            self.helper, round__goal=random.randint(MINIMUM, 5), round__minimum=MINIMUM
        )
        text = plan_text(self._bundle, self._folder / "run", stop__rounds=ROUNDS, **settings)
        return Plan.parse(text, self._folder)

    def _go(self) -> None:
        for _ in range(self.disturbances.random.randint(10, 80)):
            if self._is_over():
                return
            self._step()
        self.disturbances.calm()
        for _ in range(CALM_STEPS):
            if self._is_over():
                return
            self._step()
        raise BrokenPromiseError(f"the rounds did not end: {self.fleet.run.engine.phase}")

    @property
    def now(self) -> Clocks:
        return Clocks(self._seconds, 1000.0 + self._seconds)

    def _is_over(self) -> bool:
        there = len({*DEVICES} - self._gone - self._revoked)
        return self.fleet.run.engine.phase is Phase.FINISHED or there < MINIMUM

    def _step(self) -> None:
        disturbances, fleet = self.disturbances, self.fleet
        self._seconds += 0.1
        try:
            if disturbances.happens("helper dies"):
                self.helper = CalledHelper(self._folder, (), MINIMUM)
            if disturbances.happens("device is gone"):
                self._gone.add(disturbances.random.choice(DEVICES))
            if disturbances.happens("device is revoked"):
                self._revoke(disturbances.random.choice(DEVICES))
            if disturbances.happens("deadline") or self._waits_for_nobody():
                self._seconds += 100.0
                self._note(fleet.carry_out(fleet.run.engine.tick(self._seconds), self.now))
            elif fleet.sums.question is not None:
                self._ask()
            else:
                self._device_step(disturbances.random.choice(DEVICES))
            disturbances.may_die("coordinator")
        except DiedError:
            self._restart()

    def _restart(self) -> None:
        self.fleet.store.close()
        self.deaths += 1
        self.fleet = MaskedFleet(self.plan)
        self._given.clear()
        self._idle.clear()
        self._note(self.fleet.run.resume(self.now))

    def _waits_for_nobody(self) -> bool:
        """Whether all that are there have reported, or are connected and have no task: time is all
        that can change something."""
        engine = self.fleet.run.engine
        done = {*engine.book.accepted.values(), *self._idle} - {*self._given}
        return self.fleet.sums.question is None and {*DEVICES} - self._gone <= done

    def _revoke(self, device: str) -> None:
        if device not in self._revoked:
            self._revoked.add(device)
            self.helper.revoke(device)

    def _device_step(self, device: str) -> None:
        if device in self._gone:
            return
        lease, run = self._given.get(device), self.fleet.run
        if lease is None:
            self._idle.add(device)
            commands = run.engine.check_in(device, None, self._seconds)
            self._note(self.fleet.carry_out(commands, self.now))
        elif not run.engine.takes_report(device, lease.task):
            del self._given[device]
        else:
            self._report(device, lease)
            if self.disturbances.happens("report comes twice"):
                if not run.engine.takes_report(device, lease.task):
                    return  # it is told that its report counts, or is too late
                self._report(device, lease)

    def _report(self, device: str, lease: Assign) -> None:
        fleet, run = self.fleet, self.fleet.run
        if lease.task not in self._uploads:
            value = self.disturbances.random.uniform(-1, 1)
            update = np.full(SIZE, value, np.float32)
            self._uploads[lease.task] = masked_upload(fleet.task(lease), device, update)
        upload, blobs = self._uploads[lease.task], fleet.store.blobs
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, upload.content)
        self.disturbances.may_die("coordinator")
        run.save_update(device, upload.report, number, {UPDATE: 0.0})
        self.disturbances.may_die("coordinator")
        counted = run.engine.count_report(device, lease.task, self._seconds)
        self._note(fleet.carry_out(counted, self.now))
        self.disturbances.may_die("coordinator")
        self._note(run.work.do_work(self.now))

    def _ask(self) -> None:
        fleet, run = self.fleet, self.fleet.run
        question = fleet.sums.question
        assert question is not None
        answer = self._answer(question)
        if self.disturbances.happens("answer is lost"):
            if self.disturbances.random.random() < 0.5:
                raise DiedError("coordinator")
            return
        self.disturbances.may_die("coordinator")
        before, version = run.reports.round.state, run.engine.version
        self._note(fleet.sums.answered(question, answer, self.now))
        self.disturbances.may_die("coordinator")
        try:
            self._note(run.work.do_work(self.now))
        except ValueError as error:
            raise BrokenPromiseError(f"the round has no sum: {error}") from None
        if run.engine.version > version:
            self.committed += 1
            tasks = [report.task for report in question.request.reports]
            self._check_sum(tasks, before, run.models.newest.model.tobytes())

    def _note(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Assign):
                self._given[command.device] = command

    # What must hold

    def _answer(self, question: MaskQuestion) -> Answer:
        """Ask the helper. Whoever has two of its answers must not learn of fewer devices than the
        minimum."""
        answer, reports = self.helper.ask(question), question.request.reports
        if not isinstance(answer, np.ndarray):
            return answer
        members = frozenset(report.task for report in reports)
        if len({report.device for report in reports}) < MINIMUM:
            raise BrokenPromiseError(f"the helper added {len(members)} masks up")
        for other, words in self._sets.items():
            if other != members and other & members:
                raise BrokenPromiseError("the helper added one mask up in two sets")
            if other == members and words != answer.tobytes():
                raise BrokenPromiseError("the helper answered one set with two sums")
        self._sets[members] = answer.tobytes()
        return answer

    def _check_sum(self, tasks: Iterable[str], before: ModelState, found: bytes) -> None:
        """The model is made of exactly these updates in fixed point."""
        plain = OpenRound(self.fleet.run.reports.rules, before)
        for task in tasks:
            upload = self._uploads[task]
            words = np.frombuffer(upload.content, "<u4").astype(np.uint32)
            add_mask(words, upload.seed, -1)
            columns = columns_of(words)
            plain.accept(columns)
            plain.add(columns)
        nothing = np.zeros(SIZE + 1, np.uint32)
        exact = plain.commit(1, plain.summary({}), masks=nothing).state.model
        if exact.tobytes() != found:
            raise BrokenPromiseError("the sum is not the updates' sum")

    def _ended(self) -> list[tuple[str, str]]:
        """Check why rounds were abandoned: too few reports, or too few whom the helper knows."""
        self.fleet.store.close()
        with find_storage(self.plan.data_dir).read_ledger() as ledger:
            rows = [(row[1], str(row[-1])) for row in ledger.closed_rounds(0)]
        for outcome, summary in rows:
            if outcome == "abandoned" and not self._revoked and "helper-" in summary:
                raise BrokenPromiseError(f"a round was abandoned: {summary}")
        return rows


def first_found(mistake: str, seeds: Iterable[int], bundle: Path) -> tuple[int, str] | None:
    """Return how many seeds it took until a mistake was found, and what was said."""
    with MISTAKES[mistake]():
        for count, seed in enumerate(seeds, 1):
            try:
                RunRehearsal(seed, bundle).go()
            except BrokenPromiseError as error:
                return count, str(error)
    return None
