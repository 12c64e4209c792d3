"""Rounds of masked updates, with a helper, in which anything may die at any moment: devices, the
coordinator and the helper, and messages are lost or come twice.

Real are the round and its modular sum (``OpenRound``), the device's words, masks, seals and
signatures, and the helper with its file. Of the coordinator and the devices the rest is here: what
each has on its disk survives its death, what it has in memory does not. What must hold is checked
while it goes on: ``BrokenPromiseError`` says what did not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint, modular_sum
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.updates import MaskedArray
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import HelperBounds, OnRecord
from fleetlearn_coordinator.secure.helper_store import HelperStore
from fleetlearn_device.training.masking import (
    counted_words,
    counted_words_with_noise,
    mask_words,
    share_of,
)
from fleetlearn_protocol.encodings import masked_encoding
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.secure.about import MaskedUpdate, MaskTerms, about_update
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.helper_messages import (
    WITHOUT_THEM,
    MaskSumAnswer,
    MaskSumRefusal,
    MaskSumRequest,
    SealedReport,
    write_message,
)
from fleetlearn_protocol.secure.masks import add_mask
from helper_fleet import SecureDevice, model, request_of, terms_of
from helper_machine import DEVICES, private_key, template
from round_reports import masked_rules_of, reports_of_rows, state_of

SIZE = 5
"""Elements of the model; a masked update has one word more."""
MOST_WEIGHT = 50
MEMORY = Path("/dev/shm")
"""Where a file's bytes are safe at once, if there is such a place: no power fails here."""
CALM_STEPS = 400
"""Within so many steps without disturbances all rounds must have ended."""
CHANCES = {
    "device dies": 0.05,
    "device is gone": 0.03,
    "coordinator dies": 0.08,
    "helper dies": 0.15,
    "helper is started again": 0.02,
    "report is lost": 0.15,
    "report comes twice": 0.2,
    "request is lost": 0.2,
    "answer is lost": 0.4,
    "device is revoked": 0.05,
    "device forges": 0.03,
    "deadline": 0.04,
    "curious": 0.1,
}
"""Disturbance -> how probable it is, each time that it could happen. In a run each is left out
with probability 0.4, so that the others are seen by themselves."""
MISTAKES = {
    "seeds are forgotten after a restart of the helper",
    "the helper answers before it has written",
    "the set is asked for again with one device less",
    "a late update joins the set that was asked for",
    "an update that comes twice is added twice",
    "a restart adds updates that are in the sum",
    "a refused device stays in the sum",
    "the mask is added twice",
    "the mask is subtracted",
    "the weight is not masked",
    "an update is rounded again under the same mask",
    "the helper does not look for used seeds",
    "a word of an update is changed by one",
}
"""Planted one at a time: each must be found."""


class BrokenPromiseError(Exception):
    """Something that must hold did not."""


class DiedError(Exception):
    """A process is dead: what it had in memory is lost."""


class Disturbances:
    """What goes wrong, and how often it did."""

    def __init__(self, seed: int, chances: dict[str, float]) -> None:
        self.random, self.counts = Random(seed), Counter[str]()
        self._chances = {
            name: 0.0 if self.random.random() < 0.4 else chance for name, chance in chances.items()
        }

    def calm(self) -> None:
        """From now on nothing goes wrong."""
        self._chances = {}

    def happens(self, name: str) -> bool:
        found = self.random.random() < self._chances.get(name, 0.0)
        self.counts[name] += found
        return found

    def may_die(self, who: str) -> None:
        """A moment at which a process may die."""
        if self.happens(f"{who} dies"):
            raise DiedError(who)


class GivenTask(NamedTuple):
    """What a device was told of its task."""

    task: str
    round: int
    examples: int
    factor: float
    """What staleness leaves of the update."""


class Sent(NamedTuple):
    """What a device has in its outbox."""

    report: SealedReport
    content: Words
    """Masked, (SIZE + 1,)."""
    plain: Words
    """The same without its mask: nobody but the check knows it."""


class MaskingDevice:
    """A device: its disk is ``outbox``."""

    def __init__(self, name: str, rehearsal: Rehearsal) -> None:
        self.name, self.rehearsal = name, rehearsal
        self.task: GivenTask | None = None
        self.outbox: dict[str, Sent] = {}
        self.is_gone = self.forges = False

    def send(self) -> Sent | None:
        """Train, mask and store the update of the task, if there is none yet. Returns what is
        sent."""
        told, run = self.task, self.rehearsal
        if told is None or self.is_gone:
            return None
        if "an update is rounded again under the same mask" in run.mistakes:
            return self._masked(told)
        if told.task not in self.outbox:
            made = self._masked(told)
            run.disturbances.may_die("device")
            self.outbox[told.task] = made
            run.disturbances.may_die("device")
        return self.outbox[told.task]

    def _masked(self, told: GivenTask) -> Sent:
        run, numbers = self.rehearsal, self.rehearsal.numbers
        draw = run.disturbances.random.randbytes
        update = np.frombuffer(draw(8 * SIZE), np.int64) / 2.0**63
        update *= numbers.bound / max(1e-9, float(np.linalg.norm(update)))
        share = share_of(told.examples, None if numbers.equal else MOST_WEIGHT)
        exact = 0.999 * update.astype(np.float32)
        counted = exact, share, told.factor, numbers.bound, numbers.bits
        if numbers.noise:
            words = counted_words_with_noise(*counted, numbers.noise, draw)
        else:
            words = counted_words(*counted, draw)
        run.disturbances.may_die("device")
        plain = words.copy()
        named = MaskedUpdate(self.name, told.task, told.round, model(told.round))
        about = about_update(run.terms, named)
        signer = SecureDevice("somebody else" if self.forges else self.name)
        key = signer.private.private_bytes_raw()
        if "an update is rounded again under the same mask" in run.mistakes:
            draw = Random(told.task).randbytes
        seeds: list[bytes] = []

        def noted(size: int) -> bytes:
            seeds.append(draw(size))
            return seeds[-1]

        made = mask_words(words, about, run.terms.helper, key, numbers.bits, noted)
        width = masked_encoding(numbers.bits).block_bytes
        words = words_from_bytes(made.content, width).copy()
        if "the mask is added twice" in run.mistakes:
            add_mask(words, seeds[0])
        if "the mask is subtracted" in run.mistakes:
            add_mask(words, seeds[0], -1)
            add_mask(words, seeds[0], -1)
        if "the weight is not masked" in run.mistakes:
            words[-1] = plain[-1]
        report = SealedReport(*named, bytes.fromhex(made.sealed), bytes.fromhex(made.signature))
        run.seeds[told.task] = seeds[0]
        return Sent(report, words, plain)


@dataclass
class RoundRow:
    """A round as it is on the coordinator's disk."""

    number: int
    status: str = "open"
    """``open``, ``closed``, ``committed`` or ``abandoned``."""
    why: str = ""
    """Of an abandoned round."""
    accepted: dict[str, Sent] = field(default_factory=dict)
    """Task -> its row and its spool file, in order."""
    asked: tuple[str, ...] | None = None
    """The tasks of the set that the helper is asked for."""
    refused: set[str] = field(default_factory=set)
    """Tasks that the helper did not add up."""
    saved: dict[str, np.ndarray] | None = None
    """The round's sums, when they were saved last."""
    in_saved: tuple[str, ...] = ()
    """Tasks whose updates are in them."""


class MaskingCoordinator:
    """The coordinator: its disk is ``rows``, its memory ``round``."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.rows: list[RoundRow] = []
        self.round: OpenRound
        self.open_next()

    @property
    def row(self) -> RoundRow:
        return self.rows[-1]

    def open_next(self) -> None:
        self.rows.append(RoundRow(len(self.rows) + 1))
        self.round = self._begun()

    def _begun(self) -> OpenRound:
        rules = self.rehearsal.rules
        return OpenRound(rules, state_of(rules, [0.0] * SIZE))

    def restart(self) -> None:
        """Begin again from the disk."""
        row = self.row
        self.round = self._begun()
        counted = [task for task in row.accepted if task not in row.refused]
        done: set[str] = set()
        if row.saved is not None and set(row.in_saved) <= set(counted):
            self.round.sums.load_tensors(row.saved)
            done = set(row.in_saved)
        if "a restart adds updates that are in the sum" in self.rehearsal.mistakes:
            done = set()
        for task in counted:
            columns = columns_of(row.accepted[task].content)
            self.round.accept(columns)
            if task not in done:
                self.round.add(columns)

    def receive(self, sent: Sent) -> bool:
        """A report came. Returns whether the device is told that it is done: the report counts, or
        cannot count any more."""
        run, row, task = self.rehearsal, self.row, sent.report.task
        run.see(sent)
        if any(task in other.accepted for other in self.rows):
            if "an update that comes twice is added twice" in run.mistakes and row.status == "open":
                self.round.add(columns_of(sent.content))
            return True
        late_joins = "a late update joins the set that was asked for" in run.mistakes
        if row.status != "open" and not (late_joins and row.asked is not None):
            return row.status == "closed" and not run.buffered
        if not run.buffered and sent.report.round != row.number:
            return True
        if any(sent.report.device == other.report.device for other in row.accepted.values()):
            return False  # a device counts once in a round
        columns = columns_of(sent.content)
        received = self.round.receive(columns)
        if received.refusal is not None:
            raise BrokenPromiseError(f"a masked update was refused: {received.refusal.error.text}")
        run.disturbances.may_die("coordinator")
        row.accepted[task] = sent
        run.disturbances.may_die("coordinator")
        if "a word of an update is changed by one" in run.mistakes:
            columns = columns_of(sent.content + np.uint32(1))
        self.round.accept(columns)
        self.round.add(columns)
        if row.asked is not None:
            row.asked = (*row.asked, task)
        if run.disturbances.random.random() < 0.3:
            self.round.sums.add_waiting()
            tensors = self.round.sums.to_tensors()
            row.saved = {name: tensor.copy() for name, tensor in tensors.items()}
            row.in_saved = tuple(row.accepted)
        return True

    def tick(self) -> None:
        """Do what is to be done next."""
        run, row = self.rehearsal, self.row
        if row.status == "open":
            if len(row.accepted) >= run.goal or run.is_over():
                self._close()
        elif row.status == "closed":
            self._ask()

    def _close(self) -> None:
        run, row = self.rehearsal, self.row
        if len(row.accepted) < run.minimum:
            row.status, row.why = "abandoned", f"{len(row.accepted)} reports came"
            return
        row.status = "closed"
        run.disturbances.may_die("coordinator")

    def _ask(self) -> None:
        run, row = self.rehearsal, self.row
        if row.asked is None:
            row.asked = tuple(task for task in row.accepted if task not in row.refused)
            run.disturbances.may_die("coordinator")
        elif (
            "the set is asked for again with one device less" in run.mistakes
            and len(row.asked) > run.minimum
        ):
            row.asked = row.asked[1:]
        answer = run.helper.ask(self.request(row.asked))
        run.disturbances.may_die("coordinator")
        if isinstance(answer, MaskSumRefusal):
            self._refused(answer)
        elif answer is not None:
            self._commit(answer)

    def request(self, tasks: Iterable[str], row: RoundRow | None = None) -> MaskSumRequest:
        """Return what the helper is asked of these tasks of a round: by default the newest."""
        found = ((row or self.row).accepted[task].report for task in tasks)
        return request_of(self.rehearsal.terms, found)

    def _refused(self, refusal: MaskSumRefusal) -> None:
        run, row = self.rehearsal, self.row
        if refusal.name not in WITHOUT_THEM or not refusal.devices:
            row.status, row.why = "abandoned", f"the helper refused: {refusal.name.value}"
            return
        assert row.asked is not None
        without = {
            task for task in row.asked if row.accepted[task].report.device in refusal.devices
        }
        row.refused |= without
        rest = tuple(task for task in row.asked if task not in row.refused)
        if len(rest) < run.minimum:
            row.status, row.why = "abandoned", f"{len(rest)} updates are left: {refusal.name.value}"
            return
        row.asked = rest
        run.disturbances.may_die("coordinator")
        if "a refused device stays in the sum" in run.mistakes:
            return
        kept = [columns_of(row.accepted[task].content) for task in rest]
        self.round = self.round.without(kept)
        for task in without:
            self.round.subtract(columns_of(row.accepted[task].content))
        run.disturbances.may_die("coordinator")

    def _commit(self, answer: MaskSumAnswer) -> None:
        run, row = self.rehearsal, self.row
        assert row.asked is not None
        if answer.digest != self.request(row.asked).digest():
            raise BrokenPromiseError("the answer is of another set")
        masks = np.frombuffer(answer.words, np.uint32)
        try:
            made = self.round.commit(row.number, self.round.summary({}), masks=masks)
        except ValueError as error:
            raise BrokenPromiseError(f"round {row.number} has no sum: {error}") from None
        run.disturbances.may_die("coordinator")
        run.check_sum(row, made.state.model.tobytes())
        row.status = "committed"


class HelperProcess:
    """The helper: a real one, whose file survives its death."""

    def __init__(self, rehearsal: Rehearsal, folder: Path) -> None:
        self.rehearsal, self.file = rehearsal, folder / "helper.sqlite"
        shutil.copy(template(), self.file)
        self.bounds = HelperBounds(rehearsal.minimum, 100, 100)
        self.restart()

    def restart(self) -> None:
        """Begin again from the file."""
        if "the helper does not look for used seeds" in self.rehearsal.mistakes:
            self.helper: Helper = ForgetfulHelper(self.file, self.bounds)
            return
        if "seeds are forgotten after a restart of the helper" in self.rehearsal.mistakes:
            shutil.copy(template(), self.file)
        self.helper = Helper(self.file, self.bounds)

    def ask(self, request: MaskSumRequest) -> MaskSumAnswer | MaskSumRefusal | None:
        """Ask for a sum. None: no answer came."""
        run = self.rehearsal
        if run.disturbances.happens("request is lost"):
            return None
        if run.disturbances.happens("helper dies"):
            self.restart()
            return None
        late = "the helper answers before it has written" in run.mistakes
        before = self.file.read_bytes() if late else b""
        answer = self.helper.answer(write_message(request))
        if isinstance(answer, MaskSumAnswer):
            run.answered(request, answer)
        if run.disturbances.happens("helper dies"):
            if late:
                self.file.write_bytes(before)
            self.restart()
            return answer if late else None
        return None if run.disturbances.happens("answer is lost") else answer

    def revoke(self, name: str) -> None:
        with closing(HelperStore(self.file)) as store:
            store.revoke(name, 2.0)


class ForgetfulHelper(Helper):
    """A planted mistake: it writes down which seeds it used, and does not look them up."""

    def answer(self, body: bytes) -> MaskSumAnswer | MaskSumRefusal:
        nothing = OnRecord(None, False, (), ())
        with (
            patch.object(HelperStore, "on_record", lambda *about: nothing),
            patch.object(HelperStore, "record", lambda *about: None),
        ):
            return super().answer(body)


class Rehearsal:
    """One run of some rounds. ``go`` raises BrokenPromiseError where something did not hold."""

    def __init__(self, seed: int, mistakes: Iterable[str] = ()) -> None:
        self.mistakes = frozenset(mistakes)
        assert self.mistakes <= MISTAKES, self.mistakes - MISTAKES
        self.disturbances = Disturbances(seed, CHANCES)
        random = self.disturbances.random
        self.minimum = random.randint(2, 4)
        self.goal = random.randint(self.minimum, len(DEVICES))
        self.last = random.randint(1, 3)
        """Rounds."""
        self.buffered = random.random() < 0.4
        """Whether a late update counts in a later round."""
        bits, equal = random.choice([16, 18, 20]), random.random() < 0.5
        # With privacy.mechanism = "distributed" devices add noise, and all weigh the same.
        noise = 300.0 if equal and random.random() < 0.5 else 0.0
        if bits == 16 and not noise:
            bits = 12  # added modulo 2^24, where there is no room for noise
        self.numbers = FixedPoint(1.0, bits, equal, noise)
        numbers = self.numbers
        self.rules = masked_rules_of(aggregators={UPDATE: modular_sum(numbers)}, secure=numbers)
        key = private_key().public_key().public_bytes_raw()
        self.terms: MaskTerms = terms_of(
            key, size=SIZE + 1, minimum=self.minimum, one_model=not self.buffered
        )
        self.seeds: dict[str, bytes] = {}
        """Task -> the seed of its mask."""
        self.revoked: set[str] = set()
        self._sets: dict[frozenset[bytes], bytes] = {}
        """Seeds of an answered set -> the words of the answer."""
        self._seen: dict[str, bytes] = {}
        """Task -> its masked words, as the coordinator got them."""
        self.devices = {name: MaskingDevice(name, self) for name in DEVICES}

    def go(self) -> list[RoundRow]:
        """Let all rounds end. Returns them."""
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            self.helper = HelperProcess(self, Path(folder))
            self.coordinator = MaskingCoordinator(self)
            for _ in range(self.disturbances.random.randint(5, 120)):
                if self._is_finished():
                    break
                self._step()
            self.disturbances.calm()
            for _ in range(CALM_STEPS):
                if self._is_finished():
                    return self.coordinator.rows
                self._step()
        row = self.coordinator.row
        raise BrokenPromiseError(f"round {row.number} did not end: it is {row.status}")

    def _is_finished(self) -> bool:
        row = self.coordinator.row
        return len(self.coordinator.rows) == self.last and row.status in ("committed", "abandoned")

    def _step(self) -> None:
        random, row = self.disturbances.random, self.coordinator.row
        if self.disturbances.happens("curious"):
            self._be_curious()
        if self.disturbances.happens("helper is started again"):
            self.helper.restart()
        if row.status in ("committed", "abandoned"):
            self.coordinator.open_next()
            return
        try:
            if random.random() < 0.3:
                self.coordinator.tick()
            else:
                self._device_step(self.devices[random.choice(DEVICES)])
        except DiedError as died:
            if str(died) == "coordinator":
                self.coordinator.restart()
        if row.status == "abandoned":
            self._check_why(row)

    def _device_step(self, device: MaskingDevice) -> None:
        disturbances, row = self.disturbances, self.coordinator.row
        if disturbances.happens("device is gone"):
            device.is_gone = True
        if device.name not in self.revoked and disturbances.happens("device is revoked"):
            self.revoked.add(device.name)
            self.helper.revoke(device.name)
        if device.task is None:
            if row.status == "open":
                self._give(device)
            return
        if disturbances.happens("device forges") and not device.outbox:
            device.forges = True
        sent = device.send()
        if sent is None or disturbances.happens("report is lost"):
            return
        done = self.coordinator.receive(sent)
        if disturbances.happens("report comes twice"):
            done = self.coordinator.receive(sent)
        if done:
            device.task = None
            device.outbox.clear()

    def _give(self, device: MaskingDevice) -> None:
        """A device has one task of a round: two updates of one model are much the same."""
        random, row = self.disturbances.random, self.coordinator.row
        task = f"run_1-{row.number}-{device.name}"
        counted = (sent.report.device for sent in row.accepted.values())
        if device.is_gone or device.name in counted:
            return
        factor = random.choice([1.0, 0.5**0.5, 0.5]) if self.buffered else 1.0
        device.task = GivenTask(task, row.number, random.randint(1, 60), factor)

    def is_over(self) -> bool:
        """Return whether the round's time is over."""
        if self.disturbances.happens("deadline"):
            return True
        there = [device for device in self.devices.values() if not device.is_gone]
        accepted = self.coordinator.row.accepted
        done = {sent.report.device for sent in accepted.values()}
        return all(device.task is None and device.name in done for device in there)

    # What must hold

    def see(self, sent: Sent) -> None:
        """The coordinator has this update. It must know nothing of its words."""
        content = self._seen.setdefault(sent.report.task, sent.content.tobytes())
        if content != sent.content.tobytes():
            raise BrokenPromiseError(
                f"{sent.report.task} came as two updates under one seed: their difference is known"
            )
        if (sent.content == sent.plain).any():
            raise BrokenPromiseError(f"{sent.report.task} has an element without a mask")

    def answered(self, request: MaskSumRequest, answer: MaskSumAnswer) -> None:
        """The helper answered a set: whoever has it and an earlier one must not learn of fewer
        devices than the minimum."""
        members = self._seeds_of(report.task for report in request.reports)
        if len({report.device for report in request.reports}) < self.minimum:
            raise BrokenPromiseError(f"the helper added {len(members)} masks up")
        for other, words in self._sets.items():
            if other == members:
                if words != answer.words:
                    raise BrokenPromiseError("the helper answered one set with two sums")
            elif len(other ^ members) < self.minimum or other & members:
                raise BrokenPromiseError(
                    f"the helper answered two sets that differ by {len(other ^ members)} devices"
                )
        self._sets[members] = answer.words

    def check_sum(self, row: RoundRow, found: bytes) -> None:
        """The model is made of exactly these updates in fixed point."""
        assert row.asked is not None
        plain = OpenRound(self.rules, state_of(self.rules, [0.0] * SIZE))
        for task in row.asked:
            columns = columns_of(row.accepted[task].plain)
            plain.accept(columns)
            plain.add(columns)
        nothing = np.zeros(SIZE + 1, np.uint32)
        exact = plain.commit(row.number, plain.summary({}), masks=nothing).state.model
        if exact.tobytes() != found:
            raise BrokenPromiseError(f"the sum of round {row.number} is not the updates' sum")

    def _check_why(self, row: RoundRow) -> None:
        """A round is abandoned because too few updates could be added up, and for nothing else."""
        bad = self.revoked | self._forgers()
        tasks = {task: sent.report.device for task, sent in row.accepted.items()}
        good = [task for task, device in tasks.items() if device not in bad]
        if len(good) >= self.minimum:
            raise BrokenPromiseError(
                f"round {row.number} was abandoned with {len(good)} good updates: {row.why}"
            )

    def _forgers(self) -> set[str]:
        return {device.name for device in self.devices.values() if device.forges}

    def _be_curious(self) -> None:
        """The coordinator asks for sets from which it would learn more than a sum that it has. (It
        could use up seeds before that, and harm itself alone.)"""
        random = self.disturbances.random
        rows = [row for row in self.coordinator.rows if self._is_answered(row)]
        if not rows:
            return
        row = random.choice(rows)
        assert row.asked is not None
        asked = [*row.asked]
        left_out = random.choice(asked)
        one_less = [task for task in asked if task != left_out]
        few = random.sample(asked, min(len(asked), max(1, self.minimum - 1)))
        chosen = random.choice([one_less, few, asked, [*asked, asked[0]]])
        self.helper.ask(self.coordinator.request(chosen, row))

    def _is_answered(self, row: RoundRow) -> bool:
        return row.asked is not None and self._seeds_of(row.asked) in self._sets

    def _seeds_of(self, tasks: Iterable[str]) -> frozenset[bytes]:
        return frozenset(self.seeds[task] for task in tasks)


def columns_of(words: Words) -> ReportColumns:
    """One report with a masked update."""
    columns = reports_of_rows([[0.0] * SIZE], [1])
    columns.largest = {UPDATE: np.zeros(1)}
    columns.parts = {UPDATE: [MaskedArray(words)]}
    return columns


def first_found(mistake: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return how many seeds it took until a mistake was found, and what was said."""
    for count, seed in enumerate(seeds, 1):
        try:
            Rehearsal(seed, [mistake]).go()
        except BrokenPromiseError as error:
            return count, str(error)
    return None
