"""The distillation of a round's models: what the worker process is asked, and what follows from its
answers.

It is the run's refiner (``refining.py``): the round is averaged, and its models are not written
yet. Nothing of a distillation is stored: whoever dies, the next process averages again, and asks
the same. Nothing here asks, or reads a clock: ``service/distil_asker.py`` does, and hands the
answers in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from fleetlearn_protocol.distillation import DistillationJob, Distilled
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.device_models import DeviceModel, device_model
from fleetlearn_coordinator.plan.distil_job import failed_summary, is_due, job_of, summary_of
from fleetlearn_coordinator.plan.distil_section import DistilSection
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.service.training_run.refining import AveragedRound
from fleetlearn_coordinator.service.worker_process import WorkerAnswer
from fleetlearn_coordinator.storage.blobs import StoredBytes

BYTES = 4
"""Of an element."""


class Refined(Protocol):
    """Takes the models of a refined round: ``RoundWork.refined``."""

    def __call__(
        self, number: int, models: Mapping[str, Vector], about: Mapping[str, Any]
    ) -> None: ...


class ModelBytes:
    """``storage.blobs.StoredBytes``: a device's model, made as it is read."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self.size = BYTES * model.base.size

    def read(self, begin: int, size: int) -> bytes:
        return _bytes_of(self._model.read(begin // BYTES, (begin + size) // BYTES))


def _bytes_of(vector: Vector) -> bytes:
    return vector.astype("<f4", copy=False).tobytes()


class DistilQuestion(msgspec.Struct, frozen=True, eq=False):
    """What the worker process is to be asked. Each round has its own object."""

    round: int
    job: DistillationJob
    content: Sequence[bytes | StoredBytes]


class Distilling:
    """``refining.Refiner``: which distillation a run waits for."""

    def __init__(
        self,
        distil: DistilSection,
        seed: int,
        members: Members,
        engine: Engine,
        log: RunLog,
        refined: Refined,
    ) -> None:
        """``seed``: the plan's."""
        self._distil, self._seed, self._members = distil, seed, members.all
        self._engine, self._log, self._refined = engine, log, refined
        self.keeps_updates = distil.teachers == "devices"
        self.waits_on = f"the models are being distilled, in {distil.steps} steps"
        self.question: DistilQuestion | None = None
        """What is to be asked now. None: nothing."""
        self._tries = 0
        self._trouble = ""
        """Why the worker process has not done it."""
        self.changed: Callable[[], None] = lambda: None
        """Called when ``question`` is another one."""

    def begin(self, averaged: AveragedRound) -> None:
        """Ask for the distillation of a round's models, if it is due."""
        if not is_due(self._distil, averaged.version):
            self._refined(averaged.number, {}, {})
            return
        names = [member.name for member in self._members]
        changed = [
            place
            for place, name in enumerate(names)
            if not np.array_equal(averaged.before[name], averaged.models[name])
        ]
        content = [_bytes_of(averaged.models[names[place]]) for place in changed]
        teachers, models = self._teachers(averaged)
        if models is None:
            text = "devices reported before the plan had [distil], and their models are not kept"
            self._do_without(averaged.number, text)
            return
        if not changed:
            self._refined(averaged.number, {}, {})
            return
        version = averaged.version
        job = job_of(self._distil, self._seed, version, changed, teachers)
        self._tries, self._trouble = 0, ""
        self.question = DistilQuestion(averaged.number, job, [*content, *models])
        self._say_that_it_waits()
        self.changed()

    def _teachers(
        self, averaged: AveragedRound
    ) -> tuple[list[int], Sequence[bytes | StoredBytes] | None]:
        """Return the place of each teacher's member, and the teachers' models. None: they are not
        all there."""
        if not self.keeps_updates:
            models = [_bytes_of(averaged.models[member.name]) for member in self._members]
            return [*range(len(models))], models
        places, found = list[int](), list[StoredBytes]()
        for report in averaged.updates:
            member = self._members[report.columns.member]
            base = averaged.before[member.name]
            model = device_model(base, report.columns, 0, member.rules.buffers)
            if model is None:
                return [], None
            places.append(member.number)
            found.append(ModelBytes(model))
        return places, found

    def answered(self, question: DistilQuestion, answer: WorkerAnswer) -> None:
        """The process has answered, or could not: have the models written, or wait. An answer to
        another question than the present one changes nothing."""
        if question is not self.question:
            return
        if "error" in answer.fields:
            self._wait(answer.fields["error"])
            return
        self.forget()
        if "diverged" in answer.fields:
            # It would diverge again, and the mean is a model too.
            self._do_without(question.round, answer.fields["diverged"])
            return
        job, models = question.job, dict[str, Vector]()
        found, begin = msgspec.convert(answer.fields["students"], list[Distilled]), 0
        for place in job.students:
            member = self._members[place]
            taught = np.frombuffer(answer.content, "<f4", member.size, begin)
            models[member.name] = taught.astype(np.float32)
            begin += BYTES * member.size
        about = summary_of(job, found, [member.name for member in self._members])
        for name, each in zip(models, found, strict=True):
            self._log.info(
                "round %d: %s distilled from %d models: loss %.4g before, %.4g after",
                question.round,
                f"member {name}" if name else "the model",
                len(job.teachers),
                each.loss_before,
                each.loss_after,
                extra=said("distilled", round=question.round, member=name, **about),
            )
        self._refined(question.round, models, about)

    def _do_without(self, round: int, why: str) -> None:
        self._log.error(
            "round %d is not distilled, and has the mean of its updates: %s",
            round,
            why,
            extra=said("not-distilled", round=round, why=why),
        )
        self._refined(round, {}, failed_summary(why))

    def _wait(self, why: str) -> None:
        self._tries += 1
        if why != self._trouble:  # said once, however often it is tried
            self._trouble = why
            self._log.error(
                "round %d waits for its distillation: %s",
                self._engine.round,
                why,
                extra=said("distillation-waits", round=self._engine.round, why=why),
            )
        self._say_that_it_waits()

    def _say_that_it_waits(self) -> None:
        assert self.question is not None
        job = self.question.job
        text = (
            f"round {self.question.round} is being distilled, from {len(job.teachers)} models in "
            f"{job.steps} steps"
        )
        if self._trouble:
            times = "once" if self._tries == 1 else f"{self._tries} times"
            text = (
                f"{text}. The process for it was asked {times}, and will be asked again: "
                f"{self._trouble}"
            )
        self._engine.waits_on = text

    def forget(self) -> None:
        """The answer to a question that is under way changes nothing."""
        if self.question is not None:
            self.question = None
            self.changed()
