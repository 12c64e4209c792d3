"""What a device signs of its task. Device and coordinator make it from the same task.

The training is in it so that a coordinator cannot single one device out by its task: with a
learning rate of 0 for all the others, the sum of a round would be the one device's update.
"""

from __future__ import annotations

import hashlib
import struct

from fleetlearn_protocol.messages import MODEL, StepSchedule, Task
from fleetlearn_protocol.secure.about import MaskedUpdate, MaskTerms, length_prefixed
from fleetlearn_protocol.task_names import run_of

_TRAINING = b"fleetlearn.v1 training"
_PAIRWISE = b"fleetlearn.v1 pairwise update"


def training_digest(task: Task) -> str:
    """Return the name of what is trained, and how: SHA-256, in hexadecimal digits.

    All devices of a sum must have signed the same. Of it are the fields of the task that decide
    what an update is; not of it are those that differ between devices (task, seed, deadline), and
    the model, which ``MaskedUpdate`` has. Integers are decimal digits, other numbers the 8 bytes of
    an IEEE 754 double, big-endian, null is empty, text is ASCII. Raises ValueError where the task
    is not masked.
    """
    secure = task.secure
    if secure is None:
        raise ValueError(f"task {task.task} has no `secure`, and nothing of it is signed")
    hyper = [(name.encode(), _double(task.hyper[name])) for name in sorted(task.hyper)]
    parts = [(name.encode(), task.parts[name].encode()) for name in sorted(task.parts)]
    fields = (
        task.algorithm.encode(),
        _integer(task.epochs),
        _integer(task.batch_size),
        _integer(task.personal_epochs),
        _double(task.clip),
        _integer(secure.bits),
        _integer(secure.most_weight),
        _double(secure.least_factor),
        _double(secure.noise),
        _integer(len(hyper)),
        *(content for pair in hyper for content in pair),
        _integer(len(parts)),
        *(content for pair in parts for content in pair),
        *_schedule(task.schedule),
    )
    return hashlib.sha256(length_prefixed((_TRAINING, *fields))).hexdigest()


def terms_of(task: Task, size: int) -> MaskTerms:
    """Return what the task's update has in common with those that it is added to.

    size: Words of the update as it is masked, the weight included. Raises ValueError where the
    task is not masked, or without a helper.
    """
    if task.secure is None or task.secure.helper is None:
        raise ValueError(f"task {task.task} has no helper that a seed could be sealed for")
    return MaskTerms(
        bytes.fromhex(task.secure.helper),
        run_of(task.task),
        task.bundle,
        size,
        task.secure.minimum,
        training_digest(task),
        task.secure.least_factor is None,
    )


def update_of(task: Task, device: str) -> MaskedUpdate:
    """Return which update it is. ``device``: who trains."""
    return MaskedUpdate(device, task.task, task.round, task.vector(MODEL).sha256)


def pairwise_about(task: Task, size: int) -> bytes:
    """Return what the update of a task with pairwise masks is about, 32 bytes: the same for all
    devices of a session that are told to do the same. ``size``: as for ``terms_of``."""
    names = (run_of(task.task), str(task.round), task.bundle, task.vector(MODEL).sha256, str(size))
    texts = [text.encode() for text in (*names, training_digest(task))]
    return hashlib.sha256(length_prefixed((_PAIRWISE, *texts))).digest()


def _schedule(schedule: StepSchedule | None) -> tuple[bytes, ...]:
    """Return the fields of a schedule; none where the task has none."""
    if schedule is None:
        return ()
    return (
        schedule.kind.encode(),
        _integer(schedule.warm_up),
        _double(schedule.start),
        _integer(schedule.every),
        _double(schedule.factor),
        _integer(schedule.steps),
        _double(schedule.least),
        _integer(schedule.first),
    )


def _integer(value: int | None) -> bytes:
    return b"" if value is None else str(value).encode()


def _double(value: float | None) -> bytes:
    return b"" if value is None else struct.pack(">d", value)
