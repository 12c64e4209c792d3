"""The noise of one release of a plan in the model's own units, for people."""

from __future__ import annotations

import math

import msgspec
from fleetlearn_protocol.secure.distributed_noise import largest_step

from fleetlearn_coordinator.aggregation.privacy.correlated import strategy_of
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.secure_rules import fixed_point

MOST_ADDED_UP = 100_000
"""Most releases whose noise is added up, in a tenth of a second."""


class NoiseRow(msgspec.Struct, frozen=True):
    """The noise, as a multiplier and in the model's own units."""

    multiplier: float
    """z: of all that one round releases."""
    update_multiplier: float
    """Of the mean of updates alone; larger where the round releases more than that."""
    on_sum: float
    """Standard deviation of each element's noise on the sum of a round's updates (local: on one
    update; distributed: on the sum of the fewest updates that are added up)."""
    on_mean: float
    """The same on the mean, which moves the model: of the noisiest release."""
    added_up: float | None
    """The same on the sum of all planned releases' means. None: there are too many to say."""
    mean_length: float | None
    """L2 norm of the whole noise on the mean, about. None: the bundle cannot be read."""
    clip: float
    """C: the largest L2 norm of an update, and of the mean without noise."""
    elements: int | None
    """Of the model, as far as it travels."""
    of_device: float | None = None
    """The same of what each device adds to its update, with mechanism distributed; else None."""
    of_device_words: float | None = None
    """The same in words of the masked update."""


def noise_row(plan: Plan, rules: PrivacyRules, elements: int | None) -> NoiseRow:
    """Return the noise of one release in the model's units."""
    of_one = rules.split.update * rules.clip
    local = rules.mechanism == "local"
    numbers = fixed_point(plan)
    of_device, words = of_one if local else None, None
    if numbers is not None and numbers.noise:
        words = numbers.noise
        of_device = words * numbers.bound / largest_step(numbers.bits)
    # Noise of each of the goal's devices adds up to its root, and is divided by the goal.
    fresh = (of_one if of_device is None else of_device * math.sqrt(rules.goal)) / rules.goal
    single, total = 1.0, math.sqrt(rules.planned)
    if rules.mechanism == "dp-ftrl":
        single, total = _correlated_growth(rules)
    on_mean = fresh * single
    return NoiseRow(
        multiplier=rules.noise,
        # Where nothing else is released they are the same, up to float64's rounding.
        update_multiplier=rules.noise
        if local or math.isclose(rules.noise, rules.split.update, rel_tol=1e-12)
        else rules.split.update,
        on_sum=of_one if local else of_one * rules.largest_weight,
        on_mean=on_mean,
        added_up=fresh * total if rules.planned <= MOST_ADDED_UP else None,
        mean_length=None if elements is None else on_mean * math.sqrt(elements),
        clip=rules.clip,
        elements=elements,
        of_device=None if words is None else of_device,
        of_device_words=words,
    )


def _correlated_growth(rules: PrivacyRules) -> tuple[float, float]:
    """Return two standard deviations, in units of fresh noise: of the last release's correlated
    noise, and of the sum of all releases' noise.

    Both follow from what one fresh number adds to its own release and to each later one."""
    strategy = strategy_of(rules)
    pairs = [*zip(strategy.theta, strategy.omega, strict=True)]
    held = [0.0] * len(pairs)
    single, total, so_far = 0.0, 0.0, 0.0
    for release in range(min(rules.planned, MOST_ADDED_UP)):
        taken = sum(omega * own for (_, omega), own in zip(pairs, held, strict=True))
        added = (1.0 if release == 0 else 0.0) - taken
        held = [theta * own + added for (theta, _), own in zip(pairs, held, strict=True)]
        so_far += added
        single += added**2
        total += so_far**2
    return math.sqrt(single), math.sqrt(total)
