"""Which models and vectors a run's tasks name: the SHA-256 of each version of the model, and of what is beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetlearn_protocol.messages import MODEL
from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_coordinator.storage.errors import StoreError

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.training_run.run import Run

DELTA_BASES = 2
"""Models before the newest from which devices are sent differences: their files are kept."""


class ModelDigests:
    """The SHA-256 of a run's newest model and of earlier ones."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._beside: dict[int, Mapping[str, str]] = {}
        """Version -> SHA-256 of the vectors beside its model, by name, for some versions from the oldest in use on."""

    def of_model(self, version: int) -> str:
        """Return the SHA-256 of a version's model."""
        run = self._run
        return run.model_digest if version == run.engine.version else run.store.ledger.model_digest(version)

    def of_version(self, version: int, beside: Collection[str]) -> dict[str, str]:
        """Return the SHA-256 of a version's model and of the vectors ``beside`` it, by name. Of a version that has no
        such vector, because the algorithm was another one then or its file is gone, the newest vector's."""
        newest = self._run.vector_digests
        in_file = beside and version != self._run.engine.version
        older = self._in_file(version) if in_file else {}
        return {MODEL: self.of_model(version), **{name: older.get(name, newest[name]) for name in beside}}

    def _in_file(self, version: int) -> Mapping[str, str]:
        """Return the SHA-256 of the vectors beside an older model, by name, as far as its file is there."""
        if version not in self._beside:
            self._beside[version] = {}
            with suppress(StoreError):
                run = self._run
                vectors = run.store.load_vectors(version, self.of_model(version), run.plan.vectors)
                self._beside[version] = {name: digest(vector) for name, vector in vectors.items()}
        return self._beside[version]

    def begin_version(self, version: int, oldest: int | None) -> None:
        """This version becomes the newest. ``oldest``: the oldest that is in use; None: none of the earlier ones is."""
        kept = {} if oldest is None else {number: each for number, each in self._beside.items() if number >= oldest}
        self._beside = {**kept, version: self._run.vector_digests}

    # Bases of differences

    def bases_of(self, version: int) -> dict[int, str]:
        """Return version -> SHA-256, for the models before this version from which devices are sent differences."""
        run = self._run
        if run.plan.encoding.down != "delta":
            return {}
        numbers = range(max(0, version - DELTA_BASES), version)
        return {number: run.store.ledger.model_digest(number) for number in numbers}

    def load(self, digests: Mapping[int, str]) -> dict[str, Vector]:
        """Return SHA-256 -> model, for those of these versions whose files are there. May be called in any thread."""
        found = {}
        for number, sha256 in digests.items():
            with suppress(StoreError):
                found[sha256] = self._run.store.load_parameters(number, sha256)
        return found
