"""Rolling a run back: the model of an earlier version becomes the next version.

The open round is given up, and so is all that devices were doing for it. Versions keep rising and history is kept; the
row of the new model says which version it restores. The model's file is written first, and then one batch of rows makes
it the newest, ends the round and says that the request is answered: a process that is killed before that finds the
request again, one that is killed afterwards finds it answered, and says in the audit log what the batch kept for it.

The server optimizer goes on from the state that is kept with the earlier version. What devices keep cannot go back with
the model. So with an algorithm that ties a part of the coordinator's state to what devices keep (SCAFFOLD's c, FedDyn's
h), all of it begins from zeros, as after a change of algorithm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from fleetlearn_protocol.encodings import RESIDUAL
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.optimizers import State
from fleetlearn_coordinator.aggregation.sent_models import Forms, make_forms
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata, ModelMade, Row, TiedVectorsForgotten
from fleetlearn_coordinator.storage.requests import RollBack, decode_roll_back, encode_roll_back
from fleetlearn_coordinator.storage.run_storage import RunStorage

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.training_run.run import Clocks, Run

TO_LOG = "roll_back_to_log"
"""Key of the metadata: the request that was carried out, until the audit log has it."""


def ask_to_roll_back(place: str | os.PathLike[str], version: int, who: str) -> None:
    """Ask the run in a data directory to roll back, within a second or at its next start. From now
    on the run keeps this version. ``place``: as for ``find_storage``. Raises StoreError as
    ``check_version`` does."""
    storage = find_storage(place)
    check_version(storage, version)
    storage.requests.ask_for_roll_back(version, who)


def check_version(storage: RunStorage, version: int) -> None:
    """Raise StoreError where a run cannot be rolled back to this version: there is none of this
    number, it is not kept, or it is the newest."""
    with storage.read_ledger() as ledger:
        known = ledger.models()
    newest, there = max(known, default=0), {*storage.models.model_versions()} & known.keys()
    if version not in there or version == newest:
        kept = ", ".join(str(number) for number in sorted(there - {newest})) or "none yet"
        text = (
            f"{storage.where} cannot be rolled back to version {version}; the newest is {newest}, and it keeps {kept}"
        )
        raise StoreError(Code.UNKNOWN_CONTENT, text)


class RestoredModel(NamedTuple):
    """An earlier model as the next version, its file written. It does not count yet."""

    model: Vector
    state: State
    """Of the server optimizer."""
    vectors: dict[str, Vector]
    """What devices fetch beside the model."""
    forms: Forms
    """In which it travels beside float32."""
    made: ModelMade
    rows: list[Row]
    """What makes it the newest model."""
    keeps_state: bool
    """Whether the optimizer goes on from the earlier version's state."""


class RollBacks:
    """What people ask of one run, and how it is done."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wanted: tuple[RollBack, float] | None = None
        """What was asked for and is not done, and when it was found (Unix time)."""
        self.newest = run.store.ledger.rolled_back()
        """The newest version that a roll back made, or 0. What was measured of older ones ends no training."""
        self.log: Callable[[RollBack, ModelMade], None] | None = None
        """Writes into the audit log that an earlier model has become this one, unless it is there.
        May raise StoreUnavailableError. None while it is not known."""

    def look(self, now: Clocks) -> bool:
        """Return whether somebody asked for a roll back that was not carried out yet. The run's next step does it."""
        requests = self._run.store.storage.requests
        found = requests.roll_back()
        if found is not None and found.name == self._run.store.ledger.get("rolled_back"):
            requests.remove_roll_back()
            found = None
        self._wanted = None if found is None else (found, now.wall)
        return found is not None

    def log_last(self) -> None:
        """Let the audit log have the last roll back, if it does not yet: the process that carried it out may have died
        before."""
        store = self._run.store
        kept = store.ledger.get(TO_LOG)
        made = store.ledger.model(self.newest)
        if kept is None or made is None or self.log is None:
            return
        try:
            self.log(decode_roll_back(kept), made)
        except StoreUnavailableError as error:
            self._run.log.error("the audit log will have the roll back after the next start: %s", error.text)
        else:
            store.write([Metadata(TO_LOG, None)])

    def needed(self) -> list[int]:
        """Return the version that somebody asks for at this moment, if anybody does: its file is still needed."""
        found = self._run.store.storage.requests.roll_back()
        return [] if found is None else [found.version]

    def next_work(
        self,
    ) -> tuple[Callable[[], RestoredModel | StoreError], Callable[[RestoredModel | StoreError, Clocks], list[Command]]]:
        """Return the work of the roll back that is wanted, for any thread, and what ends it. Call only where
        ``is_wanted``."""
        assert self._wanted is not None
        run, (request, at) = self._run, self._wanted
        version = run.engine.version + 1
        known = run.store.ledger.model(request.version)
        assert known is not None
        bases = {number: sha256 for number, sha256 in run.digests.bases_of(version).items() if sha256 != known.sha256}
        made = ModelMade(version, known.sha256, 0, at, restores=known.version)
        return partial(self._restore, known, made, bases), partial(self._end, request)

    def is_wanted(self) -> bool:
        """Return whether there is something to do. A request that cannot be carried out is refused, in the log."""
        if self._wanted is None:
            return False
        request, run = self._wanted[0], self._run
        if request.version == run.engine.version or run.store.ledger.model(request.version) is None:
            self._refuse(request, "it is the newest, or there is none of this number")
            return False
        if request.version not in run.store.blobs.model_versions():
            self._refuse(request, f"{run.store.blobs.where_model(request.version)} is missing: it is not kept any more")
            return False
        return True

    def _refuse(self, request: RollBack, why: object) -> None:
        self._run.log.error("the run is not rolled back to version %d: %s", request.version, why)
        self._wanted = None
        self._run.store.storage.requests.remove_roll_back()

    def _restore(self, known: ModelMade, made: ModelMade, bases: Mapping[int, str]) -> RestoredModel | StoreError:
        run = self._run
        try:
            model, before = run.store.load_version(known)
            state = run.optimizer.init(model)
            same = known.optimizer in (None, run.optimizer.name) and before.keys() >= state.keys()
            if keeps_state := same and {*run.plan.tied} <= {RESIDUAL}:
                state = {name: before[name] for name in state}
            vectors = {name: np.zeros_like(model) for name in run.plan.vectors}
            rows = run.write_model(made, model, state | vectors)
        except StoreError as error:
            return error
        forms = make_forms(run.plan.encoding.down, model, run.digests.load(bases))
        return RestoredModel(model, state, vectors, forms, made, rows, keeps_state)

    def _end(self, request: RollBack, new: RestoredModel | StoreError, now: Clocks) -> list[Command]:
        """Write the rows with which it counts; then let the run go on."""
        if isinstance(new, StoreError):
            self._refuse(request, new.text)
            return []
        run = self._run
        answered = Metadata("rolled_back", request.name)
        rows = [*new.rows, answered, Metadata(TO_LOG, encode_roll_back(request))]
        if run.plan.tied:
            rows.append(TiedVectorsForgotten())
        heard = run.give_up_for(new, rows, now)
        self.newest = new.made.version
        self._run.log.warning(
            "rolled back (%s): version %d is version %d's model; the server optimizer %s",
            request.who, new.made.version, request.version,
            "goes on from that version's state" if new.keeps_state else "begins from the beginning",
        )  # fmt: skip
        self.log_last()
        self.look(now)
        return heard + run.record(run.engine.go_on_from_model(now.engine), now)
