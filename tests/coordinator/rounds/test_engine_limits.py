"""Participation limits in the engine: worked by hand, and with devices, losses, late reports, slow
commits, restarts, other plans and roll backs in any order."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, pairwise
from typing import Any

import pytest
from fleetlearn_coordinator.rounds.commands import (
    LOST,
    PRIVACY_LIMIT,
    Abandon,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    Opened,
    Revived,
    SendAway,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.participation_limits import (
    ParticipationLimits,
    PrivacyLimitError,
)
from fleetlearn_coordinator.rounds.round_state import EngineState
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.selection_rules import Oort, SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import PaceSettings, Settings
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_protocol import ProtocolError
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Generate
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from waking import let_time_pass

SYNCHRONOUS = Settings(
    goal=2, cohort=3, minimum=2, deadline=20.0, grace=3.0, gather=2.0, seed=3, stall=6.0,
    separation=2, participations=3,
)  # fmt: skip
CARRY = SYNCHRONOUS._replace(carry=True, max_staleness=1, separation=1)
BUFFERED = SYNCHRONOUS._replace(
    goal=3, cohort=4, minimum=2, gather=0.0, asynchronous=True, max_staleness=2
)
EACH_RELEASE = BUFFERED._replace(separation=1, participations=None)
DEVICES = st.sampled_from([f"d{number}" for number in range(8)])
RULES = SelectionRules(weights={"tier:phone": 2.0}, quotas={"tier:phone": 0.5})
OORT = SelectionRules(strategy="oort", oort=Oort(preferred=10.0, step=1.0))


class AnyOrder(RuleBasedStateMachine):
    """The engine against a record of who took part in which release, made of what was reported and
    committed alone."""

    of = SYNCHRONOUS

    def __init__(self) -> None:
        super().__init__()
        self.rules: Settings = self.of
        self.now, self.versions, self.last = 0.0, 0, 0
        self.connected: set[str] = set()
        self.open: int | None = None
        self.committing: int | None = None
        self.running: dict[str, str] = {}
        self.began: dict[str, int] = {}
        self.ended: dict[str, tuple[str, str, int]] = {}
        self.counted: dict[str, tuple[str, int]] = {}
        """Task -> device, and the round that it counts for, until that is over."""
        self.given: list[tuple[str, str, int]] = []
        self.releases = 0
        self.since = 1
        self.took_part: dict[str, list[int]] = {}
        """Device -> the releases that it took part in."""
        self.engine = self.start()

    def start(self) -> Engine:
        """A new process, which has the ledger's rows."""
        engine = Engine(self.rules, version=self.versions, round=self.last)
        if isinstance(engine.selection, RuledSelection):
            tier = frozenset(["tier:phone"])
            engine.selection.stated.update(
                (f"d{number}", Stated(labels=tier if number % 2 else frozenset()))
                for number in range(8)
            )
        assert engine.limits is not None
        rows = [
            (device, own[-1], sum(each >= self.since for each in own))
            for device, own in self.took_part.items()
        ]
        engine.limits.restore(self.releases, rows, self.since)
        return engine

    @property
    def limits(self) -> ParticipationLimits:
        assert self.engine.limits is not None
        return self.engine.limits

    def may_take_part(self, device: str, release: int, also: int = 0) -> bool:
        """What the plan says, of the record alone. ``also``: reports of it that count already."""
        own = self.took_part.get(device, [])
        if own and release - own[-1] < self.rules.separation:
            return False
        times = sum(each >= self.since for each in own) + also
        return self.rules.participations is None or times < self.rules.participations

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Opened(number):
                    self.open = self.last = number
                case Assign(device, task, number, again=again, version=version):
                    if not again:
                        self.running[task], self.began[task] = device, version
                        self.given.append((device, task, number))
                        told = "a task for nothing"
                        assert self.may_take_part(device, self.releases + 1), told
                        of_round = [own for own, count in self.counted.values() if count == number]
                        assert device not in of_round, told
                case Ended(device, task, number, cause):
                    self.counted.pop(task, None)  # one that came early, of a run that rolls back
                    self.running.pop(task, None)
                    self.ended[task] = device, cause, number
                case Revived(device, task):
                    del self.ended[task]
                    self.running[task] = device
                case CancelTask(device):
                    assert device in self.connected
                case SendAway(device):
                    self.connected.remove(device)
                case Commit(number):
                    self.open, self.committing = None, number
                case Abandon(number):
                    self.forget(number)
                    self.open = self.committing = None

    def forget(self, number: int | None) -> list[str]:
        """The round is over. Returns the devices whose reports counted for it."""
        over = {task: row[0] for task, row in self.counted.items() if row[1] == number}
        for task in over:
            del self.counted[task]
        return [*over.values()]

    @rule()
    @precondition(lambda self: self.committing is not None)
    def commit(self) -> None:
        devices, self.committing = self.forget(self.committing), None
        self.releases += 1
        assert len(set(devices)) == len(devices), "a device is in one release twice"
        assert set(self.limits.taking_part()) == set(devices)
        for device in devices:
            assert self.may_take_part(device, self.releases), (
                f"{device}: {self.took_part.get(device)}"
            )
            self.took_part.setdefault(device, []).append(self.releases)
        self.versions += 1
        self.do(self.engine.committed(self.now, change=1.0, metrics={}))

    @rule(devices=st.lists(DEVICES, min_size=1, max_size=4))
    def check_in(self, devices: list[str]) -> None:
        for device in devices:
            self.connected.add(device)
            self.do(self.engine.check_in(device, None, self.now))

    @rule(back=st.integers(1, 8))
    @precondition(lambda self: self.given)
    def check_in_with_work_done(self, back: int) -> None:
        device, task, number = self.given[-back:][0]
        self.connected.add(device)
        self.do(self.engine.check_in(device, task, self.now))
        self.report_of(device, task, number)

    @rule(device=DEVICES)
    def disconnect(self, device: str) -> None:
        self.connected.discard(device)
        self.do(self.engine.disconnect(device, self.now))

    def report_of(self, device: str, task: str, number: int) -> None:
        if device not in self.connected or self.engine.has_counted(device, task):
            return
        try:
            self.do(self.engine.announce(device, task, number, self.now))
            self.engine.check_participation(device)
        except PrivacyLimitError:
            self.do(self.engine.end(device, task, PRIVACY_LIMIT, self.now))
            return
        except ProtocolError:
            return
        self.running.pop(task)
        self.counted[task] = device, self.engine.report_terms(device).round
        self.do(self.engine.count_report(device, task, self.now))

    @rule(back=st.integers(1, 8))
    @precondition(lambda self: self.given)
    def report_again(self, back: int) -> None:
        self.report_of(*self.given[-back:][0])

    @rule(most=st.integers(1, 4))
    def report_in_time(self, most: int) -> None:
        for task in sorted(self.running)[:most]:
            if task in self.running:
                self.report_of(self.running[task], task, self.engine.round_of(task))

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def lose_and_come_back(self, data: st.DataObject) -> None:
        """A device is away for longer than its grace, and comes back without its work."""
        device = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.disconnect(device)
        let_time_pass(self, self.engine, self.rules.grace + 1)
        self.check_in([device])

    @rule(back=st.integers(1, 8))
    @precondition(lambda self: self.given)
    def fail(self, back: int) -> None:
        device, task, _ = self.given[-back:][0]
        self.do(self.engine.end(device, task, "failed: diverged", self.now))

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        let_time_pass(self, self.engine, seconds)

    @rule()
    def roll_back(self) -> None:
        self.versions += 1
        self.do(self.engine.roll_back())
        self.counted.clear()
        self.open = self.committing = None
        self.do(self.engine.go_on_from_model(self.now))

    def die(self) -> None:
        self.connected.clear()
        self.open, self.committing = self.committing or self.open, None

    @rule()
    def restart(self) -> None:
        """The process dies, and a commit under way is lost."""
        self.die()
        self.engine = self.start()
        first, of_open = self.open, dict[str, str]()
        early = list[tuple[int, int, str, str]]()
        for place, (task, (device, number)) in enumerate(self.counted.items()):
            if number == first:
                of_open[task] = device
            else:
                early.append((number, place, task, device))
        since = first or self.last + 1
        leases = [(task, device, self.began[task]) for task, device in self.running.items()]
        restored = Restored(
            first,
            sorted(leases, key=lambda row: row[2]),
            [*of_open.items()],
            [(task, *row[:2]) for task, row in self.ended.items() if row[2] >= since],
            [
                (task, device, self.began[task])
                for task, (device, cause, _) in self.ended.items()
                if cause == LOST and self.began[task] >= self.versions - self.rules.max_staleness
            ],
            [row[2:] for row in sorted(early)],
        )
        if any(restored):
            self.do(self.engine.restore(restored, self.now))
        self.do(self.engine.begin(self.now))

    @rule(separation=st.integers(1, 3), participations=st.sampled_from([1, 3, None]))
    def restart_with_another_plan(self, separation: int, participations: int | None) -> None:
        """Another segment: the open round is given up. Participations are counted from 0."""
        limits = {"separation": separation, "participations": participations}
        if self.rules == self.rules._replace(**limits):
            return
        self.die()
        self.counted.clear()
        self.running.clear()
        self.open = None
        self.rules, self.since = self.rules._replace(**limits), self.releases + 1
        self.engine = self.start()
        self.do(self.engine.begin(self.now))

    @rule()
    @precondition(lambda self: self.committing is not None)
    def resume_from_snapshot(self) -> None:
        """As a simulation that was stopped."""
        there = sorted(self.connected)
        taken, before = self.engine.snapshot(), self.engine
        self.engine = Engine.from_snapshot(self.rules, "t", taken, there)
        if isinstance(before.selection, RuledSelection):
            assert isinstance(self.engine.selection, RuledSelection)
            self.engine.selection.stated = before.selection.stated
            self.engine.selection.memory = before.selection.memory
        self.commit()

    @invariant()
    def the_engine_counts_as_the_record_does(self) -> None:
        assert self.limits.release == self.releases + 1
        pending: defaultdict[str, list[int]] = defaultdict(list)
        for device, number in self.counted.values():
            pending[device].append(number)
        assert {device: len(own) for device, own in self.limits.pending.items()} == {
            device: len(own) for device, own in pending.items()
        }

    @invariant()
    def a_device_counts_once_in_a_round(self) -> None:
        assert len({*self.counted.values()}) == len(self.counted)

    @invariant()
    def who_may_take_part_does_not_wait_for_a_later_release(self) -> None:
        selection = self.engine.selection
        counts = {device for device, _ in self.counted.values()}
        for device in selection.limited.first:
            assert device in counts or not self.may_take_part(device, self.releases + 1)
        waiting = {*selection.idle, *chain.from_iterable(selection.doubted.values())}
        for device in waiting:
            assert self.may_take_part(device, self.releases + 1)

    @invariant()
    def every_connected_device_is_in_one_place(self) -> None:
        selection = self.engine.selection
        waiting = [*selection.idle, *chain.from_iterable(selection.doubted.values())]
        leased = {device for device in self.engine.leases if device not in self.engine.book.absent}
        places = [*waiting, *selection.resting, *selection.limited.first, *leased]
        if isinstance(selection, RuledSelection):
            places += [*selection.ineligible, *selection.barred]
        assert sorted(places) == sorted(self.connected)

    @invariant()
    def no_schedule_lets_a_device_take_part_too_often(self) -> None:
        """The promise, in words of its own; another plan may have begun between two releases."""
        if self.rules != self.of:
            return
        for device, own in self.took_part.items():
            gaps = [after - before for before, after in pairwise(own) if before >= self.since]
            assert min(gaps, default=9) >= self.rules.separation, device
            most = self.rules.participations
            assert most is None or sum(each >= self.since for each in own) <= most


POLICIES = {
    "synchronous": SYNCHRONOUS,
    "carry": CARRY,
    "buffered": BUFFERED,
    "each release": EACH_RELEASE,
    "carry, with pace": CARRY._replace(pace=PaceSettings(4, longest=10.0, check_ins=2.0)),
    "buffered, by rules": BUFFERED._replace(selection=RULES),
    "carry, oort": CARRY._replace(selection=OORT, separation=2),
    "synchronous, seldom": SYNCHRONOUS._replace(selection=SelectionRules(once_in=3), separation=3),
}
USUAL = settings(
    max_examples=15,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
LONG = settings(USUAL, max_examples=300)
SLOW = {"carry, with pace", "carry, oort", "synchronous, seldom", "each release"}


def machine(rules: Settings) -> type[RuleBasedStateMachine]:
    return type("Limited", (AnyOrder,), {"of": rules})


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in SLOW])
def test_any_order(name: str) -> None:
    run_state_machine_as_test(machine(POLICIES[name]), settings=USUAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_any_order_for_long(name: str) -> None:
    run_state_machine_as_test(machine(POLICIES[name]), settings=LONG)


# --- mistakes that each must be found ---


def forgets_at_restart(
    limits: ParticipationLimits, releases: int, rows: Any, since: int = 1
) -> None:
    limits.release, limits.since, limits.known = releases + 1, since, {}


def counts_abandoned_rounds(limits: ParticipationLimits) -> list[str]:
    devices = limits.taking_part()
    limits.commit(0.0)
    return devices


def takes_a_release_back(limits: ParticipationLimits) -> list[str]:
    devices = sorted(limits.pending)
    limits.pending.clear()
    last = limits.release - 1
    limits.known = {device: own for device, own in limits.known.items() if own.last != last}
    return devices


MISTAKES: dict[str, tuple[str, type, str, Any]] = {
    "a restart forgets who took part": (
        "synchronous", ParticipationLimits, "restore", forgets_at_restart,
    ),
    "a restart forgets the open round's reports": (
        "carry", Engine, "_restore_limits", lambda engine: None,
    ),
    "tasks are limited, reports are not": (
        "each release", EngineState, "may_report", lambda state, device: True,
    ),
    "reports are limited, tasks are not": (
        "buffered", Selection, "_is_limited", lambda selection, device, limits: False,
    ),
    "abandoned rounds are counted": (
        "synchronous", ParticipationLimits, "abandon", counts_abandoned_rounds,
    ),
    "a roll back gives a release back": (
        "synchronous", ParticipationLimits, "give_up", takes_a_release_back,
    ),
    "a report that comes while a model is made counts for that model's release": (
        "buffered", EngineState, "release_of_reports", lambda state: state.limits.release,
    ),
    "a snapshot is taken up without who took part": (
        "synchronous", ParticipationLimits, "take_up",
        lambda limits, taken: limits.restore(taken[0] - 1, []),
    ),
}  # fmt: skip
"""What is wrong -> a policy, and the method that another one takes the place of."""
SEARCH = settings(
    USUAL, max_examples=400, derandomize=True, database=None, phases=[Generate.generate]
)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine(POLICIES[policy]), settings=SEARCH)
