"""What a party does with each message."""

from __future__ import annotations

import pytest
from fleetlearn_device.vertical.party_machine import (
    EndParty,
    KeepBottom,
    KeepCommonRows,
    LoadBottom,
    PartyMachine,
    Say,
    SayActivations,
    SayRows,
    SayState,
    StepBottom,
    TakeTerms,
    Wait,
)
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.messages import (
    CommonRows,
    PartyDone,
    PartyGradients,
    RowsWanted,
    VerticalBegin,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
    VerticalTerms,
)

TERMS = VerticalTerms("run", 1, (), 0, 8, 4, 2, {"lr": 0.1}, "float32")
PART = ArrayPart("gradient", "float32", 4, 0)


def gradients(attempt: int, step: int) -> PartyGradients:
    return PartyGradients(attempt, step, (PART,), 0.5)


def begun(step: int = 0) -> PartyMachine:
    machine = PartyMachine()
    machine.received(TERMS, b"")
    machine.received(VerticalBegin(1, step), b"")
    return machine


def test_a_party_says_what_it_has_and_which_rows() -> None:
    machine = PartyMachine()
    assert machine.received(TERMS, b"") == [TakeTerms(TERMS), SayState()]
    assert machine.received(RowsWanted(), b"") == [SayRows()]
    common = CommonRows(3, "a" * 64, 1, 0)
    assert machine.received(common, b"\x07") == [KeepCommonRows(common, b"\x07"), SayState()]


def test_a_party_keeps_its_bottom_before_it_says_the_next_activations() -> None:
    machine = begun()
    assert machine.received(gradients(1, 0), b"g") == [
        StepBottom(gradients(1, 0), b"g"),
        SayActivations(1, 1),
    ]
    assert machine.received(gradients(1, 1), b"g")[1:] == [KeepBottom(2), SayActivations(1, 2)]
    machine.received(gradients(1, 2), b"g")
    assert machine.received(gradients(1, 3), b"g")[1:] == [KeepBottom(4), Say(PartyDone(1))]
    assert machine.received(VerticalFinished(), b"") == [EndParty("")]


def test_a_party_goes_on_from_where_it_is_told() -> None:
    machine = PartyMachine()
    machine.received(TERMS, b"")
    assert machine.received(VerticalBegin(3, 2), b"") == [LoadBottom(2), SayActivations(3, 2)]
    assert machine.received(VerticalBegin(4, 4), b"") == [LoadBottom(4), Say(PartyDone(4))]


def test_what_is_said_of_an_attempt_that_was_given_up_does_not_count() -> None:
    machine = begun()
    assert machine.received(VerticalPause("for shop"), b"") == [Wait("for shop")]
    assert machine.received(gradients(1, 0), b"g") == []
    machine.received(TERMS, b"")
    machine.received(VerticalBegin(2, 0), b"")
    assert machine.received(gradients(1, 0), b"g") == []
    assert machine.received(gradients(2, 0), b"g") != []


def test_a_refusal_ends_the_party_and_says_why() -> None:
    assert begun().received(VerticalRefusal("no rows"), b"") == [EndParty("no rows")]
    assert begun().received(VerticalRefusal(""), b"") == [EndParty("no reason was given")]


@pytest.mark.parametrize("message", [RowsWanted(), VerticalBegin(1, 0), gradients(1, 0)])
def test_nothing_comes_before_the_terms(message: RowsWanted) -> None:
    with pytest.raises(ProtocolError, match="came before the terms"):
        PartyMachine().received(message, b"")


def test_other_steps_than_the_next_are_refused() -> None:
    with pytest.raises(ProtocolError, match="gradients of step 1 came; step 0 is awaited"):
        begun().received(gradients(1, 1), b"g")
    with pytest.raises(ProtocolError, match="begin at step 9; the run has 4"):
        begun().received(VerticalBegin(2, 9), b"")
