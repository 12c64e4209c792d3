"""What a party of a vertical run does with each message: no I/O, no arrays.

Messages go in, commands come out, to be carried out in their order.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vertical.messages import (
    CommonRows,
    FromParty,
    PartyDone,
    PartyGradients,
    RowsWanted,
    SplitBegin,
    SplitTerms,
    ToParty,
    VerticalBegin,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
    VerticalTerms,
)
from fleetlearn_protocol.vertical.schedule import is_checkpoint


class Say(NamedTuple):
    """Send a message that nothing follows."""

    message: FromParty


class TakeTerms(NamedTuple):
    """These are the run's terms: find out what is kept of that run."""

    terms: VerticalTerms


class SayState(NamedTuple):
    """Send `state`: what is kept of the run."""


class SayRows(NamedTuple):
    """Send `rows`: the hashes of the rows."""


class KeepCommonRows(NamedTuple):
    """Check which rows are common, and keep it durably."""

    message: CommonRows
    content: bytes


class LoadBottom(NamedTuple):
    """Go on from the checkpoint after this many steps."""

    step: int


class SayActivations(NamedTuple):
    """Compute the activations of a step's rows, and send them."""

    attempt: int
    step: int


class StepBottom(NamedTuple):
    """Do the step with this gradient."""

    message: PartyGradients
    content: bytes


class KeepBottom(NamedTuple):
    """Keep the bottom durably, after this many steps, before anything else is sent."""

    step: int


class EndParty(NamedTuple):
    """The party ends."""

    refused: str
    """Why, where the coordinator refused it. Empty: the training is over."""


class Wait(NamedTuple):
    """Nothing is to be done until the coordinator says more."""

    text: str


Command: TypeAlias = (
    Say
    | TakeTerms
    | SayState
    | SayRows
    | KeepCommonRows
    | LoadBottom
    | SayActivations
    | StepBottom
    | KeepBottom
    | EndParty
    | Wait
)


class PartyMachine:
    """One connection of a party, from `join` on."""

    def __init__(self) -> None:
        self.terms: VerticalTerms | None = None
        self._attempt: int | None = None
        """The attempt that is on. None: everybody waits."""
        self._step = 0
        """The step whose gradient is awaited."""

    @property
    def is_admitted(self) -> bool:
        """Whether the coordinator has told the terms."""
        return self.terms is not None

    def received(self, message: ToParty, content: bytes) -> list[Command]:
        """Return what is to be done. ``content``: the bytes that followed the message. Raises
        ProtocolError where the message does not come in its turn."""
        match message:
            case VerticalTerms():
                self.terms, self._attempt = message, None
                return [TakeTerms(message), SayState()]
            case RowsWanted():
                self._known("rows-wanted")
                return [SayRows()]
            case CommonRows():
                self._known("common-rows")
                return [KeepCommonRows(message, content), SayState()]
            case VerticalBegin(attempt, step):
                terms = self._known("begin")
                self._attempt, self._step = attempt, step
                if step > terms.steps:
                    raise ProtocolError(
                        Code.BAD_MESSAGE, f"begin at step {step}; the run has {terms.steps}"
                    )
                return [LoadBottom(step), *self._go_on(terms)]
            case PartyGradients():
                return self._gradients(message, content)
            case VerticalPause(text):
                self._attempt = None
                return [Wait(text)]
            case VerticalFinished():
                return [EndParty("")]
            case SplitTerms() | SplitBegin():
                raise ProtocolError(
                    Code.BAD_MESSAGE,
                    "this coordinator serves devices with different rows: take part by "
                    "`fleetlearn-device split`",
                )
            case VerticalRefusal(text):
                return [EndParty(text or "no reason was given")]

    def _known(self, what: str) -> VerticalTerms:
        if self.terms is None:
            raise ProtocolError(Code.BAD_MESSAGE, f"{what} came before the terms")
        return self.terms

    def _gradients(self, message: PartyGradients, content: bytes) -> list[Command]:
        terms = self._known("gradients")
        # Of an attempt that was given up: everybody has gone back since, or will.
        if message.attempt != self._attempt:
            return []
        if message.step != self._step:
            raise ProtocolError(
                Code.BAD_MESSAGE,
                f"gradients of step {message.step} came; step {self._step} is awaited",
            )
        self._step += 1
        commands: list[Command] = [StepBottom(message, content)]
        if is_checkpoint(self._step, terms.checkpoint_every, terms.steps):
            commands.append(KeepBottom(self._step))
        return [*commands, *self._go_on(terms)]

    def _go_on(self, terms: VerticalTerms) -> list[Command]:
        assert self._attempt is not None
        if self._step == terms.steps:
            return [Say(PartyDone(self._attempt))]
        return [SayActivations(self._attempt, self._step)]
