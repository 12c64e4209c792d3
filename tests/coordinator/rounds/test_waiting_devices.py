"""Sorted names against a sorted list, in all sizes."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds import waiting_devices
from fleetlearn_coordinator.rounds.waiting_devices import Idle
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sortedcontainers import SortedList

NAMES = st.integers(0, 40).map("d{:02}".format)


class Names(RuleBasedStateMachine):
    """Beside it a plain list that is sorted after each change. The limits are small, so that all ways are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.idle, self.plain = Idle(), list[str]()

    @initialize(short=st.integers(0, 12), few=st.sampled_from([0, 1, 3, 100]))
    def limits(self, short: int, few: int) -> None:
        self.patch.setattr(waiting_devices, "SHORT", short)
        self.patch.setattr(waiting_devices, "FEW", few)

    def teardown(self) -> None:
        self.patch.undo()

    @rule(name=NAMES)
    def come(self, name: str) -> None:
        assert (name in self.idle) == (name in self.plain)
        if name not in self.plain:
            self.idle.add(name)
            self.plain = sorted([*self.plain, name])

    @rule(name=NAMES)
    def go(self, name: str) -> None:
        self.idle.discard(name)
        self.plain = [other for other in self.plain if other != name]

    @rule(names=st.sets(NAMES))
    def come_together(self, names: set[str]) -> None:
        new = names - {*self.plain}
        self.idle.update(new)
        self.plain = sorted([*self.plain, *new])

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        drawn = data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=len(self.plain)))
        assert self.idle.take(drawn) == [self.plain.pop(number % len(self.plain)) for number in drawn]

    @invariant()
    def the_same(self) -> None:
        assert [*self.idle] == self.plain
        assert len(self.idle) == len(self.plain)
        assert self.idle == Idle(reversed(self.plain))
        assert self.idle != Idle([*self.plain, "x"])


TestNames = Names.TestCase


def test_many_are_no_longer_a_list_and_few_are_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long list each would be taken at the cost of its length."""
    monkeypatch.setattr(waiting_devices, "SHORT", 3)
    names = Idle("cab")
    assert isinstance(names._names, list)
    names.add("d")
    assert isinstance(names._names, SortedList)
    assert "a" in names
    assert names.take([0, 0]) == ["a", "b"]
    names.update(["a"])
    assert isinstance(names._names, list)
    assert repr(names) == "Idle(['a', 'c', 'd'])"
