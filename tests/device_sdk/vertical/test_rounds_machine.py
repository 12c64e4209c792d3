"""What a device of a split run does with each message."""

from __future__ import annotations

import pytest
from fleetlearn_device.vertical.party_machine import (
    EndParty,
    PartyMachine,
    SayActivations,
    SayState,
    StepBottom,
    Wait,
)
from fleetlearn_device.vertical.rounds_machine import (
    RoundsMachine,
    SayBottom,
    TakeBottom,
    TakeSplitTerms,
)
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.messages import (
    PartyGradients,
    RowsWanted,
    SplitBegin,
    SplitTerms,
    ToParty,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
)

TERMS = SplitTerms("run", 1, (Input("y", "int64", ()),), 0, 8, {"lr": 0.1}, "float32", False)
PART = ArrayPart("gradient", "float32", 4, 0)


def gradients(attempt: int, step: int) -> PartyGradients:
    return PartyGradients(attempt, step, (PART,), 0.5)


def begin(attempt: int = 1, step: int = 6, steps: int = 2) -> SplitBegin:
    return SplitBegin(attempt, 3, step, steps, 8, 0)


def begun() -> RoundsMachine:
    machine = RoundsMachine()
    machine.received(TERMS, b"")
    machine.received(begin(), b"bottom")
    return machine


def test_a_round_begins_with_a_bottom_and_ends_with_one() -> None:
    machine = RoundsMachine()
    assert not machine.is_admitted
    assert machine.received(TERMS, b"") == [TakeSplitTerms(TERMS), SayState()]
    assert machine.is_admitted
    assert machine.received(begin(), b"bottom") == [
        TakeBottom(begin(), b"bottom"),
        SayActivations(1, 6),
    ]
    one, two = gradients(1, 6), gradients(1, 7)
    assert machine.received(one, b"g") == [StepBottom(one, b"g"), SayActivations(1, 7)]
    assert machine.received(two, b"g") == [StepBottom(two, b"g"), SayBottom(1)]
    # Nothing more is to be done in it.
    assert machine.received(gradients(1, 8), b"g") == []
    assert machine.received(VerticalFinished(), b"") == [EndParty("")]


def test_what_is_said_of_an_attempt_that_was_given_up_does_not_count() -> None:
    machine = begun()
    assert machine.received(VerticalPause("for b"), b"") == [Wait("for b")]
    assert machine.received(gradients(1, 6), b"g") == []
    machine.received(begin(2), b"bottom")
    assert machine.received(gradients(1, 6), b"g") == []
    assert machine.received(gradients(2, 6), b"g") != []


def test_a_refusal_ends_the_device_and_says_why() -> None:
    assert begun().received(VerticalRefusal("the loss is inf"), b"") == [
        EndParty("the loss is inf")
    ]


@pytest.mark.parametrize("message", [begin(), gradients(1, 0)])
def test_nothing_comes_before_the_terms(message: ToParty) -> None:
    with pytest.raises(ProtocolError, match="came before the terms"):
        RoundsMachine().received(message, b"")


def test_other_steps_than_the_next_are_refused() -> None:
    with pytest.raises(ProtocolError, match="gradients of step 7 came; step 6 is awaited"):
        begun().received(gradients(1, 7), b"")


def test_a_run_of_the_other_kind_is_named() -> None:
    with pytest.raises(ProtocolError, match="fleetlearn-device vertical"):
        RoundsMachine().received(RowsWanted(), b"")
    with pytest.raises(ProtocolError, match="fleetlearn-device split"):
        PartyMachine().received(TERMS, b"")
