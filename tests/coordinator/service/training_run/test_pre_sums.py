"""Whatever other processes add, lose or say wrongly: the sums are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.exact_sums import exact_sums
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.own_aggregators import own_aggregator
from fleetlearn_coordinator.aggregation.partial_sum import (
    PartialSum,
    SumsToMake,
    UpdateToAdd,
    add_update,
    make_sums,
    sums_to_make,
)
from fleetlearn_coordinator.aggregation.reports import columns_of
from fleetlearn_coordinator.service.training_run import pre_sums
from fleetlearn_coordinator.service.training_run.pre_sums import PreSums, pays_off
from fleetlearn_coordinator.service.training_run.spooled_report import SpooledReport
from fleetlearn_coordinator.storage.spooled_update import SpooledUpdate, spooled_parts
from fleetlearn_coordinator.storage.sum_file import write_sum
from fleetlearn_protocol.encodings import FLOAT32, INT64
from fleetlearn_protocol.messages import BUFFERS, CONTROL, SUMS, UPDATE, Report
from fleetlearn_protocol.vector import checksum
from hypothesis import given, settings
from hypothesis import strategies as st
from round_reports import masked_rules_of, rules_of, state_of

SIZE, PLACES, COUNT = 6, [slice(4, 6)], 9


class SpoolInMemory:
    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = 8
    ) -> Iterator[memoryview]:
        content = memoryview(self.files[number])[begin : begin + size]
        assert len(content) == size
        for place in range(0, size, part_bytes):
            yield content[place : place + part_bytes]


class Others:
    """``Adders`` in this process. The update in spool file n is the process's of ``stored[n]``."""

    def __init__(self, spool: SpoolInMemory, folder: Path) -> None:
        self.spool, self.folder = spool, folder
        self.stored: dict[int, int | None] = {}
        self.sums: dict[tuple[int, int], tuple[Any, SumsToMake, list[str]]] = {}
        self.asked: list[tuple[int, int]] = []

    def adder_of(self, spool_file: int) -> int | None:
        return self.stored[spool_file]

    def begin(self, adder: int, number: int, sums: SumsToMake) -> None:
        self.sums[adder, number] = make_sums(sums), sums, []

    def add(self, adder: int, number: int, update: UpdateToAdd) -> None:
        sums, wanted, tasks = self.sums[adder, number]
        parts = {
            each.part.name: SpooledUpdate(
                self.spool, update.spool_file, each.part, each.begin, each.elements
            )
            for each in update.parts
        }
        add_update(sums, update, parts, wanted.present)
        tasks.append(update.task)

    def collect(self, adder: int, number: int, size: int) -> None:
        self.asked.append((adder, number))

    def forget(self, adder: int, number: int) -> None:
        self.sums.pop((adder, number), None)

    def file_of(self, number: int) -> str:
        return str(self.folder / str(number))

    def write(self, adder: int, number: int) -> PartialSum:
        sums, _, tasks = self.sums.pop((adder, number))
        tensors = sums.to_tensors()
        layout = tuple((name, each.dtype.str, each.size) for name, each in tensors.items())
        return PartialSum(tuple(tasks), layout, write_sum(Path(self.file_of(number)), tensors))


def rounds(kind: str) -> tuple[Any, dict[str, int]]:
    """Return what makes rounds of a kind, and the elements of each part."""
    if kind == "sums":
        rules = rules_of(aggregators={SUMS: exact_sums(SIZE, COUNT)})
        elements = {SUMS: SIZE}
    elif kind == "control":
        mean = aggregators.make("mean")
        rules, elements = (
            rules_of(aggregators={UPDATE: mean, CONTROL: mean}),
            {
                UPDATE: SIZE,
                CONTROL: SIZE,
            },
        )
    else:
        mean = aggregators.make("mean", buffers=PLACES)
        optimizer = optimizers.make("sgd")._replace(buffers=PLACES)
        rules = rules_of(aggregators={UPDATE: mean}, optimizer=optimizer)
        elements = {UPDATE: SIZE, BUFFERS: 2}
    return lambda: OpenRound(rules, state_of(rules, np.linspace(-1, 1, SIZE))), elements


def report_of(spool: SpoolInMemory, number: int, elements: dict[str, int]) -> SpooledReport:
    random = np.random.default_rng(number)
    contents, parts, largest = [], [], {}
    for name, size in elements.items():
        if name == SUMS:
            vector: Any = random.integers(-(2**57), 2**57, size, np.int64)
        else:
            scale = 10.0 ** random.uniform(-12, 6)
            vector = (random.standard_normal(size) * scale).astype(np.float32)
        contents.append(vector.tobytes())
        parts.append((INT64 if name == SUMS else FLOAT32).part(name, contents[-1]))
        largest[name] = float(np.abs(vector).max())
    spool.files[number] = b"".join(contents)
    report = Report(f"r-1-{number}", 1, tuple(parts), 10, 5, 1.0, True, 0.5)
    columns = columns_of(
        report,
        (),
        number + 1,
        largest,
        spooled_parts(spool, number, report, elements),
        staleness=0 if SUMS in elements else number % 3,
    )
    return SpooledReport(f"d{number}", report, 0, columns, number)


def bits(round: OpenRound) -> bytes:
    """Return the sums' bits: those of the means, as the bins of two equal sums may differ."""
    round.sums.add_waiting()
    found = []
    for part, aggregator in round.sums.aggregators.items():
        state = round.sums.states[part]
        if part == SUMS:
            found.append(state.total.tobytes() + bytes([state.devices]))
        else:
            found += [each.tobytes() for each in aggregator.result(state, round.present)[:2]]
    return b"".join(found)


LIES = ["huge", "negative", "no dtype", "objects", "not finite"]
"""Of a gateway on another machine, which may say anything."""
ENDS = st.sampled_from(["made", "made", "made", "late", "gone", "torn", "changed", "wrong", *LIES])


def lied(end: str, made: PartialSum, file: Path) -> PartialSum:
    (name, dtype, size), *others = made.layout
    if end != "not finite":
        size = {"huge": 2**60, "negative": -1}.get(end, size)
        dtype = {"no dtype": "words", "objects": "O"}.get(end, dtype)
        return made._replace(layout=((name, dtype, size), *others))
    content, place = bytearray(file.read_bytes()), 0
    for _, dtype, size in made.layout:
        if np.dtype(dtype).kind == "f" and size:
            content[place : place + np.dtype(dtype).itemsize] = np.array(np.nan, dtype).tobytes()
        place += np.dtype(dtype).itemsize * size
    file.write_bytes(content)
    return made._replace(crc32=checksum(content))


@pytest.fixture(autouse=True)
def tiny_models_are_pre_summed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pre_sums, "SMALLEST", 1)
    return


@pytest.mark.parametrize("kind", ["buffers", "control", "sums"])
def test_the_sums_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    make, elements = rounds(kind)

    @settings(max_examples=40, deadline=None)
    @given(
        stored=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=COUNT, max_size=COUNT),
        collects=st.sets(st.integers(0, COUNT - 1)),
        ends=st.lists(ENDS, min_size=4 * COUNT, max_size=4 * COUNT),
    )
    def run(stored: list[int | None], collects: set[int], ends: list[str]) -> None:
        spool, alone, split = SpoolInMemory(), make(), make()
        others = Others(spool, tmp_path)
        given_away = PreSums(others, lambda: None)
        others.stored = dict(enumerate(stored))

        def end_collection() -> None:
            given_away.collect()
            for adder, number in others.asked:
                end = ends.pop()
                if end == "late":
                    given_away.collected(number, None)
                elif end == "gone":
                    given_away.lost(adder)
                else:
                    made = others.write(adder, number)
                    file = Path(others.file_of(number))
                    if end == "torn":
                        file.write_bytes(file.read_bytes()[:-1])
                    elif end == "changed":
                        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
                    elif end in LIES:
                        made = lied(end, made, file)
                    elif end == "wrong":
                        made = made._replace(tasks=made.tasks[1:])
                    given_away.collected(number, made)
                given_away.collected(number, None)  # nobody waits for it any more
            others.asked.clear()
            assert not given_away.collect()
            while given_away.arrived:
                arrived = given_away.arrived.popleft()
                sums = given_away.read(arrived)
                if sums is None:
                    given_away.returned.extend(arrived.reports)
                else:
                    split.sums.merge(sums)
            while given_away.returned:
                split.add(given_away.returned.popleft().columns)

        for number in range(COUNT):
            report = report_of(spool, number, elements)
            alone.add(report.columns)
            if not given_away.give(split, report, report.columns):
                assert stored[number] is None
                split.add(report.columns)
            if number in collects:
                end_collection()
        end_collection()
        assert bits(alone) == bits(split)
        assert not list(tmp_path.iterdir()), "files are left"

    run()


def test_nothing_is_given_away_while_sums_are_collected(tmp_path: Path) -> None:
    make, elements = rounds("buffers")
    spool, round_ = SpoolInMemory(), make()
    others = Others(spool, tmp_path)
    others.stored = {0: 0, 1: 0}
    given_away = PreSums(others, lambda: None)
    first, second = (report_of(spool, number, elements) for number in range(2))
    assert given_away.give(round_, first, first.columns)
    assert given_away.collect()
    assert not given_away.give(round_, second, second.columns)
    given_away.forget()
    assert not others.sums
    assert not given_away.collect()
    assert given_away.give(round_, second, second.columns)


def test_what_needs_each_update_is_given_to_nobody() -> None:
    def wanted(rules: Any) -> SumsToMake | None:
        return sums_to_make(OpenRound(rules, state_of(rules, np.zeros(4))))

    assert wanted(rules_of()) is not None
    assert wanted(rules_of(aggregators={UPDATE: aggregators.make("median")})) is None
    own = own_aggregator("mine:mean", aggregators.MEAN, ())
    assert wanted(rules_of(aggregators={UPDATE: own})) is None, "gateways do not have it"
    assert wanted(rules_of(mixing_rate=0.5)) is None
    assert wanted(masked_rules_of()) is None


def test_small_models_and_few_updates_stay_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pre_sums, "cores", lambda: 8)
    assert pays_off(16, 2)
    assert not pays_off(15, 2)
    assert not pays_off(16, 2, regions=3), "each region has a sum of its own"
    assert pays_off(24, 2, regions=3)
    assert not pays_off(10_000, 5), "the sum is saved after 32 updates"
    monkeypatch.setattr(pre_sums, "cores", lambda: 2)
    assert pays_off(16, 1)
    assert not pays_off(16, 2)
    make, elements = rounds("buffers")
    spool = SpoolInMemory()
    others = Others(spool, tmp_path)
    others.stored = {0: 0}
    report = report_of(spool, 0, elements)
    for smallest, expected in ((4 * SIZE + 1, False), (4 * SIZE, True)):
        monkeypatch.setattr(pre_sums, "SMALLEST", smallest)
        given_away = PreSums(others, lambda: None)
        assert given_away.give(make(), report, report.columns) == expected
