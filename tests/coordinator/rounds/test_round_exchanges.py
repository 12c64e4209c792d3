"""Exchanges before a round's tasks, and between its reports and its model: worked by hand,
restarted after each event, and then in any order of events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from fleetlearn_coordinator.rounds import round_state
from fleetlearn_coordinator.rounds.commands import (
    LOST,
    Abandon,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    ExchangeClosed,
    ExchangeOpened,
    Finish,
    Opened,
    Revived,
    Unanswered,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.exchange import SavedExchange
from fleetlearn_coordinator.rounds.settings import Phase, Settings
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from roll_call import PHASES, ROLL_CALL, RollCall, roll_call
from waking import let_time_pass

RULES = Settings(
    goal=3, cohort=4, minimum=2, deadline=60.0, grace=5.0, gather=1.0, seed=7, rounds=9, metric=None
)
CALL = RollCall(devices=9)
Register = Callable[[int], None]


@pytest.fixture
def goes_with_rounds(monkeypatch: pytest.MonkeyPatch) -> Register:
    def register(training_after: int) -> None:
        rules = CALL._replace(training_after=training_after)
        monkeypatch.setitem(round_state.EXCHANGE_POLICIES, ROLL_CALL, roll_call(rules))

    return register


def begin(devices: str, rules: Settings = RULES) -> tuple[Engine, list[Command]]:
    """Return an engine to which these devices came, and what it said to that."""
    engine, commands = Engine(rules), list[Command]()
    for device in devices:
        commands += arrive(engine, device, 0.0)
    return engine, commands


def arrive(engine: Engine, device: str, now: float) -> list[Command]:
    for series in engine.exchanges.values():
        series.join(device)
    return engine.check_in(device, None, now)


def of_kind(commands: list[Command], *kinds: type) -> list[Any]:
    return [command for command in commands if isinstance(command, kinds)]


def asked(commands: list[Command]) -> dict[str, str]:
    return {row.device: row.task for row in of_kind(commands, Ask)}


def report_all(engine: Engine, devices: str, now: float) -> list[Command]:
    commands: list[Command] = []
    for device in devices:
        commands += engine.count_report(device, engine.leases[device], now)
    return commands


def answer_all(engine: Engine, tasks: dict[str, str], now: float) -> list[Command]:
    commands: list[Command] = []
    for device, task in sorted(tasks.items()):
        commands += engine.count_answer(device, task, now)
    return commands


def test_survivors_are_asked_between_the_reports_and_the_model(goes_with_rounds: Register) -> None:
    goes_with_rounds(0)
    engine, commands = begin("abcd")
    assert len(of_kind(commands, Assign)) == 4
    assert not of_kind(commands, Ask)
    commands = report_all(engine, "abc", 2.0)
    assert not of_kind(commands, Commit)
    assert of_kind(commands, Ended, CancelTask, ExchangeOpened) == [
        Ended("d", "t1-4", 1, "surplus"),
        *of_kind(commands, CancelTask),
        ExchangeOpened(1, 0, ROLL_CALL, 1, ("a", "b", "c")),
    ]
    first = asked(commands)
    assert first == {"a": "tr1-1", "b": "tr1-2", "c": "tr1-3"}
    assert engine.phase is Phase.COMMITTING
    assert waits_for(engine, 3.0) == (
        "phase 1 of round 1's roll-call has 0 answers of 3 devices, for 14 s more at most"
    )
    with pytest.raises(ValueError, match="no round is being committed"):
        engine.committed(3.0, change=1.0, metrics={})
    with pytest.raises(ValueError, match="no round is being committed"):
        engine.snapshot()
    assert not of_kind(arrive(engine, "e", 3.0), Ask, Assign), "it reported nothing"
    second = asked(answer_all(engine, first, 4.0))
    engine.disconnect("c", 5.0)
    commands = [*answer_all(engine, {name: second[name] for name in "ab"}, 6.0)]
    assert not of_kind(commands, Commit), "c may come back"
    commands = engine.tick(10.0)
    assert of_kind(commands, Unanswered) == [Unanswered("c", second["c"], LOST, ROLL_CALL)]
    third = asked(commands)
    assert third.keys() == {"a", "b"}
    commands = answer_all(engine, third, 11.0)
    dropped = {"surplus": 1}
    assert commands == [ExchangeClosed(1, 0, {}, True, ROLL_CALL, 3), Commit(1, dropped)]
    commands = engine.committed(12.0, change=1.0, metrics={})
    assert engine.version == 1
    assert of_kind(commands, Opened) == [Opened(2)]
    assert len(of_kind(commands, Assign)) == 4


def test_a_round_with_too_few_answers_is_abandoned(goes_with_rounds: Register) -> None:
    goes_with_rounds(0)
    engine, _ = begin("abc")
    first = asked(report_all(engine, "abc", 2.0))
    engine.count_answer("a", first["a"], 3.0)
    commands = engine.tick(17.0)
    abandoned, opened = of_kind(commands, Abandon, Opened)
    text = "1 devices answered in phase 1 of its roll-call, 2 are the minimum"
    assert abandoned == Abandon(1, {}, text)
    assert opened == Opened(2)
    assert {row.device for row in of_kind(commands, Assign)} == {*"abc"}
    assert (engine.version, engine.phase) == (0, Phase.OPEN)
    assert of_kind(report_all(engine, "abc", 18.0), ExchangeOpened)[0].number == 2


def test_only_those_that_answered_before_the_tasks_train(goes_with_rounds: Register) -> None:
    """Two phases before training and one after it. A device that comes in between waits for the
    next round."""
    goes_with_rounds(2)
    engine, commands = begin("abcde")
    assert of_kind(commands, Opened, Assign) == [Opened(1)]
    assert of_kind(commands, ExchangeOpened) == [ExchangeOpened(1, 0, ROLL_CALL, 1, None)]
    first = asked(commands)
    assert first.keys() == {*"abcde"}
    engine.end("e", first.pop("e"), "failed: bad-data", 2.0)
    second = asked(answer_all(engine, first, 3.0))
    assert second == {name: f"tr1.2-{number}" for number, name in enumerate("abcd", 1)}
    assert not of_kind(arrive(engine, "f", 4.0), Ask, Assign)
    engine.disconnect("d", 5.0)
    commands = answer_all(engine, {name: second[name] for name in "abc"}, 6.0)
    assert not of_kind(commands, Assign)
    commands = engine.tick(10.0)
    assert of_kind(commands, ExchangeOpened) == []
    assert {row.device for row in of_kind(commands, Assign)} == {*"abc"}
    assert engine.deadline == 70.0, "training has all its time"
    assert not of_kind(arrive(engine, "d", 11.0), Assign), "it did not answer in phase 2"
    commands = report_all(engine, "abc", 12.0)
    assert of_kind(commands, ExchangeOpened) == [
        ExchangeOpened(1, 0, ROLL_CALL, 3, ("a", "b", "c"))
    ]
    commands = answer_all(engine, asked(commands), 13.0)
    assert of_kind(commands, Commit) == [Commit(1, {})]
    commands = engine.committed(14.0, change=1.0, metrics={})
    assert of_kind(commands, ExchangeOpened) == [ExchangeOpened(2, 1, ROLL_CALL, 1, None)]
    first = asked(commands)
    assert first.keys() == {*"abcdef"}, "all may take part in the next round"
    for name in "abc":
        engine.end(name, first.pop(name), "failed: bad-data", 15.0)
    commands = answer_all(engine, asked(answer_all(engine, first, 16.0)), 17.0)
    assert {row.device for row in of_kind(commands, Assign)} == {*"def"}


def test_a_round_whose_keys_are_missing_gives_no_task(goes_with_rounds: Register) -> None:
    """The exchange may take longer than the round's own time, which begins with the tasks."""
    goes_with_rounds(1)
    engine, commands = begin("abc", RULES._replace(deadline=10.0))
    first = asked(commands)
    engine.count_answer("a", first["a"], 2.0)
    assert engine.tick(12.0) == []
    commands = engine.tick(16.0)
    assert of_kind(commands, Assign) == []
    assert [row.round for row in of_kind(commands, Abandon, Opened)] == [1, 2]
    assert of_kind(commands, ExchangeOpened)[0].number == 2


@pytest.mark.parametrize("training_after", [0, 1])
def test_a_roll_back_ends_the_round_and_its_exchange(
    goes_with_rounds: Register, training_after: int
) -> None:
    goes_with_rounds(training_after)
    engine, commands = begin("abc")
    if not training_after:
        commands = report_all(engine, "abc", 2.0)
    assert of_kind(commands, ExchangeOpened)
    commands = engine.roll_back()
    closed, abandoned = of_kind(commands, ExchangeClosed, Abandon)
    assert (closed.valid, closed.number, abandoned.round) == (False, 1, 1)
    assert {row.device for row in of_kind(commands, CancelTask)} == {*"abc"}
    commands = engine.go_on_from_model(3.0) + engine.tick(5.0)
    assert of_kind(commands, Opened) == [Opened(2)]


def test_a_stop_rule_that_is_met_meanwhile_ends_the_run_also_without_a_model(
    goes_with_rounds: Register,
) -> None:
    goes_with_rounds(0)
    rules = RULES._replace(metric="accuracy", target=0.5)
    engine, _ = begin("abc", rules)
    report_all(engine, "abc", 2.0)
    assert engine.measured({"accuracy": 0.9}, 0, 3.0) == []
    commands = engine.tick(17.0)
    abandoned, finished = of_kind(commands, Abandon, Finish)
    assert (abandoned.round, finished.rule) == (1, "metric")
    assert engine.phase is Phase.FINISHED


def test_nothing_opens_while_the_run_is_paused(goes_with_rounds: Register) -> None:
    goes_with_rounds(0)
    engine, _ = begin("abc")
    engine.paused = True
    assert not of_kind(report_all(engine, "abc", 2.0), ExchangeOpened, Ask, Commit)
    engine.paused = False
    commands = engine.tick(3.0)
    assert asked(commands).keys() == {*"abc"}


def test_it_is_for_synchronous_rounds_alone(goes_with_rounds: Register) -> None:
    goes_with_rounds(0)
    with pytest.raises(ValueError, match=r"roll-call would go with each round: .*synchronous"):
        Engine(RULES._replace(carry=True))


class Disk:
    """What commands write, and what a new engine reads of it."""

    def __init__(self, rules: Settings = RULES) -> None:
        self.rules = rules
        self.round: int | None = None
        self.last = self.version = 0
        self.tasks: dict[str, list[Any]] = {}
        self.exchange: dict[str, Any] = {}
        self.turns: dict[str, list[str]] = {}
        self.ends: list[tuple[Any, ...]] = []

    def write(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Opened(number):
                    self.round = self.last = number
                    self.tasks = {}
                case Assign(device, task, again=False):
                    self.tasks[task] = [device, "assigned"]
                case Ended(_, task, _, cause):
                    self.tasks[task][1] = cause
                case Revived(_, task):
                    self.tasks[task][1] = "assigned"
                case ExchangeOpened(number, version, _, phase, members):
                    self.exchange = {"number": number, "version": version, "is_open": True}
                    self.exchange |= {"phase": phase, "members": members, "is_valid": False}
                    self.turns = {}
                case Ask(device, task, again=False):
                    self.turns[task] = [device, "assigned"]
                case Unanswered(_, task, cause):
                    self.turns[task][1] = cause
                case ExchangeClosed(valid=valid):
                    self.exchange |= {"is_open": False, "is_valid": valid}
                    self.ends.append((self.exchange["number"], self.exchange["phase"], valid))
                case Abandon():
                    self.round = None

    def read(self, now: float) -> tuple[Engine, list[Command]]:
        engine = Engine(self.rules, "t", self.version, self.last)
        if self.exchange:
            saved = SavedExchange(**self.exchange, **self._rows(self.turns))
            engine.restore_exchange(ROLL_CALL, saved, now)
        commands: list[Command] = []
        if self.round is not None:
            rows = self._rows(self.tasks)
            leases = [(*row, None) for row in rows["leases"]]
            restored = Restored(self.round, leases, rows["accepted"], rows["dropped"])
            commands += engine.restore(restored, now)
        return engine, commands + engine.begin(now)

    def _rows(self, tasks: dict[str, list[str]]) -> dict[str, list[Any]]:
        found = defaultdict[str, list[Any]](list, leases=[], accepted=[], dropped=[])
        for task, (device, state) in tasks.items():
            if state == "assigned":
                found["leases"].append((task, device))
            elif state == "accepted":
                found["accepted"].append((task, device))
            else:
                found["dropped"].append((task, device, state))
        return found


def test_members_alone_are_given_tasks_after_a_restart(goes_with_rounds: Register) -> None:
    goes_with_rounds(1)
    disk = Disk(RULES._replace(goal=2, cohort=2))
    engine, _ = disk.read(0.0)
    for device in "abcd":
        disk.write(arrive(engine, device, 0.0))
    for device in "abc":
        task = engine.exchanges[ROLL_CALL].book.tasks[device]
        disk.turns[task][1] = "accepted"
        disk.write(engine.count_answer(device, task, 1.0))
    disk.write(engine.tick(15.0))
    tasks = dict(engine.leases)
    (waits,) = {*"abc"} - tasks.keys()
    again, commands = disk.read(16.0)
    for device in "abcd":
        commands += arrive(again, device, 17.0)
    assert {row.device for row in of_kind(commands, Assign)} == tasks.keys()
    (first, *_) = tasks
    commands = again.end(first, tasks[first], "failed: bad-data", 18.0)
    assert {row.device for row in of_kind(commands, Assign)} == {waits}
    (second,) = tasks.keys() - {first}
    commands = again.end(second, tasks[second], "failed: bad-data", 19.0)
    assert not of_kind(commands, Assign), "d did not answer"


@pytest.mark.parametrize("training_after", [0, 1])
def test_a_round_that_is_closed_stays_so_after_a_restart(
    goes_with_rounds: Register, training_after: int
) -> None:
    """It has fewer reports than its goal, by its deadline. A device that comes then is too late."""
    goes_with_rounds(training_after)
    disk = Disk()
    engine, _ = disk.read(0.0)
    for device in "abc":
        disk.write(arrive(engine, device, 0.0))
    for device in "abc" if training_after else "":
        task = engine.exchanges[ROLL_CALL].book.tasks[device]
        disk.turns[task][1] = "accepted"
        disk.write(engine.count_answer(device, task, 1.0))
    for device in "ab":
        disk.tasks[engine.leases[device]][1] = "accepted"
        disk.write(engine.count_report(device, engine.leases[device], 1.0))
    commands = engine.tick(61.0)
    disk.write(commands)
    assert asked(commands).keys() == {*"ab"}
    again, commands = disk.read(62.0)
    assert again.phase is Phase.COMMITTING
    for device in "abcd":
        commands += arrive(again, device, 63.0)
    assert not of_kind(commands, Assign)
    assert asked(commands).keys() == {*"ab"}


@pytest.mark.parametrize("training_after", [0, 1, 2, 3])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_restart_after_each_event_changes_nothing(
    goes_with_rounds: Register, training_after: int, *, restarts: bool
) -> None:
    """Two rounds of three phases each, and of training in between. Every device checks in again
    after each restart."""
    goes_with_rounds(training_after)
    disk, now, devices = Disk(), 1.0, "abc"
    engine, begun = disk.read(now)
    todo: dict[str, tuple[str, str]] = {}
    commits: list[Commit] = []

    def take(commands: list[Command]) -> None:
        disk.write(commands)
        for command in commands:
            match command:
                case Assign(device, task) | Ask(device, task):
                    todo[device] = "report" if isinstance(command, Assign) else "answer", task
                case Commit():
                    commits.append(command)

    take(begun)
    for device in devices:
        take(arrive(engine, device, now))
    for _ in range(100):
        now += 2.0
        if restarts:
            todo.clear()
            commits.clear()
            engine, begun = disk.read(now)
            take(begun)
            for device in devices:
                take(arrive(engine, device, now))
            take(engine.tick(now))
        if commits:
            assert commits == [Commit(disk.last, {})]
            commits.clear()
            disk.round, disk.version = None, disk.version + 1
            if disk.version == 2:
                break
            take(engine.committed(now, change=1.0, metrics={}))
        elif todo:
            device, (what, task) = min(todo.items())
            del todo[device]
            (disk.tasks if what == "report" else disk.turns)[task][1] = "accepted"
            count = engine.count_report if what == "report" else engine.count_answer
            take(count(device, task, now))
        else:
            take(engine.tick(now))
    assert disk.version == 2
    assert disk.ends == [(number, phase, True) for number in (1, 2) for phase in (1, 2, 3)]


class AnyOrder(RuleBasedStateMachine):
    """Six devices that come, go, report, answer and fail, time, commits, roll backs and restarts in
    any order, held against what is on the disk."""

    training_after = 1
    plan = RULES._replace(
        rounds=None, cohort=4, goal=3, minimum=2, deadline=20.0, grace=3.0, stall=8.0
    )

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.now = Disk(self.plan), 0.0
        self.engine, _ = self.disk.read(self.now)
        self.connected: set[str] = set()
        self.commit: Commit | None = None
        self.reported: set[str] = set()
        """The devices whose reports count in the open round."""
        self.answered: dict[int, set[str]] = {}
        """Phase of the newest series -> who answered."""
        self.began = self.now

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            self.disk.write([command])
            match command:
                case Opened():
                    self.reported, self.began = set(), self.now
                case Assign(device, again=False):
                    assert device in self.connected
                    assert self.part() == "training"
                    assert not self.training_after or device in self.answered[self.training_after]
                case ExchangeOpened(number, version, _, phase, members):
                    assert (number, version) == (self.disk.round, self.disk.version)
                    if phase == 1:
                        self.answered = {}
                    assert self.answered.keys() == {*range(1, phase)}
                    self.answered[phase] = set()
                    before = self.answered.get(phase - 1)
                    expected = self.reported if phase == self.training_after + 1 else before
                    assert members == (None if expected is None else tuple(sorted(expected)))
                case Ask(device):
                    assert device in self.connected
                case ExchangeClosed(valid=valid, phase=phase):
                    assert valid <= (len(self.answered[phase]) >= CALL.minimum)
                case Commit(number):
                    assert number == self.disk.round
                    assert len(self.reported) >= self.plan.minimum
                    assert self.disk.ends[-1] == (number, PHASES, True)
                    self.commit = command
                case Abandon(number):
                    assert number == self.disk.last
                    self.commit = None

    def part(self) -> str:
        """Return what the open round is at, by the disk."""
        series = self.disk.exchange
        if not series or series["number"] != self.disk.round:
            return "before" if self.training_after else "training"
        if series["is_open"]:
            return "exchange"
        return "training" if series["phase"] == self.training_after else "after"

    def is_open(self) -> bool:
        return bool(self.disk.exchange and self.disk.exchange["is_open"])

    @initialize()
    def four_are_there(self) -> None:
        for device in "abcd":
            self.check_in(device)

    @rule(device=st.sampled_from("abcdef"))
    def check_in(self, device: str) -> None:
        self.connected.add(device)
        self.do(arrive(self.engine, device, self.now))

    @rule(device=st.sampled_from("abcdef"))
    def disconnect(self, device: str) -> None:
        self.connected.discard(device)
        self.do(self.engine.disconnect(device, self.now))

    @rule(data=st.data(), fails=st.integers(0, 4))
    @precondition(lambda self: self.connected & self.engine.leases.keys())
    def end_task(self, data: st.DataObject, fails: int) -> None:
        device = data.draw(st.sampled_from(sorted(self.connected & self.engine.leases.keys())))
        task = self.engine.leases[device]
        if not fails:
            self.do(self.engine.end(device, task, "failed: diverged", self.now))
            return
        self.report(device)

    def report(self, device: str) -> None:
        task = self.engine.leases[device]
        self.disk.tasks[task][1] = "accepted"
        self.reported.add(device)
        self.do(self.engine.count_report(device, task, self.now))

    @rule(data=st.data(), fails=st.integers(0, 6))
    @precondition(lambda self: self.connected & self.asked().keys())
    def answer(self, data: st.DataObject, fails: int) -> None:
        device = data.draw(st.sampled_from(sorted(self.connected & self.asked().keys())))
        task = self.asked()[device]
        if not fails:
            self.do(self.engine.end(device, task, "failed: bad-data", self.now))
            return
        self.reply(device)

    def reply(self, device: str) -> None:
        task = self.asked()[device]
        self.disk.turns[task][1] = "accepted"
        self.answered[self.disk.exchange["phase"]].add(device)
        self.do(self.engine.count_answer(device, task, self.now))

    @rule(times=st.integers(1, 4))
    def all_do_what_they_are_to_do(self, times: int) -> None:
        for device in sorted(self.connected) * times:
            if device in self.engine.leases:
                self.report(device)
            elif device in self.asked():
                self.reply(device)

    def asked(self) -> dict[str, str]:
        return self.engine.exchanges[ROLL_CALL].book.tasks

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        let_time_pass(self, self.engine, seconds)

    @rule()
    @precondition(lambda self: self.commit is not None)
    def make_the_model(self) -> None:
        self.commit, self.disk.round = None, None
        self.disk.version += 1
        self.do(self.engine.committed(self.now, change=1.0, metrics={}))

    @rule()
    def roll_back(self) -> None:
        self.do(self.engine.roll_back())
        assert (self.disk.round, self.commit) == (None, None)
        assert not self.is_open()
        self.disk.version += 1
        self.do(self.engine.go_on_from_model(self.now))

    @rule()
    def restart(self) -> None:
        self.connected.clear()
        self.commit, self.began = None, self.now
        self.engine, commands = self.disk.read(self.now)
        self.do(commands)

    @invariant()
    def the_disk_has_all(self) -> None:
        engine = self.engine
        asked = {row[0]: task for task, row in self.disk.turns.items() if row[1] == "assigned"}
        assert self.asked() == asked
        tasks = {row[0]: task for task, row in self.disk.tasks.items() if row[1] == "assigned"}
        assert engine.leases == (tasks if self.disk.round is not None else {})
        assert not asked.keys() & tasks.keys(), "a device with two leases"
        assert engine.exchanges[ROLL_CALL].is_open == self.is_open()
        assert engine.version == self.disk.version

    @invariant()
    def every_connected_device_is_in_one_place(self) -> None:
        selection = self.engine.selection
        waiting = {*selection.idle}.union(*selection.doubted.values())
        leased = {name for name in self.connected if self.engine.has_task(name)}
        assert not waiting & selection.resting
        assert not leased & (waiting | selection.resting)
        assert waiting | selection.resting | leased == self.connected

    @invariant()
    def a_round_ends(self) -> None:
        """Its exchanges and its training have their times, whatever devices do."""
        if self.disk.round is not None and self.commit is None:
            most = self.plan.deadline + PHASES * CALL.deadline
            assert self.now <= self.began + most + 1e-6
            assert self.engine.wake_at() is not None


@pytest.mark.parametrize("training_after", [0, 1, 2, 3])
def test_any_order(goes_with_rounds: Register, training_after: int) -> None:
    goes_with_rounds(training_after)
    machine = type("Machine", (AnyOrder,), {"training_after": training_after})
    usual = settings(max_examples=30, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(machine, settings=usual)
