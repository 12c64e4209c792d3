"""Selection by rules: weights, devices in doubt, careful rounds, and slots that come free."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.reliability import DOUBT
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.selection_rules import Oort, SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord
from fleetlearn_coordinator.rounds.strategies.regional_selection import selection_of
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection

SETTINGS = Settings(
    goal=3, cohort=4, minimum=2, deadline=60.0, grace=5.0, gather=4.0, seed=7, stall=10.0
)
BOOK = LeaseBook(SETTINGS.grace, SETTINGS.stall)
PHONE = Stated(labels=frozenset({"tier:phone"}))


def waiting(devices: str, rules: SelectionRules, seed: int = 7, **stated: Stated) -> RuledSelection:
    made = selection_of(SETTINGS._replace(seed=seed, selection=rules))
    assert isinstance(made, RuledSelection)
    made.stated |= stated
    for device in devices:
        made.add(device)
    return made


def test_without_rules_selection_is_the_plain_one() -> None:
    assert type(selection_of(SETTINGS)) is Selection


def test_factors_of_labels_multiply() -> None:
    rules = SelectionRules(
        by_examples=True, weights={"tier:phone": 3.0, "tag:eu": 0.5}, most_examples=10
    )
    selection = waiting(
        "", rules, a=Stated(99, labels=frozenset({"tier:phone", "tag:eu"})), b=Stated(4)
    )
    assert selection._kind_of("a")[2] == 15 * 2**16
    assert selection._kind_of("b")[2] == 4 * 2**16
    assert selection._kind_of("unknown")[2] == 2**16


def test_a_device_in_doubt_is_tried_within_its_quota() -> None:
    found = Counter[str]()
    for seed in range(60):
        rules = SelectionRules(quotas={"tier:phone": 0.25})
        selection = waiting("", rules, seed, p=PHONE, q=PHONE)
        for device in "pq":
            selection.reliability.fail(device, DOUBT)
        for device in "pqabcdef":
            selection.add(device)
        assert {*selection.doubted[1]} == {*"pq"}
        chosen = selection.choose(4, 1, 1, BOOK)
        assert len(chosen) == 4
        assert sum(device in "pq" for device in chosen) <= 1
        found.update(chosen)
    assert found["p"] + found["q"] > 0


def test_devices_in_doubt_fill_a_round_below_its_minimum() -> None:
    selection = waiting("", SelectionRules(quotas={"tier:phone": 0.5}), p=PHONE, q=PHONE, r=PHONE)
    for device in "pqr":
        selection.reliability.fail(device, DOUBT)
        selection.add(device)
    assert selection.waiting() == 2
    assert len(selection.choose(4, 1, 1, BOOK)) == 2


@pytest.mark.parametrize("strategy", ["uniform", "power-of-choice"])
def test_careful_rounds_go_to_proven_devices(strategy: Any) -> None:
    selection = waiting("abcdefghijkl", SelectionRules(strategy=strategy))
    selection.reliability.careful = selection.reliability.caution = 1
    selection.reliability.proven |= dict.fromkeys("abcd")
    chosen = selection.choose(4, 1, 1, BOOK)
    assert sum(device in "abcd" for device in chosen) >= 3
    assert not {*chosen} & {*selection.idle}
    assert len(selection.idle) == 8


def test_admitted_devices_take_the_slots_that_come_free() -> None:
    """The first two of the order are given tasks; then one is gone, one has no room, and the next
    is taken."""
    oort = Oort(10.0, 1.0, exploration=0.0, cutoff=0.0, most_tasks=9)
    selection = waiting(
        "",
        SelectionRules(strategy="oort", oort=oort, quotas={"tier:phone": 0.25}),
        p=PHONE,
        q=PHONE,
    )
    for device in "pqabcd":
        selection.memory.records[device] = DeviceRecord(1, 1, (), 1, 1.0, 10, 1.0)
        selection.add(device)
    given = selection.choose(2, 2, 1, BOOK)
    assert len(given) == 2
    gone = next(device for device in "abcd" if device not in given)
    selection.remove(gone)
    more = [
        *selection.choose(1, 2, 3, BOOK),
        *selection.choose(1, 2, 4, BOOK),
        *selection.choose(4, 2, 5, BOOK),
    ]
    assert gone not in more
    assert sum(device in "pq" for device in [*given, *more]) <= 1
    assert {*"abcd"} - {gone} <= {*given, *more}


def test_after_a_restart_the_open_round_s_tasks_count_for_quotas() -> None:
    selection = waiting("", SelectionRules(quotas={"tier:phone": 0.25}), p=PHONE)
    selection.memory.records["q"] = DeviceRecord(1, 1, ("tier:phone",))
    selection.go_on(["q", "unknown"])
    selection.add("p")
    assert selection.choose(4, 1, 3, BOOK) == []


def test_the_utility_of_devices_that_were_forgotten_is_not_known() -> None:
    selection = waiting("", SelectionRules(strategy="oort", oort=Oort(10.0, 1.0)))
    assert selection.utility_of("ab") == {"utility": 0.0, "preferred_seconds": 10.0}
    selection.committed(1, {})
    assert selection.pacer is not None
    assert not selection.pacer.history, "a round from before the rules"
