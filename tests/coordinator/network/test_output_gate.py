"""What is held back until batches are safe, and in which order it goes out."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.network.output_gate import OutputGate, OutputOrder


class Mouth:
    """A connection that sends words."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.output = OutputOrder(lambda: self.said.append("cut"))

    def say(self, word: str, gate: OutputGate | None) -> None:
        self.output.do(lambda: self.said.append(word), gate)


@pytest.fixture
def mouth() -> Mouth:
    return Mouth()


def test_it_is_open_where_nothing_is_written(mouth: Mouth) -> None:
    gate = OutputGate()
    assert gate.is_open
    end = gate.begin()
    assert not gate.is_open
    mouth.say("of no run", None)
    assert mouth.said == ["of no run"]
    end()
    assert gate.is_open
    mouth.say("of a run", gate)
    assert mouth.said == ["of no run", "of a run"]


def test_each_waits_for_what_began_before_it(mouth: Mouth) -> None:
    gate = OutputGate()
    first = gate.begin()
    mouth.say("after the first", gate)
    second = gate.begin()
    mouth.say("after both", gate)
    first()
    assert mouth.said == ["after the first"]
    assert not gate.is_open
    assert not mouth.output.is_empty
    second()
    assert mouth.said == ["after the first", "after both"]
    assert mouth.output.is_empty


def test_batches_end_in_any_order(mouth: Mouth) -> None:
    gate = OutputGate()
    slow, quick = gate.begin(), gate.begin()
    mouth.say("both", gate)
    quick()
    assert mouth.said == []
    slow()
    assert mouth.said == ["both"]


def test_what_is_said_while_others_go_out_comes_after_them(mouth: Mouth) -> None:
    gate = OutputGate()

    def answer() -> None:
        mouth.said.append("first")
        mouth.say("third", gate)

    end = gate.begin()
    mouth.output.do(answer, gate)
    mouth.say("second", gate)
    end()
    assert mouth.said == ["first", "second", "third"]


def test_another_run_s_words_wait_for_those_before_them(mouth: Mouth) -> None:
    """And other connections' do not."""
    gate, other, neighbour = OutputGate(), OutputGate(), Mouth()
    end = gate.begin()
    mouth.say("accepted", gate)
    mouth.say("task of another", other)
    mouth.say("of no run", None)
    neighbour.say("task of another", other)
    assert (mouth.said, neighbour.said) == ([], ["task of another"])
    end()
    assert mouth.said == ["accepted", "task of another", "of no run"]


def test_what_will_never_be_safe_is_not_said(mouth: Mouth) -> None:
    """The connections that wait for it end. What is said later promises nothing of it."""
    gate, other, neighbour = OutputGate(), OutputGate(), Mouth()
    gate.begin()
    mouth.say("accepted", gate)
    mouth.say("task", gate)
    mouth.say("of another", other)
    neighbour.say("of another", other)
    gate.give_up()
    assert (mouth.said, neighbour.said) == (["cut"], ["of another"])
    assert gate.is_open
