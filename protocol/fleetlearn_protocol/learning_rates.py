"""The learning rate of each round and of each step: factors with the same bits everywhere.

The formulas are those of torch.optim.lr_scheduler: LinearLR for the warm-up, then StepLR,
ExponentialLR, LinearLR or CosineAnnealingLR (Loshchilov and Hutter, arXiv 1608.03983, equation 5,
without restarts). ``one-cycle`` is OneCycleLR (Smith and Topin, arXiv 1708.07120): its warm-up is
half a cosine wave too.

They are made of additions, products and quotients of float64 alone, in the order that PROTOCOL.md
gives (section 4, "Learning rate by step"). IEEE 754 rounds these the same way everywhere; a sine or
a power of a language's library may differ in the last bit.
"""

from __future__ import annotations

from fleetlearn_protocol.messages import StepSchedule

PI = 3.141592653589793
TERMS = 11
"""Terms of the sine's series behind the first: the next one is below 1e-18."""


def factor_at(schedule: StepSchedule, step: int, steps: int = 0) -> float:
    """Return what the learning rate of a step is multiplied by, from 1e-30 to 1.

    step: From 0. steps: How many the whole task has; counts where ``schedule.steps`` is None.
    """
    number = schedule.first + step
    if number < schedule.warm_up:
        share = number / schedule.warm_up
        if schedule.kind == "one-cycle":
            share = 1.0 - half_wave(share)
        return schedule.start + (1.0 - schedule.start) * share
    return max(schedule.least, _after_warm_up(schedule, number - schedule.warm_up, steps))


def _after_warm_up(schedule: StepSchedule, after: int, steps: int) -> float:
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "step":
        return power(schedule.factor, after // schedule.every)
    if schedule.kind == "exponential":
        return power(schedule.factor, after)
    length = schedule.steps
    if length is None:
        length = max(1, steps - schedule.warm_up)
    if after >= length:
        return schedule.least
    share = after / length
    height = 1.0 - share if schedule.kind == "linear" else half_wave(share)
    return schedule.least + (1.0 - schedule.least) * height


def half_wave(share: float) -> float:
    """Return (1 + cos(pi * share)) / 2 for a share from 0 to 1, by the series of the sine of
    pi * (1/2 - share)."""
    angle = PI * (0.5 - share)
    square = angle * angle
    series = 1.0
    for term in range(TERMS, 0, -1):
        series = 1.0 - square * series / (2 * term * (2 * term + 1))
    return (1.0 + angle * series) / 2.0


def power(base: float, exponent: int) -> float:
    """Return ``base`` to the power of a whole number, at least 0, by squaring."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result = result * base
        base = base * base
        exponent //= 2
    return result
