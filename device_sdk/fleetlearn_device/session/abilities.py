"""What of a task this device can do: vectors, parts, encodings, algorithms, noise, masks."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlearn_protocol.algorithms import EXCHANGES, OWN
from fleetlearn_protocol.encodings import (
    FAMILIES,
    FLOAT32,
    FLOATS,
    INT64,
    MASKED64,
    MASKED_NAMES,
    UINT32,
    is_known,
    is_own,
    leaves_residual,
    masked_encoding,
)
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, content_of
from fleetlearn_protocol.messages import (
    BUFFERS,
    PLAIN,
    ROWS,
    SUMS,
    UPDATE,
    Question,
    SecureTask,
    Task,
)
from fleetlearn_protocol.secure.fixed_point import (
    MODULUS_BITS,
    PART_BITS,
    modulus_bits,
    most_updates,
)

PRIVACY = ("clip", "local-noise")
"""What this SDK can do for privacy, as a check-in says it."""
SECURE_PRIVACY = ("secure", "secure-noise")
"""What it can do beside that where the package cryptography is there."""
SECURE_NEEDS = (
    "secure aggregation needs the package cryptography on the device: pip install "
    '"fleetlearn[device,secure]"'
)


def unsupported(
    task: Task | Question,
    algorithms: Sequence[str],
    exchanges: Sequence[str],
    *,
    can_mask: bool = False,
) -> str | None:
    """Return what of the task this device cannot do, for people; None if it can do all.

    algorithms: those that the device knows beside ``plain``. exchanges: the kinds of questions that
    it can answer. can_mask: whether it has what secure aggregation needs. Raises ProtocolError
    (bad-message) on a question whose content is not as its kind says.
    """
    if isinstance(task, Question):
        return _unknown_question(task, exchanges)
    known_algorithms = (PLAIN, *algorithms)
    if task.algorithm not in known_algorithms:
        known = ", ".join(known_algorithms)
        return f"the task asks for the algorithm {task.algorithm}; this device knows {known}"
    exchange = EXCHANGES[task.algorithm]
    if (task.function is not None) != (task.algorithm == OWN):
        named = "no function" if task.function is None else f"the function {task.function}"
        return f"the task asks for the algorithm {task.algorithm} and names {named}"
    up = task.parts.get(UPDATE, "")
    if (task.encoding is not None) != is_own(up):
        named = "no function" if task.encoding is None else f"the function {task.encoding.function}"
        return f"the task asks for the update as {up}, and names {named} that makes the encoding"
    hides = (task.secure, task.clip, task.local_noise) != (None, None, None) or ROWS in task.parts
    if hides and (task.algorithm == OWN or task.encoding is not None):
        return (
            "the task asks for a function of the owner's with a mask, a bound, noise, or rows of "
            "tables: nobody has shown what an own algorithm's update tells beside these"
        )
    sent = [(vector.name, vector.encoding) for vector in task.vectors]
    # Whether the bundle has buffers is known once it is here.
    parts = (*exchange.parts, *(name for name in (BUFFERS, ROWS) if name in task.parts))
    families: tuple[str, ...] = FAMILIES if task.secure is None else MASKED_NAMES
    asked = [*task.parts.items()]
    if task.encoding is not None:  # the trainer makes it, or says why it cannot
        asked = [(name, FLOAT32.name if name == UPDATE else each) for name, each in asked]
    if ROWS in task.parts:
        families = (*families, UINT32.name)
    if parts == (SUMS,):
        families = (INT64.name if task.secure is None else MASKED64.name,)
    return (
        _differing("sends the vectors", sent, exchange.vectors, FLOATS)
        or _unknown_masking(task, task.secure, can_mask=can_mask)
        or _told_rows(task)
        or _differing("asks for the parts", asked, parts, families)
        or _unknown_noise(task)
    )


def _told_rows(task: Task) -> str | None:
    """Return why the device does not say which rows of tables its data name; None if it does, or is
    not asked."""
    hides = task.secure is not None or task.local_noise is not None or task.clip is not None
    if ROWS not in task.parts or not hides:
        return None
    return (
        "the task asks for the rows of tables that the data name, which would tell what a private "
        "or masked update hides"
    )


def _unknown_masking(task: Task, secure: SecureTask | None, *, can_mask: bool) -> str | None:
    """Return why the device cannot mask its update as the task asks, or why that would hide
    nothing; None if it can, or there is nothing to mask."""
    if secure is None:
        return None
    masked = "the task asks for a masked update"
    if not can_mask:
        return f"{masked}: {SECURE_NEEDS}"
    if secure.mode == "helper" and secure.helper is None:
        return f"{masked} in the mode helper, and names no helper's key"
    if secure.mode == "pairwise" and (secure.session is None or secure.least_factor is not None):
        lacking = "names no session" if secure.session is None else "may count it for less later"
        return f"{masked} in the mode pairwise, and {lacking}"
    if task.local_noise is not None:
        return (
            f"{masked} with noise before it (`local_noise`): noise has no largest element, and a "
            "masked one has"
        )
    if EXCHANGES[task.algorithm].parts == (SUMS,):
        return _unfit_sums(masked, task, secure)
    if task.clip is None:
        return f"{masked}, and does not bound it (`clip`): its numbers need a largest one"
    if others := [name for name in task.parts if name != UPDATE]:
        return f"{masked}, and for the part {others[0]}, which the mask does not hide"
    if task.parts[UPDATE] != (expected := masked_encoding(secure.bits).name):
        return (
            f"{masked} of {secure.bits} bits, and for it as {task.parts[UPDATE]}; expected "
            f"{expected}"
        )
    if secure.noise is not None:
        return _unfit_noise(masked, secure, secure.noise)
    if secure.minimum > most_updates(secure.bits):
        return (
            f"{masked} of {secure.bits} bits, of which {most_updates(secure.bits)} can be added "
            f"modulo 2^{modulus_bits(secure.bits)}, for a sum of at least {secure.minimum}"
        )
    return None


def _unfit_sums(masked: str, task: Task, secure: SecureTask) -> str | None:
    """Return why the device cannot mask the sums of a computation as the task asks; None if it
    can."""
    if secure.reports is None:
        return f"{masked} of sums, and does not say how many are added up (`secure.reports`)"
    if secure.noise is not None or secure.least_factor is not None:
        return f"{masked} of sums, which are not noised or multiplied"
    if secure.bits != PART_BITS:
        return f"{masked} of sums in words of {secure.bits} bits; expected {PART_BITS}"
    return None


def _unknown_noise(task: Task) -> str | None:
    """Return why the device cannot add the noise that the task asks for; None if it can, or there
    is none to add."""
    if task.local_noise is None:
        return None
    noise = "the task asks the device to add noise to its update"
    if task.clip is None:
        return f"{noise}, and does not bound the update (`clip`): no noise hides one of any length"
    if others := [name for name in task.parts if name != UPDATE]:
        return f"{noise}, and asks for the part {others[0]}, which the noise does not hide"
    if leaves_residual(task.parts[UPDATE]):
        return (
            f"{noise} and to send it as {task.parts[UPDATE]}, which leaves out most of it: "
            "expected an encoding of all elements, such as float32"
        )
    return None


def _unfit_noise(masked: str, secure: SecureTask, noise: float) -> str | None:
    """Return why an update cannot be masked with this noise; None if it can."""
    from fleetlearn_protocol.secure.distributed_noise import LEAST_NOISE, has_room  # makes tables

    if noise < LEAST_NOISE:
        return (
            f"{masked} with noise of {noise:g} words: expected {LEAST_NOISE:g} or more, as with "
            "less the noise of several devices does not add up to what is promised"
        )
    if modulus_bits(secure.bits) < MODULUS_BITS:
        return f"{masked} of {secure.bits} bits with noise, which such short words have no room for"
    if has_room(secure.minimum, secure.bits, noise):
        return None
    return (
        f"{masked} of {secure.bits} bits with noise of {noise:g} words, for a sum of at least "
        f"{secure.minimum}: such a sum has no room in 32 bits"
    )


def _unknown_question(question: Question, exchanges: Sequence[str]) -> str | None:
    if question.kind not in exchanges:
        known = ", ".join(exchanges) or "none"
        return f"the question is of the kind {question.kind}; this device knows {known}"
    vectors = EXCHANGE_KINDS[question.kind].vectors_of(content_of(question))
    if vectors and question.bundle is None:
        return f"the question of the kind {question.kind} names no bundle"
    sent = [(vector.name, vector.encoding) for vector in question.vectors]
    return _differing("sends the vectors", sent, vectors, FLOATS)


def _differing(
    what: str, given: Sequence[tuple[str, str]], names: Sequence[str], families: Sequence[str]
) -> str | None:
    """Return how these vectors or parts, with their encodings, are not those that are known
    here."""
    same = sorted(name for name, _ in given) == sorted(names)
    if same and all(is_known(encoding, families) for _, encoding in given):
        return None
    listed = ", ".join(f"{name} ({encoding})" for name, encoding in given)
    known = f"{', '.join(names)} ({', '.join(families)})"
    return f"the task {what} {listed}; this device knows {known}"
