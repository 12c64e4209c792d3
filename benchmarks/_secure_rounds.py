"""A round of secure.py in this process: devices, helper and coordinator are their real, pure parts.

An upload goes through one spool file, as on a server: what is timed there is the check of its
bytes, and all that the round does with it. Nothing travels. Each sum is compared with the sum of
the words without masks, bit by bit.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.model_state import make_state
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint, modular_sum
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import columns_of
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.weighing.weighing import PLAIN
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import HelperBounds
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.spooled_update import SpooledUpdate
from fleetlearn_device.driver.signatures import public_key_of
from fleetlearn_device.training.masking import counted_words, mask_words
from fleetlearn_protocol.encodings import FLOAT32, masked_encoding
from fleetlearn_protocol.formats.masked import words_to_bytes
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import UPDATE, Part, Report
from fleetlearn_protocol.secure import pairwise
from fleetlearn_protocol.secure.about import MaskedUpdate, MaskTerms, about_update
from fleetlearn_protocol.secure.fixed_point import Words, bits_for, modulus_bits
from fleetlearn_protocol.secure.graph import graph_of, neighbours_of
from fleetlearn_protocol.secure.helper_messages import (
    MaskSumAnswer,
    MaskSumRequest,
    SealedReport,
    write_message,
)
from fleetlearn_protocol.vector import Vector, checksum

HOSTILE, LOST = 0.05, 0.1
"""Shares of the devices that a pairwise round bears, and of those that it loses here."""
CLIP = 1.0
MODEL, BUNDLE = "a" * 64, "b" * 64


class Stopwatch:
    """The CPU of this process, by whose work it was."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, whose: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds.setdefault(whose, []).append(time.process_time() - began)

    def total(self, whose: str) -> float:
        return sum(self.seconds.get(whose, ()))

    def middle_ms(self, whose: str) -> float:
        return 1e3 * median(self.seconds[whose])


class Coordinator:
    """A round at the coordinator. Plain updates without ``numbers``."""

    def __init__(self, folder: Path, elements: int, numbers: FixedPoint | None = None) -> None:
        folder.mkdir()
        self._blobs = FileBlobs(folder, spool_files=1)
        self._file = self._blobs.take_spool_file()
        self._encoding = FLOAT32 if numbers is None else masked_encoding(numbers.bits)
        self.bits = 0 if numbers is None else numbers.bits
        self._elements, self._given = elements, 0
        adder = aggregators.make("mean") if numbers is None else modular_sum(numbers)
        rules = RoundRules(
            aggregators={UPDATE: adder},
            weighing=PLAIN,
            optimizer=optimizers.make("sgd"),
            staleness_factor=lambda staleness: 1.0,
            outlive=False,
            mixing_rate=None,
            devices=None,
            metrics=("loss",),
            bounds={},
            max_weight=1000,
            first_mu=0.0,
            adaptive_mu=False,
            most_mu=1.0,
            secure=numbers,
        )
        model = np.zeros(elements, np.float32)
        optimizer_state = rules.optimizer.init(model)
        state = make_state(
            rules, None, version=0, model=model, optimizer_state=optimizer_state, vectors={}
        )
        self.round = OpenRound(rules, state)

    def take(self, content: Buffer) -> None:
        """Check the bytes of an update, and add them up."""
        largest = self._encoding.check(content, self._encoding.elements(self._elements))
        crc32 = checksum(content, 0)
        self._blobs.write_spool_file(self._file, 0, content)
        size = memoryview(content).nbytes
        part = Part(UPDATE, self._encoding.name, size, crc32)
        self._given += 1
        report = Report(f"t-{self._given}", 1, (part,), 1, 1, 1.0, complete=True, loss=0.0)
        update = SpooledUpdate(self._blobs, self._file, part, 0, self._elements)
        columns = columns_of(report, (), 1, {UPDATE: largest}, {UPDATE: update})
        received = self.round.receive(columns)
        if received.refusal is not None:
            raise received.refusal.error
        self.round.accept(received.accepted)
        self.round.add(received.accepted)

    def commit(self, masks: Words | None = None) -> Vector:
        """Return the next model."""
        return self.round.commit(1, self.round.summary({}), masks=masks).state.model

    def close(self) -> None:
        self._blobs.close()


class Sizes(NamedTuple):
    """Of one round."""

    devices: int
    elements: int
    short: bool = False
    """Whether elements have 12 bits, and travel in 3 bytes."""

    @property
    def bits(self) -> int:
        return 12 if self.short else bits_for(self.devices)

    @property
    def update_bytes(self) -> float:
        """Bytes of a masked update."""
        encoding = masked_encoding(self.bits)
        return float(encoding.size(encoding.elements(self.elements)))

    @property
    def numbers(self) -> FixedPoint:
        return FixedPoint(CLIP, self.bits, equal=True)


def updates_of(sizes: Sizes) -> Iterator[Vector]:
    """Yield an update for each device. They share memory: small models have many of them."""
    random = np.random.default_rng(1)
    update = random.standard_normal(sizes.elements + 97, np.float32)
    update *= np.float32(0.9 * CLIP / np.linalg.norm(update))
    for device in range(sizes.devices):
        yield update[device % 97 : device % 97 + sizes.elements]


def plain(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Return the figures of a round without secure aggregation."""
    watch, encoding = Stopwatch(), FLOAT32
    with closing(Coordinator(folder, sizes.elements)) as coordinator:
        for update in updates_of(sizes):
            with watch("device"):
                content = encoding.encode(update)
            with watch("coordinator"):
                coordinator.take(content)
        with watch("coordinator"):
            coordinator.commit()
    return {
        "bytes_up": 4.0 * sizes.elements,
        "device_ms": watch.middle_ms("device"),
        "coordinator_s": watch.total("coordinator"),
    }


def helped(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Return the figures of a round with a helper."""
    watch = Stopwatch()
    folder.mkdir()
    make_helper_store(folder / "helper.sqlite", 0.0)
    names = [f"d{number}" for number in range(sizes.devices)]
    keys = {name: secrets.token_bytes(32) for name in names}
    """Device -> its private key."""
    roster = [(name, public_key_of(key)) for name, key in keys.items()]
    with closing(HelperStore(folder / "helper.sqlite")) as store:
        store.enrol(roster, 0)
    bounds = HelperBounds(2, sizes.devices, sizes.elements + 1)
    helper = Helper(folder / "helper.sqlite", bounds, lambda: 0.0)
    terms = MaskTerms(helper.card.key, "run", BUNDLE, sizes.elements + 1, 2, "0" * 64, True)
    reports, exact = [], np.zeros(sizes.elements + 1, np.uint32)
    with closing(Coordinator(folder / "data", sizes.elements, sizes.numbers)) as coordinator:
        for name, update in zip(names, updates_of(sizes), strict=True):
            with watch("device: fixed point"):
                words = counted_words(update, 1.0, 1.0, CLIP, sizes.bits)
            exact += words
            with watch("device"):
                own = MaskedUpdate(name, f"{name}-1", 1, MODEL)
                about = about_update(terms, own)
                upload = mask_words(words, about, terms.helper, keys[name], sizes.bits)
            with watch("coordinator"):
                coordinator.take(upload.content)
            sealed, signature = bytes.fromhex(upload.sealed), bytes.fromhex(upload.signature)
            reports.append(SealedReport(*own, sealed, signature))
        with watch("coordinator"):
            asked = MaskSumRequest(*terms, reports=tuple(reports))
            body = write_message(asked)
        with watch("helper"):
            answer = helper.answer(body)
        if not isinstance(answer, MaskSumAnswer):
            raise RuntimeError(f"the helper refused: {answer.text}")
        with watch("coordinator"):
            if answer.digest != asked.digest():
                raise RuntimeError("the helper answered for another set")
            masks = np.frombuffer(answer.words, "<u4").astype(np.uint32)
            coordinator.commit(masks)
        check_sum(coordinator, masks, exact)
    sealed_bytes = len(f',"sealed":"{upload.sealed}","signature":"{upload.signature}"')
    return {
        "bytes_up": sizes.update_bytes + sealed_bytes,
        "device_ms": watch.middle_ms("device"),
        "device_fixed_point_ms": watch.middle_ms("device: fixed point"),
        "coordinator_s": watch.total("coordinator"),
        "helper_s": watch.total("helper"),
        "helper_asked_bytes": float(len(body)),
        "helper_answer_bytes": float(len(write_message(answer))),
    }


def paired(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Return the figures of a round without a helper: SecAgg+, in which a tenth of the devices
    vanish after they have shared their secrets."""
    watch, random = Stopwatch(), np.random.default_rng(3)
    degree, threshold = graph_of(sizes.devices, HOSTILE, LOST)
    names = [f"d{number}" for number in range(sizes.devices)]
    near = {name: neighbours_of(place, names, degree) for place, name in enumerate(names)}
    devices: dict[str, pairwise.PairwiseDevice] = {}
    keys: dict[str, pairwise.Keys] = {}
    sent = dict.fromkeys(names, 0.0)
    """Device -> bytes that it sends beside its update."""
    work = dict.fromkeys(names, 0.0)

    def step(name: str, do: Callable[..., Any], *given: Any) -> Any:
        began = time.process_time()
        found = do(*given)
        work[name] += time.process_time() - began
        return found

    for name in names:
        devices[name] = step(name, pairwise.PairwiseDevice, name)
        keys[name] = step(name, devices[name].keys)
    with watch("coordinator"):
        session = pairwise.session_of(b"benchmark", keys.items())
    shared: dict[str, Mapping[str, bytes]] = {}
    for name in names:
        around = {other: keys[other] for other in near[name]}
        shared[name] = step(name, devices[name].shares, session, around, threshold)
        sent[name] += 64.0 + sum(map(len, shared[name].values()))
    lost = int(LOST * sizes.devices)
    stayed = [*names]
    for place in sorted(random.choice(sizes.devices, lost, replace=False), reverse=True):
        del stayed[place]
    exact = np.zeros(sizes.elements + 1, np.uint32)
    with closing(Coordinator(folder, sizes.elements, sizes.numbers)) as coordinator:
        for name, update in zip(names, updates_of(sizes), strict=True):
            if name not in {*stayed}:
                continue
            with watch("device: fixed point"):
                words = counted_words(update, 1.0, 1.0, CLIP, sizes.bits)
            exact += words
            sealed = {other: shared[other][name] for other in near[name]}
            masked = step(name, devices[name].masked, words, sealed)
            with watch("coordinator"):
                coordinator.take(words_to_bytes(masked))
        answers = {}
        commitments = {name: devices[name].commitment() for name in names}
        gone = {*names} - {*stayed}
        for name in stayed:
            here = [other for other in near[name] if other not in gone]
            away = [other for other in near[name] if other in gone]
            answers[name] = step(name, devices[name].unmasking, session, here, away)
            sent[name] += sum(len(share) for told in answers[name] for share in told.values())
        with watch("unmasking"):
            total = coordinator.round.sums.states[UPDATE].words.copy()
            pairwise.unmask(total, session, keys, near, stayed, answers, threshold, commitments)
            masks = coordinator.round.sums.states[UPDATE].words - total
        with watch("coordinator"):
            coordinator.commit(masks)
        check_sum(coordinator, masks, exact)
    return {
        # what is said in the exchanges travels as hexadecimal digits
        "bytes_up": 4.0 * (sizes.elements + 1) + 2 * median(sent[name] for name in stayed),
        "device_ms": 1e3 * median(work[name] for name in stayed),
        "coordinator_s": watch.total("coordinator") + watch.total("unmasking"),
        "unmasking_s": watch.total("unmasking"),
        "neighbours": float(degree),
        "threshold": float(threshold),
    }


def check_sum(coordinator: Coordinator, masks: Words, exact: Words) -> None:
    """Raise RuntimeError unless the sum without masks is the sum of what devices masked."""
    kept = np.uint32(2 ** modulus_bits(coordinator.bits) - 1)
    if not np.array_equal(coordinator.round.sums.states[UPDATE].words - masks & kept, exact):
        raise RuntimeError("the sum without its masks is not the sum of the updates")


MODES: Mapping[str, Callable[[Path, Sizes], dict[str, float]]] = {
    "plain": plain,
    "helper": helped,
    "helper, 12 bits": lambda folder, sizes: helped(folder, sizes._replace(short=True)),
    "pairwise": paired,
}


def sizes_of(texts: Sequence[str]) -> list[Sizes]:
    """Return sizes written as DEVICESxELEMENTS."""
    pairs = (map(int, text.split("x")) for text in texts)
    return [Sizes(devices, elements) for devices, elements in pairs]
