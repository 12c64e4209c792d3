"""What the coordinator of a split run does with each event: no I/O, no clock, no models.

Devices with rows of their own train one model that is divided at a layer. They do so in rounds:

* SplitFed (Thapa, Chamikara, Camtepe, Sun 2020, arXiv 2004.12088, SplitFedV1): all devices train at
  the same time, each its own copy of the bottom with a copy of the top that is its own too. When
  all have done their steps, the bottoms and the tops are averaged, weighted by the rows that were
  trained on. That is Federated Averaging of the whole model, of which devices compute the lower
  part. With one step in a round it is the step of one place on the devices' joined batches.
* turns (Gupta, Raskar 2018, arXiv 1810.06060): one device after the other trains the bottom with
  the top, and the bottom goes to the next. A turn is a round of one device, and averages nothing.

Devices keep nothing: each begins a round with what the coordinator sends. So a device that is gone
has no part in the round until it is back, and then begins its part again from the start. A round
that others wait for ends without it, when ``waited`` says that it was gone, or silent, for long
enough. Of each device the newest connection counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias

from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError, clip
from fleetlearn_protocol.manifest import Cut
from fleetlearn_protocol.vector import Vector
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays, read_bottom
from fleetlearn_protocol.vertical.messages import (
    MOST_STEPS,
    FromParty,
    PartyActivations,
    PartyGradients,
    PartyJoin,
    PartyState,
    PartyStops,
    SplitBottom,
    SplitTerms,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
)
from fleetlearn_protocol.vertical.schedule import is_checkpoint, seed_of_step, steps_of_epoch
from numpy.typing import NDArray

from fleetlearn_coordinator.service.vertical.engine import FinishRun, Phase, StopRun, TellParty
from fleetlearn_coordinator.service.vertical.joining import misfit_of_join

TOP = 0
"""The part number of a device's copy of the top, from which its random numbers come."""
DEVICE_SEED = 128
"""The part number from which a device's own seed comes; its place is added."""
MOST_BEGINS = 3
"""Of a device's part in a round: from the next one on, its steps do not hold up the others."""


class BeginDevice(NamedTuple):
    """Give a device its copy of the top, and send it the bottom, as both were when the round
    began."""

    device: str
    attempt: int
    round: int
    step: int
    """The device's first step."""
    steps: int
    """How many it is to do."""


class StepCopy(NamedTuple):
    """Do a step of a device's copy of the top, and pass its result to ``copy_done``."""

    device: str
    attempt: int
    done: int
    """Steps that the copy has done in this round."""
    seed: int
    arrays: tuple[NDArray[Any], ...]
    """Activations, then the targets."""


class AddDevice(NamedTuple):
    """Add a device's bottom, and its copy of the top, to the round, then call ``added``."""

    device: str
    attempt: int
    bottom: Vector
    """float32: the parameters, then the optimizer's state in turns."""
    done: int
    """Steps that the device's copy of the top has done."""
    rows: int
    """How many it has trained on, in all steps: its weight."""


class CloseRound(NamedTuple):
    """Make the round's model of what was added to it."""

    round: int
    """Rounds that are done with it."""
    keep: bool
    """Whether to keep the model durably, before anything else is sent."""


class SkipTurn(NamedTuple):
    """The device whose turn it was is gone: the model stays as it is."""

    device: str
    round: int
    keep: bool


class DropDevice(NamedTuple):
    """End a device's connection: it was silent for too long."""

    device: str


class EndServing(NamedTuple):
    """Devices that were gone when the training ended have had their time to come back."""


RoundsCommand: TypeAlias = (
    TellParty
    | BeginDevice
    | StepCopy
    | AddDevice
    | CloseRound
    | SkipTurn
    | DropDevice
    | FinishRun
    | EndServing
    | StopRun
)


@dataclass
class _DeviceSeat:
    """A device that is connected."""

    rows: int = 0
    """Of its data; 0: it has not said so yet."""
    attempt: int = 0
    """Of its part in the round; 0: it has none now."""
    step: int = 0
    """The step whose activations are awaited."""
    end: int = 0
    """The step before which its part ends."""
    first: int = 0
    """The first step of its part."""
    trained: int = 0
    """Rows that it has trained on in this part."""


@dataclass
class RoundsEngine:
    """One split run. Its methods are events, and return what is to be done.

    terms: what all devices are told, in which ``part`` and ``seed`` are each device's own, and the
    seed here is the run's. devices: in the order of their turns. turns: whether they train one
    after the other. rounds: how many rounds, or turns of each device, the run has. round_steps: how
    many steps a device does in a round; None: an epoch of its rows. bottom_size: elements of a
    bottom that travels. least: devices that a round needs, to end without the others.
    """

    terms: SplitTerms
    cut: Cut
    devices: Sequence[str]
    turns: bool
    rounds: int
    round_steps: int | None
    bottom_size: int
    checkpoint_every: int = 1
    least: int = 1
    step: int = 0
    """Rounds, or turns, that are done."""
    phase: Phase = "waiting"
    attempt: int = 0
    why: str = ""
    """Why the run failed, or the last device stopped."""
    checkpoint: int = 0
    """After how many rounds the model was last kept."""
    seats: dict[str, _DeviceSeat] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    """Devices whose part is in the open round."""
    given_up: set[str] = field(default_factory=set)
    """Devices that were gone, or silent, for too long: nobody waits for them until they are
    back."""
    stopped: set[str] = field(default_factory=set)
    """Devices that cannot go on. A run whose devices all cannot ends."""
    begins: dict[str, int] = field(default_factory=dict)
    """How often each device has begun its part in the open round."""

    @property
    def parties(self) -> Sequence[str]:
        """The devices' names."""
        return self.devices

    @property
    def missing(self) -> list[str]:
        """The devices that are not connected."""
        return [device for device in self.devices if device not in self.seats]

    @property
    def steps(self) -> int:
        """How many rounds, or turns of all devices, the run has."""
        return self.rounds * len(self.devices) if self.turns else self.rounds

    @property
    def due(self) -> list[str]:
        """The devices whose part in the open round is waited for."""
        if self.turns:
            return [self.devices[self.step % len(self.devices)]]
        without = self.ended | self.given_up
        return [device for device in self.devices if device not in without]

    def most_bytes(self, message: FromParty) -> int:
        """Return the most bytes that may follow a message."""
        match message:
            case SplitBottom():
                return 4 * self.bottom_size
            case PartyActivations():
                rows = self.terms.batch_size
                elements = rows * prod(self.cut.activations.shape)
                labels = sum(8 * rows * prod(row.shape) for row in self.terms.targets)
                return find_encoding(self.terms.encoding).size(elements) + labels
        return 0

    # Events

    def joined(self, device: str, message: PartyJoin) -> list[RoundsCommand]:
        """A device has connected, perhaps again, and said `join`."""
        bundle = self.cut.bundle if device in self.devices else None
        misfit = misfit_of_join(message, device, bundle)
        if misfit:
            return [TellParty(device, VerticalRefusal(misfit))]
        if self.phase == "finished":
            return [TellParty(device, VerticalFinished())]
        if self.phase == "failed":
            return [TellParty(device, VerticalRefusal(clip(self.why)))]
        self.seats[device] = _DeviceSeat()
        self.given_up.discard(device)
        self.stopped.discard(device)
        terms = SplitTerms(
            self.terms.run,
            self._part_of(device),
            self.terms.targets,
            self.seed_of(device),
            self.terms.batch_size,
            self.terms.hyper,
            self.terms.encoding,
            self.terms.carries_state,
        )
        return [TellParty(device, terms)]

    def left(self, device: str) -> list[RoundsCommand]:
        """A device's newest connection has ended."""
        self.seats.pop(device, None)
        self._note_phase()
        return self._fail(self.why) if self._is_hopeless() else []

    def said(self, device: str, message: FromParty, content: bytes) -> list[RoundsCommand]:
        """A device has said something. Raises ProtocolError where it breaks the protocol."""
        seat = self.seats.get(device)
        if seat is None or self.phase in ("finished", "failed"):
            return []
        match message:
            case PartyState(rows):
                self._check_state(seat, rows)
                seat.rows = rows
                return self._begin_or_wait(device)
            case PartyActivations():
                return self._take_activations(device, seat, message, content)
            case SplitBottom():
                return self._take_bottom(device, seat, message, content)
            case PartyStops(text):
                self.why = f"{device} stopped: {text}"
                self.stopped.add(device)
                return []
        raise ProtocolError(
            Code.BAD_MESSAGE, f"{message.__struct_config__.tag} has no place in a split run"
        )

    def copy_done(
        self, device: str, attempt: int, gradient: NDArray[Any], loss: float
    ) -> list[RoundsCommand]:
        """A step of a device's copy of the top is done."""
        seat = self.seats.get(device)
        if seat is None or seat.attempt != attempt:
            return []
        step, seat.step = seat.step, seat.step + 1
        seat.trained += len(gradient)
        seed = seed_of_step(step, self.seed_of(device), 64)
        parts, content = encode_arrays([("gradient", gradient)], self.terms.encoding, seed)
        return [TellParty(device, PartyGradients(attempt, step, parts, loss), content)]

    def copy_failed(self, device: str, text: str) -> list[RoundsCommand]:
        """A step of a device's copy of the top cannot be done, such as one whose loss is not
        finite. Others go on; where no device can, the run ends."""
        self.seats.pop(device, None)
        self.stopped.add(device)
        self.why = f"{device} cannot go on: {text}"
        refused: list[RoundsCommand] = [TellParty(device, VerticalRefusal(clip(self.why)))]
        return [*refused, *self._fail(self.why)] if self._is_hopeless() else refused

    def _is_hopeless(self) -> bool:
        return self.phase in ("waiting", "training") and self.stopped >= set(self.devices)

    def added(self, device: str) -> list[RoundsCommand]:
        """A device's part is in the round."""
        self.ended.add(device)
        if device in self.seats:
            self.seats[device].attempt = 0
        # Devices are given up where enough parts are there: who is left is enough for a round.
        if self.turns or not self.due:
            closed = self._close()
            waits = self.phase != "finished" and device not in self.due
            return [*closed, *self._pause(device)] if waits else closed
        return self._pause(device)

    def top_lost(self) -> list[RoundsCommand]:
        """The top's process died, with all copies: whoever was at work begins its part again."""
        at_work = [device for device, seat in self.seats.items() if seat.attempt]
        return [command for device in at_work for command in self._begin_or_wait(device)]

    # Waiting for devices that are gone

    @property
    def waits_for(self) -> Hashable:
        """What the run waits for: another value whenever something has happened. None: nothing
        that it could do without."""
        if self.phase == "finished":
            return "end"
        if self.phase == "failed":
            return None
        # A turn can go to somebody else; a round needs the parts of some devices.
        enough = (
            any(device not in self.due for device in self.seats)
            if self.turns
            else len(self.ended) >= self.least
        )
        if not enough:
            return None
        there = [(device, *self._progress_of(device)) for device in self.due]
        return (self.step, len(self.ended), *there)

    def _progress_of(self, device: str) -> tuple[int, int]:
        """Return what changes while a device gets on with its part: how often it has begun, and its
        step. A device that begins again and again does not change it: it would hold up the others
        for ever."""
        begins = self.begins.get(device, 0)
        if begins > MOST_BEGINS or device not in self.seats:
            return min(begins, MOST_BEGINS), 0
        return begins, self.seats[device].step

    def waited(self) -> list[RoundsCommand]:
        """``waits_for`` has been the same for as long as devices may be gone, or silent."""
        if self.phase == "finished":
            return [EndServing()]
        due = self.due
        self.given_up.update(due)
        dropped = [device for device in due if self.seats.pop(device, None) is not None]
        commands: list[RoundsCommand] = [DropDevice(device) for device in dropped]
        return [*commands, *(self._go_on() if self.turns else self._close())]

    # A device's part

    def seed_of(self, device: str) -> int:
        """Return a device's own seed."""
        return seed_of_step(0, self.terms.seed, DEVICE_SEED + self._part_of(device))

    def _part_of(self, device: str) -> int:
        return self.devices.index(device) + 1

    def _check_state(self, seat: _DeviceSeat, rows: int) -> None:
        """Raise ProtocolError where a device may not say this of its rows."""
        if seat.rows:
            raise ProtocolError(Code.BAD_MESSAGE, "state was said twice on one connection")
        steps = self._steps_of(rows)
        if steps * self.rounds > MOST_STEPS:
            raise ProtocolError(
                Code.OUT_OF_RANGE,
                f"{rows} rows in batches of {self.terms.batch_size} are {steps} steps in each of "
                f"{self.rounds} rounds; all rounds can have {MOST_STEPS}. Set round_steps, or "
                "larger batches, in the plan",
            )

    def _steps_of(self, rows: int) -> int:
        """Return how many steps a device with this many rows does in a round."""
        return self.round_steps or steps_of_epoch(rows, self.terms.batch_size)

    def _begin_or_wait(self, device: str) -> list[RoundsCommand]:
        """Begin a device's part in the open round, or tell it what it waits for."""
        seat = self.seats[device]
        if not seat.rows:  # it has not said yet what it has
            return []
        if device not in self.due:
            return self._pause(device)
        steps = self._steps_of(seat.rows)
        own_round = self.step // len(self.devices) if self.turns else self.step
        self.attempt += 1
        self.begins[device] = self.begins.get(device, 0) + 1
        first = own_round * steps
        rows = seat.rows
        self.seats[device] = _DeviceSeat(rows, self.attempt, first, first + steps, first)
        self.phase = "training"
        return [BeginDevice(device, self.attempt, self.step, first, steps)]

    def _pause(self, device: str) -> list[RoundsCommand]:
        if device not in self.seats:
            return []
        turn = f"it is the turn of {self.due[0]}" if self.turns else ""
        text = turn or f"for {', '.join(self.due) or 'more devices'}, to end the round"
        return [TellParty(device, VerticalPause(clip(text)))]

    def _take_activations(
        self, device: str, seat: _DeviceSeat, message: PartyActivations, content: bytes
    ) -> list[RoundsCommand]:
        if message.attempt != seat.attempt:
            return []
        if message.step != seat.step or seat.step == seat.end:
            raise ProtocolError(
                Code.BAD_MESSAGE, f"activations of step {message.step} came at step {seat.step}"
            )
        count = min(seat.rows, self.terms.batch_size)
        expected = [self.cut.activations, *self.terms.targets]
        arrays = decode_arrays(message.arrays, content, expected, count, self.terms.encoding)
        seed = seed_of_step(seat.step, self.seed_of(device), TOP)
        return [StepCopy(device, seat.attempt, seat.step - seat.first, seed, tuple(arrays))]

    def _take_bottom(
        self, device: str, seat: _DeviceSeat, message: SplitBottom, content: bytes
    ) -> list[RoundsCommand]:
        if message.attempt != seat.attempt:
            return []
        if seat.step != seat.end:
            raise ProtocolError(
                Code.BAD_MESSAGE, f"bottom came after step {seat.step}; {seat.end} ends the round"
            )
        bottom = read_bottom(content, self.bottom_size)
        done = seat.end - seat.first
        return [AddDevice(device, seat.attempt, bottom, done, seat.trained)]

    # The end of a round

    def _close(self) -> list[RoundsCommand]:
        self.step += 1
        return [CloseRound(self.step, self._is_kept()), *self._go_on()]

    def _is_kept(self) -> bool:
        kept = is_checkpoint(self.step, self.checkpoint_every, self.steps)
        if kept:
            self.checkpoint = self.step
        return kept

    def _go_on(self) -> list[RoundsCommand]:
        """Begin the next round with whoever is there, or finish."""
        self.ended, self.begins = set(), {}
        commands: list[RoundsCommand] = []
        while self.turns and self.step < self.steps and self._is_skipped(self.due[0]):
            device = self.due[0]
            self.step += 1
            commands.append(SkipTurn(device, self.step, self._is_kept()))
        if self.step == self.steps:
            self.phase = "finished"
            told = [TellParty(device, VerticalFinished()) for device in self.seats]
            return [*commands, FinishRun(), *told]
        self._note_phase()
        there = [device for device in self.due if device in self.seats]
        return [*commands, *(one for device in there for one in self._begin_or_wait(device))]

    def _is_skipped(self, device: str) -> bool:
        """Whether a device's turn goes to the next: it was given up, and others are there."""
        return device in self.given_up and bool(self.seats)

    def _note_phase(self) -> None:
        if self.phase in ("waiting", "training"):
            at_work = any(device in self.seats for device in self.due)
            self.phase = "training" if at_work else "waiting"

    def _fail(self, text: str) -> list[RoundsCommand]:
        self.phase, self.why = "failed", text
        told = [TellParty(device, VerticalRefusal(clip(text))) for device in self.seats]
        return [*told, StopRun(text)]
