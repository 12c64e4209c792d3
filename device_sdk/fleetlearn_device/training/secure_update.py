"""From a clipped update to the report of a masked one: at once, or when the coordinator has said
what the update counts.

The package cryptography is imported where something is masked, and not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from fleetlearn_protocol.encodings import FLOAT32, MASKED, masked_encoding
from fleetlearn_protocol.messages import UPDATE, Question, Report, SecureTask, Task
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.session.abilities import SECURE_NEEDS
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.unmasked import UnmaskedUpdate, report_of_unmasked
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.pairwise_sessions import PairwiseSessions
from fleetlearn_device.training.train import OutOfTimeError

if TYPE_CHECKING:
    from types import ModuleType

CUT_SHORT = (
    "the training was cut short, and such an update is not masked: where others have learned less, "
    "a sum tells more of one device"
)


class MaskedReport(NamedTuple):
    """A masked update, ready to be saved and sent."""

    report: Report
    content: memoryview
    """The bytes of its one part."""


def import_masking() -> ModuleType:
    """Return ``training.masking``. Raises UnsupportedError where cryptography is not installed."""
    try:
        return import_module("fleetlearn_device.training.masking")
    except ImportError as error:
        raise UnsupportedError(f"{SECURE_NEEDS} ({error})") from None


def check_helper(task: Task) -> None:
    """Raise UnsupportedError where nothing can be sealed for the task's helper: before anything is
    fetched or trained."""
    secure = task.secure
    if secure is None or secure.helper is None:
        return
    import_masking()
    from fleetlearn_protocol.secure.sealed import can_seal_for

    if not can_seal_for(bytes.fromhex(secure.helper)):
        raise UnsupportedError(
            f"the task's helper has the key {secure.helper}, which is of small order: anybody "
            "could open what is sealed for it"
        )


def check_whole(task: Task, *, complete: bool) -> None:
    """Raise OutOfTimeError where a masked task's training was cut short.

    The time that a device has is not among what all devices of a sum sign, as it differs between
    them: a coordinator that leaves all others the time for one step would have a sum that is
    nearly one device's update.
    """
    if task.secure is not None and not complete:
        raise OutOfTimeError(CUT_SHORT)


def trained_parts(task: Task) -> dict[str, str]:
    """Return the parts, with their encodings, that training leaves: of a masked task the clipped
    update as float32."""
    return dict(task.parts) if task.secure is None else {UPDATE: FLOAT32.name}


def room_for(task: Task, elements: int) -> tuple[int, int]:
    """Return (bytes of the masked update, bytes of the unmasked one while it waits on the disk) of
    a task with ``secure``. ``elements``: of the update."""
    assert task.secure is not None
    waits = task.secure.least_factor is not None
    encoding = masked_encoding(task.secure.bits)
    masked = encoding.size(encoding.elements(elements))
    return masked, FLOAT32.size(elements) if waits else 0


def masked_memory(task: Task | Question, elements: int) -> int:
    """Return the bytes of memory that a task's masked update takes: words of 4 bytes, and of 3 too
    where they travel so. 0: it is not masked."""
    if not isinstance(task, Task) or task.secure is None:
        return 0
    held = {MASKED, masked_encoding(task.secure.bits)}
    return sum(encoding.size(encoding.elements(elements)) for encoding in held)


def share_of_task(task: Task, examples: int) -> float:
    """Return what the device's update weighs, as a share of the largest weight."""
    assert task.secure is not None
    share: float = import_masking().share_of(examples, task.secure.most_weight)
    return share


def unmasked_update(
    task: Task, report: Report, content: memoryview, share: float
) -> UnmaskedUpdate:
    """Return what is kept of an update that is masked later. content: the bytes of the clipped
    update, float32."""
    return UnmaskedUpdate(task, share, report_of_unmasked(report, content))


def masked_report(
    task: Task,
    report: Report,
    update: Vector,
    share: float,
    factor: float,
    directory: StateDirectory,
    sessions: PairwiseSessions | None = None,
) -> MaskedReport:
    """Mask an update, with a new seed, and return its report. An update is masked once.

    report: what is reported beside the parts. update: float32, (P,), clipped. share: its weight.
    factor: what its staleness leaves of it. sessions: in which masks are agreed on, for tasks of
    that mode. Makes the device's key where there is none. Raises UnsupportedError, StateError, and
    what ``PairwiseSessions.masked`` raises.
    """
    masking = import_masking()
    if task.secure is not None and task.secure.mode == "pairwise":
        assert sessions is not None  # such an update is never masked later
        return _masked_in_pairs(task, report, _words(task, update, share, factor), sessions)
    from fleetlearn_protocol.secure.about import about_update
    from fleetlearn_protocol.secure.task_terms import terms_of, update_of

    assert task.secure is not None
    words, bits = _words(task, update, share, factor), task.secure.bits
    terms = terms_of(task, len(words))
    about = about_update(terms, update_of(task, directory.device))
    upload = masking.mask_words(words, about, terms.helper, device_key(directory.path), bits)
    part = masked_encoding(bits).part(UPDATE, upload.content)
    masked = {"parts": (part,), "sealed": upload.sealed, "signature": upload.signature}
    return MaskedReport(msgspec.structs.replace(report, **masked), upload.content)


def _masked_in_pairs(
    task: Task, report: Report, words: Words, sessions: PairwiseSessions
) -> MaskedReport:
    from fleetlearn_protocol.formats.masked import words_to_bytes

    assert task.secure is not None
    encoding = masked_encoding(task.secure.bits)
    content = words_to_bytes(sessions.masked(task, words), encoding.block_bytes)
    report = msgspec.structs.replace(report, parts=(encoding.part(UPDATE, content),))
    return MaskedReport(report, content)


def mask_pending(directory: StateDirectory, task_id: str, factor: float) -> Report:
    """Mask the update that waits in the outbox, make it durable so, and return its report.

    Raises UnsupportedError, StateError.
    """
    found, update = directory.outbox.unmasked_update(task_id)
    made = masked_report(found.task, found.report, update, found.share, factor, directory)
    directory.outbox.save_masked(*made)
    return made.report


def _words(task: Task, update: Vector, share: float, factor: float) -> Words:
    """Return the update as whole numbers, without a mask."""
    secure: SecureTask | None = task.secure
    assert secure is not None
    assert task.clip is not None  # the session has seen to both
    masking, numbers = import_masking(), (share, factor, task.clip, secure.bits)
    words: Words
    try:
        if secure.noise is None:
            words = masking.counted_words(update, *numbers)
        else:
            words = masking.counted_words_with_noise(update, *numbers, secure.noise)
    except ValueError as error:
        raise UnsupportedError(f"the update cannot be masked: {error}") from None
    return words
