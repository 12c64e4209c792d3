"""From a clipped update, or from sums, to the report of a masked one: at once, or when the
coordinator has said what the update counts.

The package cryptography is imported where something is masked, and not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from fleetlearn_protocol.encodings import (
    FLOAT32,
    MASKED,
    MASKED64,
    find_encoding,
    masked_encoding,
)
from fleetlearn_protocol.messages import SUMS, UPDATE, Question, Report, SecureTask, Task
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.session.abilities import SECURE_NEEDS
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.unmasked import UnmaskedUpdate, report_of_unmasked
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.pairwise_sessions import PairwiseSessions
from fleetlearn_device.training.train import OutOfTimeError

if TYPE_CHECKING:
    from types import ModuleType

    from fleetlearn_protocol.computations.layout import Sums

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
    where they travel so. 0: it is not masked. ``elements``: of the update, or of the sums."""
    if not isinstance(task, Task) or task.secure is None:
        return 0
    if SUMS in task.parts:
        return MASKED64.size(elements)
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
    words: Words,
    directory: StateDirectory,
    sessions: PairwiseSessions | None = None,
) -> MaskedReport:
    """Mask an update, with a new seed, and return its report. An update is masked once.

    report: what is reported beside the part. words: as ``words_of_update`` or ``words_of_sums``
    returns. sessions: in which masks are agreed on, for tasks of that mode. Makes the device's key
    where there is none. Raises UnsupportedError, StateError, and what ``PairwiseSessions.masked``
    raises.
    """
    masking = import_masking()
    if task.secure is not None and task.secure.mode == "pairwise":
        assert sessions is not None  # such an update is never masked later
        return _masked_in_pairs(task, report, words, sessions)
    from fleetlearn_protocol.secure.about import about_update
    from fleetlearn_protocol.secure.task_terms import terms_of, update_of

    assert task.secure is not None
    bits = task.secure.bits
    terms = terms_of(task, len(words))
    about = about_update(terms, update_of(task, directory.device))
    upload = masking.mask_words(words, about, terms.helper, device_key(directory.path), bits)
    signed = {"sealed": upload.sealed, "signature": upload.signature}
    return _report_of(task, msgspec.structs.replace(report, **signed), upload.content)


def _report_of(task: Task, report: Report, content: memoryview) -> MaskedReport:
    """Return the report of a task's only part."""
    ((name, encoding),) = task.parts.items()  # the session has seen to that
    part = find_encoding(encoding).part(name, content)
    return MaskedReport(msgspec.structs.replace(report, parts=(part,)), content)


def _masked_in_pairs(
    task: Task, report: Report, words: Words, sessions: PairwiseSessions
) -> MaskedReport:
    from fleetlearn_protocol.formats.masked import words_to_bytes

    assert task.secure is not None
    width = masked_encoding(task.secure.bits).block_bytes
    return _report_of(task, report, words_to_bytes(sessions.masked(task, words), width))


def mask_pending(directory: StateDirectory, task_id: str, factor: float) -> Report:
    """Mask the update that waits in the outbox, make it durable so, and return its report.

    Raises UnsupportedError, StateError.
    """
    found, update = directory.outbox.unmasked_update(task_id)
    words = words_of_update(found.task, update, found.share, factor)
    made = masked_report(found.task, found.report, words, directory)
    directory.outbox.save_masked(*made)
    return made.report


def words_of_update(task: Task, update: Vector, share: float, factor: float) -> Words:
    """Return an update as whole numbers, without a mask: uint32, (P + 1,).

    update: float32, (P,), clipped. share: its weight. factor: what its staleness leaves of it.
    Raises UnsupportedError.
    """
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


def words_of_sums(task: Task, sums: Sums) -> Words:
    """Return the sums of a computation, int64, (S,), without a mask: uint32, (3 S,). Nothing of
    them is left out or rounded. Raises DataError where one is so large that the total might not
    fit: the coordinator, which could say so of plain sums, does not see it."""
    from fleetlearn_protocol.secure.whole_words import largest_sum, sums_to_words

    assert task.secure is not None
    assert task.secure.reports is not None  # the session has seen to both
    most = largest_sum(task.secure.reports)
    if sums.size and not -most <= int(sums.min()) <= int(sums.max()) <= most:
        raise DataError(
            f"a sum over the device's rows is beyond {most}, which is 2^62 divided by the "
            f"{task.secure.reports} devices of a round: the values or the rows are too many"
        )
    return sums_to_words(sums)
