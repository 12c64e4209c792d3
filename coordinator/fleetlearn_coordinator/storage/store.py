"""The data directory of a run: its ledger and its blobs, and the order in which both are written.

Bytes come first, and then the rows that make them count. An update's bytes are written to a spool
file as they arrive; ``record_report`` writes one row, which makes the report and its update
durable; only then is the device told. The aggregator adds accepted updates in memory. After
SPOOL_FILES_HELD of them its state is written (``begin_save``) and recorded (``end_save``), which
frees their spool files. No further upload begins while as many spool files are in use as
``most_spool_files`` says, so the disk holds no more updates, however large the cohort is. A new
model's file is written before the batch of rows that closes its round.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from secrets import token_hex
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector, checksum
from numpy.typing import NDArray

from fleetlearn_coordinator.storage.batch_writer import BatchWriter
from fleetlearn_coordinator.storage.blobs import PARAMETERS, Blobs, Tensors
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import (
    AggregatorSaved,
    Ledger,
    Metadata,
    ModelMade,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    Row,
    SavedReport,
    TiedVectorsCounted,
    TiedVectorsForgotten,
)
from fleetlearn_coordinator.storage.run_storage import RunStorage

T = TypeVar("T")
Written: TypeAlias = Literal["rows", "update", "sum", "model"]
"""What is written: a batch of rows, an update's bytes, the sum of a round's updates, a model."""

SPOOL_FILES_HELD = 32
"""Accepted updates kept in spool files before the aggregator's state is written and their files are
freed."""
BEGINS_AT = "begins_at"
"""Key of the metadata: the version of a run's first model, where that is not 0."""
OPTIMIZER_STATE = "state."
"""In a model's file, the names of the server optimizer's state begin with this."""


class Store:
    """What one run remembers. All calls are synchronous; ``write_model`` may be called in any
    thread, and so may what ``begin_save`` returns."""

    def __init__(
        self,
        storage: RunStorage,
        ledger: Ledger,
        blobs: Blobs,
        resources: ExitStack,
        uploads: int,
    ) -> None:
        """Made by ``open_store``. ``resources`` are closed with it."""
        self.storage, self.blobs, self._ledger = storage, blobs, ledger
        self.uploads = uploads
        """How many uploads may be granted at a time."""
        self._resources = resources
        self._writer: BatchWriter | None = None
        """Writes a slow ledger's batches while the run is served. None: each is written at once."""
        self._bytes_changed = 0
        """The number of the last batch that changed which models or sums count."""
        self._models = {made.version: made for made in ledger.known_models()}
        self._tied = ledger.tied_tasks()
        self._begun: Callable[[], Callable[[], None]] = lambda: lambda: None
        self.run: str = ledger.get("run")
        """The run's name: random, so that no other run has it."""
        self._held: dict[str, int] = {}
        """Accepted task -> its spool file, until the aggregator's saved state has its update."""
        self._early: dict[str, tuple[int, int]] = {}
        """Accepted task of a round that is not open yet -> that round, and its spool file."""
        self._turn: int | None = ledger.get("sum")
        """Which of the two saved sums of the open round counts. None: neither."""
        self.timed: Callable[[Written, float], object] | None = None
        """Called with what was written, and with the seconds until it was durable, in the thread
        that wrote it."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._resources.close()

    # --- when rows are safe ---

    def write_beside(
        self,
        call: Callable[[Callable[[], None]], object],
        begun: Callable[[], Callable[[], None]],
        failed: Callable[[BaseException], None],
    ) -> None:
        """From now on let no batch of a slow store keep the caller waiting: neither its rows, nor
        the bytes of the updates that they accept. Harmless where neither is slow.

        ``call``, ``failed``: as for ``BatchWriter``. ``begun``: called when a batch is to be
        written; what it returns is called once the batch is safe. What a batch promises is told
        after that.
        """
        if self._ledger.is_slow or self.blobs.is_slow:
            self._begun = begun
            self._writer = BatchWriter(self._write_now, call, failed)

    @property
    def ledger(self) -> Ledger:
        """The ledger, to be read before the run is served. The event loop would wait for a slow
        one: what is needed later is kept in memory from here on."""
        assert self._writer is None, "a ledger that is slow is not read while the run is served"
        return self._ledger

    @property
    def is_slow(self) -> bool:
        """Whether the ledger or the blobs are slow, and rows are written while the run goes on."""
        return self._writer is not None

    @property
    def is_safe(self) -> bool:
        """Whether all rows so far are safe, and what was to be done then is done."""
        return self._writer is None or self._writer.is_safe

    @property
    def may_replace_bytes(self) -> bool:
        """Whether a sum may be saved or models dropped: rows that are safe do not need them any
        more."""
        return self._writer is None or self._writer.safe >= self._bytes_changed

    def when_safe(self, action: Callable[[], None]) -> None:
        """Do this once all rows so far are safe: now, where they are. It is not done if that
        fails."""
        if self._writer is None:
            action()
        else:
            self._writer.when_safe(action)

    def wait_until_safe(self) -> None:
        """Wait until all rows so far are safe. Safe to call in any thread. Raises what writing them
        ended with."""
        if self._writer is not None:
            self._writer.wait()

    def model_made(self, version: int) -> ModelMade | None:
        """Return what is known of a version's model, also of one whose row is not safe yet; None:
        there was none of this version."""
        return self._models.get(version)

    def tied_to(self, device: str) -> str | None:
        """Return the task whose tied vectors the device's next task goes on from, also where the
        row is not safe yet; None: from none."""
        return self._tied.get(device)

    def _write(self, rows: Sequence[Row]) -> None:
        self._write_rows(rows)
        for row in rows:
            match row:
                case ModelMade():
                    self._models[row.version] = row
                case TiedVectorsCounted(device, task):
                    self._tied[device] = task
                case TiedVectorsForgotten():
                    self._tied.clear()

    def _write_rows(self, rows: Sequence[Row]) -> None:
        if self._writer is None:
            self._write_now(rows)
        else:
            number = self._writer.submit(rows)
            self._writer.when_safe(self._begun())
            if any(isinstance(row, AggregatorSaved | ModelMade | RoundClosed) for row in rows):
                self._bytes_changed = number

    def _write_now(self, rows: Sequence[Row]) -> None:
        accepted = [row for row in rows if isinstance(row, ReportAccepted)]
        if sizes := {row.spool_file: row.report.size for row in accepted}:
            self._time("update", partial(self.blobs.settle_spool_files, sizes))
        self._time("rows", partial(self._ledger.write, rows))

    def _time(self, what: Written, make: Callable[[], T]) -> T:
        """Make something durable, and tell how long that took. Returns what ``make`` does."""
        began = time.perf_counter()
        made = make()
        if self.timed is not None:
            self.timed(what, time.perf_counter() - began)
        return made

    def write(self, rows: Sequence[Row]) -> None:
        """Write one batch of rows: all of them count, or none. They are safe when this returns, or
        later (``when_safe``)."""
        self._write(rows)
        for row in rows:
            if type(row) is RoundClosed:
                self._turn = None
                self._free_held()
            elif type(row) is RoundOpened and self._early:
                self._held |= {
                    task: file for task, (round, file) in self._early.items() if round == row.number
                }
                self._early = {
                    task: kept for task, kept in self._early.items() if task not in self._held
                }

    # --- updates ---

    def record_report(
        self, accepted: ReportAccepted, early: int | None = None, also: Sequence[Row] = ()
    ) -> None:
        """Make the report and its update durable: once it is safe they survive this process.
        ``early``: the round that it counts for, if that is not open yet. ``also``: rows that count
        with it."""
        self._write([accepted, *also])
        self._hold(accepted.report.task, accepted.spool_file, early)

    def _hold(self, task: str, spool_file: int, early: int | None) -> None:
        if early is None:
            self._held[task] = spool_file
        else:
            self._early[task] = early, spool_file

    @property
    def spool_files(self) -> int:
        """How many spool files hold accepted updates that no saved state contains."""
        return len(self._held) + len(self._early)

    @property
    def must_save_aggregator(self) -> bool:
        """Whether SPOOL_FILES_HELD accepted updates are in spool files, so that the state must be
        saved now. Not while the last saved one may not be what counts: it must stay whole."""
        return len(self._held) >= SPOOL_FILES_HELD and self.may_replace_bytes

    def begin_save(self, tensors: Tensors) -> Callable[[], AggregatorSaved]:
        """Return the work of writing the aggregator's state, which contains all updates that are
        accepted now.

        Call it in any thread while nobody changes the state, once, and hand its result to
        ``end_save`` before the next ``begin_save``. It raises OSError (the disk is full).
        """
        turn, tasks = 1 - (self._turn or 0), list(self._held)
        layout = json.dumps([[name, each.dtype.str, each.size] for name, each in tensors.items()])
        save = partial(self.blobs.save_aggregator, turn, tensors)
        return lambda: AggregatorSaved(turn, self._time("sum", save), tasks, layout)

    def end_save(self, saved: AggregatorSaved) -> None:
        """Record that the aggregator's state was written, and free the spool files of the updates
        that it contains."""
        if not self._held.keys() >= set(saved.tasks):
            return  # their round was closed meanwhile, and their files are free
        self._write([saved])
        self._turn = saved.turn
        self._free([self._held.pop(task) for task in saved.tasks])

    def load_aggregator(self, first_version: Tensors) -> dict[str, NDArray[Any]] | None:
        """Return the open round's aggregator state as it was last saved, as flat tensors by name;
        or None if it was not saved. ``first_version``: like the tensors that the first version of
        fleetlearn saved, whose ledger does not say which they are. Raises StoreError (damaged, or
        saved by an earlier version whose state cannot be read: ``first_version`` is empty)."""
        turn, layout = self.ledger.get("sum"), self.ledger.get("sum_layout")
        if turn is None:
            return None
        like = first_version
        if layout is not None:
            like = {name: np.empty(size, dtype) for name, dtype, size in json.loads(layout)}
        if not like:
            text = (
                f"{self.blobs.where_aggregator()}: an earlier version of fleetlearn saved the sum"
            )
            raise StoreError(Code.WRONG_HASH, text)
        return self.blobs.load_aggregator(int(turn), like, int(self.ledger.get("sum_crc32")))

    def take_back_update(self, saved: SavedReport, early: int | None = None) -> bytearray:
        """Return the bytes of an update that an earlier process accepted, and hold its spool file.
        ``early``: as for ``record_report``. Raises StoreError (damaged)."""
        assert saved.spool_file is not None
        self.blobs.reserve_spool_file(saved.spool_file)
        self._hold(saved.task, saved.spool_file, early)
        update, begin = bytearray(), 0
        for block in self.blobs.read_spool_file(saved.spool_file, saved.report.size):
            update += block
        for part in saved.report.parts:
            if checksum(memoryview(update)[begin : begin + part.size]) != part.crc32:
                where = self.blobs.where_spool_file(saved.spool_file)
                raise StoreError(Code.WRONG_HASH, f"{where}: the update of {saved.task} is damaged")
            begin += part.size
        return update

    def begun_uploads(self) -> dict[int, bytes]:
        """Return the checkpoints of uploads that an earlier process began, by the numbers of their
        spool files. A file that holds an accepted update is none of them."""
        held = {*self._held.values(), *(number for _, number in self._early.values())}
        found = self.blobs.checkpoints()
        return {number: found[number] for number in sorted(found.keys() - held)}

    def _free_held(self) -> None:
        self._free([*self._held.values()])
        self._held.clear()

    def _free(self, spool_files: Iterable[int]) -> None:
        """Let these files be used again once the rows say that their bytes are not needed."""
        for spool_file in spool_files:
            self.when_safe(partial(self.blobs.free_spool_file, spool_file))

    def give_up_early(self) -> None:
        """Free the spool files of all reports that came before their round: the ledger says that
        they do not count."""
        self._free([spool_file for _, spool_file in self._early.values()])
        self._early.clear()

    # --- the open round of an earlier process ---

    def is_given_up(self, round: int) -> bool:
        """Return whether the round is to be abandoned: somebody removed the aggregator's files
        because they were damaged, or the plan has another algorithm now."""
        return bool(self.ledger.get("given_up") == round)

    @contextmanager
    def repair_advice(self) -> Iterator[None]:
        """Add what can be done to an error about damaged files: a StoreError, or a ValueError about
        the aggregator's state. Raises StoreError."""
        try:
            yield
        except (StoreError, ValueError) as error:
            where = self.blobs.where_aggregator()
            damage = (
                error
                if isinstance(error, StoreError)
                else StoreError(Code.WRONG_HASH, f"{where}: {error}")
            )
            raise StoreError(
                damage.code,
                f"{damage.text}. Put the data directory back from a backup. Or remove {where}: the "
                f"next start then gives up what was reported in round {self.ledger.last_round()}, "
                "and goes on from the newest model.",
            ) from None

    # --- models ---

    def load_model(self) -> tuple[int, Vector, dict[str, Vector]] | None:
        """Return the newest committed model: version, float32 vector (P,), server optimizer's
        state; or None before the first. Raises StoreError (missing, damaged, or not the model that
        was committed)."""
        newest = self.ledger.newest_model()
        if newest is None:
            return None
        version, sha256 = newest
        return version, *self.load_version(
            ModelMade(version, sha256, 0, 0.0, state_crc32=self.ledger.get("state_crc32"))
        )

    def load_version(self, known: ModelMade) -> tuple[Vector, dict[str, Vector]]:
        """Return an older model as a float32 vector (P,), and the state beside it. Raises
        StoreError (missing, damaged)."""
        tensors = self.blobs.load_model(known.version, known.sha256)
        vector = tensors.pop(PARAMETERS)
        state = {name.removeprefix(OPTIMIZER_STATE): tensor for name, tensor in tensors.items()}
        if known.state_crc32 not in (None, checksum_of(state)):
            where = self.blobs.where_model(known.version)
            raise StoreError(
                Code.WRONG_HASH,
                f"{where}: the server optimizer's state was changed after it was committed; put it "
                "back from a backup",
            )
        return vector, state

    def load_vectors(self, version: int, sha256: str, names: Iterable[str]) -> dict[str, Vector]:
        """Return those vectors of the state beside an older model that have these names and are
        there. Raises StoreError (missing, damaged)."""
        tensors = self.blobs.load_model(version, sha256)
        return {
            name: tensors[OPTIMIZER_STATE + name]
            for name in names
            if OPTIMIZER_STATE + name in tensors
        }

    def load_parameters(self, version: int, sha256: str) -> Vector:
        """Return an older model as a float32 vector (P,). Raises StoreError (missing, damaged)."""
        return self.blobs.load_model(version, sha256)[PARAMETERS]

    def write_model(
        self,
        made: ModelMade,
        vector: Vector,
        state: Mapping[str, Vector],
        dropped: Iterable[int] = (),
    ) -> list[Row]:
        """Write a model's file, and remove those of older versions that are not kept any more,
        ``dropped``. The newest model so far is none of them: until the rows are written, a start
        begins with it.

        Returns the rows that make this model the newest, once they are written. May be called in
        any thread. Raises StoreError (the disk is full).
        """
        tensors = {
            PARAMETERS: vector,
            **{OPTIMIZER_STATE + name: tensor for name, tensor in state.items()},
        }
        self._time("model", partial(self.blobs.save_model, made.version, tensors))
        self.blobs.drop_models(dropped)
        crc32 = checksum_of(state)
        return [Metadata("state_crc32", crc32), made._replace(state_crc32=crc32)]


def open_store(
    place: str | os.PathLike[str],
    bundle: str,
    *,
    durable: str = "process",
    uploads: int = 16,
    kept: int = 0,
    any_thread: bool = False,
    what: str = "bundle",
) -> Store:
    """Open and lock a run's storage, which is made if it does not exist. ``place``: as for
    ``find_storage``. ``bundle`` is the SHA-256 of the run's bundle, or what names those of a
    family. ``uploads``, ``kept``: as for
    ``most_spool_files``. ``any_thread``: as for ``RunStorage.open_ledger``. ``what``: what
    ``bundle`` is of, for people.

    Raises StoreError: locked, another bundle's, made by a newer version, or its ledger is lost.
    """
    storage, power = find_storage(place), durable == "power"
    most = most_spool_files(uploads, kept)
    with ExitStack() as opened:
        opened.enter_context(storage.lock())
        blobs = opened.enter_context(closing(storage.open_blobs(power=power, spool_files=most)))
        blobs.drop_drafts()
        ledger = opened.enter_context(
            closing(storage.open_ledger(power=power, any_thread=any_thread))
        )
        _refuse_lost(storage, ledger, blobs)
        if ledger.is_new:
            ledger.create({"bundle": bundle, "run": token_hex(4)})
        _check_bundle(storage, ledger.get("bundle"), bundle, what)
        rows: list[Row] = [Metadata("live", None)]  # forget the status of an earlier process
        # There is none in a new run, or where somebody removed it to give up the open round.
        if not blobs.has_aggregator():
            rows.append(Metadata("given_up", ledger.last_round()))
        ledger.write(rows)
        blobs.open_aggregator()
        resources = opened.pop_all()
    return Store(storage, ledger, blobs, resources, uploads)


def _refuse_lost(storage: RunStorage, ledger: Ledger, blobs: Blobs) -> None:
    """Raise StoreError if there are models that the ledger does not know: training would begin at
    version 0 beside them. The first version alone is no error: the first start may have been killed
    after it wrote the model."""
    versions = blobs.model_versions()
    first = 0 if ledger.is_new else ledger.get(BEGINS_AT) or 0
    if versions if ledger.is_new else versions[-1:] > [first] and ledger.newest_model() is None:
        raise StoreError(
            Code.UNKNOWN_CONTENT,
            f"{storage.where} has models up to version {versions[-1]}, but {ledger.where} there is "
            f"lost or empty. {ledger.restore_advice} Or give the plan another data_dir, or remove "
            "that one: training then begins at version 0.",
        )


def _check_bundle(storage: RunStorage, kept: object, bundle: str, what: str) -> None:
    if kept != bundle:
        raise StoreError(
            Code.WRONG_HASH,
            f"{storage.where} holds the run of another {what} ({str(kept)[:12]}..., the plan's is "
            f"{bundle[:12]}...). Give the plan another data_dir, or remove that one.",
        )


def most_spool_files(uploads: int, kept: int = 0) -> int:
    """Return how many spool files are open at most, if ``uploads`` uploads may be granted at a time
    and the aggregator keeps ``kept`` updates of a round. As many uploads as may be granted wait
    with some of their bytes, and as many are of devices that are away."""
    return max(SPOOL_FILES_HELD, kept) + 3 * uploads


def checksum_of(state: Mapping[str, Vector]) -> int:
    """Return the CRC-32 of a server optimizer's state, names included."""
    found = 0
    for name in sorted(state):
        found = checksum(state[name], checksum(name.encode(), found))
    return found
