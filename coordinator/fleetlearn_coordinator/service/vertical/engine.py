"""What the coordinator of a vertical run does with each event: no I/O, no clock.

Events go in, commands come out, to be carried out in their order. Of all parties only the newest
connection counts. Everybody trains, or nobody: a party that is gone pauses the run, and when all
are there again everybody goes back to the newest checkpoint that all sides have.

That checkpoint is never more than one behind: each side keeps its own durably before it sends what
the next step needs, so that the sides' newest checkpoints differ by one at most. Two are enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError, clip
from fleetlearn_protocol.manifest import Cut, Input
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.alignment import (
    HASH_BYTES,
    MOST_ROWS,
    RowHashes,
    check_sorted,
    common_hashes,
    digest_of,
    membership,
    read_hashes,
)
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays
from fleetlearn_protocol.vertical.messages import (
    CommonRows,
    FromParty,
    PartyActivations,
    PartyDone,
    PartyGradients,
    PartyJoin,
    PartyRows,
    PartyState,
    PartyStops,
    RowsWanted,
    ToParty,
    VerticalBegin,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
    VerticalTerms,
)
from fleetlearn_protocol.vertical.schedule import is_checkpoint, rows_of_step, seed_of_step
from numpy.typing import NDArray

from fleetlearn_coordinator.service.vertical.joining import misfit_of_join

Phase = Literal["waiting", "aligning", "training", "finished", "failed"]


class TellParty(NamedTuple):
    """Send a message to a party, and what follows it."""

    party: str
    message: ToParty
    content: bytes = b""


class LoadTop(NamedTuple):
    """Go on from the top's checkpoint after this many steps."""

    step: int


class StepTop(NamedTuple):
    """Do a step of the top, and pass its result to ``top_done``."""

    step: int
    seed: int
    rows: NDArray[Any]
    """Numbers of the rows, for labels that the coordinator has."""
    arrays: tuple[NDArray[Any], ...]
    """Activations of each party in their order, then the targets that a party sent."""


class KeepTop(NamedTuple):
    """Keep the top durably after this many steps, before anything else is sent."""

    step: int


class KeepAlignment(NamedTuple):
    """Keep durably which rows are common."""

    digest: str
    rows: int
    own: bytes
    """A bit for each of the coordinator's own rows, where it has the labels."""


class FinishRun(NamedTuple):
    """Keep durably that the training is over."""


class StopRun(NamedTuple):
    """The run cannot go on, and nothing will change that by itself."""

    text: str


RunCommand: TypeAlias = (
    TellParty | LoadTop | StepTop | KeepTop | KeepAlignment | FinishRun | StopRun
)


class KeptRun(NamedTuple):
    """What the coordinator has kept of the run."""

    alignment: str | None = None
    """SHA-256 of the common rows' hashes."""
    rows: int = 0
    """How many they are."""
    checkpoints: tuple[int, ...] = ()
    """After how many steps the top is kept. 0 is always there: the initial one."""
    finished: bool = False


@dataclass
class _Seat:
    """A party that is connected."""

    state: PartyState | None = None
    hashes: RowHashes | None = None
    arrays: list[NDArray[Any]] | None = None
    """Of the open step."""
    rows: str = ""
    """The digest of the rows that the arrays are of."""
    done: bool = False


@dataclass
class VerticalEngine:
    """One vertical run.

    terms: what all parties are told, in which ``part`` and ``targets`` are each party's own. cuts:
    those of the top, in their order. targets: the arrays of the labels. labels: the party that has
    them; None: the coordinator, whose rows have the hashes ``own``, rising.
    """

    terms: VerticalTerms
    cuts: Sequence[Cut]
    targets: tuple[Input, ...]
    labels: str | None
    kept: KeptRun
    own: RowHashes | None = None
    phase: Phase = "waiting"
    step: int = 0
    """Steps that are done."""
    attempt: int = 0
    why: str = ""
    """Why the run failed, or the last party stopped."""
    seats: dict[str, _Seat] = field(default_factory=dict)
    _asked: bool = False
    """The parties were told the terms, and their states are awaited or known."""

    def __post_init__(self) -> None:
        self.phase = "finished" if self.kept.finished else "waiting"
        self.step = max(self.kept.checkpoints, default=0)

    @property
    def parties(self) -> list[str]:
        return [cut.party for cut in self.cuts]

    @property
    def waits_for(self) -> Hashable:
        """A vertical run waits for a party however long it is gone."""
        return None

    def waited(self) -> list[RunCommand]:
        """Nothing is given up."""
        return []

    @property
    def missing(self) -> list[str]:
        """The parties that are not connected."""
        return [party for party in self.parties if party not in self.seats]

    def most_bytes(self, message: FromParty) -> int:
        """Return the most bytes that may follow a message."""
        match message:
            case PartyRows():
                return HASH_BYTES * MOST_ROWS
            case PartyActivations():
                find, rows = find_encoding(self.terms.encoding), self.terms.batch_size
                shapes = [prod(cut.activations.shape) for cut in self.cuts]
                labels = sum(8 * rows * prod(row.shape) for row in self.targets)
                return find.size(rows * max(shapes)) + labels
        return 0

    # Events

    def joined(self, party: str, message: PartyJoin) -> list[RunCommand]:
        """A party has connected, perhaps again, and said `join`."""
        cut = next((cut for cut in self.cuts if cut.party == party), None)
        misfit = misfit_of_join(message, party, None if cut is None else cut.bundle)
        if misfit:
            return _refused(party, misfit)
        if self.phase == "finished":
            return [TellParty(party, VerticalFinished())]
        if self.phase == "failed":
            return _refused(party, self.why)
        self.seats[party] = _Seat()
        return self._from_the_beginning()

    def left(self, party: str) -> list[RunCommand]:
        """A party's newest connection has ended."""
        if self.seats.pop(party, None) is None or self.phase in ("finished", "failed"):
            return []
        return self._from_the_beginning()

    def said(self, party: str, message: FromParty, content: bytes) -> list[RunCommand]:
        """A party has said something. Raises ProtocolError where it breaks the protocol."""
        seat = self.seats.get(party)
        if seat is None or self.phase in ("finished", "failed"):
            return []
        match message:
            case PartyState() if self._asked:
                seat.state = message
                return self._compare()
            case PartyRows() if self.phase == "aligning":
                return self._take_rows(seat, content)
            case PartyActivations():
                return self._take_activations(party, seat, message, content)
            case PartyDone(attempt) if attempt == self.attempt and self.phase == "training":
                return self._take_done(seat)
            case PartyStops(text):
                self.why = f"{party} stopped: {text}"
            case PartyJoin():
                raise ProtocolError(Code.BAD_MESSAGE, "join came twice")
        # What else comes belongs to an attempt that was given up.
        return []

    def top_done(
        self, step: int, gradients: Sequence[NDArray[Any]], loss: float
    ) -> list[RunCommand]:
        """The top's step is done. gradients: for each party, in the order of the cuts."""
        if self.phase != "training" or step != self.step:
            return []
        self.step += 1
        commands: list[RunCommand] = []
        if is_checkpoint(self.step, self.terms.checkpoint_every, self.terms.steps):
            self.kept = self.kept._replace(checkpoints=(*self.kept.checkpoints, self.step)[-2:])
            commands.append(KeepTop(self.step))
        for number, cut in enumerate(self.cuts, 1):
            arrays = [("gradient", gradients[number - 1])]
            seed = seed_of_step(step, self.terms.seed, 64 + number)
            parts, content = encode_arrays(arrays, self.terms.encoding, seed)
            message = PartyGradients(self.attempt, step, parts, loss)
            commands.append(TellParty(cut.party, message, content))
        return commands

    def top_lost(self, checkpoints: tuple[int, ...]) -> list[RunCommand]:
        """The top's process died: everybody goes back. checkpoints: those that are kept."""
        self.kept = self.kept._replace(checkpoints=checkpoints)
        return self._from_the_beginning()

    # Meeting: all parties say what they have, and agree where they go on

    def _from_the_beginning(self) -> list[RunCommand]:
        """Ask everybody what they have, or wait for who is missing."""
        self.phase, self._asked = "waiting", not self.missing
        for party in self.seats:
            self.seats[party] = _Seat()
        if self.missing:
            pause = VerticalPause(clip(f"for {', '.join(self.missing)}"))
            return [TellParty(party, pause) for party in self.seats]
        return [TellParty(party, self._terms_of(party)) for party in self.parties]

    def _terms_of(self, party: str) -> VerticalTerms:
        return VerticalTerms(
            self.terms.run,
            self.parties.index(party) + 1,
            self.targets if party == self.labels else (),
            self.terms.seed,
            self.terms.batch_size,
            self.terms.steps,
            self.terms.checkpoint_every,
            self.terms.hyper,
            self.terms.encoding,
        )

    def _compare(self) -> list[RunCommand]:
        states = [seat.state for seat in self.seats.values()]
        known = [state for state in states if state is not None]
        if len(known) < len(self.cuts):
            return []
        alignment = self.kept.alignment
        if alignment is not None and all(state.alignment == alignment for state in known):
            return self._begin(known)
        self.phase, self._asked = "aligning", False
        return [TellParty(party, RowsWanted()) for party in self.parties]

    def _begin(self, states: Sequence[PartyState]) -> list[RunCommand]:
        """Everybody goes on from the newest checkpoint that all have."""
        common = {0, *self.kept.checkpoints}
        for state in states:
            common &= {0, *state.checkpoints}
        self.attempt += 1
        self.phase, self._asked, self.step = "training", False, max(common)
        # Later ones are of steps that are done again.
        before = tuple(step for step in self.kept.checkpoints if step <= self.step)
        self.kept = self.kept._replace(checkpoints=before)
        begin = VerticalBegin(self.attempt, self.step)
        return [LoadTop(self.step), *(TellParty(party, begin) for party in self.parties)]

    def _take_rows(self, seat: _Seat, content: bytes) -> list[RunCommand]:
        hashes = read_hashes(content)
        check_sorted(hashes)
        if seat.state is None or len(hashes) != seat.state.rows:
            raise ProtocolError(Code.WRONG_LENGTH, f"{len(hashes)} hashes of rows were sent")
        seat.hashes = hashes
        of_parties = [self.seats[party].hashes for party in self.parties]
        there = [hashes for hashes in of_parties if hashes is not None]
        if len(there) < len(self.cuts):
            return []
        return self._align(there)

    def _align(self, of_parties: list[RowHashes]) -> list[RunCommand]:
        sets = of_parties if self.own is None else [*of_parties, self.own]
        common = common_hashes(sets)
        sizes = [f"{party} {len(rows)}" for party, rows in zip(self.parties, sets, strict=False)]
        if self.own is not None:
            sizes.append(f"the coordinator's labels {len(self.own)}")
        if not len(common):
            return self._fail(
                f"no row is common to all ({', '.join(sizes)} rows): do all parties have the same "
                "key, and the same kind of ids?"
            )
        digest = digest_of(common)
        if self.kept.checkpoints and digest != self.kept.alignment:
            return self._fail(
                f"the common rows are others than those that were trained on ({len(common)} now, "
                f"{self.kept.rows} before): a party's data have changed. Begin a run of its own "
                "for them, with another data_dir"
            )
        self.kept = self.kept._replace(alignment=digest, rows=len(common))
        bits_of_own = b"" if self.own is None else membership(self.own, common)
        commands: list[RunCommand] = [KeepAlignment(digest, len(common), bits_of_own)]
        for party, hashes in zip(self.parties, of_parties, strict=True):
            bits = membership(hashes, common)
            message = CommonRows(len(common), digest, len(bits), checksum(bits))
            commands.append(TellParty(party, message, bits))
            self.seats[party] = _Seat()
        self.phase, self._asked = "waiting", True
        return commands

    # Training

    def _take_activations(
        self, party: str, seat: _Seat, message: PartyActivations, content: bytes
    ) -> list[RunCommand]:
        if message.attempt != self.attempt or self.phase != "training":
            return []
        if message.step != self.step or seat.arrays is not None:
            raise ProtocolError(
                Code.BAD_MESSAGE, f"activations of step {message.step} came at step {self.step}"
            )
        if message.rows is None:
            raise ProtocolError(Code.BAD_MESSAGE, f"{party} does not say which rows it means")
        terms, number = self.terms, self.parties.index(party)
        rows = rows_of_step(self.step, self.kept.rows, terms.batch_size, terms.seed)
        expected = [self.cuts[number].activations]
        expected += self.targets if party == self.labels else ()
        seat.arrays = decode_arrays(message.arrays, content, expected, len(rows), terms.encoding)
        seat.rows = message.rows
        seats: Mapping[str, _Seat] = self.seats
        if any(seats[each].arrays is None for each in self.parties):
            return []
        digests = {each: seats[each].rows for each in self.parties}
        if len({*digests.values()}) > 1:
            return self._fail(
                f"in step {self.step} the parties do not mean the same rows: "
                f"{', '.join(f'{each} {digest[:12]}' for each, digest in digests.items())}. "
                "Nothing was trained on them"
            )
        arrays: list[NDArray[Any]] = []
        labels: list[NDArray[Any]] = []
        for each in self.parties:
            first, *more = seats[each].arrays or []
            arrays.append(first)
            labels += more
            seats[each].arrays = None
        seed = seed_of_step(self.step, terms.seed, 0)
        return [StepTop(self.step, seed, rows, (*arrays, *labels))]

    def _take_done(self, seat: _Seat) -> list[RunCommand]:
        if self.step != self.terms.steps:
            raise ProtocolError(Code.BAD_MESSAGE, f"done came at step {self.step}")
        seat.done = True
        if not all(self.seats[party].done for party in self.parties):
            return []
        self.phase = "finished"
        told = [TellParty(party, VerticalFinished()) for party in self.parties]
        return [FinishRun(), *told]

    def _fail(self, text: str) -> list[RunCommand]:
        self.phase, self.why = "failed", text
        told = [TellParty(party, VerticalRefusal(clip(text))) for party in self.seats]
        return [*told, StopRun(text)]


def _refused(party: str, text: str) -> list[RunCommand]:
    return [TellParty(party, VerticalRefusal(clip(text)))]
