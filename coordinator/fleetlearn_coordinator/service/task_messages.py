"""The messages by which devices get tasks and questions."""

from __future__ import annotations

import msgspec
from fleetlearn_protocol.encodings import is_own
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS
from fleetlearn_protocol.messages import UPDATE, Question, Task, VectorReference

from fleetlearn_coordinator.rounds.commands import Ask, Assign
from fleetlearn_coordinator.service.served_models import ServedModels
from fleetlearn_coordinator.service.training_run.run import Run


def task_message(run: Run, models: ServedModels, lease: Assign, now: float) -> Task:
    """Return the task that a device is given, and let it fetch what the task needs. ``now``: in
    seconds on the engine's clock."""
    device = lease.device
    member = run.members.of_task(lease.task)
    vectors = models.references(device, lease.version, member, run.plan.vectors)
    parts = models.parts_of(device, member)
    return msgspec.structs.replace(
        run.tasks.shared(lease.version, member),
        task=lease.task,
        round=lease.round,
        vectors=vectors,
        parts=parts,
        encoding=run.plan.encoding.own if is_own(parts.get(UPDATE, "")) else None,
        seed=lease.seed,
        deadline=max(0.0, lease.deadline - now),
        kept=run.tied_to(device),
        secure=run.secure_of(device),
    )


def question_message(run: Run, models: ServedModels, lease: Ask, now: float) -> Question:
    """Return the question of an exchange that a device is asked, and let it fetch what the question
    needs. ``now``: in seconds on the engine's clock."""
    bundle: str | None = None
    vectors: tuple[VectorReference, ...] = ()
    content = run.exchanges[lease.kind].content(lease)
    kind = EXCHANGE_KINDS[lease.kind]
    if kind.listed is not None:  # it sends the models of members by their names
        listed = list(map(run.members.named, content[kind.listed]))
        bundle = listed[0].bundle.sha256
        vectors = tuple(
            msgspec.structs.replace(reference, name=member.name)
            for member in listed
            for reference in models.references(lease.device, lease.version, member)
        )
    elif kind.vectors:
        member = run.members.of_device(lease.device)
        bundle = member.bundle.sha256
        vectors = models.references(lease.device, lease.version, member)
    return Question(
        task=lease.task,
        kind=lease.kind,
        deadline=max(0.0, lease.deadline - now),
        phase=lease.phase,
        content=content,
        bundle=bundle,
        vectors=vectors,
    )
