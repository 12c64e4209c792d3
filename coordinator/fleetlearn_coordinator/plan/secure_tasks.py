"""What the tasks of a plan with [secure] say of it, and which devices can have none of them."""

from __future__ import annotations

from fleetlearn_protocol.encodings import MASKED, MASKED64, masked_encoding
from fleetlearn_protocol.messages import CheckIn, SecureTask
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE

from fleetlearn_coordinator.aggregation.modular_sum import MaskedNumbers, SumWords
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.plan.plan_keys import PlanKeys

LEAST_FACTOR = 1e-30
"""The least factor that a message can say."""


def secure_of_tasks(plan: PlanKeys, rules: RoundRules) -> SecureTask | None:
    """Return what each task says of its masks; None without [secure]. ``rules``: the plan's."""
    secure, numbers = plan.secure, rules.secure
    if secure is None or numbers is None:
        return None
    return SecureTask(
        mode=secure.mode,
        minimum=secure.minimum,
        bits=numbers.bits,
        most_weight=_most_weight(plan, numbers),
        least_factor=_least_factor(plan, rules) if rules.outlive else None,
        helper=secure.key or None,
        noise=numbers.noise or None,
        reports=numbers.reports if isinstance(numbers, SumWords) else None,
    )


def _most_weight(plan: PlanKeys, numbers: MaskedNumbers) -> int | None:
    """Return the examples for which an update counts most; None: all count the same."""
    equal = isinstance(numbers, SumWords) or numbers.equal
    return None if equal else plan.round.max_weight


def _least_factor(plan: PlanKeys, rules: RoundRules) -> float:
    """Return the smallest factor of an update that is not too stale to count."""
    factors = (rules.staleness_factor(tau) for tau in (0, plan.staleness.max or 0))
    return max(LEAST_FACTOR, min(1.0, *factors))


def why_not_secure(secure: SecureTask | None, check_in: CheckIn) -> str:
    """Return why secure aggregation keeps a device from having tasks of the run, for the device's
    owner; empty if it does not. ``secure``: of the run's tasks."""
    can = check_in.privacy
    if secure is None and "secure-required" in can:
        return (
            "the device's owner lets it take part only in runs with secure aggregation, and this "
            "run's plan has no [secure]"
        )
    if secure is not None and "secure" not in can:
        return (
            "this run's coordinator learns the sum of updates alone ([secure]), and the device "
            "cannot mask its update. Update its fleetlearn, and install the package cryptography "
            "there (fleetlearn[secure])"
        )
    # Whoever can mask knows ``masked``.
    known = (MASKED.name, *check_in.encodings)
    if secure is not None and secure.reports is not None and MASKED64.name not in known:
        return (
            f"this run's masked sums travel as {MASKED64.name}, which the device does not know. "
            "Update its fleetlearn"
        )
    if secure is not None and (name := masked_encoding(secure.bits).name) not in known:
        return (
            f"this run's masked updates travel as {name} (secure.bits = {secure.bits}), which the "
            "device does not know. Update its fleetlearn"
        )
    if secure is not None and secure.mode == "pairwise" and PAIRWISE not in check_in.exchanges:
        return (
            'this run has devices agree on masks with each other (secure.mode = "pairwise"), and '
            "the device cannot. Update its fleetlearn; devices in a browser or with the SDK in "
            "Kotlin cannot take part"
        )
    if secure is not None and secure.noise is not None and "secure-noise" not in can:
        return (
            "this run has devices add noise to their updates before they mask them "
            '(privacy.mechanism = "distributed"), and the device cannot. Update its fleetlearn; '
            "devices in a browser or with the SDK in Kotlin cannot take part"
        )
    return ""
