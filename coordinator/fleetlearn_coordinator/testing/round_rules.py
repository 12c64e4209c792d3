"""Checks of own selection strategies and stop rules, for the tests of the package that has them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fleetlearn_coordinator.rounds.own_stop_rule import PastRound, StopRule
from fleetlearn_coordinator.rounds.random_draws import stream
from fleetlearn_coordinator.rounds.selection_rules import Stated
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord
from fleetlearn_coordinator.rounds.strategies.own_strategy import (
    Choice,
    SelectionStrategy,
    WaitingDevice,
    choose,
    fractions,
)

MOST_DEVICES = 60


def check_selection(strategy: SelectionStrategy) -> None:
    """Check a selection strategy. Raises AssertionError with what was asked and what came.

    It names devices that wait, none twice; it chooses some device where all that are eligible
    wait; the same question has the same answer, whatever was asked before: after a restart and in
    the simulator it is asked anew. It gets its chance from ``choice.random`` alone.
    """
    questions = [
        (number, wanted, round, draw)
        for number in (1, 2, 7, MOST_DEVICES)
        for wanted in (1, 5, MOST_DEVICES + 1)
        for round, draw in ((1, 1), (1, 2**40), (9, 3))
    ]
    first = [_chosen(strategy, *question) for question in questions]
    assert any(first), "it never chose a device, also of 60 that all wait"
    for question, before in reversed([*zip(questions, first, strict=True)]):
        _same(question, before, _chosen(strategy, *question))


def _same(question: tuple[int, int, int, int], before: list[str], now: list[str]) -> None:
    number, wanted, round, _ = question
    assert now == before, (
        f"of {number} devices, {wanted} wanted in round {round}, it chose another order or others "
        "when it was asked again after other questions: it keeps a state, or draws its own random "
        f"numbers. What it goes by must be in choice. It chose {before}, then {now}"
    )


def _chosen(
    strategy: SelectionStrategy, number: int, wanted: int, round: int, draw: int
) -> list[str]:
    devices = waiting_devices(number, round)
    choice = Choice(devices, wanted, round, fractions(stream(draw)))
    chosen = choose(strategy, choice)
    assert [*choice.devices] == waiting_devices(number, round), "it changed choice.devices"
    return chosen


def waiting_devices(number: int, round: int = 1) -> list[WaitingDevice]:
    """Return this many different devices for tests: large and small ones, with and without
    records and labels."""
    found = []
    for place in range(number):
        luck = Random(place)  # its own, so that a device is the same among few and among many
        labels = frozenset(["tier:phone"] if place % 3 == 0 else ["tier:pi", "tag:eu"])
        stated = Stated(luck.randrange(1, 2000), "onnx", luck.choice([None, 2**28]), labels)
        record = None
        if place % 4 and round > 1:
            record = DeviceRecord(round - 1, luck.randrange(1, 9))
            if place % 4 > 1:
                record = record._replace(
                    reported=round - 1, loss=luck.uniform(0, 5), examples=10, seconds=place / 2
                )
        found.append(WaitingDevice(f"device-{place:03}", stated, record))
    return found


def check_stop_rule(rule: StopRule, metric: str = "loss", rounds: int = 200) -> None:
    """Check a stop rule. Raises AssertionError with what was asked and what came.

    It returns None or words, whatever the rounds before were: metrics that fall, rise, stay, are
    missing, or are not finite. The same rounds have the same answer, whatever was asked before, as
    after a restart. It does not stop before a round.
    """
    for name, values in _courses(rounds).items():
        past = [
            PastRound(version, 4, 1.0 / version, {} if value is None else {metric: value})
            for version, value in enumerate(values, 1)
        ]
        lengths = sorted({*range(1, 12), len(past) // 2, len(past)})
        first = [_answer(rule, past[:length], name) for length in lengths]
        for length, before in reversed([*zip(lengths, first, strict=True)]):
            now = _answer(rule, past[:length], name)
            assert now == before, (
                f"after {length} rounds whose {metric} {name}, it said {before!r}, and {now!r} "
                "when it was asked again after other questions: it keeps a state. What it goes by "
                "must be in the rounds that it is told"
            )


def _courses(rounds: int) -> dict[str, Sequence[float | None]]:
    luck = Random(3)
    return {
        "falls": [2.0 / version for version in range(1, rounds + 1)],
        "rises": [float(version) for version in range(1, rounds + 1)],
        "stays": [1.0] * rounds,
        "goes up and down": [luck.random() for _ in range(rounds)],
        "is missing at times": [1.0 if version % 3 else None for version in range(rounds)],
        "is missing": [None] * rounds,
        "is not finite": [float("inf"), float("nan"), 1.0] * (rounds // 3),
    }


def _answer(rule: StopRule, past: Sequence[PastRound], name: str) -> str | None:
    given = (*past,)
    said = rule(given)
    assert said is None or (isinstance(said, str) and said), (
        f"after {len(past)} rounds whose metric {name}, it returned {said!r}; expected None, or "
        "why training is over, in words"
    )
    return said
