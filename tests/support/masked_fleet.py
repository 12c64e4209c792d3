"""For tests: a run whose devices mask their updates and answer at once, and a helper beside it that
is asked by a call in place of a connection."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from answering import NOW, Fleet
from fleetlearn_coordinator.rounds.commands import Assign, Command
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import HelperBounds
from fleetlearn_coordinator.secure.helper_client import HelperRefusedError
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_coordinator.service.training_run.mask_sum import Answer, MaskQuestion
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import MODEL, UPDATE, Task, VectorReference
from fleetlearn_protocol.secure.helper_messages import MaskSumRefusal, write_message
from fleetlearn_protocol.vector import Vector
from helper_fleet import SecureDevice
from masked_peers import SECURE, MaskedUpload, masked_upload
from peers import SIZE


class CalledHelper:
    """A real helper with its file, asked by a call."""

    def __init__(self, folder: Path, devices: Iterable[str], minimum: int = 2) -> None:
        path = folder / "helper.sqlite"
        if not path.exists():
            make_helper_store(path, 0.0)
        store = HelperStore(path)
        store.enrol([(name, SecureDevice(name).public) for name in devices], 0.0)
        store.close()
        self.path = path
        self.core = Helper(path, HelperBounds(minimum, 1000, 10**6))

    @property
    def key(self) -> str:
        return self.core.card.key.hex()

    def ask(self, question: MaskQuestion) -> Answer:
        """Answer as ``ask_for_sum`` does over a connection."""
        found = self.core.answer(write_message(question.request))
        if isinstance(found, MaskSumRefusal):
            return HelperRefusedError(found)
        return np.frombuffer(found.words, "<u4").astype(np.uint32)

    def enrol(self, device: str) -> None:
        store = HelperStore(self.path)
        store.enrol([(device, SecureDevice(device).public)], 2.0)
        store.close()

    def revoke(self, device: str) -> None:
        store = HelperStore(self.path)
        store.revoke(device, 1.0)
        store.close()


def secure_settings(helper: CalledHelper, **changed: Any) -> dict[str, Any]:
    """Settings of a plan whose rounds take three masked updates, two at least."""
    return SECURE | {"round__goal": 3, "secure__key": helper.key} | changed


class MaskedFleet(Fleet):
    """A run whose devices mask."""

    @property
    def sums(self) -> Any:
        assert self.run.mask_sums is not None
        return self.run.mask_sums

    def task(self, lease: Assign) -> Task:
        """The task as its device is told it."""
        run = self.run
        digest = run.models.digest_of(lease.version)
        model = VectorReference(MODEL, digest, FLOAT32.size(SIZE), FLOAT32.name)
        shared = run.tasks.shared(lease.version, run.members.all[0])
        return msgspec.structs.replace(
            shared, task=lease.task, round=lease.round, vectors=(model,), seed=lease.seed
        )

    def save(self, lease: Assign, update: Vector, factor: float = 1.0) -> MaskedUpload:
        """Spool a masked update, and make its report durable."""
        upload = masked_upload(self.task(lease), lease.device, update, factor)
        blobs = self.store.blobs
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, upload.content)
        self.run.save_update(lease.device, upload.report, number, {UPDATE: 0.0})
        return upload

    def report_masked(self, lease: Assign, update: Vector) -> list[Command]:
        """The same, counted; what the engine then wants, carried out."""
        self.save(lease, update)
        return self.carry_out(self.run.engine.count_report(lease.device, lease.task, 0.0))

    def answer(self, helper: CalledHelper) -> list[Command]:
        """Ask the helper what there is to be asked, and do what follows."""
        question = self.sums.question
        assert question is not None
        return self.hear(question, helper.ask(question))

    def hear(self, question: MaskQuestion, answer: Answer) -> list[Command]:
        """Do what the server does with an answer."""
        heard = self.sums.answered(question, answer, NOW)
        return [*heard, *self.run.work.do_work(NOW)]
