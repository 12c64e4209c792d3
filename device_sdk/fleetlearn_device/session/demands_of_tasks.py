"""What a device says at its check-in of what it can do and its owner demands, and why it gives a
task back that is against these."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlearn_protocol.messages import Question, Task

from fleetlearn_device.session.abilities import PRIVACY, SECURE_PRIVACY, unsupported
from fleetlearn_device.session.privacy_demands import PrivacyDemands, refusal, why_once
from fleetlearn_device.session.secure_demands import (
    HARMLESS_KINDS,
    GivenBack,
    SecureDemands,
    secure_refusal,
)


def said_of_privacy(
    demands: PrivacyDemands, secure_demands: SecureDemands, *, can_mask: bool
) -> tuple[str, ...]:
    """Return what the device can do for privacy, and what its owner demands: ``CheckIn.privacy``.
    ``can_mask``: whether it has what secure aggregation needs."""
    found = [*PRIVACY, *(SECURE_PRIVACY if can_mask else ())]
    if demands.require:
        found.append("required")
    if secure_demands.require:
        found.append("secure-required")
    return tuple(found)


def offered_exchanges(
    exchanges: tuple[str, ...], demands: PrivacyDemands, secure_demands: SecureDemands
) -> tuple[str, ...]:
    """Return the kinds of questions that the device answers, of those that it could, as its owner
    allows it."""
    if demands.require or secure_demands.require:
        return tuple(kind for kind in exchanges if kind in HARMLESS_KINDS)
    return exchanges


def why_given_back(
    task: Task | Question,
    demands: PrivacyDemands,
    secure_demands: SecureDemands,
    took_part: int,
    *,
    known: tuple[Sequence[str], Sequence[str], bool],
    made: bool,
) -> GivenBack | None:
    """Return why the device gives a task back at once; None if it does it.

    took_part: how often it took part in the run before. known: the algorithms and the kinds of
    questions that it knows, and whether it can mask. made: whether it made its update of this task
    already.
    """
    if refused := secure_refusal(secure_demands, task):
        return refused
    algorithms, exchanges, can_mask = known
    lacking = refusal(demands, task, took_part)
    if lacking is None:
        lacking = unsupported(task, algorithms, exchanges, can_mask=can_mask)
    if lacking is None and made:
        lacking = why_once(task)
    return None if lacking is None else GivenBack("unsupported", lacking)
