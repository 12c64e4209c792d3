"""A run's newest model, and what its tasks name of it and of earlier versions: their SHA-256."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from fleetlearn_protocol.encodings import FLOAT16
from fleetlearn_protocol.messages import MODEL
from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_coordinator.aggregation import adaptive_mu
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.sent_models import Forms, half_of, make_forms
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.training_run.members import Members, RunMember
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.store import Store

DELTA_BASES = 2
"""Models before the newest from which devices are sent differences: their files are kept."""


class RunModels:
    """The newest model of a run, and the digests of earlier ones."""

    def __init__(self, plan: Plan, members: Members, store: Store, newest: ModelState) -> None:
        self._plan, self._members, self._store = plan, members, store
        self.newest = newest
        self.forms = self.make_forms(newest.model, self.bases_of(newest.version))
        """In which each member's newest model travels beside float32."""
        self._of_members: dict[int, Mapping[str, str]] = {}
        """Version -> SHA-256 of each member's model, by name, for some versions of a family from
        the oldest in use on."""
        self._beside: dict[int, Mapping[str, str]] = {}
        """Version -> SHA-256 of the vectors beside its model, by name, for some versions from the
        oldest in use on."""
        self._half: dict[int, str] = {}
        """Version -> SHA-256 of its model as float16, of some earlier ones."""
        self._mu: dict[int, float] = {}
        """Version -> the mu of the tasks that begin from it, or from a later one up to the next
        here."""
        if plan.local.adaptive_mu:
            # Tasks that an earlier process gave may begin from any of these versions.
            most = (plan.staleness.max or 0) + 1
            for made, summary in store.ledger.committed_rounds(most):
                first = members.all[0].hyper["mu"]
                self._mu[made] = adaptive_mu.state_after(summary, first).mu

    def digest_of(self, version: int) -> str:
        """Return the SHA-256 of a version's model: of a family, of all members' vectors
        together."""
        if version == self.newest.version:
            return self.newest.digest
        made = self._store.model_made(version)
        assert made is not None
        return made.sha256

    def sent_digest(self, version: int) -> str:
        """Return the SHA-256 of a version's model as devices have it that know every encoding, as
        those do that mask their updates."""
        if self._plan.encoding.down != FLOAT16.name:
            return self.digest_of(version)
        if version == self.newest.version:
            return self.forms[0].half or self.newest.digest
        if version not in self._half:
            half = half_of(self.load_model(version))
            self._half[version] = self.digest_of(version) if half is None else digest(half)
        return self._half[version]

    def member_digest(self, version: int, member: RunMember) -> str:
        """Return the SHA-256 of a member's model. Raises StoreError where it has to be read, and is
        missing or damaged."""
        if not self._members.is_family:
            return self.digest_of(version)
        if version == self.newest.version:
            return self.newest.members[member.number].digest
        if version not in self._of_members:
            models = self._members.rules.models_of(self.load_model(version))
            self._of_members[version] = {name: digest(each) for name, each in models.items()}
        return self._of_members[version][member.name]

    def member_state(self, member: RunMember) -> ModelState:
        """Return the state at a member's newest model."""
        return self._members.states_of(self.newest)[member.number]

    def digests_of(
        self, version: int, beside: Collection[str], member: RunMember
    ) -> dict[str, str]:
        """Return the SHA-256 of a member's model of this version and of the vectors ``beside`` it,
        by name. Of a version that has no such vector, because the algorithm was another one then or
        its file is gone, the newest vector's. Raises as ``member_digest`` does."""
        newest = self.newest.vector_digests
        in_file = beside and version != self.newest.version
        older = self._in_file(version) if in_file else {}
        vectors = {name: older.get(name, newest[name]) for name in beside}
        return {MODEL: self.member_digest(version, member), **vectors}

    def _in_file(self, version: int) -> Mapping[str, str]:
        """Return the SHA-256 of the vectors beside an older model, by name, as far as its file is
        there."""
        if version not in self._beside:
            self._beside[version] = {}
            with suppress(StoreError):
                sha256 = self.digest_of(version)
                vectors = self._store.load_vectors(version, sha256, self._plan.vectors)
                self._beside[version] = {name: digest(vector) for name, vector in vectors.items()}
        return self._beside[version]

    def load_model(self, version: int) -> Vector:
        """Return a version's model, float32, shape (P,). Raises StoreError (missing, damaged)."""
        if version == self.newest.version:
            return self.newest.model
        return self._store.load_parameters(version, self.digest_of(version))

    def hyper_of(self, version: int, member: RunMember) -> dict[str, float]:
        """Return the hyper-parameters of the tasks that begin from this version of a member."""
        hyper = self._plan.hyper_of(version, member.hyper)
        if not self._plan.local.adaptive_mu:
            return hyper
        if version == self.newest.version:
            return {**hyper, "mu": self.newest.mu.mu}
        before = [made for made in self._mu if made <= version]
        mu = self._mu[max(before)] if before else hyper["mu"]
        return {**hyper, "mu": mu}

    def begin_version(self, newest: ModelState, forms: Sequence[Forms], oldest: int | None) -> None:
        """This model becomes the newest. ``oldest``: the oldest version that is in use; None: none
        of the earlier ones is."""
        self.newest, self.forms = newest, [*forms]
        if self._plan.local.adaptive_mu:
            self._mu[newest.version] = newest.mu.mu
        kept = dict[int, Mapping[str, str]]()
        if oldest is not None:
            kept = {number: each for number, each in self._beside.items() if number >= oldest}
        self._beside = {**kept, newest.version: newest.vector_digests}
        self._of_members = {
            number: each
            for number, each in self._of_members.items()
            if oldest is not None and number >= oldest
        }
        self._half = (
            {}
            if oldest is None
            else {number: each for number, each in self._half.items() if number >= oldest}
        )

    def free(self) -> None:
        """Let the newest model, and all that is as large, be freed now."""
        empty = np.empty(0, np.float32)
        before = self.newest
        freed = ModelState(before.version, empty, {}, {}, before.weighing, before.mu)
        self.newest = replace(freed, members=tuple(freed for _ in before.members))
        self.forms = [Forms() for _ in self._members.all]

    # Bases of differences

    def bases_of(self, version: int) -> dict[int, str]:
        """Return version -> SHA-256, for the models before this version from which devices are sent
        differences."""
        if self._plan.encoding.down != "delta":
            return {}
        # A canary's run may begin at any version: there is none before that.
        numbers = [
            number
            for number in range(max(0, version - DELTA_BASES), version)
            if number == self.newest.version or self._store.model_made(number) is not None
        ]
        return {number: self.digest_of(number) for number in numbers}

    def make_forms(self, model: Vector, bases: Mapping[int, str]) -> list[Forms]:
        """Return the forms in which each member's model travels beside float32. ``model``: the
        run's vector. ``bases``: as ``bases_of`` returned them; those whose files are gone are left
        out. May be called in any thread."""
        members, down = self._members, self._plan.encoding.down
        earlier: list[dict[str, Vector]] = [{} for _ in members.all]
        for number, sha256 in bases.items():
            with suppress(StoreError):
                base = self._store.load_parameters(number, sha256)
                for member in members.all:
                    part = base[member.place]
                    own = digest(part) if members.is_family else sha256
                    earlier[member.number][own] = part
        return [
            make_forms(down, model[member.place], earlier[member.number]) for member in members.all
        ]
