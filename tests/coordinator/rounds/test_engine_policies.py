"""Every policy in which leases outlive their round, with devices, losses, time, slow commits and
restarts in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain

import pytest
from fleetlearn_coordinator.rounds import participation
from fleetlearn_coordinator.rounds.commands import (
    LOST,
    STALE,
    Abandon,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    ExchangeClosed,
    ExchangeOpened,
    Opened,
    Revived,
    SendAway,
    Unanswered,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.exchange import SavedExchange
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES
from fleetlearn_coordinator.rounds.selection_rules import Eligibility, Oort, SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import (
    CohortShare,
    EvaluationSettings,
    PaceSettings,
    Phase,
    Settings,
)
from fleetlearn_coordinator.rounds.strategies.own_strategy import Choice
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_protocol import ProtocolError
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from waking import let_time_pass

CARRY = Settings(
    goal=2,
    cohort=3,
    minimum=2,
    deadline=20.0,
    grace=3.0,
    gather=2.0,
    seed=3,
    stall=6.0,
    carry=True,
    max_staleness=1,
)
BUFFERED = Settings(
    goal=3,
    cohort=4,
    minimum=3,
    deadline=20.0,
    grace=3.0,
    gather=0.0,
    seed=3,
    stall=6.0,
    asynchronous=True,
    max_staleness=2,
)
FEW_OF_EACH = BUFFERED._replace(max_updates=1, minimum=1)
ONE_BY_ONE = BUFFERED._replace(goal=1, minimum=1, cohort=2, max_staleness=0)
SYNCHRONOUS = CARRY._replace(carry=False, max_staleness=0)
HALF = CohortShare(share=0.5, most=3, least=1, over_selection=1.5, minimum_share=0.6)
SHARE = SYNCHRONOUS._replace(**HALF.size_of_goal(3)._asdict(), share=HALF)
SHARE_CARRIED = CARRY._replace(**HALF.size_of_goal(3)._asdict(), share=HALF)
EVALUATED = EvaluationSettings(every=2, devices=3, minimum=2, deadline=15.0)
ABLE = {"d0", "d1", "d2", "d3"}
"""Devices that can evaluate."""
DEVICES = st.sampled_from([f"d{number}" for number in range(6)])


class AnyOrder(RuleBasedStateMachine):
    """The engine against a record made of its commands alone. A commit takes until ``commit`` ends
    it."""

    of = BUFFERED
    tasks = Bundle("tasks")
    """(device, task, round) of leases that were given, for late and repeated reports."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: Settings = self.of
        self.engine = Engine(self.rules)
        self.now = 0.0
        self.connected: set[str] = set()
        self.open: int | None = None
        self.committing: int | None = None
        self.last = 0
        self.running: dict[str, str] = {}
        self.began: dict[str, tuple[int, float]] = {}
        """Task -> the version that it began from, and when."""
        self.ended: dict[str, tuple[str, str, int]] = {}
        """Task -> device, cause, round, of those that ended without a report."""
        self.counted: dict[str, tuple[str, int]] = {}
        """Task -> device, and the round that it counts for."""
        self.given: list[tuple[str, str, int]] = []
        self.revived: set[str] = set()
        self.versions = 0
        self.size = self.rules.size
        """Of the open round, or of the last one."""
        self.holding: set[str] = set()
        """Devices that checked in with an update, or might get a lost task back, and have had no
        other since."""
        self.evaluation = SavedExchange(0, 0, False, [], [], [])
        self.measuring: dict[str, str] = {}
        """Task -> device."""
        self.measured: dict[str, str] = {}
        self.unmeasured: dict[str, tuple[str, str]] = {}
        """Task -> device, cause, of the open evaluation."""

    def counted_for(self, round: int | None) -> dict[str, str]:
        return {task: device for task, (device, number) in self.counted.items() if number == round}

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Opened(number, goal, devices):
                    assert self.open is None
                    assert self.committing is None
                    assert number == self.last + 1
                    self.open = self.last = number
                    if (share := self.rules.share) is not None:
                        early = len(self.counted_for(number))
                        assert devices is not None
                        assert (
                            early
                            <= devices
                            <= len(
                                {*self.connected, *self.running.values()}
                                | {*self.counted_for(number).values()}
                            )
                        )
                        self.size = share.size_for(devices, early)
                    assert goal == (None if share is None else self.size.goal)
                case Assign(device, task, number, again=again, version=version, deadline=deadline):
                    assert device in self.connected
                    assert deadline <= self.now + 2 * self.rules.deadline + 1e-6
                    if again:
                        assert self.running[task] == device
                        assert self.began[task][0] == version
                        continue
                    assert number == self.open
                    assert task not in self.began, "an id was given twice"
                    assert version == self.versions, "a new task begins from the newest model"
                    assert len(self.running.keys() - self.revived) < self.size.cohort
                    self.running[task], self.began[task] = device, (version, self.now)
                    self.given.append((device, task, number))
                case Ended(device, task, number, cause):
                    self.holding.discard(device)
                    assert self.running.pop(task) == device
                    assert number == (self.open or self.last + 1)
                    self.ended[task] = (device, cause, number)
                    if cause == STALE:
                        assert self.versions - self.began[task][0] > self.rules.max_staleness
                case Revived(device, task):
                    assert self.ended.pop(task)[:2] == (device, LOST)
                    self.running[task] = device
                    self.revived.add(task)
                case CancelTask(device, task):
                    assert device in self.connected
                    assert task in self.ended or task in self.unmeasured
                case SendAway(device, after):
                    assert self.rules.pace is not None
                    assert device in self.connected
                    assert not self.engine.has_task(device), "a device with a task was sent away"
                    assert device not in self.holding, (
                        "a device with a finished update was sent away"
                    )
                    assert after > 0
                    self.connected.remove(device)
                case ExchangeOpened(number, version):
                    assert not self.evaluation.is_open
                    assert number == self.evaluation.number + 1
                    assert version == self.versions
                    self.evaluation = self.evaluation._replace(
                        number=number, version=version, is_open=True
                    )
                    self.measured, self.unmeasured, self.evaluation_began = {}, {}, self.now
                case Ask(device, task, number, version, again=again):
                    assert device in self.connected & ABLE
                    assert (number, version) == (self.evaluation.number, self.evaluation.version)
                    if again:
                        assert self.measuring[task] == device
                        continue
                    before = [*self.measuring, *self.measured, *self.unmeasured]
                    assert task not in before
                    devices = [*self.measuring.values(), *self.measured.values()]
                    assert device not in devices, "it counts once in an evaluation"
                    failed = sum(device == owner for owner, _ in self.unmeasured.values())
                    assert failed <= SECOND_CHANCES
                    assert len(devices) < self.rules.evaluation.devices
                    self.measuring[task] = device
                case Unanswered(device, task, cause):
                    assert self.measuring.pop(task) == device
                    self.unmeasured[task] = device, cause
                case ExchangeClosed(number, version, dropped, valid):
                    assert (number, version) == (self.evaluation.number, self.evaluation.version)
                    assert not self.measuring
                    assert valid == (len(self.measured) >= self.rules.evaluation.minimum)
                    assert dropped == Counter(cause for _, cause in self.unmeasured.values())
                    self.evaluation = self.evaluation._replace(is_open=False)
                case Commit(number, dropped):
                    assert number == self.open
                    self.open, self.committing = None, number
                    counted = self.counted_for(number)
                    assert self.size.minimum <= len(counted) <= self.size.goal
                    if self.rules.max_updates is not None:
                        assert max(Counter(counted.values()).values()) <= self.rules.max_updates
                    causes = Counter(
                        cause for _, cause, round in self.ended.values() if round == number
                    )
                    assert dropped == causes
                case Abandon(number):
                    assert number == self.open
                    assert not self.rules.asynchronous
                    assert len(self.counted_for(number)) < self.size.minimum
                    self.open = None

    @rule()
    @precondition(lambda self: self.committing is not None)
    def commit(self) -> None:
        self.committing = None
        self.versions += 1
        self.do(self.engine.committed(self.now, change=1.0, metrics={}))

    def connect(self, device: str) -> None:
        self.connected.add(device)
        if device in ABLE:
            self.engine.exchanges[EVALUATION].join(device)

    def arrive(self, device: str, held: str | None) -> None:
        self.connect(device)
        self.holding.discard(device)
        lost = {owner for owner, cause, _ in self.ended.values() if cause == LOST}
        if held is not None or device in lost & {
            owner for owner, _ in self.engine.book.lost.values()
        }:
            self.holding.add(device)
        self.do(self.engine.check_in(device, held, self.now))
        if self.engine.pace is not None:
            assert self.engine.pace.present == self.connected
            most = self.engine.pace.rules.connected
            stay = {*filter(self.engine.has_task, self.connected), *self.holding}
            assert len(self.connected) <= most or self.connected <= stay

    @rule(device=DEVICES)
    def check_in(self, device: str) -> None:
        self.arrive(device, None)

    @rule(target=tasks, data=st.data())
    @precondition(lambda self: self.given)
    def remember(self, data: st.DataObject) -> tuple[str, str, int]:
        return data.draw(st.sampled_from(self.given[-12:]))

    @rule(given=tasks)
    def check_in_with_work_done(self, given: tuple[str, str, int]) -> None:
        device, task, _ = given
        self.arrive(device, task)

    @rule(device=DEVICES)
    def disconnect(self, device: str) -> None:
        self.connected.discard(device)
        self.holding.discard(device)
        self.do(self.engine.disconnect(device, self.now))

    def report_of(self, device: str, task: str, number: int) -> None:
        if device not in self.connected or self.engine.has_counted(device, task):
            return
        try:
            self.do(self.engine.announce(device, task, number, self.now))
        except ProtocolError:
            if task in self.running:  # a commit is under way that makes it too old
                assert self.versions + 1 - self.began[task][0] > self.rules.max_staleness
            return
        assert task not in self.counted, "a report counted twice"
        counts = self.engine.report_terms(device)
        early = sum(round > self.last for _, round in self.counted.values())
        ahead = early // self.rules.largest_goal
        assert counts.early == (self.open is None)
        assert counts.round == (self.open or self.last + 1 + ahead)
        newest = self.versions + (self.committing is not None) + (ahead if self.open is None else 0)
        assert counts.staleness == newest - self.began[task][0] <= self.rules.max_staleness
        assert self.running.pop(task) == device
        self.holding.discard(device)
        self.counted[task] = device, counts.round
        self.do(self.engine.count_report(device, task, self.now))

    @rule(given=tasks)
    def report(self, given: tuple[str, str, int]) -> None:
        self.report_of(*given)

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def report_in_time(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.running)))
        self.report_of(self.running[task], task, self.engine.round_of(task))

    @rule(given=tasks)
    def fail(self, given: tuple[str, str, int]) -> None:
        self.do(self.engine.end(given[0], given[1], "failed: diverged", self.now))

    @rule(given=tasks, amount=st.integers(0, 3))
    def progress(self, given: tuple[str, str, int], amount: int) -> None:
        device, task, _ = given
        if device in self.connected:
            self.engine.progress(device, task, "steps", amount, self.now)

    @rule(data=st.data(), fails=st.booleans())
    @precondition(lambda self: self.measuring)
    def measure(self, data: st.DataObject, fails: bool) -> None:
        task = data.draw(st.sampled_from(sorted(self.measuring)))
        device = self.measuring[task]
        if device not in self.connected:
            return
        if fails:
            self.do(self.engine.end(device, task, "failed: diverged", self.now))
            return
        assert self.engine.exchanges[EVALUATION].takes_answer(device, task)
        self.measured[task] = self.measuring.pop(task)
        self.do(self.engine.count_answer(device, task, self.now))

    @rule()
    @precondition(lambda self: self.rules.evaluation.every)
    def request(self) -> None:
        self.do(self.engine.request_exchange(EVALUATION, self.now))

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        let_time_pass(self, self.engine, seconds)

    @rule()
    def restart(self) -> None:
        """The process dies, a commit under way is lost, and nobody is connected."""
        first = self.committing or self.open
        self.engine = Engine(self.rules, version=self.versions, round=self.last)
        self.connected.clear()
        self.holding.clear()
        self.open, self.committing = first, None
        since = first or self.last + 1
        lost = [
            (task, device, self.began[task][0])
            for task, (device, cause, _) in self.ended.items()
            if cause == LOST and self.began[task][0] >= self.versions - self.rules.max_staleness
        ]
        if first is not None:  # what ended while its commit was under way now counts for it, too
            self.ended = {task: (*row[:2], min(row[2], first)) for task, row in self.ended.items()}
        early = sorted(
            (round, place, task) for place, (task, (_, round)) in enumerate(self.counted.items())
        )
        leases = [(task, device, self.began[task][0]) for task, device in self.running.items()]
        restored = Restored(
            first,
            sorted(leases, key=lambda row: row[2]),
            list(self.counted_for(first).items()),
            [
                (task, device, cause)
                for task, (device, cause, round) in self.ended.items()
                if round >= since
            ],
            lost,
            [
                (task, self.counted[task][0])
                for round, _, task in early
                if round > (first or self.last)
            ],
            goal=self.size.goal if first is not None and self.rules.share is not None else None,
        )
        self.evaluation_began = self.now
        self.engine.restore_exchange(
            EVALUATION,
            self.evaluation._replace(
                leases=list(self.measuring.items()),
                accepted=list(self.measured.items()),
                dropped=[(task, *row) for task, row in self.unmeasured.items()],
            ),
            self.now,
        )
        if any(restored):
            self.do(self.engine.restore(restored, self.now))
        self.do(self.engine.begin(self.now))

    @invariant()
    def no_lease_is_lost(self) -> None:
        assert {task: device for device, task in self.engine.leases.items()} == self.running
        assert self.engine.accepted == self.counted_for(self.open or self.committing)
        early = {
            task: device for task, (device, round) in self.counted.items() if round > self.last
        }
        assert self.engine.book.early == early
        assert len(set(self.running.values())) == len(self.running), "a device with two leases"

    @invariant()
    def no_measurement_is_lost(self) -> None:
        evaluations = self.engine.exchanges[EVALUATION]
        assert {task: device for device, task in evaluations.book.tasks.items()} == self.measuring
        if self.evaluation.is_open:
            assert evaluations.book.accepted == self.measured
        assert not {*self.measuring.values()} & {*self.running.values()}, "a device with two leases"
        assert evaluations.is_open == self.evaluation.is_open
        assert evaluations.is_open or not self.measuring
        assert evaluations.able == self.connected & ABLE or not self.rules.evaluation.every

    @invariant()
    def an_evaluation_ends(self) -> None:
        if self.evaluation.is_open:
            assert self.now <= self.evaluation_began + self.rules.evaluation.deadline + 1e-6
            assert (self.engine.wake_at() or 0.0) <= self.engine.exchanges[EVALUATION].deadline

    @invariant()
    def no_evaluation_that_lacks_a_device_waits_beside_one_that_may_try_again(self) -> None:
        evaluations = self.engine.exchanges[EVALUATION]
        # others measure when their tasks are over
        if evaluations._again.keys() - self.engine.leases.keys():
            devices = len(self.measuring) + len(self.measured) + len(evaluations.chosen)
            assert devices >= self.rules.evaluation.minimum

    @invariant()
    def who_is_chosen_and_free_measures(self) -> None:
        chosen = self.engine.exchanges[EVALUATION].chosen
        assert chosen <= self.connected & ABLE
        assert self.committing is not None or chosen <= {*self.running.values()}

    @invariant()
    def every_lease_ends(self) -> None:
        for device, terms in self.engine.book.terms.items():
            assert terms.ends <= self.now + 2 * self.rules.deadline + 1e-6, device
            assert self.versions - terms.version <= self.rules.max_staleness
        if self.running:
            assert self.engine.wake_at() is not None

    @invariant()
    def the_policy_s_bounds_hold(self) -> None:
        used = len(self.running.keys() - self.revived)
        if not self.rules.asynchronous:
            used += len(self.counted_for(self.open))
        assert used <= self.rules.cohort + len(self.engine.accepted) * (not self.rules.asynchronous)
        assert self.engine.version == self.versions

    @invariant()
    def every_connected_device_is_in_one_place(self) -> None:
        selection = self.engine.selection
        waiting = [*selection.idle, *chain.from_iterable(selection.doubted.values())]
        leased = {device for device in self.engine.leases if device not in self.engine.book.absent}
        leased |= self.connected & {*self.measuring.values()}
        assert len(set(waiting)) == len(waiting)
        assert not set(waiting) & selection.resting
        assert not leased & (set(waiting) | selection.resting)
        assert set(waiting) | selection.resting | leased == self.connected

    @invariant()
    def no_slot_is_free_while_a_device_waits(self) -> None:
        if self.open is not None and self.rules.asynchronous and self.engine.selection.idle:
            assert len(self.running) > self.rules.cohort - max(
                1, self.rules.cohort // participation.TOGETHER
            )

    @invariant()
    def no_round_that_lacks_a_device_waits_beside_one_that_may_try_again(self) -> None:
        selection = self.engine.selection
        assert selection.again <= selection.resting
        if self.open is not None and selection.again:
            needed = self.size.goal if self.rules.asynchronous else self.size.minimum
            assert len(self.running) + len(self.engine.accepted) >= min(needed, self.size.cohort)

    @invariant()
    def no_device_fails_again_and_again_in_a_round(self) -> None:
        """Asynchronously a round's time may be over several times, and each time all is
        forgiven."""
        if not self.rules.asynchronous:
            failed = Counter((device, number) for device, _, number in self.ended.values())
            assert max(failed.values(), default=0) <= 1 + SECOND_CHANCES

    @invariant()
    def a_round_ends(self) -> None:
        """It is looked at by its deadline. Asynchronously it may then go on, but whoever rested may
        take part again."""
        if self.open is not None:
            assert self.engine.phase is Phase.OPEN
            assert self.engine.deadline <= self.now + self.rules.deadline + 1e-6
            assert (self.engine.wake_at() or 0.0) <= self.engine.deadline


def machine(rules: Settings) -> type[RuleBasedStateMachine]:
    return type("Policy", (AnyOrder,), {"of": rules})


PACE = PaceSettings(connected=4, longest=10.0, check_ins=2.0)
POLICIES = {
    "carry": CARRY,
    "buffered": BUFFERED,
    "few of each": FEW_OF_EACH,
    "one by one": ONE_BY_ONE,
    "carry, with pace": CARRY._replace(pace=PACE),
    "buffered, with pace": BUFFERED._replace(pace=PACE),
    "synchronous, with pace": CARRY._replace(carry=False, max_staleness=0, pace=PACE),
    "carry, with pace, evaluated": CARRY._replace(pace=PACE, evaluation=EVALUATED),
    "buffered, with pace, evaluated": BUFFERED._replace(pace=PACE, evaluation=EVALUATED),
    "synchronous, evaluated": SYNCHRONOUS._replace(evaluation=EVALUATED),
    "carry, evaluated": CARRY._replace(evaluation=EVALUATED),
    "buffered, evaluated": BUFFERED._replace(evaluation=EVALUATED),
    "share": SHARE,
    "share, carry": SHARE_CARRIED,
    "share, with pace, evaluated": SHARE._replace(pace=PACE, evaluation=EVALUATED),
    "share, carry, with pace, evaluated": SHARE_CARRIED._replace(pace=PACE, evaluation=EVALUATED),
}
USUAL = settings(
    max_examples=20,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
LONG = settings(USUAL, max_examples=300)


SLOW = {
    "carry, with pace", "buffered, with pace", "carry, evaluated", "buffered, evaluated", "share",
    "share, with pace, evaluated",
}  # fmt: skip
"""What the slow tests alone run: the usual ones run pace and evaluations together."""


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in SLOW])
def test_any_order(name: str) -> None:
    run_state_machine_as_test(machine(POLICIES[name]), settings=USUAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_any_order_for_long(name: str) -> None:
    run_state_machine_as_test(machine(POLICIES[name]), settings=LONG)


WEIGHED = SelectionRules(
    eligibility=Eligibility(least_examples=10), by_examples=True, weights={"tier:phone": 0.25},
    quotas={"tier:phone": 0.4, "tag:eu": 0.7},
)  # fmt: skip
BY_LOSS = SelectionRules(
    strategy="power-of-choice",
    by_examples=True,
    candidates=1.5,
    quotas={"tier:phone": 0.34},
    once_in=2,
)
BY_UTILITY = SelectionRules(
    strategy="oort",
    oort=Oort(5.0, 5.0, window=2, exploration=0.6, most_tasks=3),
    quotas={"tag:eu": 0.67},
)


def by_loss_of_three(choice: Choice) -> Sequence[str]:
    """An own strategy: device by device, of three that are drawn the one with the largest loss."""
    left, chosen = [*choice.devices], list[str]()
    while left and len(chosen) < choice.wanted:
        drawn = [left[int(next(choice.random) * len(left))] for _ in range(3)]
        best = max(drawn, key=lambda each: (each.record and each.record.loss) or 9.0)
        left.remove(best)
        chosen.append(best.name)
    return chosen


OWN = SelectionRules(
    strategy="mine:by_loss_of_three", own=by_loss_of_three, candidates=None,
    quotas={"tier:phone": 0.4}, once_in=2,
)  # fmt: skip
SELECTIONS = {
    "own, synchronous": CARRY._replace(selection=OWN),
    "own, asynchronous": BUFFERED._replace(
        selection=OWN._replace(quotas={}, once_in=None, candidates=2.0)
    ),
    "weights, synchronous": CARRY._replace(selection=WEIGHED),
    "weights, asynchronous": BUFFERED._replace(selection=WEIGHED),
    "seldom, synchronous": CARRY._replace(selection=SelectionRules(once_in=2)),
    "seldom, asynchronous": BUFFERED._replace(selection=SelectionRules(once_in=2), minimum=1),
    "power-of-choice, synchronous": CARRY._replace(selection=BY_LOSS),
    "power-of-choice, asynchronous": BUFFERED._replace(selection=BY_LOSS._replace(once_in=None)),
    "oort": CARRY._replace(selection=BY_UTILITY),
    "weights, share": SHARE_CARRIED._replace(selection=WEIGHED),
}
STATED = {
    f"d{number}": Stated(examples, labels=frozenset(labels.split()))
    for number, (examples, labels) in enumerate(
        [
            (5, "tier:phone"),
            (50, "tier:phone tag:eu"),
            (100, "tier:phone"),
            (200, "tag:eu"),
            (400, ""),
            (9, "tag:eu"),
        ]
    )
}


class SelectedInAnyOrder(AnyOrder):
    """``AnyOrder`` with rules on selection: what they promise holds, also over restarts."""

    of = BUFFERED._replace(selection=WEIGHED)

    def __init__(self) -> None:
        self.chosen: dict[int, list[str]] = {}
        """Round -> the devices that were given its tasks."""
        super().__init__()

    @property
    def engine(self) -> Engine:
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        """A process that begins has what the ledger remembers."""
        assert isinstance(engine.selection, RuledSelection)
        if hasattr(self, "_engine"):
            before = self.selection
            engine.selection.memory, engine.selection.pacer = before.memory, before.pacer
        engine.selection.stated = dict(STATED)
        self._engine = engine

    @property
    def selection(self) -> RuledSelection:
        assert isinstance(self._engine.selection, RuledSelection)
        return self._engine.selection

    def do(self, commands: list[Command]) -> None:
        for row in commands:
            if isinstance(row, Opened) and self.rules.share is not None:
                assert row.goal is not None
                self.size = self.rules.share.size_of_goal(row.goal)
            if isinstance(row, Assign) and not row.again:
                self.check_choice(row)
            elif isinstance(row, Commit):
                found = self.selection.utility_of(self.engine.accepted.values())
                self.selection.committed(self.versions + 1, found)
        super().do(commands)

    def check_choice(self, given: Assign) -> None:
        rules = self.selection.rules
        assert not rules.eligibility.refusals(STATED[given.device])
        for number in range(given.round - (rules.once_in or 0) + 1, given.round + 1):
            assert given.device not in self.chosen.get(number, [])
        devices = self.chosen.setdefault(given.round, [])
        devices.append(given.device)
        usual = self.rules.goal if self.rules.asynchronous else self.size.cohort
        for label, share in rules.quotas.items():
            assert sum(label in STATED[device].labels for device in devices) <= share * max(
                usual, len(devices)
            )

    def report_of(self, device: str, task: str, number: int) -> None:
        if device in self.connected and self.engine.leases.get(device) == task:
            counts = self.engine.report_terms(device)
            # else it is refused, and nothing is learnt
            if counts.staleness <= self.rules.max_staleness:
                self.selection.learn(
                    device, counts.round, float(len(self.counted) % 5), 10, self.now % 7
                )
        super().report_of(device, task, number)

    @invariant()
    def every_connected_device_is_in_one_place(self) -> None:
        selection = self.selection
        places = [
            *selection.idle, *chain.from_iterable(selection.doubted.values()), *selection.resting,
            *selection.ineligible, *selection.barred,
            *(device for device in self.engine.leases if device not in self.engine.book.absent),
        ]  # fmt: skip
        assert sorted(places) == sorted(self.connected)

    @invariant()
    def no_round_that_lacks_a_device_waits_beside_one_that_may_try_again(self) -> None:
        """Unless the rules keep it out."""
        if not self.selection.rules.quotas and self.selection.rules.once_in is None:
            super().no_round_that_lacks_a_device_waits_beside_one_that_may_try_again()

    @invariant()
    def no_slot_is_free_while_a_device_waits(self) -> None:
        """Unless its quotas keep it out."""
        if self.open is not None and self.rules.asynchronous and not self.selection.rules.quotas:
            assert not self.selection.idle or len(self.running) >= self.rules.cohort


@pytest.mark.parametrize(
    "usual", [USUAL, pytest.param(LONG, marks=pytest.mark.slow)], ids=["", "for long"]
)
@pytest.mark.parametrize("name", SELECTIONS)
def test_any_order_under_rules_on_selection(name: str, usual: settings) -> None:
    rules = type("Selected", (SelectedInAnyOrder,), {"of": SELECTIONS[name]})
    run_state_machine_as_test(rules, settings=usual)


def test_any_order_with_slots_that_are_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participation, "TOGETHER", 2)
    run_state_machine_as_test(machine(BUFFERED), settings=USUAL)


def test_reports_told_together_are_those_told_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asynchronous: up to where free slots are given or the buffer is full."""
    monkeypatch.setattr(participation, "TOGETHER", 2)
    one = Engine(BUFFERED._replace(cohort=6, goal=5, minimum=5))
    for number in range(9):
        one.check_in(f"d{number}", None, 0.0)
    many, now, told = deepcopy(one), 1.0, Counter[int]()
    for _ in range(40):
        reports = [*one.leases.items()][: one.reports_together()]
        told[len(reports)] += 1
        said = [one.count_report(*report, now + place) for place, report in enumerate(reports)]
        now += len(reports)
        assert not any(said[:-1])
        devices, tasks = zip(*reports, strict=True)
        assert many.count_reports(devices, tasks, now - 1) == said[-1]
        if one.phase is Phase.COMMITTING:
            assert many.committed(now, change=1.0, metrics={}) == one.committed(
                now, change=1.0, metrics={}
            )
        assert many == one
    assert told.keys() == {1, 2, 3}


def lost_and_back(rules: Settings) -> tuple[Engine, str]:
    """An engine that has lost device a with its task, and the name of the task."""
    engine = Engine(rules)
    engine.check_in("a", None, 0.0)
    task = engine.leases["a"]
    engine.disconnect("a", 0.0)
    engine.tick(rules.grace)
    assert "a" not in engine.leases
    return engine, task


def test_a_lost_task_that_would_be_too_stale_does_not_go_on() -> None:
    """A model is being made that makes its update too old: nothing changes."""
    engine, task = lost_and_back(ONE_BY_ONE)
    engine.check_in("b", None, 4.0)
    engine.count_report("b", engine.leases["b"], 5.0)
    assert engine.phase is Phase.COMMITTING
    with pytest.raises(ProtocolError):
        engine.announce("a", task, 1, 6.0)
    assert "a" not in engine.leases


def test_a_lost_task_does_not_go_on_beyond_what_its_device_may_have_of_a_round() -> None:
    engine, task = lost_and_back(FEW_OF_EACH)
    engine.check_in("a", None, 4.0)
    engine.count_report("a", engine.leases["a"], 5.0)
    with pytest.raises(ProtocolError):
        engine.announce("a", task, 1, 6.0)
    assert [*engine.accepted.values()] == ["a"]


def test_a_device_that_reported_early_is_counted_once_when_a_round_may_open() -> None:
    engine = Engine(CARRY._replace(cohort=3, goal=2, minimum=2))
    for device in "abc":
        engine.check_in(device, None, 0.0)
    (first, one), (second, two), (third, three) = engine.leases.items()
    engine.count_reports([first, second], [one, two], 1.0)
    engine.count_report(third, three, 2.0)
    for device in (first, second):
        engine.disconnect(device, 2.0)
    said = engine.committed(3.0, change=1.0, metrics={}) + engine.tick(6.0)
    assert not [row for row in said if isinstance(row, Opened)], "one device is no two"
