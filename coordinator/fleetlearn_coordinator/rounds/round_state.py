"""The state of a training run's rounds, and what drivers and the engine ask of it. Nothing here
changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.exchanges import FIT
from fleetlearn_protocol.quality_messages import QUALITY
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE

from fleetlearn_coordinator.rounds import stop_rules
from fleetlearn_coordinator.rounds.clustering import FitPolicy
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.evaluation import EVALUATION, EvaluationPolicy
from fleetlearn_coordinator.rounds.exchange import ExchangePolicy, ExchangeSeries
from fleetlearn_coordinator.rounds.improvement import Improvement
from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.pace import Pace
from fleetlearn_coordinator.rounds.pairwise import PairwisePolicy
from fleetlearn_coordinator.rounds.participation_limits import ParticipationLimits, limits_of
from fleetlearn_coordinator.rounds.regional_rounds import (
    Participation,
    RegionalRounds,
    book_of,
    participation_of,
)
from fleetlearn_coordinator.rounds.round_exchanges import RoundExchanges
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.settings import Phase, Settings
from fleetlearn_coordinator.rounds.strategies.regional_selection import selection_of
from fleetlearn_coordinator.rounds.training_tasks import TrainingTasks

EXCHANGE_POLICIES: dict[str, Callable[[Settings], ExchangePolicy | None]] = {
    EVALUATION: lambda rule: EvaluationPolicy(rule.evaluation),
    QUALITY: lambda rule: (
        None if rule.quality is None else EvaluationPolicy(rule.quality, QUALITY, "q")
    ),
    PAIRWISE: lambda rule: None if rule.pairwise is None else PairwisePolicy(rule.pairwise),
    FIT: lambda rule: None if rule.fit is None else FitPolicy(rule.fit),
}
"""Kind of exchange -> its policy under a run's settings; None: such a run has none of the kind.
Devices are asked in this order."""


class ReportTerms(NamedTuple):
    """For which round a report would count if it came now, and how stale it would be."""

    round: int
    """The open round, or a later one if none is open."""
    staleness: int
    """How many versions that round's model is newer than the one that the task began from."""
    early: bool
    """Whether the round is not open yet."""


@dataclass(slots=True)
class EngineState:
    """The state of one training run. ``version`` counts committed rounds and roll backs; ``round``
    numbers all rounds from 1."""

    settings: Settings
    prefix: str = "t"
    """Task ids begin with it. Each run has its own, so that an update cannot be taken for one of
    another run."""
    version: int = 0
    round: int = 0
    releases: int = 0
    """Rounds that ``Settings.budget`` limits: those that were committed, and where it says so the
    abandoned ones. A roll back gives none back."""
    phase: Phase = Phase.GATHERING
    deadline: float = 0.0
    """When the open round ends. Asynchronous: when it is next looked at."""
    book: LeaseBook = field(init=False)
    participation: Participation = field(init=False)
    limits: ParticipationLimits | None = field(init=False)
    """How often devices may take part. None: at any time."""
    selection: Selection = field(init=False)
    pace: Pace | None = field(init=False)
    tasks: TrainingTasks = field(init=False)
    exchanges: dict[str, ExchangeSeries] = field(init=False)
    """By kind."""
    round_exchanges: RoundExchanges | None = field(init=False)
    """Those that go with the rounds' training, if a kind does."""
    books: list[LeaseBook] = field(init=False)
    """All leases: those of the rounds, then those of each kind of exchange."""
    paused: bool = False
    """No task is given, and no round or exchange opens. The driver stops the engine's clock
    meanwhile."""
    draining: bool = False
    """No other round or series of exchanges opens."""
    waits_on: str = ""
    """What the closed round waits for before its model can be made, for people. The driver sets
    it. Empty: nothing."""
    left_out: list[str] = field(default_factory=list)
    """Devices whose reports counted for the closed round, and count no more."""
    improvement: Improvement = field(init=False)
    """Of the metric that may stop the run. Empty where the plan has no patience."""
    finishing: Finish | None = None
    """The stop rule that is met, while the run does not finish yet: a model is being made, or the
    last one is being measured."""

    def __post_init__(self) -> None:
        rule = self.settings
        self.book = book_of(rule)
        self.limits = limits_of(rule)
        self.improvement = Improvement(rule.below, rule.least)
        self.selection = selection_of(rule)
        self.participation = participation_of(rule, self.book, self.selection)
        self.selection.limits = self.limits
        self.selection.next_round = self.round + 1
        self.pace = Pace(rule.pace, rule.seed) if rule.pace is not None else None
        self.tasks = TrainingTasks(rule, self.prefix, self.book, self.selection, self.pace)
        self.exchanges, self.books = {}, [self.book]
        for kind, policy_of in EXCHANGE_POLICIES.items():
            policy = policy_of(rule)
            if policy is None:
                continue
            book = LeaseBook(rule.grace)
            self.exchanges[kind] = ExchangeSeries(
                policy, rule.seed, self.prefix, self.selection, self.pace, book, self.books
            )
            self.books.append(book)
        self.round_exchanges = self._find_round_exchanges()

    def _find_round_exchanges(self) -> RoundExchanges | None:
        found = [
            series for series in self.exchanges.values() if series.policy.training_after is not None
        ]
        rule = self.settings
        if len(found) > 1 or (found and (rule.outlive or rule.regions is not None)):
            kinds = ", ".join(series.policy.kind for series in found)
            raise ValueError(
                f"{kinds} would go with each round: one kind of exchange may, and only in "
                "synchronous rounds without regions that carry no report to the next one"
            )
        return RoundExchanges(found[0], self.selection) if found else None

    # --- the run ---

    @property
    def regional(self) -> RegionalRounds | None:
        """The rounds with regions; None: they have none."""
        policy = self.participation
        return policy if isinstance(policy, RegionalRounds) else None

    @property
    def leases(self) -> Mapping[str, str]:
        """Device -> its running task."""
        return self.book.tasks

    @property
    def accepted(self) -> Mapping[str, str]:
        """Task -> device, of this round's reports that count."""
        return self.book.accepted

    def causes(self) -> dict[str, int]:
        """Return how many of this round's leases ended without a report that counts, by cause."""
        return self.book.causes()

    def has_task(self, device: str) -> bool:
        """Return whether the device has a task, of a round or of an exchange."""
        return any(device in book.tasks for book in self.books)

    def exchange_of(self, device: str, task: str) -> ExchangeSeries | None:
        """Return the exchanges in which the device holds this task, or None."""
        for series in self.exchanges.values():
            if series.takes_answer(device, task):
                return series
        return None

    def oldest_version(self) -> int | None:
        """Return the oldest model version that a device may still need, or None."""
        versions = [self.book.oldest_version()]
        versions += [series.oldest_version() for series in self.exchanges.values()]
        return min((version for version in versions if version is not None), default=None)

    @property
    def ends_with_exchanges(self) -> bool:
        """Whether training is over, and the run finishes when the exchanges about its last model
        are over."""
        last = self.phase is Phase.FINISHED and self.finishing is not None
        return last and self.exchanges_follow()

    def exchanges_follow(self) -> bool:
        """Return whether an exchange is open, or due if no newer model follows."""
        series = self.exchanges.values()
        return any(each.is_open or each.due(self.version, last=True) for each in series)

    def asks_next(self) -> bool:
        """Return whether devices are to be asked in an exchange as soon as they are free."""
        # Asked twice for each report that comes alone, which takes 2.9 us; 3.1 with any().
        for series in self.exchanges.values():  # noqa: SIM110
            if series.has_next:
                return True
        return False

    def waiting(self) -> int:
        """Return how many connected devices may be given a task."""
        return self.selection.waiting()

    def wake_at(self) -> float | None:
        """Return when ``tick`` is next due, or None."""
        times = [series.wake_at() for series in self.exchanges.values()]
        if self.phase is not Phase.FINISHED:
            policy, is_open = self.participation, self.phase is Phase.OPEN
            times.append(self.book.wake_at())
            times.append(policy.wake_at(self.deadline) if is_open else policy.gather_until)
        return min((time for time in times if time is not None), default=None)

    def finish(
        self, change: float, metrics: Mapping[str, float], measured: int | None = None
    ) -> Finish | None:
        """Return the stop rule that is met at this version, if one is. ``change`` is of the last
        committed round, as for ``committed``; ``metrics`` are of the model of version
        ``measured``."""
        return stop_rules.finish(
            self.settings,
            self.version,
            change,
            metrics,
            measured,
            self.releases,
            self.improvement,
        )

    # --- reports ---

    def wanted_reports(self) -> int:
        """Return how many more reports the round takes."""
        return self.participation.wanted_reports(self.book)

    def reports_together(self) -> int:
        """Return for how many reports ``count_reports`` may be called now."""
        if self.asks_next() or (self.phase is not Phase.OPEN and self.settings.outlive):
            return 1
        return self.participation.reports_together(self.book)

    def takes_report(self, device: str, task: str) -> bool:
        """Return whether an update that is on its way would still count."""
        return self.book.tasks.get(device) == task and self.phase is not Phase.FINISHED

    def has_counted(self, device: str, task: str) -> bool:
        """Return whether the device's report of this task counts, for the open round or a later
        one."""
        return device in (self.book.accepted.get(task), self.book.early.get(task))

    def report_terms(self, device: str) -> ReportTerms:
        """Return for which round the report of the device's task would count now, and how stale it
        would be. The device has a task."""
        return self._terms_from(self.book.terms[device].version)

    def _terms_from(self, version: int) -> ReportTerms:
        """Return the same of a task that began from this version of the model."""
        if self.phase is Phase.OPEN:
            return ReportTerms(self.round, self.version - version, False)
        ahead = len(self.book.early) // self.settings.largest_goal  # whole rounds
        newest = self.version + (self.phase is Phase.COMMITTING)
        return ReportTerms(self.round + 1 + ahead, newest + ahead - version, True)

    def _could_count(self, device: str, version: int) -> bool:
        """Return whether a report of the device, of a task that began from this version, could
        count now where leases outlive their round."""
        if self._terms_from(version).staleness > self.settings.max_staleness:
            return False
        most = self.settings.max_updates
        if most is None:
            return True
        if self.phase is Phase.OPEN:
            return self.selection.updates[device] < most
        before = [*self.book.early.values()]
        of_round = before[len(before) // self.settings.goal * self.settings.goal :]
        return of_round.count(device) < most

    def release_of_reports(self) -> int:
        """Return for which release a report would count now, where participation is limited
        (participation_limits.py)."""
        assert self.limits is not None
        if self.phase is Phase.OPEN:
            return self.limits.release
        ahead = len(self.book.early) // self.settings.largest_goal  # as in ``report_terms``
        return self.limits.release + (self.phase is Phase.COMMITTING) + ahead

    def may_report(self, device: str) -> bool:
        """Return whether the limits of participation let a report of the device count now."""
        limits = self.limits
        return limits is None or limits.may_take_part(device, self.release_of_reports())

    def check_participation(self, device: str) -> None:
        """Raise PrivacyLimitError where the device may not report now. The caller ends the task,
        with the cause PRIVACY_LIMIT."""
        if self.limits is not None and not self.may_report(device):
            self.limits.refuse(device, self.release_of_reports())

    def check_staleness(self, device: str) -> None:
        """Raise ProtocolError (stale-round) if the update of the device's task is too stale to
        count now."""
        if (
            self.settings.outlive
            and (staleness := self.report_terms(device).staleness) > self.settings.max_staleness
        ):
            raise ProtocolError(
                Code.STALE_ROUND, self.tasks.too_stale(self.book.tasks[device], staleness)
            )

    def check_wanted(self, device: str, task: str, round: int) -> None:
        """Raise ProtocolError where the device does not hold the task, with the reason."""
        if self.takes_report(device, task):
            return
        ended = self.book.dropped.get(task)
        if ended is not None and ended[0] == device:
            raise ProtocolError(
                Code.NOT_WANTED, f"task {task} ended ({ended[1]}); its slot was given back"
            )
        if round != self.round or self.phase is not Phase.OPEN:
            at = f"round {self.round} is {self.phase}" if self.round else "no round has begun"
            raise ProtocolError(Code.STALE_ROUND, f"task {task} is of round {round}; {at}")
        raise ProtocolError(
            Code.UNKNOWN_TASK, f"task {task} was not given to device {device} in round {round}"
        )

    def round_of(self, task: str) -> int:
        """Return the round in which a task was given."""
        return self.tasks.round_of(task)

    @property
    def round_for_ended_tasks(self) -> int:
        """The round for which a lease's end counts now: the open round, or the next one to open."""
        return self.round + (self.phase is not Phase.OPEN)
