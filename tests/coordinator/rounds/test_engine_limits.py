"""Participation limits in the engine: worked by hand, and with devices, losses, late reports, slow
commits, restarts, other plans and roll backs in any order."""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from itertools import chain, pairwise
from math import inf
from typing import Any

import pytest
from fleetlearn_coordinator.rounds import round_state
from fleetlearn_coordinator.rounds.commands import (
    LOST,
    PRIVACY_LIMIT,
    Abandon,
    Ask,
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
from fleetlearn_coordinator.rounds.settings import PaceSettings, Phase, Settings
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_coordinator.rounds.waiting_words import waits_for
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
from roll_call import ROLL_CALL, RollCall, roll_call
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


def arrive(engine: Engine, devices: str, now: float = 0.0) -> list[Command]:
    commands = list[Command]()
    for device in devices:
        for series in engine.exchanges.values():
            series.join(device)
        commands += engine.check_in(device, None, now)
    return commands


def make_release(engine: Engine, now: float) -> list[str]:
    """Let all devices with tasks report, and the round be committed. Returns them."""
    devices = sorted(engine.leases)
    commands = list[Command]()
    for device in devices:
        commands += engine.count_report(device, engine.leases[device], now)
    assert any(isinstance(command, Commit) for command in commands)
    engine.committed(now, change=1.0, metrics={})
    return devices


PAIRS = SYNCHRONOUS._replace(cohort=2, gather=0.0, stall=inf)


def test_a_device_rests_for_its_separation_and_others_take_part() -> None:
    engine = Engine(PAIRS._replace(separation=3, participations=None))
    arrive(engine, "abcdef")
    took_part = [make_release(engine, 10.0 * number) for number in range(1, 7)]
    assert {*took_part[0], *took_part[1], *took_part[2]} == {*"abcdef"}
    assert took_part[3:] == took_part[:3]  # each pair again after three releases
    assert engine.waiting() == 0
    assert {*engine.selection.limited.first.values()} == {8, 9}


def test_who_took_part_as_often_as_it_may_is_never_chosen_again() -> None:
    engine = Engine(PAIRS._replace(separation=1, participations=1))
    arrive(engine, "abcde")
    first, second = make_release(engine, 1.0), make_release(engine, 2.0)
    assert {*first}.isdisjoint(second)
    assert engine.phase is Phase.GATHERING
    done = [*first, *second]
    engine.disconnect(done[0], 3.0)
    arrive(engine, done[0], 4.0)  # a connection gives nothing back
    assert engine.selection.limited.done() == 4
    assert engine.waiting() == 1
    assert waits_for(engine, 4.0) == (
        "a round needs 2 devices (round.minimum), and 1 can take part; of the connected "
        "devices, 4 took part as often as they may (privacy.participations = 1). Others have to "
        "connect"
    )
    assert isinstance(arrive(engine, "f", 5.0)[0], Opened)  # one comes, and the run goes on
    assert {"f"} < {*engine.leases}


def test_a_round_that_is_abandoned_is_no_participation() -> None:
    engine = Engine(PAIRS._replace(participations=1))
    arrive(engine, "ab")
    engine.count_report("a", engine.leases["a"], 1.0)
    engine.disconnect("b", 1.0)
    assert any(isinstance(command, Abandon) for command in engine.tick(20.0))
    assert [*engine.selection.idle] == ["a"]
    arrive(engine, "b", 21.0)
    assert {*engine.leases} == {"a", "b"}


def test_a_lost_task_does_not_come_back_beside_a_report_of_its_device() -> None:
    engine = Engine(EACH_RELEASE)
    arrive(engine, "ab")
    lost = engine.leases["a"]
    engine.disconnect("a", 1.0)
    engine.tick(5.0)
    arrive(engine, "a", 5.0)
    other = engine.leases["a"]
    assert other != lost
    engine.count_report("a", other, 6.0)
    assert engine.check_in("a", lost, 7.0) == []  # with the work of the first one done
    with pytest.raises(PrivacyLimitError, match="took part in release 1, and may again from re"):
        engine.announce("a", lost, 1, 7.0)
    assert engine.accepted == {other: "a"}
    assert engine.end("a", lost, PRIVACY_LIMIT, 7.0) == []  # it ended when its device was lost


def test_a_report_of_a_task_that_runs_is_refused_and_its_task_ends_by_a_cause_of_its_own() -> None:
    """No schedule leads there; whatever does, nobody takes part too often."""
    engine = Engine(PAIRS)
    arrive(engine, "ab")
    task = engine.leases["a"]
    engine.limits.restore(4, [("a", 4, 1)])  # type: ignore[union-attr]
    with pytest.raises(PrivacyLimitError):
        engine.announce("a", task, 1, 1.0)
    with pytest.raises(ValueError, match="is not wanted"):
        engine.count_report("a", task, 1.0)
    assert engine.end("a", task, PRIVACY_LIMIT, 1.0)[0] == Ended("a", task, 1, PRIVACY_LIMIT)
    assert engine.causes() == {"rejected: privacy-limit": 1}
    assert engine.selection.reliability.points == {}  # the device did nothing wrong


def test_exchanges_before_the_tasks_ask_nobody_who_may_not_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = RollCall(devices=9, training_after=1)
    monkeypatch.setitem(round_state.EXCHANGE_POLICIES, ROLL_CALL, roll_call(rules))
    monkeypatch.setattr(RollCall, "next_members", lambda *_: None)
    engine = Engine(PAIRS._replace(cohort=4))
    engine.limits.restore(5, [("a", 5, 1), ("b", 3, 3)])  # type: ignore[union-attr]
    asked = [each.device for each in arrive(engine, "abcd") if isinstance(each, Ask)]
    assert asked == ["c", "d"]
    engine.disconnect("a", 1.0)
    assert not any(isinstance(each, Ask) for each in arrive(engine, "a", 2.0))


def test_who_may_not_take_part_leaves_first_and_comes_back_when_it_may() -> None:
    pace = PaceSettings(connected=2, longest=1000.0, check_ins=100.0)
    engine = Engine(PAIRS._replace(separation=4, participations=2, pace=pace))
    engine.limits.restore(9, [("done", 5, 2), ("later", 9, 1)])  # type: ignore[union-attr]
    for pair, now in (("ab", 100.0), ("cd", 130.0)):
        arrive(engine, pair, now)
        make_release(engine, now)
        for device in pair:
            engine.disconnect(device, now)
    sent_away = list[Command]()
    for device in ("later", "done", "e", "f"):
        sent_away += engine.check_in(device, None, 131.0)[:1]
    assert {*sent_away} == {  # releases take 30 s
        SendAway("later", 30.0),  # from release 13 on; 12 is the next
        SendAway("done", 1000.0),  # never: as late as pace.longest allows
    }


@pytest.mark.parametrize(("separation", "most"), [(0, None), (1, 3), (4, None)])
def test_fast_devices_take_part_no_more_often_than_slow_ones_may(
    separation: int, most: int | None
) -> None:
    """Asynchronously a device is given another task as soon as it has reported: where tasks
    take a tenth of the others' time, a tenth of the devices send half of all updates, and lose so
    much more of their privacy (arXiv 2505.07041)."""
    rules = BUFFERED._replace(
        goal=5, cohort=40, minimum=5, stall=inf, deadline=1e4, grace=1e4, max_staleness=10**6,
        separation=separation, participations=most,
    )  # fmt: skip
    engine, took_part = Engine(rules), defaultdict[str, list[int]](list)
    times = {f"d{number:02}": 1.0 if number < 4 else 10.0 for number in range(40)}
    due = list[tuple[float, str, str]]()
    releases, counted = 0, list[str]()

    def do(commands: list[Command], now: float) -> None:
        nonlocal releases
        for command in commands:
            if isinstance(command, Assign):
                heappush(due, (now + times[command.device], command.device, command.task))
            elif isinstance(command, Commit):
                releases += 1
                for device in counted:
                    took_part[device].append(releases)
                counted.clear()
                do(engine.committed(now, change=1.0, metrics={}), now)

    for device in times:
        do(engine.check_in(device, None, 0.0), 0.0)
    while due and releases < 60:
        now, device, task = heappop(due)
        counted.append(device)
        do(engine.count_report(device, task, now), now)
    fast = [len(own) for device, own in took_part.items() if times[device] == 1.0]
    slow = [len(own) for device, own in took_part.items() if times[device] == 10.0]
    if not separation:
        assert min(fast) > 4 * max(slow)
        return
    gaps = [b - a for own in took_part.values() for a, b in pairwise(own)]
    assert min(gaps) >= separation
    if most is None:
        assert max(fast) <= 60 / separation
        return
    assert {*fast, *slow} == {most}  # 40 devices 3 times: 24 releases of 5
    assert (releases, engine.phase, engine.waiting()) == (24, Phase.GATHERING, 0)
    assert waits_for(engine, now) == (
        "a round needs 1 device, and none can take part; of the connected devices, 40 took part as "
        "often as they may (privacy.participations = 3). Others have to connect"
    )
    new, _ = engine.check_in("new", None, now)  # nothing is finished: another one may come
    assert isinstance(new, Opened)


# --- in any order ---


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

    def come_with_work_done(self, device: str, task: str, number: int) -> None:
        self.connected.add(device)
        self.do(self.engine.check_in(device, task, self.now))
        self.report_of(device, task, number)

    @rule(back=st.integers(1, 8))
    @precondition(lambda self: self.given)
    def check_in_with_work_done(self, back: int) -> None:
        self.come_with_work_done(*self.given[-back:][0])

    @rule(back=st.integers(1, 3))
    def check_in_with_the_work_of_a_lost_task(self, back: int) -> None:
        lost = [task for task, row in self.ended.items() if row[1] == LOST]
        for task in lost[-back:][:1]:
            self.come_with_work_done(self.ended[task][0], task, self.engine.round_of(task))

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
        assert self.limits.known == {
            device: (own[-1], sum(each >= self.since for each in own))
            for device, own in self.took_part.items()
        }
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
    USUAL, max_examples=1500, derandomize=True, database=None, phases=[Generate.generate]
)
"""With other seeds a mistake took up to 378 examples."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine(POLICIES[policy]), settings=SEARCH)
