"""What a private plan takes for granted, and what it does not protect, in sentences for people."""

from __future__ import annotations

from collections.abc import Iterator

from fleetlearn_coordinator.aggregation.privacy.beside_the_mean import noise_on_metrics
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.secure_section import SecureSection

NOT_PROTECTED = (
    "That a device takes part, when, and what it says of itself when it checks in: its name, tags, "
    "memory, number of examples.",
    "What becomes of its tasks: how long they take, whether they fail, and the cause.",
    "What holds of many devices together: that is what the model learns.",
    "What several runs tell together about one device: each has a budget of its own, and they add "
    "up. So do the devices of one person.",
)
"""What no plan protects: docs/privacy.md has more."""


def assumed(plan: PlanKeys, rules: PrivacyRules) -> Iterator[str]:
    """Yield what is assumed. The plan has [privacy]."""
    privacy = plan.privacy
    assert privacy is not None
    planned = plan.stop.rounds
    most = privacy.most_of(planned)
    yield (
        "What is protected is one device: all of its data, in all rounds that it takes part in. "
        "Whoever has several devices is protected as each of them is, not as all together."
    )
    yield (
        "epsilon and delta compare the run with one in which this device sends zeros instead of "
        "its updates, and everything else is the same. Compared with a run in which it has other "
        "data, what it sends differs up to twice as much, as if the noise were half."
    )
    yield _clipped(plan, rules)
    yield (
        "A device may send an update in each round: all of them are counted, also those of rounds "
        "that are abandoned, whatever separation and participations are."
        if rules.mechanism == "local"
        else f"A device counts in at most {most} of the {planned} releases"
        + (f", at least {rules.separation} apart" if rules.separation > 1 else "")
        + ". The coordinator enforces it by the device's name, and its records survive restarts. "
        "A device that comes under several names (see identities) is several devices."
    )
    if privacy.sampling == "poisson":
        yield (
            "Each device takes part in a round by a coin of its own, with probability "
            f"{plan.round.goal / privacy.population:.4g} (goal / population), which makes epsilon "
            "less. Only the simulator does that: the coordinator refuses this plan."
        )
    else:
        yield (
            "epsilon is not lowered because few devices take part in a round (amplification by "
            "sampling): that holds where each is drawn at random, and devices check in when they "
            "can."
        )
    chance = 1 / privacy.population
    side = "below" if privacy.delta < chance else "NOT below"
    yield (
        f"delta, with which epsilon may not hold, is {privacy.delta:g}: {side} 1 / population = "
        f"{chance:.3g}."
    )
    if rules.mechanism == "local":
        yield "The coordinator is not trusted: it sees each update with its noise alone."
    elif rules.mechanism == "distributed":
        yield from _distributed(plan)
    elif plan.secure is not None:
        yield (
            f"{_who_is_trusted_with_masks(plan.secure)} sees the sum of a round's updates and no "
            "single one. It is trusted with that sum, adds the noise to it, and keeps the secret "
            "that the noise follows from."
        )
    else:
        yield (
            "The coordinator is trusted: it sees the updates themselves, adds the noise, and keeps "
            "the secret that the noise follows from. So is whoever can read its folder."
        )
    if privacy.metrics == "noised":
        names = ", ".join(privacy.metrics_bounds)
        yield (
            f"Of what devices measure these values are shown, with noise, and no others: {names}. "
            f"The noise's standard deviation is {noise_on_metrics(rules):.3g} times the distance "
            "of a value's bounds (privacy.metrics_bounds)."
        )
    else:
        yield "What devices measure is shown to nobody: neither losses nor metrics."
    yield (
        "Each update has its noise, whoever else takes part or drops out."
        if rules.mechanism == "local"
        else "Noise is never less where devices drop out: each device adds as much as the fewest "
        "need, so that there is more where more stay; epsilon is told for the fewest."
        if rules.mechanism == "distributed"
        else "Noise is never less where devices drop out: it is for the goal that the plan states, "
        "and the sum is divided by it, however many came."
    )


def _who_is_trusted_with_masks(secure: SecureSection) -> str:
    """Return whom the masks hide updates from, and on which condition; "sees ..." follows."""
    if secure.mode == "helper":
        return "The coordinator and the helper are trusted not to work together: the coordinator"
    return (
        f"No more than {secure.adversaries:g} of a round's devices (secure.adversaries) work "
        "together with the coordinator: the coordinator"
    )


def _distributed(plan: PlanKeys) -> Iterator[str]:
    """Yield what is assumed where devices add the noise under their masks."""
    secure, privacy = plan.secure, plan.privacy
    assert secure is not None
    assert privacy is not None
    yield (
        f"{_who_is_trusted_with_masks(secure)} sees neither an update nor a sum without noise. "
        f"Each device adds so much that {secure.minimum} of them (secure.minimum), the fewest "
        "whose updates are added up, have a release's noise together. No device writes the secret "
        "of its noise to a disk."
    )
    if privacy.colluding:
        told = (
            f"At most {privacy.colluding:.4g} of the devices in any sum (privacy.colluding) tell "
            "their noise to somebody, or add none; the others' noise is enough."
        )
    else:
        told = (
            "No device tells its noise to anybody, or adds none: the noise would be less by that "
            f"device's part, one in {secure.minimum} (privacy.colluding allows for it). Whoever "
            "has a device in a sum knows that device's part."
        )
    yield told
    yield (
        "The coordinator tells devices how much noise to add. Devices sign it, and the helper adds "
        "up only updates whose devices were told the same."
        if secure.mode == "helper"
        else "The coordinator tells devices how much noise to add; masks cancel out only where all "
        "of a sum were told the same. That it takes them off sums of at least "
        f"{secure.minimum} updates is trusted."
    )


def _clipped(plan: PlanKeys, rules: PrivacyRules) -> str:
    """Return who sees to it that updates are no longer than the clip norm."""
    if plan.algorithm.computes:
        return (
            "What a device sends are sums, scaled so that each of its rows moves them by at most "
            f"1: a device with up to {rules.clip:g} rows counts whole, and one with more as at "
            f"least {rules.clip:g} of them. Devices shorten longer sums, and the coordinator "
            "refuses what is still longer. The noise here is on scaled sums, in rows; "
            "`fleetlearn-coordinator result` shows the noise of each number that comes out."
        )
    if rules.mechanism == "local":
        return (
            f"Each device shortens its update to {rules.clip:g} (L2 norm) and adds the noise "
            "itself. A device whose software does not do that is not protected."
        )
    if plan.secure is not None:
        return (
            f"Each device shortens its update to {rules.clip:g} (L2 norm) itself: the coordinator "
            "cannot check it, as it sees the sum alone. A device whose software does not do that "
            "is not protected; the others are."
        )
    return (
        f"An update is at most {rules.clip:g} long (L2 norm): devices shorten longer ones, and "
        "the coordinator checks each and shortens what is still longer, whatever a device sends."
    )
