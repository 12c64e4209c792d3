"""What [secure] with mode = "pairwise" takes, and what contradicts it; how many neighbours its
devices have.

Its exchanges go with rounds that are open for everybody at the same time, and the devices of a
round must stay connected from its first exchange to its last.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetlearn_protocol.messages import MOST_NEIGHBOURS
from fleetlearn_protocol.secure.graph import Degrees, graph_of

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.secure_section import SecureSection
from fleetlearn_coordinator.rounds.settings import PairwiseSettings

OF_HELPER = ("helper", "key", "certificate")
OF_PAIRWISE = ("adversaries", "dropouts", "server", "degree", "threshold", "deadline", "roster")
"""Keys that the other mode has no use for."""


def graph_for(secure: SecureSection, devices: int) -> Degrees:
    """Return how many neighbours each of a round's devices has, and how many of them give its
    secrets. Raises ValueError where the plan's shares cannot hold for this number of devices."""
    assert secure.adversaries is not None
    assert secure.dropouts is not None
    degree, threshold = secure.degree, secure.threshold
    consistent = secure.server == "semi-honest"
    if not consistent and (degree or threshold):
        raise ValueError(
            'with secure.server = "semi-malicious" all devices are neighbours, and the threshold '
            "follows from their number: leave secure.degree and secure.threshold out"
        )
    if degree is None or threshold is None:
        found = graph_of(devices, secure.adversaries, secure.dropouts, consistent=consistent)
        degree = degree or found.neighbours
        threshold = threshold or min(found.threshold, degree)
    degree = min(degree, devices - 1)
    if degree > MOST_NEIGHBOURS:
        raise ValueError(
            f"of {devices} devices each would need {degree} neighbours, and can have "
            f"{MOST_NEIGHBOURS}: what is said of more does not fit into a message"
        )
    if threshold > degree:
        raise ValueError(
            f"{threshold} neighbours of each of {devices} devices would have to stay, and it has "
            f"{degree}"
        )
    return Degrees(degree, threshold)


def pairwise_settings(plan: PlanKeys) -> PairwiseSettings | None:
    """Return what the engine needs to let devices agree on masks; None: they do not."""
    secure = plan.secure
    if secure is None or secure.mode != "pairwise":
        return None
    assert secure.deadline is not None
    # a device has no share of its own secrets
    least = graph_for(secure, plan.round.minimum).threshold + 1
    graph = secure.adversaries, secure.dropouts, secure.server, secure.degree, secure.threshold
    return PairwiseSettings(
        plan.round.cohort, plan.round.minimum, least, secure.deadline, str(graph)
    )


def mode_contradictions(plan: PlanKeys) -> Iterable[str]:
    """Yield what the mode of [secure] has no use for, or lacks, with what to do."""
    secure = plan.secure
    if secure is None:
        return
    if secure.mode == "helper":
        for key in OF_HELPER:
            if not getattr(secure, key):
                yield f'secure.{key} is missing: mode = "helper" needs it; `helper status` shows it'
        yield from _useless(secure, OF_PAIRWISE)
        return
    yield from _useless(secure, OF_HELPER)
    yield from _pairwise_contradictions(plan, secure)


def _useless(secure: SecureSection, keys: Iterable[str]) -> Iterable[str]:
    for key in keys:
        value = getattr(secure, key)
        if value not in (None, ""):
            shown = f"{value:g}" if isinstance(value, int | float) else f'"{value}"'
            yield (
                f'secure.{key} = {shown} with secure.mode = "{secure.mode}", which has no use for '
                "it. Leave it out"
            )


def _pairwise_contradictions(plan: PlanKeys, secure: SecureSection) -> Iterable[str]:
    what = 'secure.mode = "pairwise"'
    if plan.round.asynchronous:
        yield (
            f'{what} with round.participation = "asynchronous": devices agree on masks before '
            "they train, which only those of one round can do. It needs synchronous rounds, or "
            'secure.mode = "helper"'
        )
    if plan.round.late == "carry":
        yield (
            f'{what} with round.late = "carry": a late update would have the masks of another '
            'round. It needs round.late = "discard", or secure.mode = "helper"'
        )
    if plan.pace.connected is not None:
        yield (
            f"{what} with pace.connected = {plan.pace.connected}: a device that is sent away "
            "between two exchanges is lost for its round. Leave pace.connected out, or take "
            'secure.mode = "helper"'
        )
    for key, devices in (("round.minimum", plan.round.minimum), ("the cohort", plan.round.cohort)):
        try:
            graph_for(secure, devices)
        except ValueError as error:
            yield (
                f"{what} and {devices} devices ({key}): {error}. Change the number of devices, "
                "secure.adversaries, secure.dropouts or secure.server, or take secure.mode = "
                '"helper"'
            )
            return
