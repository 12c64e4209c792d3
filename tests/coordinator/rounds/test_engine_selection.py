"""The engine with rules on selection: rounds worked by hand. test_engine_policies.py has any order
of events."""

from __future__ import annotations

from collections import Counter

from fleetlearn_coordinator.rounds.commands import STOPPED, Assign, Command, Commit, Opened
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.selection_rules import Eligibility, Oort, SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import Phase, Settings
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection

PLAIN = Settings(goal=4, cohort=4, minimum=2, deadline=60.0, grace=5.0, gather=1.0, seed=7)
OORT = Oort(preferred=5.0, step=5.0, window=2, exploration=0.5, least_exploration=0.5, most_tasks=3)


def ruled(engine: Engine) -> RuledSelection:
    assert isinstance(engine.selection, RuledSelection)
    return engine.selection


class Rounds:
    """An engine whose devices all report at once, each with a loss of its own."""

    def __init__(
        self, rules: SelectionRules, stated: dict[str, Stated], base: Settings = PLAIN
    ) -> None:
        self.engine, self.now, self.number = Engine(base._replace(selection=rules)), 0.0, 0
        self.stated, self.losses, self.seconds = stated, dict[str, float](), dict[str, float]()
        self.last: list[str] = []
        self.check_in(stated)

    def check_in(self, devices: dict[str, Stated]) -> list[Command]:
        ruled(self.engine).stated |= devices
        found: list[Command] = []
        for device in devices:
            found += self.engine.check_in(device, None, self.now)
        return self.remember(found)

    def remember(self, commands: list[Command]) -> list[Command]:
        self.last = [row.device for row in commands if isinstance(row, Assign)] or self.last
        return commands

    def tick(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.remember(self.engine.tick(self.now))

    def round(self) -> list[str]:
        """Let the open round's devices report, and the next one open. Returns who had tasks."""
        engine = self.engine
        if engine.phase is Phase.GATHERING:
            self.tick(2.0)
        given = sorted(engine.leases)
        for device in given:
            loss = self.losses.get(device, 1.0)
            ruled(engine).learn(
                device, engine.report_terms(device).round, loss, 10, self.seconds.get(device, 1.0)
            )
            commands = engine.count_report(device, engine.leases[device], self.now)
            if any(isinstance(row, Commit) for row in commands):
                selection = ruled(engine)
                selection.committed(
                    engine.version + 1, selection.utility_of(engine.accepted.values())
                )
                self.remember(engine.committed(self.now, change=1.0, metrics={}))
        return given


def fleet(count: int, **labels: str) -> dict[str, Stated]:
    """Devices d0, d1, ...; ``labels``: name of a device -> its label."""
    names = [f"d{number}" for number in range(count)]
    return {
        name: Stated(100, labels=frozenset([labels[name]] if name in labels else []))
        for name in names
    }


def test_an_ineligible_device_waits_and_is_counted() -> None:
    rounds = Rounds(SelectionRules(eligibility=Eligibility(least_examples=50)), {})
    assert rounds.check_in({"small": Stated(49)}) == []
    assert rounds.engine.waiting() == 0
    assert ruled(rounds.engine).live() == {
        "ineligible": 1, "ineligible_by": {"selection.least_examples": 1}, "barred": 0
    }  # fmt: skip
    rounds.check_in(fleet(4))
    assert rounds.round() == ["d0", "d1", "d2", "d3"]
    rounds.check_in({"small": Stated(50)})  # it has more now
    assert rounds.engine.waiting() == 1
    assert ruled(rounds.engine).live()["ineligible"] == 0
    rounds.check_in({"small": Stated(49)})
    rounds.engine.disconnect("small", rounds.now)
    assert ruled(rounds.engine).live()["ineligible"] == 0


def test_a_round_does_not_open_for_ineligible_devices() -> None:
    rounds = Rounds(SelectionRules(eligibility=Eligibility(charging=True)), fleet(9))
    assert rounds.tick(100.0) == []
    assert rounds.engine.phase is Phase.GATHERING


def test_quotas_hold_and_the_others_fill_the_round() -> None:
    phones = {f"d{number}": "tier:phone" for number in range(8)}
    rounds = Rounds(SelectionRules(quotas={"tier:phone": 0.25}), fleet(12, **phones))
    for _ in range(20):
        given = rounds.round()
        assert len(given) == 4
        assert sum(device in phones for device in given) <= 1


def test_a_round_opens_with_what_the_quotas_allow() -> None:
    """Of eight phones one may have a task: below the minimum of two the round does not open."""
    phones = {f"d{number}": "tier:phone" for number in range(8)}
    rounds = Rounds(SelectionRules(quotas={"tier:phone": 0.25}), fleet(8, **phones))
    rounds.tick(100.0)
    assert rounds.engine.phase is Phase.GATHERING
    assert rounds.engine.waiting() == 1
    rounds.check_in({"pi": Stated()})
    assert any(isinstance(row, Opened) for row in rounds.tick(100.0))
    assert len(rounds.engine.leases) == 2


def test_once_in_three_rounds() -> None:
    rounds = Rounds(SelectionRules(once_in=3), fleet(12))
    given = [set(rounds.round()) for _ in range(9)]
    for number in range(len(given) - 2):
        assert not given[number] & (given[number + 1] | given[number + 2])
    assert set().union(*given[:3]) == set(fleet(12))


def test_a_device_that_gave_its_task_back_is_barred_too() -> None:
    rounds = Rounds(SelectionRules(once_in=2), fleet(5))
    rounds.tick(2.0)
    device, task = next(iter(rounds.engine.leases.items()))
    rounds.engine.end(device, task, STOPPED, rounds.now)
    rounds.check_in({device: Stated()})
    assert device not in rounds.engine.leases
    assert device in ruled(rounds.engine).barred


def test_the_largest_losses_win_among_the_candidates() -> None:
    """With as many candidates as devices, the variant is greedy: who has not reported, then the
    largest losses."""
    rounds = Rounds(
        SelectionRules(strategy="power-of-choice", candidates=3.0, by_examples=True), fleet(12)
    )
    rounds.losses = {f"d{number}": float(number) for number in range(12)}
    first = {device for _ in range(3) for device in rounds.round()}
    assert len(first) == 12, "each once, as none had reported"
    assert rounds.round() == ["d10", "d11", "d8", "d9"]
    rounds.losses |= dict.fromkeys(["d8", "d9", "d10", "d11"], 0.5)
    assert rounds.round() == ["d10", "d11", "d8", "d9"], "by the losses that they reported last"
    assert rounds.round() == ["d4", "d5", "d6", "d7"]


def test_candidates_are_drawn_in_proportion_to_their_examples() -> None:
    """One candidate for each task: the draw alone decides. 1 of 4 devices has 3 of 6 parts of the
    examples."""
    stated = {f"d{number}": Stated(300 if number == 0 else 100) for number in range(4)}
    base = PLAIN._replace(goal=1, cohort=1, minimum=1)
    counts = Counter[str]()
    for seed in range(2000):
        rules = SelectionRules(strategy="power-of-choice", candidates=1.0, by_examples=True)
        engine = Engine(base._replace(seed=seed, selection=rules))
        ruled(engine).stated |= stated
        ruled(engine).next_round = 1
        for device in stated:
            ruled(engine).add(device)
        counts.update(ruled(engine).choose(1, 1, 1, engine.book))
    expected = {device: 2000 * row.examples / 600 for device, row in stated.items()}
    # 3 df, p = 0.001
    assert sum((counts[device] - mean) ** 2 / mean for device, mean in expected.items()) < 16.3


def test_oort_explores_and_exploits() -> None:
    """Half of four tasks are for devices that have not reported, half for the best utilities."""
    rules = SelectionRules(
        strategy="oort", oort=OORT._replace(cutoff=1.0, clip=1.0, most_tasks=100)
    )
    rounds = Rounds(rules, fleet(12))
    rounds.losses = {f"d{number}": 0.0 for number in range(12)}
    first = rounds.round()
    rounds.losses |= dict(zip(first, [0.0, 0.0, 0.0, 9.0], strict=True))
    assert len({*first, *rounds.last}) >= 6, "at least two of the second round are new"
    rounds.round()
    assert len(ruled(rounds.engine).memory.records) >= 8


def test_oort_s_most_tasks_do_not_hold_up_a_small_fleet() -> None:
    rules = SelectionRules(strategy="oort", oort=OORT._replace(most_tasks=1))
    rounds = Rounds(rules, fleet(5))
    assert [len(rounds.round()) for _ in range(10)] == [4] * 10


def test_slow_devices_lose_utility() -> None:
    """Two of eight take ten times as long as is preferred, which leaves a hundredth of their
    utility."""
    rules = SelectionRules(
        strategy="oort", oort=OORT._replace(least_exploration=0.2, decay=0.5, most_tasks=1000)
    )
    rounds = Rounds(rules, fleet(8))
    rounds.seconds = {"d0": 50.0, "d1": 50.0}
    counts = Counter(device for _ in range(40) for device in rounds.round())
    assert sum(counts.values()) == 160
    assert counts["d0"] + counts["d1"] < 160 / 8


def test_quotas_count_a_second_chance_as_a_task_and_a_task_that_is_given_back_once() -> None:
    rules = SelectionRules(quotas={"tier:phone": 0.5})
    phone = Stated(labels=frozenset({"tier:phone"}))
    fleet = Rounds(rules, {"a": phone, "b": Stated()}, PLAIN._replace(goal=2, cohort=2, grace=1.0))
    engine = fleet.engine
    fleet.tick(2.0)
    assert set(engine.leases) == {"a", "b"}
    engine.disconnect("a", fleet.now)
    fleet.tick(2.0)
    engine.check_in("a", None, fleet.now)
    assert engine.leases["a"] in {"t1-1", "t1-2"}, "the phone has its task back"
    assert ruled(engine).quotas.total == 2
    engine.end("a", engine.leases["a"], "failed: diverged", fleet.now)
    engine.disconnect("a", fleet.now)
    assert engine.check_in("a", None, fleet.now) == [], (
        "another would be the second phone of three tasks"
    )
