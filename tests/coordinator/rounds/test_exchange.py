"""Exchanges of several phases: worked by hand, restored at every point, then in any order of
events."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from math import inf

import pytest
from fleetlearn_coordinator.rounds import round_state
from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    ExchangeClosed,
    ExchangeOpened,
    Finish,
    Unanswered,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.exchange import ExchangeSeries, SavedExchange
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES, Selection
from fleetlearn_coordinator.rounds.settings import EvaluationSettings, Settings
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from roll_call import PHASES, ROLL_CALL, RollCall, roll_call
from waking import let_time_pass

RULES = Settings(goal=9, cohort=9, minimum=9, deadline=60.0, grace=5.0, gather=1.0, seed=7)
CALL = RollCall()


@pytest.fixture(autouse=True)
def _has_roll_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(round_state.EXCHANGE_POLICIES, ROLL_CALL, roll_call(CALL))


def engine_with(devices: str, rules: Settings = RULES) -> Engine:
    engine = Engine(rules)
    for device in devices:
        arrive(engine, device, 0.0)
    return engine


def arrive(engine: Engine, device: str, now: float) -> list[Command]:
    for series in engine.exchanges.values():
        series.join(device)
    return engine.check_in(device, None, now)


def asked(commands: list[Command], kind: str = ROLL_CALL) -> dict[str, str]:
    return {row.device: row.task for row in commands if isinstance(row, Ask) and row.kind == kind}


def answer(engine: Engine, tasks: dict[str, str], now: float) -> list[Command]:
    said = [engine.count_answer(device, task, now) for device, task in tasks.items()]
    return [*chain.from_iterable(said)]


def of_kind(commands: list[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_each_phase_asks_those_that_answered_the_one_before() -> None:
    engine = engine_with("abcd")
    commands = engine.request_exchange(ROLL_CALL, 1.0)
    assert commands[0] == ExchangeOpened(1, 0, ROLL_CALL, 1, None)
    first = asked(commands)
    assert sorted(first.values()) == ["tr1-1", "tr1-2", "tr1-3", "tr1-4"]
    assert engine.end("d", first.pop("d"), "failed: bad-data", 2.0) == [
        Unanswered("d", "tr1-4", "failed: bad-data", ROLL_CALL)
    ]
    commands = answer(engine, first, 3.0)
    assert commands[:2] == [
        ExchangeClosed(1, 0, {"failed: bad-data": 1}, True, ROLL_CALL, 1),
        ExchangeOpened(1, 0, ROLL_CALL, 2, ("a", "b", "c")),
    ]
    second = asked(commands)
    assert second == {"a": "tr1.2-1", "b": "tr1.2-2", "c": "tr1.2-3"}
    engine.disconnect("c", 4.0)
    answer(engine, {device: second[device] for device in "ab"}, 5.0)
    commands = engine.tick(9.0)
    assert commands[0] == Unanswered("c", "tr1.2-3", LOST, ROLL_CALL)
    assert commands[1] == ExchangeClosed(1, 0, {LOST: 1}, True, ROLL_CALL, 2)
    assert commands[2] == ExchangeOpened(1, 0, ROLL_CALL, 3, ("a", "b"))
    assert arrive(engine, "c", 10.0) == [], "it is no member any more"
    commands = answer(engine, asked(commands), 11.0)
    assert commands == [ExchangeClosed(1, 0, {}, True, ROLL_CALL, 3)]
    assert engine.request_exchange(ROLL_CALL, 12.0)[0] == ExchangeOpened(2, 0, ROLL_CALL, 1, None)


def test_a_series_ends_with_a_phase_below_its_minimum() -> None:
    engine = engine_with("abc")
    second = asked(answer(engine, asked(engine.request_exchange(ROLL_CALL, 0.0)), 1.0))
    engine.count_answer("a", second["a"], 2.0)
    commands = engine.tick(16.0)
    (closed,) = of_kind(commands, ExchangeClosed)
    assert closed == ExchangeClosed(1, 0, {LATE: 2}, False, ROLL_CALL, 2)
    assert {row.device for row in commands if isinstance(row, CancelTask)} == {"b", "c"}
    assert not of_kind(commands, ExchangeOpened)


def test_members_that_are_away_when_a_phase_opens_are_asked_when_they_return() -> None:
    engine = engine_with("ab")
    first = asked(engine.request_exchange(ROLL_CALL, 0.0))
    engine.count_answer("a", first["a"], 1.0)
    engine.disconnect("a", 1.5)
    assert asked(engine.count_answer("b", first["b"], 2.0)) == {"b": "tr1.2-1"}
    engine.count_answer("b", "tr1.2-1", 3.0)
    assert arrive(engine, "z", 4.0) == [], "it answered nothing before"
    assert asked(arrive(engine, "a", 4.0)) == {"a": "tr1.2-2"}


def test_a_device_that_leaves_before_it_is_asked_may_be_chosen_again() -> None:
    """It was chosen, or waited in the queue while the exchange had all that it needs."""
    engine = engine_with("ab", RULES._replace(goal=2, cohort=2, minimum=2))
    engine.tick(1.0)
    training = dict(engine.leases)
    assert not asked(engine.request_exchange(ROLL_CALL, 1.0)), "both train"
    engine.disconnect("a", 2.0)
    assert engine.exchanges[ROLL_CALL].chosen == {"b"}
    arrive(engine, "a", 3.0)
    assert "a" in asked(engine.count_report("a", training["a"], 4.0))

    engine = engine_with("abcdef")
    tasks = asked(engine.request_exchange(ROLL_CALL, 1.0))
    first, second = sorted({*"abcdef"} - tasks.keys())
    for device in (first, second):
        engine.disconnect(device, 2.0)
    fails = next(iter(tasks))
    said = engine.end(fails, tasks[fails], "failed: bad-data", 3.0)
    assert not asked(said), "nobody is there for its place"
    assert asked(arrive(engine, second, 4.0)).keys() == {second}


def test_a_device_is_asked_one_thing_at_a_time_and_trains_when_nothing_is_asked() -> None:
    """Both kinds want both devices, and a round needs them too."""
    evaluated = EvaluationSettings(0, 2, 2, 30.0)
    rules = RULES._replace(goal=2, cohort=2, minimum=2, evaluation=evaluated)
    engine = Engine(rules)
    engine.paused = True
    for device in "ab":
        arrive(engine, device, 0.0)
    for kind in (EVALUATION, ROLL_CALL):
        engine.request_exchange(kind, 0.0)
    engine.paused = False
    commands = engine.begin(1.0)
    assert sorted(row.device for row in commands if isinstance(row, Assign)) == ["a", "b"]
    training = dict(engine.leases)
    said = [engine.count_report(*row, 2.0) for row in training.items()]
    commands = [*chain.from_iterable(said)]
    measuring = asked(commands, EVALUATION)
    assert measuring.keys() == {"a", "b"}
    assert not asked(commands)
    assert of_kind(commands, Commit)
    commands = answer(engine, measuring, 3.0)
    assert of_kind(commands, ExchangeClosed) == [ExchangeClosed(1, 0, {}, True, EVALUATION)]
    for phase in range(1, PHASES + 1):
        tasks = asked(commands)
        assert tasks.keys() == {"a", "b"}, phase
        commands = answer(engine, tasks, 3.0 + phase)
    assert not asked(commands)
    assert of_kind(engine.committed(9.0, change=1.0, metrics={}), Assign)


def test_a_run_finishes_when_its_exchanges_are_over() -> None:
    engine = engine_with("ab", RULES._replace(goal=2, cohort=2, minimum=2, rounds=1))
    engine.tick(1.0)
    engine.request_exchange(ROLL_CALL, 1.0)
    said = [engine.count_report(*row, 2.0) for row in dict(engine.leases).items()]
    commands = [*chain.from_iterable(said)]
    commands += engine.committed(3.0, change=1.0, metrics={})
    for phase in range(1, PHASES + 1):
        assert not of_kind(commands, Finish), phase
        assert waits_for(engine, 3.0) == "the training is over, and its roll-call goes on"
        commands = answer(engine, asked(commands), 3.0 + phase)
    assert of_kind(commands, Finish)


def test_a_snapshot_beside_a_commit_has_the_open_exchange() -> None:
    """Four devices are asked, the last of them when its report ends the round; two are to be asked
    if another fails."""
    rules = RULES._replace(goal=2, cohort=2, minimum=2)
    engine = engine_with("ab", rules)
    engine.tick(1.0)
    training = dict(engine.leases)
    call = engine.exchanges[ROLL_CALL]
    engine.request_exchange(ROLL_CALL, 1.0)
    engine.count_report("a", training["a"], 2.0)
    for device in "cdef":
        arrive(engine, device, 3.0)
    commands = engine.count_report("b", training["b"], 4.0)
    assert of_kind(commands, Commit)
    assert call.book.tasks.keys() == {*"abcd"}
    assert [*call._queue] == ["e", "f"]
    other = Engine.from_snapshot(rules, "t", engine.snapshot(), "abcdef")
    for series in other.exchanges.values():
        series.able.update("abcdef")
    expected = engine.committed(5.0, change=1.0, metrics={})
    assert {row.device for row in of_kind(expected, Assign)} == {"e", "f"}
    assert other.committed(5.0, change=1.0, metrics={}) == expected
    expected = engine.end("c", call.book.tasks["c"], "failed: bad-data", 6.0)
    assert other.end("c", "tr1-2", "failed: bad-data", 6.0) == expected
    assert other == engine


def test_an_answer_to_nothing_is_an_error() -> None:
    engine = engine_with("ab")
    with pytest.raises(ValueError, match="task tr1-1 of a is not wanted in any exchange"):
        engine.count_answer("a", "tr1-1", 0.0)


class Record:
    """What a driver writes down of one kind's commands, and what the next process reads."""

    def __init__(self) -> None:
        self.saved = SavedExchange(0, 0, False, [], [], [])
        self.running: dict[str, str] = {}
        """Task -> device."""
        self.answered: dict[str, str] = {}
        self.ended: dict[str, tuple[str, str]] = {}
        """Task -> device, cause."""
        self.closed: list[ExchangeClosed] = []

    def write(self, command: Command) -> None:
        match command:
            case ExchangeOpened(number, version, _, phase, members):
                self.saved = SavedExchange(number, version, True, [], [], [], phase, members)
                self.running, self.answered, self.ended = {}, {}, {}
            case Ask(device, task, again=False):
                self.running[task] = device
            case Unanswered(device, task, cause):
                assert self.running.pop(task) == device
                self.ended[task] = device, cause
            case ExchangeClosed():
                self.saved = self.saved._replace(is_open=False)
                self.closed.append(command)

    def count(self, task: str) -> str:
        """The answer of this task is safe. Returns its device."""
        self.answered[task] = device = self.running.pop(task)
        return device

    def read(self) -> SavedExchange:
        return self.saved._replace(
            leases=[*self.running.items()],
            accepted=[*self.answered.items()],
            dropped=[(task, *row) for task, row in self.ended.items()],
        )


EVENTS = 14


def history(restart_after: int | None) -> list[ExchangeClosed]:
    """Four devices through a roll call, one of which vanishes in each phase. The process dies after
    one of the EVENTS, and all devices that are still there come back to the next one."""
    engine, record, there = engine_with("abcd"), Record(), set("abcd")
    number = 0

    def do(commands: list[Command]) -> None:
        nonlocal engine, number
        for command in commands:
            record.write(command)
        number += 1
        if number == restart_after:
            engine = Engine(RULES)
            engine.restore_exchange(ROLL_CALL, record.read(), 0.0)
            again = engine.begin(0.0)
            for device in sorted(there):
                again += arrive(engine, device, 0.0)
            for command in again:
                record.write(command)

    def count(device: str) -> None:
        task = next(task for task, owner in record.running.items() if owner == device)
        record.count(task)
        do(engine.count_answer(device, task, 0.0))

    def fail(device: str) -> None:
        there.discard(device)
        task = next(task for task, owner in record.running.items() if owner == device)
        do(engine.end(device, task, "failed: bad-data", 0.0))
        do(engine.disconnect(device, 0.0))

    do(engine.request_exchange(ROLL_CALL, 0.0))
    fail("d")
    for device in "abc":
        count(device)
    fail("c")
    for device in "ab":
        count(device)
    count("b")
    fail("a")
    do(engine.tick(15.0))
    assert number == EVENTS
    return record.closed


@pytest.mark.parametrize("restart_after", range(1, EVENTS + 1))
def test_a_series_goes_on_after_a_restart_at_any_point(restart_after: int) -> None:
    found = history(restart_after)
    assert found == history(None)
    assert [(row.phase, row.valid) for row in found] == [(1, True), (2, True), (3, False)]


DEVICES = st.sampled_from([f"d{number}" for number in range(7)])
GRACE, RESTART = 3.0, 20.0


class AnyOrder(RuleBasedStateMachine):
    """A series against a record made of its commands alone, beside training of which only leases
    are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.version, self.turn = 0.0, 0, 0
        self.record = Record()
        self.before: list[str] | None = None
        """Who answered in the phase that was closed last, if it was valid and not the last."""
        self.began = 0.0
        self.connected: set[str] = set()
        self.start()

    def start(self) -> None:
        self.selection, self.training = Selection(RULES), LeaseBook(GRACE)
        self.start_series()

    def start_series(self) -> None:
        book = LeaseBook(GRACE)
        books = [self.training, book]
        self.series = ExchangeSeries(CALL, 7, "t", self.selection, None, book, books)

    def do(self, commands: list[Command]) -> None:
        """Carry out what an event said, and what the state then allows, as the engine does."""
        for command in [*commands, *self.series.go_on(self.now)]:
            self.check(command)
            self.record.write(command)

    def check(self, command: Command) -> None:
        record, saved = self.record, self.record.saved
        match command:
            case ExchangeOpened(number, version, kind, phase, members):
                assert kind == ROLL_CALL
                assert not saved.is_open
                if phase == 1:
                    assert (number, version, members) == (saved.number + 1, self.version, None)
                    assert self.before is None, "a phase of the series before is missing"
                else:
                    assert (number, version) == (saved.number, saved.version)
                    assert phase == saved.phase + 1
                    assert self.before is not None
                    assert members == tuple(sorted(self.before))
                self.began, self.before = self.now, None
            case Ask(device, task, number, version, deadline, again, _, phase):
                assert device in self.connected - self.training.tasks.keys()
                assert (number, version, phase) == (saved.number, saved.version, saved.phase)
                assert deadline == self.began + CALL.deadline
                if again:
                    assert record.running[task] == device
                    return
                assert saved.members is None or device in saved.members
                before = [*record.running, *record.answered, *record.ended]
                assert task not in before, "an id was given twice"
                devices = [*record.running.values(), *record.answered.values()]
                assert device not in devices, "it answers once"
                assert len(devices) < CALL.devices
                assert sum(owner == device for owner, _ in record.ended.values()) <= SECOND_CHANCES
            case CancelTask(device, task):
                assert device in self.connected
                assert task in record.ended
            case ExchangeClosed(number, version, dropped, valid, _, phase):
                assert (number, version, phase) == (saved.number, saved.version, saved.phase)
                assert not record.running
                assert valid == (len(record.answered) >= CALL.minimum)
                assert dropped == Counter(cause for _, cause in record.ended.values())
                self.before = [*record.answered.values()] if valid and phase < PHASES else None

    # --- events ---

    @rule(device=DEVICES)
    def join(self, device: str) -> None:
        if device in self.connected:
            return
        self.connected.add(device)
        self.series.join(device)
        again = self.series.come_back(device, self.now)
        if again is None:
            self.selection.come_back(device)
        self.do(again or [])

    @rule(device=DEVICES)
    def leave(self, device: str) -> None:
        """A device that trains is out of sight when it leaves."""
        if device in self.training.tasks:
            self.training.drop(device, LOST)
        self.connected.discard(device)
        self.selection.remove(device)
        self.series.leave(device, self.now)
        self.do([])

    @rule(device=DEVICES)
    def train(self, device: str) -> None:
        if device in self.selection.idle:
            self.turn += 1
            self.selection.remove(device)
            self.training.give([device], [f"t1-{self.turn}"], Terms(0, inf), self.now)

    @rule(data=st.data())
    @precondition(lambda self: self.training.tasks)
    def end_training(self, data: st.DataObject) -> None:
        device = data.draw(st.sampled_from(sorted(self.training.tasks)))
        self.training.complete([device], [self.training.tasks[device]])
        self.selection.come_back(device)
        self.do([])

    @rule()
    def ask_for_one(self) -> None:
        self.series.requested = True
        if self.series.due(self.version, last=False):
            self.do(self.series.open(self.version, self.now))

    @rule()
    def new_version(self) -> None:
        self.version += 1

    @rule(data=st.data(), fails=st.booleans())
    @precondition(lambda self: {*self.record.running.values()} & self.connected)
    def answer(self, data: st.DataObject, fails: bool) -> None:
        rows = self.record.running.items()
        running = {task: device for task, device in rows if device in self.connected}
        task = data.draw(st.sampled_from(sorted(running)))
        if fails:
            self.do(self.series.end(running[task], task, "failed: bad-data"))
            return
        device = self.record.count(task)
        assert self.series.takes_answer(device, task)
        self.series.count(device, task)
        assert self.series.has_counted(device, task)
        self.do([])

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds: float) -> None:
        let_time_pass(self, self.series, seconds)

    @rule(answers=st.booleans())
    def restart(self, answers: bool) -> None:
        """The process dies, ``answers``: when an answer is safe and not counted yet. The next one
        has what was written down, and nobody is connected."""
        running = [task for task, device in self.record.running.items() if device in self.connected]
        if answers and running:
            self.record.count(running[0])
        self.connected.clear()
        self.start()
        self.began = self.now
        self.series.restore(self.record.read(), self.now, self.now + RESTART)
        self.do([])

    @rule()
    def go_on_from_a_snapshot(self) -> None:
        """Another process goes on from plain values, with the same devices connected."""
        before, taken = self.series, json.loads(json.dumps(self.series.snapshot()))
        self.start_series()
        self.series.take_up(taken)
        self.series.able.update(self.connected)
        assert not before.is_open or self.series == before

    # --- what holds at any time ---

    @invariant()
    def no_lease_and_no_answer_is_lost(self) -> None:
        series, record = self.series, self.record
        assert series.is_open == record.saved.is_open
        assert {task: device for device, task in series.book.tasks.items()} == record.running
        if series.is_open:
            assert series.book.accepted == record.answered
            assert (series.number, series.phase) == (record.saved.number, record.saved.phase)
        assert series.is_open or not record.running
        assert self.before is None, "the next phase opens with the end of the one before"

    @invariant()
    def an_exchange_ends(self) -> None:
        if self.series.is_open:
            assert self.now <= self.series.deadline == self.began + CALL.deadline
            assert (self.series.wake_at() or 0.0) <= self.series.deadline
            assert len(self.record.answered) < CALL.devices
            if not self.record.running and len(self.record.answered) >= CALL.minimum:
                assert self.series.chosen, "it waits for somebody"

    @invariant()
    def who_is_to_be_asked_trains(self) -> None:
        chosen = self.series.chosen
        assert chosen <= self.connected & self.training.tasks.keys()
        assert self.record.saved.members is None or chosen <= {*self.record.saved.members}

    @invariant()
    def nobody_waits_who_could_be_asked(self) -> None:
        """While the exchange has room: for those that were not asked yet, up to its goal, for
        others to its minimum."""
        series, record = self.series, self.record
        if not series.is_open:
            return
        part = {*record.running.values(), *record.answered.values(), *series.chosen}
        failed = Counter(device for device, _ in record.ended.values())
        fresh = series.able - part - failed.keys()
        if record.saved.members is not None:
            fresh &= {*record.saved.members}
        assert not fresh or len(part) >= CALL.devices
        assert not series._again or len(part) >= CALL.minimum

    @invariant()
    def every_connected_device_is_in_one_place(self) -> None:
        asked = self.connected & {*self.record.running.values()}
        places = [*self.selection.idle, *self.selection.resting, *self.training.tasks, *asked]
        assert sorted(places) == sorted(self.connected)
        assert self.series.able == self.connected


AnyOrder.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.slow
class TestAnyOrderForLong(AnyOrder.TestCase):
    settings = settings(AnyOrder.TestCase.settings, max_examples=2000)
