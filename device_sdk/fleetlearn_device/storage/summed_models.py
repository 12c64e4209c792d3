"""summed_models.json: the models of which the device has let a sum of updates be unmasked.

It does so once for each model of a run: of two sums of updates of one model, with other devices in
them, the difference could be one device's update. What is written counts before the coordinator is
told anything.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

log = logging.getLogger("fleetlearn.device")
KEPT = 200
"""Models that are remembered, the last ones."""
FILE = "summed_models.json"


class ModelsFile(msgspec.Struct, frozen=True):
    """The contents of summed_models.json."""

    models: tuple[str, ...]
    """Names of runs and models (``_name``), the last one at the end."""


class SummedModels:
    """The file in a state directory. Opening it, and ``add``, raise StateError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._models: tuple[str, ...] = ()
        with os_errors_as_state_errors(self._path):
            try:
                self._models = read_checked_json(self._path.read_bytes(), ModelsFile).models
            except FileNotFoundError:
                pass
            except msgspec.DecodeError as error:
                raise StateError(
                    f"{self._path} is damaged ({error}): of which models sums were unmasked is not "
                    "known any more. Delete the file to let the device take part again"
                ) from None

    def has(self, run: str, model: str) -> bool:
        """Return whether a sum of this model was unmasked. ``model``: its SHA-256."""
        return _name(run, model) in self._models

    def add(self, run: str, model: str) -> None:
        """Remember, durably, that a sum of this model is unmasked."""
        models = (*self._models, _name(run, model))[-KEPT:]
        with os_errors_as_state_errors(self._path):
            write_durably(self._path, checked_json(ModelsFile(models)))
        self._models = models


def _name(run: str, model: str) -> str:
    return hashlib.sha256(f"{run} {model}".encode()).hexdigest()[:32]
