"""What a device's owner demands of secure aggregation, whatever the coordinator says."""

from __future__ import annotations

import re
from typing import NamedTuple

from fleetlearn_protocol.messages import MOST_REPORTS, FailureCode, Question, Task
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE

_KEY = re.compile(r"[0-9a-f]{64}")
HARMLESS_KINDS = frozenset({PAIRWISE})
"""Kinds of questions whose answers tell nothing of the device's data."""
MASKED_ONCE = (
    "the device made a masked update for this task already, and it is lost: a second one could be "
    "added to another sum, and the two sums compared"
)
"""Why a task is given back whose update was masked before."""


class SecureDemands(NamedTuple):
    """The owner's demands."""

    require: bool = False
    """Do no task without secure aggregation, and answer no question about the data."""
    helper: str | None = None
    """The public key (X25519, 64 hexadecimal digits) of the only helper that seeds are sealed for:
    a task for another one is given back. None: the one that the task names."""
    minimum: int | None = None
    """The fewest devices of a sum: a task that allows fewer is given back. None: what the task
    says."""
    least_factor: float | None = None
    """The smallest part of itself that an update may count for because it is late: a task that
    allows less is given back. None: what the task says; with ``require``, none may count for
    less."""
    roster: str | None = None
    """The path of a file of devices with their public keys (lines of ``public-key``): pairwise
    masks are agreed on with these alone, whose keys must be signed. None: with anybody that the
    coordinator names."""


NO_SECURE_DEMANDS = SecureDemands()


class GivenBack(NamedTuple):
    """Why a task is given back."""

    code: FailureCode
    text: str


def check_secure_demands(demands: SecureDemands) -> None:
    """Raise ValueError where they make no sense."""
    helper, minimum, least = demands.helper, demands.minimum, demands.least_factor
    if helper is not None and not _KEY.fullmatch(helper):
        raise ValueError(
            f"secure.helper is {helper!r}; expected 64 of 0-9 and a-f, as `fleetlearn-coordinator "
            "helper status` prints the helper's key"
        )
    if minimum is not None and not 2 <= minimum <= MOST_REPORTS:
        raise ValueError(f"secure.minimum is {minimum}; expected 2 to {MOST_REPORTS}, or None")
    if least is not None and not 0 < least <= 1:
        raise ValueError(f"secure.least_factor is {least}; expected above 0, at most 1, or None")


def is_masked(task: Task | Question | None) -> bool:
    """Return whether the device is to mask its update of a task."""
    return isinstance(task, Task) and task.secure is not None


def secure_refusal(demands: SecureDemands, task: Task | Question) -> GivenBack | None:
    """Return why the owner's demands forbid this; None if they do not."""
    if isinstance(task, Question):
        if not demands.require or task.kind in HARMLESS_KINDS:
            return None
        return _not_secure(f"the answer to the question {task.kind} tells of this device's data")
    secure = task.secure
    if secure is None:
        if not demands.require:
            return None
        return _not_secure("the task asks for the update as it is (no `secure`)")
    if demands.helper is not None and secure.helper != demands.helper:
        names = "no helper" if secure.helper is None else f"the helper with the key {secure.helper}"
        text = (
            f"the task names {names}, and this device's owner trusts the helper with the key "
            f"{demands.helper} alone (secure.helper)"
        )
        return GivenBack("untrusted", text)
    if demands.minimum is not None and secure.minimum < demands.minimum:
        text = (
            f"the task lets the updates of {secure.minimum} devices be added up, and this device's "
            f"owner wants at least {demands.minimum} (secure.minimum)"
        )
        return GivenBack("untrusted", text)
    least = secure.least_factor
    if least is not None and demands.require and demands.least_factor is None:
        text = (
            f"the task lets updates of other models, each for as little as {least:g} of itself, be "
            "added to this one, so that a sum may be nearly one device's update; this device's "
            "owner has not said that this may be (secure.least_factor)"
        )
        return GivenBack("untrusted", text)
    if demands.least_factor is not None and least is not None and least < demands.least_factor:
        text = (
            f"the task lets an update count for {least:g} of itself, and this device's owner wants "
            f"at least {demands.least_factor:g} (secure.least_factor)"
        )
        return GivenBack("untrusted", text)
    return None


def factor_refusal(least_factor: float, factor: float) -> GivenBack | None:
    """Return why an update may not count for this part of itself; None if it may. With a factor
    near 0 for all others, the sum would be nearly one device's update."""
    if least_factor <= factor <= 1:
        return None
    text = (
        f"the update was to count for {factor:g} of itself, and the task promised at least "
        f"{least_factor:g}, and at most 1"
    )
    return GivenBack("untrusted", text)


def _not_secure(lacking: str) -> GivenBack:
    text = (
        "this device's owner lets it take part only with secure aggregation (secure.require), and "
        f"{lacking}"
    )
    return GivenBack("unsupported", text)
