"""An own selection strategy: what it is told, that what it chooses is kept to, and what is
refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.own_stop_rule import OwnRuleError
from fleetlearn_coordinator.rounds.selection_rules import SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_coordinator.rounds.strategies.own_strategy import (
    Choice,
    SelectionStrategy,
    WaitingDevice,
    choose,
    fractions,
)
from fleetlearn_coordinator.rounds.strategies.regional_selection import selection_of
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection

SETTINGS = Settings(
    goal=3, cohort=4, minimum=2, deadline=60.0, grace=5.0, gather=4.0, seed=7, stall=10.0
)
BOOK = LeaseBook(SETTINGS.grace, SETTINGS.stall)
PHONE = frozenset({"tier:phone"})


def largest_first(choice: Choice) -> Sequence[str]:
    ranked = sorted(choice.devices, key=lambda device: -device.stated.examples)
    return [device.name for device in ranked[: choice.wanted]]


def shuffled(choice: Choice) -> Sequence[str]:
    """All of them, in a random order."""
    keys = {device.name: next(choice.random) for device in choice.devices}
    return sorted(keys, key=keys.__getitem__)


def waiting(strategy: SelectionStrategy, devices: str = "abcdef", **more: object) -> RuledSelection:
    """A selection with the devices a, b, ..., of 1, 2, ... examples."""
    rules = SelectionRules(strategy="x:y", own=strategy, candidates=None)._replace(**more)  # type: ignore[arg-type]
    made = selection_of(SETTINGS._replace(selection=rules))
    assert isinstance(made, RuledSelection)
    for number, device in enumerate(sorted(devices), 1):
        labels = PHONE if device in "ef" else frozenset[str]()
        made.stated[device] = Stated(examples=number, labels=labels)
    for device in devices:
        made.add(device)
    return made


def test_those_are_chosen_that_it_names() -> None:
    selection = waiting(largest_first)
    assert selection.choose(2, 1, 1, BOOK) == ["f", "e"]
    assert [*selection.idle] == ["a", "b", "c", "d"]
    assert selection.choose(9, 1, 3, BOOK) == ["d", "c", "b", "a"]
    assert selection.choose(1, 1, 7, BOOK) == []


def test_it_is_told_what_is_known_of_those_that_wait() -> None:
    asked = list[Choice]()

    def none(choice: Choice) -> Sequence[str]:
        asked.append(choice)
        return []

    selection = waiting(none, "ba")
    selection.memory.give("b", 1, ())
    selection.memory.learn("b", 1, 0.5, 20, 3.0)
    selection.next_round = 2
    assert selection.choose(1, 2, 1, BOOK) == []
    assert selection.waiting() == 2, "those that are not chosen wait"
    (choice,) = asked
    assert choice.devices == [
        WaitingDevice("a", Stated(1), None),
        WaitingDevice("b", Stated(2), selection.memory.records["b"]),
    ]
    assert (choice.wanted, choice.round) == (1, 2)
    assert selection.rules.remember
    assert selection.rules.times_tasks


def test_who_comes_first_does_not_matter_and_a_restart_neither() -> None:
    chosen = waiting(shuffled, "abcdef").choose(3, 1, 1, BOOK)
    assert waiting(shuffled, "fbdcea").choose(3, 1, 1, BOOK) == chosen
    later = waiting(shuffled, "abcdef").choose(3, 1, 4, BOOK)
    assert later != chosen, "with later slots of the round the numbers are others"
    assert len({*chosen}) == 3


def test_quotas_hold_whatever_it_chooses() -> None:
    selection = waiting(largest_first, quotas={"tier:phone": 0.25})
    assert selection.choose(4, 1, 1, BOOK) == ["f", "d", "c"], "e is a phone too"


def test_it_may_be_given_candidates_alone() -> None:
    offered = list[int]()

    def count(choice: Choice) -> Sequence[str]:
        offered.append(len(choice.devices))
        return largest_first(choice)

    selection = waiting(count, candidates=2.0)
    assert len(selection.choose(2, 1, 1, BOOK)) == 2
    assert offered == [4]
    assert selection.waiting() == 4, "candidates that are not chosen wait again"
    assert waiting(count, candidates=2.0).choose(2, 1, 1, BOOK) == waiting(
        count, "fedcba", candidates=2.0
    ).choose(2, 1, 1, BOOK)


@pytest.mark.parametrize(
    ("strategy", "refusal"),
    [
        (lambda choice: ["z"], r"chose 'z', which is none of the 2 devices that wait"),
        (lambda choice: [0], r"chose 0, which is none"),
        (lambda choice: ["a", "b", "a"], r"chose a twice"),
        (lambda choice: 1 / 0, r"failed: ZeroDivisionError: division by zero"),
        (lambda choice: sys.exit(1), r"failed: SystemExit: 1"),
        (lambda choice: None, r"returned None; expected a list of the chosen devices' names"),
        (lambda choice: "a", r"returned 'a'; expected a list"),
        (lambda choice: 1, r"failed: TypeError"),
    ],
)
def test_a_wrong_choice_is_named(strategy: SelectionStrategy, refusal: str) -> None:
    devices = [WaitingDevice(name, Stated(), None) for name in "ab"]
    with pytest.raises(OwnRuleError, match=rf"selection\.strategy {refusal}"):
        choose(strategy, Choice(devices, 1, 1, iter([])))


def test_fractions_are_below_one() -> None:
    assert [*fractions([0, 2**63, 2**64 - 1])] == [0.0, 0.5, 1 - 2**-53]
