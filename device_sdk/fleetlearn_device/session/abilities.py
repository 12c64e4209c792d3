"""What of a task this device can do: vectors, parts, encodings, algorithms, noise."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlearn_protocol.algorithms import EXCHANGES
from fleetlearn_protocol.encodings import FAMILIES, FLOATS, is_known, leaves_residual
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, content_of
from fleetlearn_protocol.messages import BUFFERS, PLAIN, UPDATE, Question, Task

PRIVACY = ("clip", "local-noise")
"""What this SDK can do for privacy, as a check-in says it."""


def unsupported(
    task: Task | Question, algorithms: Sequence[str], exchanges: Sequence[str]
) -> str | None:
    """Return what of the task this device cannot do, for people; None if it can do all.

    algorithms: those that the device knows beside ``plain``. exchanges: the kinds of questions that
    it can answer. Raises ProtocolError (bad-message) on a question whose content is not as its kind
    says.
    """
    if isinstance(task, Question):
        return _unknown_question(task, exchanges)
    known_algorithms = (PLAIN, *algorithms)
    if task.algorithm not in known_algorithms:
        known = ", ".join(known_algorithms)
        return f"the task asks for the algorithm {task.algorithm}; this device knows {known}"
    exchange = EXCHANGES[task.algorithm]
    sent = [(vector.name, vector.encoding) for vector in task.vectors]
    # Whether the bundle has buffers is known once it is here.
    parts = (*exchange.parts, BUFFERS) if BUFFERS in task.parts else exchange.parts
    return (
        _differing("sends the vectors", sent, exchange.vectors, FLOATS)
        or _differing("asks for the parts", [*task.parts.items()], parts, FAMILIES)
        or _unknown_noise(task)
    )


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


def _unknown_question(question: Question, exchanges: Sequence[str]) -> str | None:
    if question.kind not in exchanges:
        known = ", ".join(exchanges) or "none"
        return f"the question is of the kind {question.kind}; this device knows {known}"
    content_of(question)
    vectors = EXCHANGE_KINDS[question.kind].vectors
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
