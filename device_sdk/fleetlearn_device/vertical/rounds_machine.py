"""What a device of a split run does with each message: no I/O, no arrays.

Each round, or turn, begins with the bottom that the coordinator sends, and ends with the bottom
that the device sends back. The device keeps nothing: one that comes back is sent what to do.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vertical.messages import (
    PartyGradients,
    SplitBegin,
    SplitTerms,
    ToParty,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
)

from fleetlearn_device.vertical.party_machine import (
    EndParty,
    SayActivations,
    SayState,
    StepBottom,
    Wait,
)


class TakeSplitTerms(NamedTuple):
    """These are the run's terms."""

    terms: SplitTerms


class TakeBottom(NamedTuple):
    """Go on from this bottom."""

    message: SplitBegin
    content: bytes


class SayBottom(NamedTuple):
    """Send `bottom`: the steps are done."""

    attempt: int


RoundsCommand: TypeAlias = (
    TakeSplitTerms
    | SayState
    | TakeBottom
    | SayActivations
    | StepBottom
    | SayBottom
    | EndParty
    | Wait
)


class RoundsMachine:
    """One connection of a device, from `join` on."""

    def __init__(self) -> None:
        self.is_admitted = False
        """Whether the coordinator has told the terms."""
        self._attempt: int | None = None
        """The attempt that is on. None: there is nothing to do."""
        self._step = 0
        """The step whose gradient is awaited."""
        self._end = 0
        """The step before which the round ends."""

    def received(self, message: ToParty, content: bytes) -> list[RoundsCommand]:
        """Return what is to be done. ``content``: the bytes that followed the message. Raises
        ProtocolError where the message does not come in its turn."""
        match message:
            case SplitTerms():
                self.is_admitted, self._attempt = True, None
                return [TakeSplitTerms(message), SayState()]
            case SplitBegin(attempt, _, step, steps):
                self._check_admitted("round")
                self._attempt, self._step, self._end = attempt, step, step + steps
                return [TakeBottom(message, content), SayActivations(attempt, step)]
            case PartyGradients():
                return self._gradients(message, content)
            case VerticalPause(text):
                self._attempt = None
                return [Wait(text)]
            case VerticalFinished():
                return [EndParty("")]
            case VerticalRefusal(text):
                return [EndParty(text or "no reason was given")]
        raise ProtocolError(
            Code.BAD_MESSAGE,
            "this coordinator serves parties with different features of the same rows: take part "
            "by `fleetlearn-device vertical`",
        )

    def _check_admitted(self, what: str) -> None:
        if not self.is_admitted:
            raise ProtocolError(Code.BAD_MESSAGE, f"{what} came before the terms")

    def _gradients(self, message: PartyGradients, content: bytes) -> list[RoundsCommand]:
        self._check_admitted("gradients")
        # Of an attempt that was given up.
        if message.attempt != self._attempt:
            return []
        if message.step != self._step:
            raise ProtocolError(
                Code.BAD_MESSAGE,
                f"gradients of step {message.step} came; step {self._step} is awaited",
            )
        self._step += 1
        if self._step < self._end:
            return [StepBottom(message, content), SayActivations(message.attempt, self._step)]
        self._attempt = None
        return [StepBottom(message, content), SayBottom(message.attempt)]
