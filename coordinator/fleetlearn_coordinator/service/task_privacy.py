"""What a private run asks of its devices in each task, and of which devices it asks nothing."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_protocol.messages import CheckIn, PrivacyNote

from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState
from fleetlearn_coordinator.privacy.budget import PrivacyAccount

MOST = 1e30
"""The largest number in a message."""


class TaskPrivacy(NamedTuple):
    """The fields of a task that are about privacy, by their names there."""

    clip: float | None = None
    local_noise: float | None = None
    privacy: PrivacyNote | None = None


def privacy_of_tasks(
    rules: PrivacyRules | None, state: PrivacyState | None, account: PrivacyAccount | None
) -> TaskPrivacy:
    """Return what the tasks say that are given now. The clip norm is the one of the open round,
    where it is adaptive."""
    if rules is None or state is None:
        return TaskPrivacy()
    return TaskPrivacy(
        state.clip,
        rules.noise * rules.clip if rules.mechanism == "local" else None,
        None if account is None else _note(account),
    )


def _note(account: PrivacyAccount) -> PrivacyNote:
    return PrivacyNote(min(account.epsilon, MOST), account.delta, account.budget)


def why_not_private(rules: PrivacyRules | None, check_in: CheckIn) -> str:
    """Return why a device can have no task for the sake of privacy, for its owner; empty if it
    can."""
    if rules is None and "required" in check_in.privacy:
        return (
            "the device's owner lets it take part only in runs with differential privacy, and this "
            "run's plan has no [privacy]"
        )
    if rules is not None and rules.mechanism == "local" and "local-noise" not in check_in.privacy:
        return (
            "this run has devices add the noise of differential privacy themselves "
            '(privacy.mechanism = "local"), and the device cannot. Update its fleetlearn; devices '
            "in a browser or with the SDK in Kotlin cannot take part"
        )
    return ""
