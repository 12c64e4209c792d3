"""The sum of a closed round's masks: which set of updates the helper is asked for, and what follows
from its answers.

A set is written down before anybody is asked for it. A start that finds it goes on asking for the
same set: the helper answers each seed in one set alone, ever. Nothing here asks, or reads a clock:
``service/helper_asker.py`` does, and hands the answers in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec
from fleetlearn_protocol.date_text import date_text
from fleetlearn_protocol.secure.about import MaskTerms
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.helper_messages import (
    MaskSumRefusal,
    MaskSumRequest,
    RefusalName,
    SealedReport,
)

from fleetlearn_coordinator.plan.secure_section import SecureSection
from fleetlearn_coordinator.rounds.commands import BY_HELPER, Command, Commit
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.waiting_words import named
from fleetlearn_coordinator.secure.helper_client import (
    HelperAddress,
    HelperError,
    HelperRefusedError,
    WrongHelperError,
)
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.helper_refusals import HelperRefusals
from fleetlearn_coordinator.service.training_run.private_budget import PrivateBudget
from fleetlearn_coordinator.service.training_run.round_reports import RoundReports
from fleetlearn_coordinator.service.training_run.round_work import Record
from fleetlearn_coordinator.service.training_run.saved_mask_set import (
    KEY,
    SavedMaskSet,
    saved_set,
)
from fleetlearn_coordinator.service.training_run.spooled_report import SpooledReport
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_coordinator.storage.store import Store

WHAT_TO_DO = {
    RefusalName.UNKNOWN_DEVICE: "the helper's operator lets devices in with `fleetlearn-coordinator"
    " helper enrol`",
    RefusalName.BAD_SIGNATURE: "the devices may have new keys, which the helper's operator must "
    "enrol, or a plan that changed since their tasks were given",
    RefusalName.SEED_USED: "a set with these updates was answered before, such as before a backup "
    "was restored, and no other set that has them ever is",
    RefusalName.DEVICE_TWICE: "a sum with their updates of this very model was made before, such "
    "as before a roll back or a restored backup: other devices have to train, or a new run has to "
    "begin from the model (`fleetlearn-coordinator export-model --bundle`)",
    RefusalName.TOO_FEW_DEVICES: "the helper's operator can lower its minimum, or secure.minimum "
    "and round.minimum have to be as large",
    RefusalName.TOO_LARGE: "the helper's operator can raise most_elements or most_devices",
}
"""What people can do about a refusal, where something is known."""

Answer: TypeAlias = Words | HelperError
"""The sum of the masks, uint32, (P + 1,), or why it cannot be had."""


def helper_address(secure: SecureSection) -> HelperAddress:
    """Return where a plan's helper is, and how it is known."""
    return HelperAddress(secure.helper.rstrip("/"), secure.certificate)


class MaskQuestion(msgspec.Struct, frozen=True, eq=False):
    """What the helper is to be asked. Each set has an object of its own."""

    helper: HelperAddress
    request: MaskSumRequest


class Unmask(Protocol):
    """Makes the model of a closed round from the sum of its masks."""

    def __call__(self, command: Commit, masks: Words, now: Clocks) -> None: ...


class MaskSums:
    """Which sum of masks a run waits for."""

    def __init__(
        self,
        helper: HelperAddress,
        terms: MaskTerms,
        store: Store,
        engine: Engine,
        reports: RoundReports,
        budget: PrivateBudget,
        model_digest: Callable[[int], str],
        log: RunLog,
        unmask: Unmask,
        record: Record,
    ) -> None:
        """``terms``: what the run's devices sign. ``model_digest``: version -> SHA-256 of its
        model. ``record``: the run's."""
        self.helper, self.terms = helper, terms
        self._store, self._engine, self._reports, self._log = store, engine, reports, log
        self._model_digest, self._unmask, self._record = model_digest, unmask, record
        self._budget = budget
        self._saved = saved_set(store.ledger)
        """The set that an earlier process asked for."""
        self.refusals = HelperRefusals(store.ledger)
        self._command: Commit | None = None
        """The round that waits for a sum."""
        self._written: MaskQuestion | None = None
        """The question whose set is written down, perhaps not safely yet."""
        self.question: MaskQuestion | None = None
        """What is to be asked now. None: nothing."""
        self.tries = 0
        """How often it was asked without a sum."""
        self._since = 0.0
        """When this process began to ask: Unix time."""
        self._trouble = ""
        """Why there was none."""
        self.changed: Callable[[], None] = lambda: None
        """Called when ``question`` is another one."""

    def is_closed(self, round: int | None) -> bool:
        """Return whether an earlier process closed this round, and asked the helper for its
        sum."""
        return self._saved is not None and self._saved.round == round

    def begin(self, command: Commit, now: Clocks) -> list[Command]:
        """The round is closed: ask for the sum of its masks. Returns the engine's next commands, as
        ``Run.record`` does."""
        question = self._make_question()
        if self.is_closed(command.round):
            assert self._saved is not None
            if self._saved.digest != question.request.digest().hex():
                text = (
                    f"its {len(question.request.reports)} masked updates are not the "
                    f"{self._saved.reports} that the helper was asked for before the restart, and "
                    "no seed is in two sums"
                )
                return self._give_up(command, text, now)
        elif missing := self._too_few():
            return self._give_up(command, missing, now)
        else:
            self._store.write([self._row(command.round, question)])
        self._command, self.tries, self._trouble = command, 0, ""
        self._since = now.wall
        self._ask(question)
        return []

    def _ask(self, question: MaskQuestion) -> None:
        """Ask once the row that names the set is safe."""
        self.question, self._written = None, question
        self._say_that_it_waits()
        self._store.when_safe(lambda: self._ask_now(question))

    def _ask_now(self, question: MaskQuestion) -> None:
        if self._written is question and self._command is not None:
            self._budget.seen = self._command.round  # unless the helper refuses
            self.question = question
            self.changed()

    def _make_question(self) -> MaskQuestion:
        reports = map(self._sealed, self._reports.counted.values())
        return MaskQuestion(self.helper, MaskSumRequest(*self.terms, reports=tuple(reports)))

    def _sealed(self, counted: SpooledReport) -> SealedReport:
        report, version = counted.report, counted.version
        # the conversation accepts no report without them
        assert version is not None
        assert report.sealed is not None
        assert report.signature is not None
        return SealedReport(
            counted.device,
            report.task,
            report.round,
            self._model_digest(version),
            bytes.fromhex(report.sealed),
            bytes.fromhex(report.signature),
        )

    def _row(self, round: int, question: MaskQuestion) -> Row:
        request = question.request
        saved = SavedMaskSet(round, request.digest().hex(), len(request.reports))
        return Metadata(KEY, msgspec.json.encode(saved).decode())

    def _too_few(self) -> str:
        """Return why the round has too few reports for a sum; empty if it has enough."""
        devices = {report.device for report in self._reports.counted.values()}
        least = self.terms.minimum
        if len(devices) < least:
            return f"{len(devices)} different devices are left, {least} are secure.minimum"
        if not self._engine.may_go_on():
            least = self._engine.settings.minimum
            return f"{len(self._reports.counted)} reports are left, {least} are round.minimum"
        return ""

    # What the helper answers

    def answered(self, question: MaskQuestion, answer: Answer, now: Clocks) -> list[Command]:
        """The helper was asked: make the model, or ask without some devices, or wait, or give the
        round up. Returns the engine's next commands, as ``Run.record`` does. An answer to another
        question than the present one changes nothing."""
        command = self._command
        if question is not self.question or command is None:
            return []
        match answer:
            case HelperRefusedError() if answer.refusal.name is RefusalName.WRONG_HELPER:
                self._wait(answer)  # its operator can put the helper with the right key there
            case HelperRefusedError():
                return self._refused(command, answer, now)
            case HelperError():
                self._wait(answer)
            case masks:
                if self._trouble:
                    answered = said("helper-answered", round=command.round)
                    self._log.info(
                        "round %d: the helper has answered", command.round, extra=answered
                    )
                self.forget()
                taken = (report.device for report in question.request.reports)
                if rows := self.refusals.take(taken):
                    self._store.write(rows)
                self._unmask(command, masks, now)
        return []

    def _wait(self, error: HelperError) -> None:
        self.tries += 1
        if error.text != self._trouble:  # said once, however often it is tried
            self._trouble = error.text
            loud = isinstance(error, WrongHelperError | HelperRefusedError)
            say = self._log.error if loud else self._log.warning
            what = said("helper-waits", round=self._engine.round, why=error.text)
            say(
                "round %d waits for the sum of its masks: %s",
                self._engine.round,
                error.text,
                extra=what,
            )
        self._say_that_it_waits()

    def _say_that_it_waits(self) -> None:
        updates = len(self._reports.counted)
        text = (
            f"round {self._engine.round} waits for the helper's sum of the masks of its {updates} "
            "updates"
        )
        if self._trouble:
            times = "once" if self.tries == 1 else f"{self.tries} times"
            text = (
                f"{text}. The helper was asked {times} since {date_text(self._since)}, and will be "
                f"asked again: {self._trouble}"
            )
        self._engine.waits_on = text

    def _refused(self, command: Commit, error: HelperRefusedError, now: Clocks) -> list[Command]:
        refusal = error.refusal
        if not self.tries and not self.is_closed(command.round):
            self._budget.seen = None  # nobody was given the sum
        tasks = [
            task for task, report in self._reports.counted.items() if report.device in error.without
        ]
        if not tasks:
            return self._give_up(command, _advised(error.text, refusal), now)
        cause = f"{BY_HELPER}{refusal.name.value}"
        devices = {self._reports.counted[task].device for task in tasks}
        self._log.warning(
            "round %d: the updates of %s are left out: %s",
            command.round,
            named(devices),
            _advised(error.text, refusal),
            extra=said("devices-left-out", round=command.round, cause=cause, devices=len(devices)),
        )
        ended = self._engine.leave_out(tasks, cause)
        rows = self.refusals.refuse(devices, refusal.name)
        if refusal.name in (RefusalName.DEVICE_TWICE, RefusalName.SEED_USED):
            self._engine.spend(devices & self._reports.trained_from(self._engine.version))
        self._reports.leave_out(tasks)
        dropped = Counter(command.dropped)
        dropped[cause] += len(tasks)
        command = command._replace(dropped=dict(dropped))
        if missing := self._too_few():
            text = f"{missing}: {_advised(error.text, refusal)}"
            return self._give_up(command, text, now, ended, rows)
        self._command, question = command, self._make_question()
        heard = self._record(ended, now, [*rows, self._row(command.round, question)])
        self._ask(question)
        return heard

    def _give_up(
        self,
        command: Commit,
        text: str,
        now: Clocks,
        ended: Iterable[Command] = (),
        rows: Sequence[Row] = (),
    ) -> list[Command]:
        self.forget()
        self._budget.give_up(command.round, self._engine)
        given_up = self._engine.give_up_commit(text, command.dropped, now.engine)
        return self._record([*ended, *given_up], now, rows)

    def forget(self) -> None:
        """No sum is waited for any more. The answer to a question that is under way changes
        nothing."""
        self._command = self.question = self._written = self._saved = None
        self.tries, self._engine.waits_on = 0, ""
        self.changed()


def _advised(text: str, refusal: MaskSumRefusal) -> str:
    """Return the text of a refusal, and what to do about it."""
    advice = WHAT_TO_DO.get(refusal.name)
    return text if advice is None else f"{text}. {advice[0].upper()}{advice[1:]}"
