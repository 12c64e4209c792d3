"""Rolling a run back: the model of an earlier version becomes the next version.

The open round is given up, and so is all that devices were doing for it. Versions keep rising and
history is kept; the row of the new model says which version it restores. The model's file is
written first, and then one batch of rows makes it the newest, ends the round and says that the
request is answered: a process that is killed before that finds the request again, one that is
killed afterwards finds it answered, and says in the audit log what the batch kept for it.

The server optimizer goes on from the state that is kept with the earlier version. What devices keep
cannot go back with the model. So with an algorithm that ties a part of the coordinator's state to
what devices keep (SCAFFOLD's c, FedDyn's h), all of it begins from zeros, as after a change of
algorithm."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.encodings import RESIDUAL
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.service.training_run.run_models import RunModels
from fleetlearn_coordinator.service.training_run.written_model import WrittenModel, write_model
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata, ModelMade, Row, TiedVectorsForgotten
from fleetlearn_coordinator.storage.requests import RollBack, decode_roll_back, encode_roll_back
from fleetlearn_coordinator.storage.run_storage import RunStorage
from fleetlearn_coordinator.storage.store import Store

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
            f"{storage.where} cannot be rolled back to version {version}; the newest is {newest}, "
            f"and it keeps {kept}"
        )
        raise StoreError(Code.UNKNOWN_CONTENT, text)


class RestoredModel(NamedTuple):
    """An earlier model as the next version, its file written. It does not count yet."""

    model: WrittenModel
    made: ModelMade
    keeps_state: bool
    """Whether the optimizer goes on from the earlier version's state."""


class RollBackWork(NamedTuple):
    """A roll back that can be carried out."""

    request: RollBack
    known: ModelMade
    """The earlier version."""
    made: ModelMade
    """The next version, which it becomes."""
    bases: Mapping[int, str]
    """As ``RunModels.bases_of`` returned them."""


class RollBacks:
    """What people ask of one run, and how it is done."""

    def __init__(
        self, plan: Plan, members: Members, store: Store, models: RunModels, log: RunLog
    ) -> None:
        self._plan, self._members, self._store, self._models = plan, members, store, models
        self._requests, self._log = store.storage.requests, log
        self._asked: tuple[RollBack, float] | None = None
        """What was asked for and is not done, and when it was found (Unix time)."""
        self.newest = store.ledger.rolled_back()
        """The newest version that a roll back made, or 0. What was measured of older ones ends no
        training."""
        self._answered: str | None = store.ledger.get("rolled_back")
        """The name of the request that was carried out last."""
        self._to_log: str | None = store.ledger.get(TO_LOG)
        """That request, while the audit log may not have it."""
        self.audit: Callable[[RollBack, ModelMade], None] | None = None
        """Writes into the audit log that an earlier model has become this one, unless it is there.
        May raise StoreUnavailableError. None while it is not known."""

    def look(self, wall: float) -> bool:
        """Return whether somebody asked for a roll back that was not carried out yet. ``wall``:
        Unix time."""
        found = self._requests.roll_back()
        if found is not None and found.name == self._answered:
            # A process that dies before its rows are safe must leave it to the next one.
            self._store.when_safe(self._remove_answered)
            found = None
        self._asked = None if found is None else (found, wall)
        return found is not None

    def _remove_answered(self) -> None:
        found = self._requests.roll_back()
        if found is not None and found.name == self._answered:
            self._requests.remove_roll_back()

    def log_last(self) -> None:
        """Let the audit log have the last roll back, if it does not yet: the process that carried
        it out may have died before."""
        made = self._store.model_made(self.newest)
        if self._to_log is None or made is None or self.audit is None:
            return
        try:
            self.audit(decode_roll_back(self._to_log), made)
        except StoreUnavailableError as error:
            self._log.error(
                "the audit log will have the roll back after the next start: %s", error.text
            )
        else:
            self._to_log = None
            self._store.write([Metadata(TO_LOG, None)])

    def versions_asked_for(self) -> list[int]:
        """Return the version that somebody asks for at this moment, if anybody does: its file is
        still needed. May be called in any thread."""
        found = self._requests.roll_back()
        return [] if found is None else [found.version]

    def next_work(self) -> RollBackWork | None:
        """Return the roll back that somebody asked for, or None. A request that cannot be carried
        out is refused, in the log."""
        if self._asked is None:
            return None
        request, at = self._asked
        models, store = self._models, self._store
        known = store.model_made(request.version)
        if request.version == models.newest.version or known is None:
            self.refuse(request, "it is the newest, or there is none of this number")
            return None
        if request.version not in store.blobs.model_versions():
            where = store.blobs.where_model(request.version)
            self.refuse(request, f"{where} is missing: it is not kept any more")
            return None
        version = models.newest.version + 1
        bases = {
            number: each
            for number, each in models.bases_of(version).items()
            if each != known.sha256
        }
        made = ModelMade(version, known.sha256, 0, at, restores=known.version)
        return RollBackWork(request, known, made, bases)

    def refuse(self, request: RollBack, why: object) -> None:
        """Do not carry a request out."""
        self._log.error("the run is not rolled back to version %d: %s", request.version, why)
        self._asked = None
        self._requests.remove_roll_back()

    def restore(self, work: RollBackWork) -> RestoredModel | StoreError:
        """Write the earlier model as the next version, in any thread. Returns why that cannot
        be."""
        rules, known = self._members.all[0].rules, work.known
        optimizer = rules.optimizer
        try:
            model, before = self._store.load_version(known)
            slots = optimizer.init(model)
            same = known.optimizer in (None, optimizer.name) and before.keys() >= slots.keys()
            if keeps_state := same and {*self._plan.tied} <= {RESIDUAL}:
                slots = {name: before[name] for name in slots}
            state = replace(
                self._models.newest,
                version=work.made.version,
                model=model,
                optimizer_state=slots,
                vectors={name: np.zeros_like(model) for name in self._plan.vectors},
            )
            state = self._members.rules.cut(state)
            rows = write_model(rules, self._store, work.made, state)
        except StoreError as error:
            return error
        forms = self._models.make_forms(model, work.bases)
        return RestoredModel(WrittenModel(state, forms, rows), work.made, keeps_state)

    def rows_of(self, request: RollBack, new: RestoredModel) -> list[Row]:
        """Return the rows with which the model counts."""
        answered = Metadata("rolled_back", request.name)
        rows = [*new.model.rows, answered, Metadata(TO_LOG, encode_roll_back(request))]
        return [*rows, TiedVectorsForgotten()] if self._plan.tied else rows

    def end(self, request: RollBack, new: RestoredModel, wall: float) -> None:
        """The model counts. ``wall``: Unix time."""
        self.newest = new.made.version
        self._answered, self._to_log = request.name, encode_roll_back(request)
        self._store.when_safe(self.log_last)
        self.look(wall)
