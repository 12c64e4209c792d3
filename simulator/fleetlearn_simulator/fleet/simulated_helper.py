"""Masks of simulated devices, and the helper that adds them up: its own code, with its file in a
temporary folder.

What devices draw at random follows from the simulation's seed here: it hides nothing from anybody
who knows the scenario. An update takes 0.3 ms more than without masks.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import HelperBounds
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_protocol.messages import MOST_REPORTS
from fleetlearn_protocol.secure.about import MaskedUpdate, MaskTerms, about_update, signed_seed
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.helper_messages import (
    MaskSumRefusal,
    MaskSumRequest,
    SealedReport,
    write_message,
)
from fleetlearn_protocol.secure.masks import MaskAdder
from fleetlearn_protocol.secure.sealed import seal
from fleetlearn_protocol.task_names import run_of

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.keyed_random import secret_bytes

TRAINING = sha256(b"simulated training").hexdigest()
"""What devices sign of their training: all of a simulation train the same."""


class HelperTerms(NamedTuple):
    """What a plan says of its masks."""

    bundle: str
    """SHA-256 of the bundle's manifest, in hexadecimal digits."""
    size: int
    """Words of a masked update."""
    minimum: int
    one_model: bool
    """Whether all updates of a sum began from one model."""


class SimulatedHelper:
    """A helper in the simulator's own process, and the devices' side of it."""

    def __init__(self, seed: int, terms: HelperTerms, prefix: str) -> None:
        """``seed``: of the simulation. ``prefix``: of all tasks' names."""
        self._seed = seed
        folder = Path(mkdtemp(prefix="fleetlearn-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._file = folder / "helper.sqlite"
        make_helper_store(self._file, 0.0)
        bounds = HelperBounds(terms.minimum, MOST_REPORTS, terms.size)
        self._helper = Helper(self._file, bounds, clock=lambda: 0.0)
        key, run = self._helper.card.key, run_of(prefix)
        self._terms = MaskTerms(
            key, run, terms.bundle, terms.size, terms.minimum, TRAINING, terms.one_model
        )
        self._enrolled: set[str] = set()
        self._reports: list[SealedReport] = []
        """Of the open round."""

    def begin_round(self) -> None:
        """A round opens: nothing is in its sum."""
        self._reports = []

    def mask(self, words: Words, tasks: RunningTasks, rows: slice) -> None:
        """Add each device's mask to its words, in place: uint32, (n, P + 1)."""
        adder = MaskAdder(words.shape[1])
        for row, index in zip(words, range(len(tasks.task))[rows], strict=False):
            adder.add(row, self._mask_seed(tasks, index))

    def accept(self, tasks: RunningTasks, rows: slice, model_of: Callable[[int], str]) -> None:
        """The masked updates of these tasks count. ``model_of``: round -> SHA-256 of the model that
        its tasks began from."""
        models = {round: model_of(round) for round in {*tasks.round[rows]}}
        for index in range(len(tasks.task))[rows]:
            name, task, round = tasks.name[index], tasks.task[index], tasks.round[index]
            update = MaskedUpdate(name, task, round, models[round])
            about = about_update(self._terms, update)
            sealed = seal(self._mask_seed(tasks, index), self._terms.helper, about)
            signature = self._key_of(name).sign(signed_seed(about, sealed))
            self._reports.append(SealedReport(*update, sealed, signature))

    def sum_of_masks(self) -> Words:
        """Ask for the sum of the masks of the round's updates: uint32, (P + 1,). Raises
        SimulatorError where the helper refuses."""
        self._enrol([report.device for report in self._reports])
        asked = MaskSumRequest(*self._terms, reports=tuple(self._reports))
        answer = self._helper.answer(write_message(asked))
        if isinstance(answer, MaskSumRefusal):
            raise SimulatorError(
                f"the helper does not add the masks of {len(self._reports)} updates up "
                f"({answer.name.value}): {answer.text}"
            )
        return np.frombuffer(answer.words, "<u4").astype(np.uint32)

    def _enrol(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._enrolled]
        roster = [(name, self._key_of(name).public_key().public_bytes_raw()) for name in new]
        with closing(HelperStore(self._file)) as store:
            store.enrol(roster, 0.0)
        self._enrolled.update(new)

    def _key_of(self, name: str) -> Ed25519PrivateKey:
        own = secret_bytes(self._seed, f"key of {name}")
        return Ed25519PrivateKey.from_private_bytes(own)

    def _mask_seed(self, tasks: RunningTasks, index: int) -> bytes:
        return secret_bytes(self._seed, "mask", tasks.device[index], tasks.seed[index])
