"""The ledgers of all stores say the same after the same rows: those of SQLite and PostgreSQL, and
the one in memory, which is written in another way."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.storage import ledger as rows_of
from fleetlearn_coordinator.storage import sql_exchanges, sql_ledger, sqlite_ledger
from fleetlearn_coordinator.storage.errors import DuplicateRowError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import (
    AggregatorSaved,
    AnswerAccepted,
    AnswerDropped,
    DeviceActivity,
    DeviceAsked,
    DeviceRemembered,
    ExchangeBegun,
    ExchangeEnded,
    Ledger,
    Metadata,
    ModelMade,
    ParticipationCounted,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    Row,
    TaskEnded,
    TaskGiven,
    TaskRevived,
    TiedVectorsCounted,
    TiedVectorsForgotten,
)
from fleetlearn_coordinator.storage.ledger_reader import LedgerReader
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE

KINDS = ("evaluation", "roll-call")


class Story:
    """Rows as a run might write them, by chance: rounds, tasks, models and exchanges of two
    kinds that go on."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.round = self.version = self.task = 0
        self.open = False
        self.tasks: list[str] = []
        self.exchanges = dict.fromkeys(KINDS, (0, 0))
        """Kind -> the number and the phase of its open exchange; phase 0: none is open."""
        self.asked: list[str] = []

    def batch(self) -> list[Row]:
        return [row for _ in range(self.random.randrange(1, 4)) for row in self._rows()]

    def _rows(self) -> list[Row]:
        steps: list[Callable[[], list[Row]]] = [
            self._begin_round, self._give, self._give, self._give, self._report, self._report,
            self._end_task, self._revive, self._save_sum, self._close, self._close, self._remember,
            self._ask, self._ask, self._exchange, self._exchange, self._put, self._notice,
        ]  # fmt: skip
        return self.random.choice(steps)()

    def _begin_round(self) -> list[Row]:
        if self.open:
            return []
        self.round, self.open = self.round + 1, True
        return [RoundOpened(self.round, float(self.round))]

    def _give(self) -> list[Row]:
        self.task += 1
        self.tasks.append(f"t{self.task}")
        device, version = (
            f"d{self.random.randrange(6)}",
            max(0, self.version - self.random.randrange(3)),
        )
        member = "large" if device < "d3" else None
        region = None if member else "north"
        return [TaskGiven(self.tasks[-1], max(1, self.round), device, version, member, region)]

    def _some_task(self) -> str:
        return self.random.choice(self.tasks[-8:]) if self.tasks else "unknown"

    def _counts_for(self) -> int | None:
        return self.random.choice((None, None, self.round, self.round + 1))

    def _report(self) -> list[Row]:
        report = Report(
            self._some_task(), 1, (FLOAT32.part("update", bytes(8)),), 3, 1, 1.0, True, 0.5
        )
        norms = self.random.choice((None, (1.5, 0.5)))
        number, stale = self.random.randrange(5), self.random.randrange(3)
        return [ReportAccepted(report, 3, number, stale, self._counts_for(), norms)]

    def _end_task(self) -> list[Row]:
        cause = self.random.choice(("lost", "lost", "failed: bad-data"))
        return [TaskEnded(self._some_task(), cause, self._counts_for())]

    def _revive(self) -> list[Row]:
        return [TaskRevived(self._some_task())]

    def _save_sum(self) -> list[Row]:
        return [
            AggregatorSaved(
                self.random.randrange(2), 99, [self._some_task(), self._some_task()], "[]"
            )
        ]

    def _close(self) -> list[Row]:
        if not self.open:
            return []
        self.open = False
        if self.random.random() < 0.3:
            return [RoundClosed(self.round, "abandoned", {"reports": 0}, self.round + 0.5)]
        self.version += 1
        restores = self.random.choice((None, None, 0))
        made = ModelMade(self.version, f"{self.version:064d}", self.round, 1.0, restores, "adam", 5)
        return [
            made,
            RoundClosed(self.round, "committed", {"reports": self.round}, self.round + 0.5),
        ]

    def _remember(self) -> list[Row]:
        device = f"d{self.random.randrange(6)}"
        if self.random.random() < 0.1:
            return [TiedVectorsForgotten()]
        if self.random.random() < 0.4:
            return [ParticipationCounted(device, self.version, self.random.choice((1, 3)))]
        remembered = DeviceRemembered(device, self.round, 2, ["a", "b"], self.round, 0.5, 10, None)
        return [remembered, TiedVectorsCounted(device, self._some_task())]

    def _notice(self) -> list[Row]:
        device, at = f"d{self.random.randrange(6)}", self.random.choice((None, float(self.task)))
        if self.random.random() < 0.5:
            return [DeviceActivity(device, at, at, "onnx 1", "sdk 1", None, ["a", "b"])]
        error = self.random.choice((None, "bad-data: [none]"))
        return [DeviceActivity(device, at, done=1, failed=2, lost=-1, error=error, error_at=at)]

    def _ask(self) -> list[Row]:
        kind = self.random.choice(KINDS)
        number, phase = self.exchanges[kind]
        if not phase:
            return []
        task = f"m{len(self.asked)}"
        self.asked.append(task)
        other = self.random.choice(self.asked)
        end: Row = AnswerAccepted(other, b'{"examples": 10}')
        if self.random.random() < 0.4:
            end = AnswerDropped(other, "lost")
        return [DeviceAsked(task, kind, number, phase, f"d{len(task)}", "fast"), end]

    def _exchange(self) -> list[Row]:
        """Begin a series, end it, or go on with its next exchange."""
        kind = self.random.choice(KINDS)
        number, phase = self.exchanges[kind]
        rows: list[Row] = []
        if phase:
            outcome = self.random.choice(("valid", "invalid"))
            rows = [ExchangeEnded(kind, number, phase, outcome, {"devices": number}, 2.0)]
        number, phase = number + (not phase), phase + 1
        if phase == 4 or (rows and self.random.random() < 0.3):
            self.exchanges[kind] = number, 0
            return rows
        self.exchanges[kind] = number, phase
        members, request = self.random.choice((None, ["d1", "d2"])), self.random.choice((None, "x"))
        return [*rows, ExchangeBegun(kind, number, phase, self.version, members, request, 1.0)]

    def _put(self) -> list[Row]:
        return [Metadata(self.random.choice("abc"), self.random.choice((None, 1.5, "text")))]


def said_by(ledger: Ledger, story: Story) -> dict[str, Any]:
    """Everything that a ledger says."""
    return {
        "metadata": [
            ledger.get(key) for key in ("a", "b", "c", "sum", "sum_crc32", "sum_layout", "run")
        ],
        "newest": ledger.newest_model(),
        "last": (ledger.last_round(), ledger.last_committed()),
        "committed": [ledger.committed_rounds(most) for most in (1, 3, 1000)],
        "remembered": ledger.remembered_devices(),
        "tied": ledger.tied_tasks(),
        "participations": ledger.participations(),
        "models": ledger.known_models(),
        "rolled back": ledger.rolled_back(),
        "updates": sorted(ledger.accepted_updates()),
        "rounds of updates": [round for round, _ in ledger.accepted_updates()],
        "unfinished": [ledger.unfinished(since) for since in (None, 0, story.version - 1)],
        "exchanges": [ledger.last_series(kind) for kind in (*KINDS, "unknown")],
        "valid": [
            ledger.last_valid_exchange(kind, since)
            for kind in KINDS
            for since in (0, story.version)
        ],
    }


def read_by(reader: LedgerReader, story: Story) -> dict[str, Any]:
    """Everything that is read from outside."""
    versions = range(story.version + 2)
    return {
        "metadata": reader.metadata(),
        "models": reader.models(),
        "known": reader.known_models(),
        "rounds": (
            reader.last_round(),
            reader.open_round(),
            reader.closed_rounds(0),
            reader.closed_rounds(3),
        ),
        "tasks": [reader.tasks(number) for number in range(story.round + 2)],
        "searched": sorted(reader.searched_devices()),
        "activity of some": reader.device_activity(only=["d1", "d4", "nobody"]),
        "tasks of": [reader.tasks_of(f"d{number}", 3) for number in range(7)],
        "states": [reader.task_states(number) for number in range(story.round + 2)],
        "opened": [reader.opened(number) for number in range(story.round + 2)],
        "newest": (reader.newest_model(), reader.round_outcomes()),
        "activity": [reader.device_activity(since) for since in (None, 5.0)],
        "in rounds": reader.measured_in_rounds(versions),
        "exchanges": [
            (reader.exchanges(kind), reader.valid_exchanges(kind, versions))
            for kind in (*KINDS, "unknown")
        ],
    }


@pytest.fixture(params=["here", pytest.param("PostgreSQL too", marks=pytest.mark.slow)])
def places(request: pytest.FixtureRequest, tmp_path: Path, memory: Path) -> tuple[Path, ...]:
    if request.param == "here":
        return tmp_path, memory
    in_postgres: Path = request.getfixturevalue("in_postgres")
    return tmp_path, memory, in_postgres


@pytest.fixture
def all_ledgers(places: tuple[Path, ...]) -> Iterator[tuple[Ledger, ...]]:
    with ExitStack() as opened:
        ledgers = []
        for place in places:
            storage = find_storage(place)
            opened.enter_context(storage.lock())
            ledger = storage.open_ledger(power=False, any_thread=False)
            ledgers.append(opened.enter_context(closing(ledger)))
            ledger.create({"run": "r"})
        yield tuple(ledgers)


@pytest.mark.parametrize("seed", range(12))
def test_they_say_the_same(
    all_ledgers: tuple[Ledger, ...],
    places: tuple[Path, ...],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_of, "ROUNDS_KEPT", 3)
    monkeypatch.setattr(sql_ledger, "ROUNDS_KEPT", 3)
    monkeypatch.setattr(rows_of, "EXCHANGES_KEPT", 2)
    monkeypatch.setattr(sql_exchanges, "EXCHANGES_KEPT", 2)
    story = Story(seed)
    for step in range(140):
        rows = story.batch()
        for ledger in all_ledgers:
            ledger.write(rows)
        if step % 10 == 9:
            said = [said_by(ledger, story) for ledger in all_ledgers]
            assert said[1:] == said[:-1]
            read = []
            for place in places:
                with find_storage(place).read_ledger() as reader:
                    read.append(read_by(reader, story))
            assert read[1:] == read[:-1]
    assert story.round > 5
    assert max(story.exchanges.values()) > (2, 0)
    begun = ExchangeBegun(KINDS[0], 1, 1, 0, None, None, 0.0)
    for row in (RoundOpened(1, 0.0), TaskGiven("t1", 1, "d", 0), begun):
        for ledger in all_ledgers:
            if isinstance(row, TaskGiven):  # the first one may be forgotten
                ledger.write([row._replace(task="again")])
                row = row._replace(task="again")
            with pytest.raises(DuplicateRowError):
                ledger.write([Metadata("a", "of a batch that fails"), row])
            assert ledger.get("a") != "of a batch that fails"


@pytest.mark.parametrize(("kind", "kept"), [(PAIRWISE, [2]), ("evaluation", [1, 2])])
def test_of_pairwise_masks_only_the_last_series_keeps_its_shares(
    all_ledgers: tuple[Ledger, ...], tmp_path: Path, kind: str, kept: list[int]
) -> None:
    """No ledger tells of earlier answers, so the tables are looked at."""
    files, memory_ledger, *others = all_ledgers
    for number in (1, 2):
        task = f"{kind}-{number}"
        rows: list[Row] = [
            ExchangeBegun(kind, number, 1, 0, None, None, 0.0),
            DeviceAsked(task, kind, number, 1, "d", ""),
            AnswerAccepted(task, b'{"shares": "secret"}'),
            ExchangeEnded(kind, number, 1, "valid", {}, 1.0),
        ]
        for ledger in all_ledgers:
            ledger.write(rows)
    with closing(sqlite3.connect(tmp_path / sqlite_ledger.DATABASE)) as db:
        assert [row for (row,) in db.execute("SELECT number FROM answers ORDER BY number")] == kept
    in_memory = memory_ledger._now().answers.values()
    assert [row.exchange[1] for row in in_memory] == kept
    for postgres in others:
        rows_there = postgres._db.execute("SELECT number FROM answers ORDER BY number")
        assert [row for (row,) in rows_there] == kept
    assert files.last_series(kind) == memory_ledger.last_series(kind)
