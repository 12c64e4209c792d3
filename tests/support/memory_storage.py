"""For tests: a store in memory, by ``RunStorage``'s protocols alone. It outlives what uses it, as a
disk does.

``memory://NAME`` is the storage of that name. ``MemoryStorage.kill`` is what SIGKILL is to a
process with a disk: from then on nothing that has the storage open changes or reads anything, and
the lock is free.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_coordinator.storage import ledger as rows_of
from fleetlearn_coordinator.storage.blobs import PARAMETERS, PART_BYTES, StoredModels, Tensors
from fleetlearn_coordinator.storage.errors import DuplicateRowError, StoreError
from fleetlearn_coordinator.storage.held_out import HeldOutResults
from fleetlearn_coordinator.storage.ledger import (
    AggregatorSaved,
    AnswerAccepted,
    AnswerDropped,
    DeviceActivity,
    DeviceAsked,
    DeviceRemembered,
    ExchangeBegun,
    ExchangeEnded,
    LastSeries,
    Metadata,
    ModelMade,
    ParticipationCounted,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    Row,
    SavedAnswer,
    SavedParticipations,
    SavedPhase,
    SavedReport,
    SavedTask,
    TaskEnded,
    TaskGiven,
    TaskRevived,
    TiedVectorsCounted,
    TiedVectorsForgotten,
    Unfinished,
)
from fleetlearn_coordinator.storage.ledger_reader import EndedExchange
from fleetlearn_coordinator.storage.requests import Requests, RollBack
from fleetlearn_coordinator.storage.run_storage import CopiedRun
from fleetlearn_coordinator.storage.stored_json import decode, read_json
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.stored_report import read_report
from fleetlearn_protocol.vector import checksum, digest
from numpy.typing import NDArray

SCHEME, SLOW_SCHEME = "memory", "slow-memory"
STORED: dict[str, MemoryStorage] = {}
"""URL -> its storage."""


class KilledError(KeyboardInterrupt):
    """The process that had the storage open is dead. No handler of errors may take it for one."""


class TaskRow(NamedTuple):
    """A task of a round."""

    round: int
    device: str
    version: int
    state: str = "assigned"
    report: bytes | None = None
    weight: int | None = None
    spool_file: int | None = None
    staleness: int = 0
    norms: tuple[float, float] | None = None
    member: str | None = None
    region: str | None = None


class RoundRow(NamedTuple):
    """A round. ``summary`` is JSON."""

    opened: float
    closed: float | None = None
    outcome: str | None = None
    summary: bytes | None = None
    goal: int | None = None


class ExchangeRow(NamedTuple):
    """An exchange. ``summary`` is JSON."""

    version: int
    members: tuple[str, ...] | None
    request: str | None
    closed: float | None = None
    outcome: str | None = None
    summary: bytes | None = None


class AnswerRow(NamedTuple):
    """A device's turn in an exchange."""

    exchange: tuple[str, int, int]
    device: str
    note: str
    state: str = "assigned"
    content: bytes | None = None


@dataclass(frozen=True)
class Tables:
    """All rows of a run. Nothing of them changes: a batch makes new ones."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, TaskRow] = field(default_factory=dict)
    rounds: dict[int, RoundRow] = field(default_factory=dict)
    models: dict[int, ModelMade] = field(default_factory=dict)
    devices: dict[str, DeviceRemembered] = field(default_factory=dict)
    activity: dict[str, DeviceActivity] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    participations: dict[str, SavedParticipations] = field(default_factory=dict)
    exchanges: dict[tuple[str, int, int], ExchangeRow] = field(default_factory=dict)
    """(kind, number, phase) -> the exchange."""
    answers: dict[str, AnswerRow] = field(default_factory=dict)

    def copy(self) -> Tables:
        return Tables(*({**getattr(self, each.name)} for each in fields(self)))


class Contents:
    """What a storage has: what is on the disk of a store with files."""

    def __init__(self) -> None:
        self.tables: Tables | None = None
        self.spool: dict[int, bytearray] = {}
        self.checkpoints: dict[int, bytes] = {}
        self.sums: dict[int, bytes] | None = None
        self.models: dict[int, dict[str, NDArray[Any]]] = {}
        self.evaluation: str | None = None
        self.roll_back: RollBack | None = None
        self.held_out: dict[int, bytes] = {}


class MemoryStorage:
    """``RunStorage`` in memory. Its parts may be used in any thread."""

    has_folder = False

    def __init__(self, where: str, latency: float | None = None) -> None:
        """``latency``: seconds that a batch takes at least, as in a store that is elsewhere. None:
        the ledger is not slow."""
        self.where, self.latency = where, latency
        self.may_write = threading.Event()
        """While this is not set, no batch is written."""
        self.may_write.set()
        self.batches: list[list[Row]] = []
        """All batches that were written."""
        self.contents = Contents()
        self.models: StoredModels = MemoryModels(self)
        self.requests: Requests = MemoryRequests(self)
        self.held_out: HeldOutResults = MemoryHeldOutResults(self)
        self.holder: object | None = None
        """Who has the lock."""
        self._guard = threading.Lock()

    def kill(self) -> None:
        """End the process that holds the lock."""
        with self._guard:
            self.holder = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        holder = object()
        with self._guard:
            if self.holder is not None:
                text = f"{self.where} is in use by another coordinator; stop that one first"
                raise StoreError(Code.BUSY, text)
            self.holder = holder
        try:
            yield
        finally:
            with self._guard:
                if self.holder is holder:
                    self.holder = None

    def is_locked(self) -> bool:
        return self.holder is not None

    def open_ledger(self, *, power: bool, any_thread: bool) -> MemoryLedger:
        return MemoryLedger(self)

    def open_blobs(self, *, power: bool, spool_files: int) -> MemoryBlobs:
        return MemoryBlobs(self, spool_files)

    @contextmanager
    def read_ledger(self) -> Iterator[MemoryReader]:
        if self.contents.tables is None:
            text = f"{self.where} is not a coordinator's data directory: it has no ledger"
            raise StoreError(Code.UNKNOWN_CONTENT, text)
        yield MemoryReader(self.where, self.contents.tables)

    def check_ledger(self) -> str:
        return ""

    def copy_to(self, folder: Path) -> CopiedRun:
        raise StoreError(Code.BAD_MESSAGE, f"{self.where} is in memory, and is not copied")


def memory_storage(url: str) -> MemoryStorage:
    """Return the storage of a URL, for ``find_storage.STORES``."""
    return STORED.setdefault(url, MemoryStorage(url))


def slow_storage(url: str) -> MemoryStorage:
    """The same, of a ledger that is slow. Tests may change its latency."""
    return STORED.setdefault(url, MemoryStorage(url, 0.001))


class MemoryRequests:
    """``Requests`` in memory."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    def _of_a_run(self) -> Contents:
        if self._storage.contents.tables is None:
            text = f"{self._storage.where} does not exist: serve the plan first"
            raise StoreError(Code.UNKNOWN_CONTENT, text)
        return self._storage.contents

    def ask_for_evaluation(self) -> None:
        self._of_a_run().evaluation = token_hex(8)

    def evaluation(self) -> str | None:
        return self._storage.contents.evaluation

    def remove_evaluation(self) -> None:
        self._storage.contents.evaluation = None

    def ask_for_roll_back(self, version: int, who: str) -> None:
        self._of_a_run().roll_back = RollBack(token_hex(8), version, who)

    def roll_back(self) -> RollBack | None:
        return self._storage.contents.roll_back

    def remove_roll_back(self) -> None:
        self._storage.contents.roll_back = None


class MemoryHeldOutResults:
    """``HeldOutResults`` in memory."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    def write(self, version: int, result: dict[str, Any]) -> None:
        self._storage.contents.held_out.setdefault(version, msgspec.json.encode(result))

    def read(self, version: int) -> dict[str, Any] | None:
        content = self._storage.contents.held_out.get(version)
        return None if content is None else decode(content, dict[str, Any], f"version {version}")

    def read_all(self) -> dict[int, dict[str, Any]]:
        found = {version: self.read(version) for version in sorted(self._storage.contents.held_out)}
        return {version: result for version, result in found.items() if result is not None}


class OpenBytes:
    """``StoredBytes`` in memory."""

    def __init__(self, content: bytes) -> None:
        self.size, self._content = len(content), content

    def read(self, begin: int, size: int) -> bytes:
        return self._content[begin : begin + size]


class MemoryModels:
    """``StoredModels`` in memory."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    def model_versions(self) -> list[int]:
        return sorted(self._storage.contents.models)

    def model_size(self, version: int) -> int | None:
        tensors = self._storage.contents.models.get(version)
        return None if tensors is None else sum(each.nbytes for each in tensors.values())

    def load_model(self, version: int, sha256: str) -> dict[str, NDArray[Any]]:
        tensors = self._find(version)
        if digest(tensors[PARAMETERS]) != sha256:
            text = f"{self.where_model(version)} was changed after it was committed"
            raise StoreError(Code.WRONG_HASH, text)
        return {name: each.copy() for name, each in tensors.items()}

    def open_tensor(self, version: int, name: str = PARAMETERS) -> OpenBytes:
        tensors = self._find(version)
        if name not in tensors:
            text = f"{self.where_model(version)} has no tensor {name}"
            raise StoreError(Code.UNKNOWN_CONTENT, text)
        return OpenBytes(tensors[name].tobytes())

    def where_model(self, version: int) -> str:
        return f"{self._storage.where}, model {version}"

    def _find(self, version: int) -> dict[str, NDArray[Any]]:
        if version not in self._storage.contents.models:
            raise StoreError(Code.UNKNOWN_CONTENT, f"{self.where_model(version)} is missing")
        return self._storage.contents.models[version]


class MemoryBlobs(MemoryModels):
    """``Blobs`` in memory."""

    is_slow = False
    served = None

    def __init__(self, storage: MemoryStorage, most: int) -> None:
        super().__init__(storage)
        self._holder, self._most = storage.holder, most
        self._taken: set[int] = set()

    @property
    def _contents(self) -> Contents:
        """What this process may read and write: raises KilledError once it is dead."""
        if self._storage.holder is not self._holder:
            raise KilledError
        return self._storage.contents

    def close(self) -> None:
        pass

    # Spool files

    def has_room(self) -> bool:
        return len(self._taken) < self._most

    def take_spool_file(self) -> int:
        number = next(number for number in range(self._most + 1) if number not in self._taken)
        self.reserve_spool_file(number)
        return number

    def reserve_spool_file(self, number: int) -> None:
        assert number not in self._taken, "taken twice"
        self._contents.spool.setdefault(number, bytearray())
        self._taken.add(number)

    def free_spool_file(self, number: int) -> None:
        self.drop_checkpoint(number)
        self._taken.remove(number)

    def write_checkpoint(self, number: int, content: bytes) -> None:
        assert number in self._taken
        self._contents.checkpoints[number] = content

    def checkpoints(self) -> dict[int, bytes]:
        return {**self._contents.checkpoints}

    def drop_checkpoint(self, number: int) -> None:
        self._contents.checkpoints.pop(number, None)

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        assert number in self._taken
        file = self._contents.spool[number]
        file.extend(bytes(max(0, offset - len(file))))
        file[offset : offset + len(content)] = content

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = PART_BYTES
    ) -> Iterator[memoryview]:
        for place in range(begin, begin + size, part_bytes):
            end = min(begin + size, place + part_bytes)
            part = bytes(self._contents.spool[number][place:end])
            if len(part) != end - place:
                text = (
                    f"{self.where_spool_file(number)} ends before its update's {begin + size} bytes"
                )
                raise StoreError(Code.WRONG_LENGTH, text)
            yield memoryview(part)

    def settle_spool_files(self, sizes: Mapping[int, int]) -> None:
        assert sizes.keys() <= {*self._taken}

    def where_spool_file(self, number: int) -> str:
        return f"{self._storage.where}, slot-{number:04d}"

    # The aggregator's state

    def has_aggregator(self) -> bool:
        return self._contents.sums is not None

    def open_aggregator(self) -> None:
        contents = self._contents
        contents.sums = contents.sums or {}

    def save_aggregator(self, turn: int, tensors: Tensors) -> int:
        sums, content = self._contents.sums, b""
        assert sums is not None
        # what was there is overwritten piece by piece, as a file is
        for tensor in tensors.values():
            content += np.ascontiguousarray(tensor).tobytes()
            self._write_sum(turn, content)
        return checksum(content)

    def _write_sum(self, turn: int, content: bytes) -> None:
        sums = self._contents.sums
        assert sums is not None
        sums[turn] = content + sums.get(turn, b"")[len(content) :]

    def load_aggregator(self, turn: int, like: Tensors, crc32: int) -> dict[str, NDArray[Any]]:
        content, place = (self._contents.sums or {}).get(turn, b""), 0
        size = sum(each.nbytes for each in like.values())
        if len(content) < size:
            text = f"{self.where_aggregator()} is shorter than the sum of a round: it is damaged"
            raise StoreError(Code.WRONG_LENGTH, text)
        if checksum(content[:size]) != crc32:
            text = f"{self.where_aggregator()} was changed after it was written: it is damaged"
            raise StoreError(Code.WRONG_HASH, text)
        tensors: dict[str, NDArray[Any]] = {}
        for name, each in like.items():
            part = content[place : place + each.nbytes]
            tensors[name] = np.frombuffer(part, each.dtype).reshape(each.shape).copy()
            place += each.nbytes
        return tensors

    def where_aggregator(self) -> str:
        return f"{self._storage.where}, sums"

    # Models

    def save_model(self, version: int, tensors: Tensors) -> None:
        model = {name: np.array(each) for name, each in tensors.items()}
        self._put_model(version, model)

    def _put_model(self, version: int, model: dict[str, NDArray[Any]]) -> None:
        self._contents.models[version] = model

    def drop_models(self, versions: Iterable[int]) -> None:
        for version in versions:
            self._contents.models.pop(version, None)

    def drop_drafts(self) -> None:
        pass  # a model is put in its place at once


class Reads:
    """What is read of the tables, by the coordinator and from outside."""

    where: str

    def _now(self) -> Tables:
        raise NotImplementedError

    def last_round(self) -> int:
        return max(self._now().rounds, default=0)

    def _summary(self, number: int, content: bytes | None) -> dict[str, Any]:
        what = f"{self.where}: the summary of round {number}"
        return decode(content or b"", dict[str, Any], what)

    def _exchange_summary(self, kind: str, number: int, content: bytes | None) -> dict[str, Any]:
        what = f"{self.where}: the summary of {kind} {number}"
        return decode(content or b"", dict[str, Any], what)


class MemoryReader(Reads):
    """``LedgerReader`` of tables that do not change."""

    def __init__(self, where: str, tables: Tables) -> None:
        self.where, self._tables = where, tables

    def _now(self) -> Tables:
        return self._tables

    def metadata(self) -> dict[str, Any]:
        return {**self._tables.metadata}

    def models(self) -> dict[int, str]:
        return {version: made.sha256 for version, made in self._tables.models.items()}

    def known_models(self) -> list[ModelMade]:
        return [made for _, made in sorted(self._tables.models.items())]

    def open_round(self) -> int | None:
        found = (number for number, row in self._tables.rounds.items() if row.closed is None)
        return next(found, None)

    def closed_rounds(self, since: int) -> list[tuple[int, str, float, float, dict[str, Any]]]:
        return [
            (number, row.outcome or "", row.opened, row.closed, self._summary(number, row.summary))
            for number, row in sorted(self._tables.rounds.items())
            if row.closed is not None and number >= since
        ]

    def newest_model(self) -> ModelMade | None:
        return next(reversed(self.known_models()), None)

    def round_outcomes(self) -> dict[str, int]:
        return dict(sorted(Counter(outcome for _, outcome, *_ in self.closed_rounds(0)).items()))

    def goal(self, round: int) -> int | None:
        row = self._tables.rounds.get(round)
        return None if row is None else row.goal

    def opened(self, round: int) -> float | None:
        row = self._tables.rounds.get(round)
        return None if row is None else row.opened

    def task_states(self, round: int) -> dict[str, int]:
        return dict(sorted(Counter(state for _, _, state, _ in self.tasks(round)).items()))

    def device_activity(
        self, since: float | None = None, only: Collection[str] | None = None
    ) -> list[DeviceActivity]:
        rows = [row for _, row in sorted(self._tables.activity.items())]
        if only is not None:
            return [row for row in rows if row.device in only]
        if since is None:
            return rows
        return [row for row in rows if row.seen is not None and row.seen >= since]

    def searched_devices(self) -> list[tuple[str, float | None, int, str]]:
        return [
            (
                device,
                row.connected,
                int(row.error is not None),
                f"{' '.join(row.tags or ())} {row.tier or ''} {row.runtime or ''}".lower(),
            )
            for device, row in self._tables.activity.items()
        ]

    def tasks_of(self, device: str, most: int) -> list[tuple[str, int, str, str | None]]:
        found = [
            (task, row.round, row.state, row.member)
            for task, row in sorted(self._tables.tasks.items())
            if row.device == device
        ]
        return sorted(found, key=lambda row: -row[1])[:most]

    def tasks(self, round: int) -> list[tuple[str, str, str, str | None]]:
        return [
            (task, row.device, row.state, row.member)
            for task, row in sorted(self._tables.tasks.items())
            if row.round == round
        ]

    def measured_in_rounds(self, versions: Iterable[int]) -> dict[int, dict[str, Any]]:
        found = {}
        for version in versions:
            made = self._tables.models.get(version + 1)
            row = None if made is None else self._tables.rounds.get(made.round)
            if made is not None and row is not None and row.outcome == "committed":
                found[version] = self._summary(made.round, row.summary)
        return found

    def exchanges(self, kind: str) -> list[EndedExchange]:
        return [
            EndedExchange(
                number,
                row.version,
                row.outcome or "",
                row.closed,
                self._exchange_summary(kind, number, row.summary),
                phase,
            )
            for (its_kind, number, phase), row in sorted(self._tables.exchanges.items())
            if its_kind == kind and row.closed is not None
        ]

    def valid_exchanges(self, kind: str, versions: Iterable[int]) -> dict[int, dict[str, Any]]:
        rows = [row for row in self.exchanges(kind) if row.outcome == "valid"]
        return {row.version: row.summary for row in rows if row.version in {*versions}}


class MemoryLedger(Reads):
    """``Ledger`` in memory."""

    restore_advice = "Put it back from a backup."

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage, self._holder = storage, storage.holder
        self.where, self.is_slow = "its ledger", storage.latency is not None

    @property
    def is_new(self) -> bool:
        return self._contents.tables is None

    @property
    def _contents(self) -> Contents:
        if self._storage.holder is not self._holder:
            raise KilledError
        return self._storage.contents

    def _now(self) -> Tables:
        tables = self._contents.tables
        assert tables is not None
        return tables

    def close(self) -> None:
        pass

    def create(self, values: Mapping[str, str]) -> None:
        assert self.is_new
        self._contents.tables = Tables(metadata={**values})

    def write(self, rows: Sequence[Row]) -> None:
        if self._storage.latency is not None:
            assert self._storage.may_write.wait(20), "nobody let the batch be written"
            time.sleep(self._storage.latency)
        draft = self._now().copy()
        for row in rows:
            self._write(draft, row)
        self._contents.tables = draft
        self._storage.batches.append([*rows])

    def _write(self, tables: Tables, row: Row) -> None:
        changed = partial(_change, tables.tasks)
        match row:
            case TaskGiven(task, round, device, version, member, region):
                _add(
                    tables.tasks,
                    task,
                    TaskRow(round, device, version, member=member, region=region),
                )
            case TaskEnded(task, cause, counts_for):
                changed(task, lambda old: old._replace(state=cause, round=_moved(old, counts_for)))
            case TaskRevived(task):
                changed(task, lambda old: old._replace(state="assigned"))
            case ReportAccepted():
                changed(row.report.task, partial(_accepted, row))
            case AggregatorSaved(turn, crc32, tasks, layout):
                tables.metadata.update(sum=turn, sum_crc32=crc32, sum_layout=layout)
                for task in tasks:
                    changed(task, lambda old: old._replace(spool_file=None))
            case RoundOpened(number, at, goal):
                _add(tables.rounds, number, RoundRow(at, goal=goal))
                tables.metadata["sum"] = None
            case RoundClosed():
                self._close_round(tables, row)
            case ModelMade():
                tables.models[row.version] = row
            case DeviceRemembered():
                tables.devices[row.device] = row._replace(labels=[*row.labels])
            case DeviceActivity():
                before = tables.activity.get(row.device, DeviceActivity(row.device, tags=[]))
                tables.activity[row.device] = _together(before, row)
            case TiedVectorsCounted(device, task):
                tables.tied[device] = task
            case TiedVectorsForgotten():
                tables.tied.clear()
            case ParticipationCounted(device, release, since):
                known = tables.participations.get(device)
                times = 1 if known is None or known.since != since else known.times + 1
                tables.participations[device] = SavedParticipations(device, release, times, since)
            case Metadata(key, value):
                tables.metadata[key] = value
            case _:
                self._write_exchange(tables, row)

    def _close_round(self, tables: Tables, row: RoundClosed) -> None:
        summary = msgspec.json.encode(row.summary)
        _change(
            tables.rounds,
            row.number,
            lambda old: old._replace(closed=row.at, outcome=row.outcome, summary=summary),
        )
        for task, each in [*tables.tasks.items()]:
            if each.round == row.number:
                tables.tasks[task] = each._replace(spool_file=None)
            if each.round <= row.number - rows_of.ROUNDS_KEPT and each.state != "assigned":
                del tables.tasks[task]
        tables.metadata["sum"] = None

    def _write_exchange(self, tables: Tables, row: Row) -> None:
        changed = partial(_change, tables.answers)
        match row:
            case ExchangeBegun(kind, number, phase, version, members, request):
                told = None if members is None else tuple(members)
                begun = ExchangeRow(version, told, request)
                _add(tables.exchanges, (kind, number, phase), begun)
            case DeviceAsked(task, kind, number, phase, device, note):
                _add(tables.answers, task, AnswerRow((kind, number, phase), device, note))
            case AnswerDropped(task, cause):
                changed(task, lambda old: old._replace(state=cause))
            case AnswerAccepted(task, content):
                changed(task, lambda old: old._replace(state="accepted", content=content))
            case ExchangeEnded(kind, number, phase, outcome, summary, at):
                encoded = msgspec.json.encode(summary)
                end = {"closed": at, "outcome": outcome, "summary": encoded}
                _change(tables.exchanges, (kind, number, phase), lambda old: old._replace(**end))
                last = number - rows_of.KEPT_OF_KIND.get(kind, rows_of.EXCHANGES_KEPT)
                for task, each in [*tables.answers.items()]:
                    if each.exchange[0] == kind and each.exchange[1] <= last:
                        del tables.answers[task]
            case _:
                raise AssertionError(row)

    def get(self, key: str) -> Any:
        return self._now().metadata.get(key)

    def newest_model(self) -> tuple[int, str] | None:
        models = self._now().models
        return (max(models), models[max(models)].sha256) if models else None

    def last_committed(self) -> dict[str, Any] | None:
        rounds = self._now().rounds
        number = max(
            (key for key, row in rounds.items() if row.outcome == "committed"), default=None
        )
        return None if number is None else self._summary(number, rounds[number].summary)

    def committed_rounds(self, most: int) -> list[tuple[int, dict[str, Any]]]:
        tables, found = self._now(), []
        for version, made in sorted(tables.models.items()):
            row = tables.rounds.get(made.round)
            if row is not None and row.outcome == "committed":
                found.append((version, self._summary(made.round, row.summary)))
        return found[len(found) - most :] if most < len(found) else found

    def remembered_devices(self) -> list[DeviceRemembered]:
        return sorted(self._now().devices.values(), key=lambda row: (row.given, row.device))

    def tied_tasks(self) -> dict[str, str]:
        return {**self._now().tied}

    def participations(self) -> list[SavedParticipations]:
        return [row for _, row in sorted(self._now().participations.items())]

    def known_models(self) -> list[ModelMade]:
        return [made for _, made in sorted(self._now().models.items())]

    def rolled_back(self) -> int:
        models = self._now().models.values()
        return max((made.version for made in models if made.restores is not None), default=0)

    def accepted_updates(self) -> Sequence[tuple[int, str]]:
        rows = [row for _, row in sorted(self._now().tasks.items()) if row.state == "accepted"]
        return [(row.round, row.device) for row in sorted(rows, key=lambda row: row.round)]

    def unfinished(self, lost_since: int | None) -> Unfinished:
        tables = self._now()
        opened = next((number for number, row in tables.rounds.items() if row.closed is None), None)
        goal = None if opened is None else tables.rounds[opened].goal
        found = Unfinished(opened, [], [], [], [], goal)
        first = self.last_round() + 1 if opened is None else opened
        for task, row in sorted(tables.tasks.items(), key=lambda item: (item[1].version, item[0])):
            lost = lost_since is not None and row.state == "lost" and row.version >= lost_since
            runs = lost_since is not None and row.state == "assigned"
            if not (row.round >= first or lost or runs):
                continue
            if row.state == "assigned":
                found.leases.append(
                    SavedTask(task, row.device, row.version, row.member, row.region)
                )
            elif row.state == "accepted":
                found.reports.append(self._saved_report(task, row))
            elif row.round >= first:
                found.dropped.append((task, row.device, row.state))
            if row.state == "lost" and lost_since is not None:
                found.lost.append(SavedTask(task, row.device, row.version, row.member, row.region))
        return found

    def _saved_report(self, task: str, row: TaskRow) -> SavedReport:
        report = read_json(read_report, row.report or b"", f"{self.where}: the report of {task}")
        weight = row.weight or 0
        return SavedReport(
            task,
            row.device,
            report,
            weight,
            row.spool_file,
            row.staleness,
            row.round,
            row.norms,
            row.version,
            row.member,
            row.region,
        )

    def last_series(self, kind: str) -> LastSeries | None:
        tables = self._now()
        last = max((key[1] for key in tables.exchanges if key[0] == kind), default=None)
        phases, about = [], None
        for key, row in sorted(tables.exchanges.items()):
            if key[:2] == (kind, last):
                about = about or row
                answers = [
                    SavedAnswer(task, *answer[1:])
                    for task, answer in sorted(tables.answers.items())
                    if answer.exchange == key
                ]
                members = None if row.members is None else [*row.members]
                outcome = row.closed is None, row.outcome == "valid"
                phases.append(SavedPhase(key[2], members, *outcome, answers))
        return about and LastSeries(last, about.version, about.request, phases)

    def last_valid_exchange(self, kind: str, since: int = 0) -> tuple[int, dict[str, Any]] | None:
        for key, row in sorted(self._now().exchanges.items(), reverse=True):
            if key[0] == kind and row.outcome == "valid" and row.version >= since:
                return row.version, self._exchange_summary(kind, key[1], row.summary)
        return None


def _add(table: dict[Any, Any], key: object, row: object) -> None:
    if key in table:
        raise DuplicateRowError(Code.DUPLICATE, f"{key} is there already")
    table[key] = row


def _change(table: dict[Any, Any], key: object, change: Callable[[Any], Any]) -> None:
    if key in table:
        table[key] = change(table[key])


def _accepted(row: ReportAccepted, old: TaskRow) -> TaskRow:
    return old._replace(
        state="accepted",
        report=msgspec.json.encode(row.report),
        weight=row.weight,
        spool_file=row.spool_file,
        staleness=row.staleness,
        norms=row.norms,
        round=_moved(old, row.round),
    )


def _moved(old: TaskRow, round: int | None) -> int:
    """Return the round that a task counts for. None: the one that it had."""
    return old.round if round is None else round


def _together(before: DeviceActivity, new: DeviceActivity) -> DeviceActivity:
    """Return what two rows of a device say together."""
    found = {name: value for name, value in new._asdict().items() if value is not None}
    sums = {name: getattr(before, name) + getattr(new, name) for name in ("done", "failed", "lost")}
    return before._replace(**{**found, **sums, "connected": new.connected})
