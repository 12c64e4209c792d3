"""What is held back until batches are safe, and in which order it goes out."""

from __future__ import annotations

from fleetlearn_coordinator.network.output_gate import OutputGate


def test_it_is_open_where_nothing_is_written() -> None:
    gate = OutputGate()
    assert gate.is_open
    end = gate.begin()
    assert not gate.is_open
    end()
    assert gate.is_open


def test_each_waits_for_what_began_before_it() -> None:
    gate, said = OutputGate(), list[str]()
    first = gate.begin()
    gate.hold(lambda: said.append("after the first"))
    second = gate.begin()
    gate.hold(lambda: said.append("after both"))
    first()
    assert said == ["after the first"]
    assert not gate.is_open
    second()
    assert said == ["after the first", "after both"]


def test_batches_of_several_runs_end_in_any_order() -> None:
    gate, said = OutputGate(), list[str]()
    slow, quick = gate.begin(), gate.begin()
    gate.hold(lambda: said.append("both"))
    quick()
    assert said == []
    slow()
    assert said == ["both"]


def test_what_is_said_while_others_go_out_comes_after_them() -> None:
    gate, said = OutputGate(), list[str]()

    def answer() -> None:
        said.append("first")
        assert not gate.is_open
        gate.hold(lambda: said.append("third"))

    end = gate.begin()
    gate.hold(answer)
    gate.hold(lambda: said.append("second"))
    end()
    assert said == ["first", "second", "third"]
    assert gate.is_open
