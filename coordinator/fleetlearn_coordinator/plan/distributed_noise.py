"""What of a plan cannot be where devices add the noise of differential privacy under the masks of
[secure] (privacy.mechanism = "distributed"), and how much noise each of them adds."""

from __future__ import annotations

from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.secure.distributed_noise import (
    has_room,
    honest_of,
    largest_step,
    noise_of_device,
)

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import private_rule
from fleetlearn_coordinator.privacy.accounting import PrivacyError

DISTRIBUTED = "distributed"

DISTRIBUTED_RULES = (
    private_rule(
        lambda plan, privacy: privacy.mechanism == DISTRIBUTED and plan.secure is None,
        lambda plan, privacy: (
            'privacy.mechanism = "distributed" without [secure]: each device adds a part of the '
            "noise, which hides an update only where the coordinator sees the sum of many and no "
            'single one. It needs [secure]; "local" has each device add all of the noise'
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.mechanism == DISTRIBUTED and plan.recipe == "dp-ftrl",
        lambda plan, privacy: (
            'privacy.mechanism = "distributed" with recipe = "dp-ftrl": its noise cancels in later '
            "releases, for which whoever adds it must know the noise of the releases before. No "
            'device knows the others\' noise. It needs recipe = "dp-fedavg", or mechanism = '
            '"dp-ftrl": the coordinator adds the noise to the sum'
        ),
    ),
    private_rule(
        lambda plan, privacy: (
            privacy.mechanism == DISTRIBUTED and plan.round.weighting != "uniform"
        ),
        lambda plan, privacy: (
            f'round.weighting = "{plan.round.weighting}" with privacy.mechanism = "distributed": '
            "the sum of the weights would be seen without noise. It needs "
            'round.weighting = "uniform"'
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.colluding and privacy.mechanism != DISTRIBUTED,
        lambda plan, privacy: (
            f"privacy.colluding = {privacy.colluding:g} is for privacy.mechanism = "
            f'"distributed"; here it is "{privacy.mechanism}", and no device knows a part of the '
            "noise of others' updates. Leave it out"
        ),
    ),
)


def survivors(plan: PlanKeys) -> int | None:
    """Return how many devices' noise is a release's together; None where devices add none, or each
    all of it."""
    privacy, secure = plan.privacy, plan.secure
    if privacy is None or secure is None or privacy.mechanism != DISTRIBUTED:
        return None
    return honest_of(secure.minimum, privacy.colluding)


def device_noise(plan: PlanKeys, multiplier: float) -> float:
    """Return the standard deviation of the noise that each device adds, in words: 0 where devices
    add none. ``multiplier``: the plan's noise multiplier.

    Raises PrivacyError where sums with this noise cannot be added modulo 2^32, or it is less than
    what is proved."""
    privacy, secure = plan.privacy, plan.secure
    if privacy is None or secure is None or privacy.mechanism != DISTRIBUTED:
        return 0.0
    try:
        noise = noise_of_device(multiplier, secure.bits, secure.minimum, privacy.colluding)
    except ValueError as error:
        keys = f"privacy.noise = {multiplier:.6g} with secure.bits = {secure.bits}"
        text = f"{keys} and secure.minimum = {secure.minimum}: {error}"
        raise PrivacyError(Code.BAD_MESSAGE, text) from None
    if not has_room(plan.round.goal, secure.bits, noise):
        raise PrivacyError(
            Code.BAD_MESSAGE,
            f"secure.bits = {secure.bits} leave no room for the noise: {plan.round.goal} updates "
            f"(round.goal), each up to {largest_step(secure.bits)} words long and with noise of "
            f"{noise:.4g}, may not fit into 2^32. {_more_room(plan)}",
        )
    return noise


def _more_room(plan: PlanKeys) -> str:
    """Return what gives a sum's noise more room, in words."""
    assert plan.secure is not None
    ways = ["fewer secure.bits"] if plan.secure.bits > 16 else []
    if (survivors(plan) or 0) < plan.round.goal:
        ways.append("a larger secure.minimum, with which each device adds less")
    return f"It takes {', or '.join([*ways, 'less noise'])}"
