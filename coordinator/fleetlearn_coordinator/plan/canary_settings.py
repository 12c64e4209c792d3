"""How a canary goes: which shares of the devices get a new plan, bundle or model, after what, and
what sends it back."""

from __future__ import annotations

from math import ceil, log2
from typing import Annotated

from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Positive, Section

Minutes = Annotated[float, Meta(ge=0, le=1e6)]
PartOfDevices = Annotated[float, Meta(gt=0, le=1)]
Difference = Annotated[float, Meta(ge=0, le=1)]


class CanarySettings(Section, frozen=True, kw_only=True):
    """[canary]: docs/operate/canary.md. A canary keeps the settings that it began with."""

    steps: Annotated[tuple[PartOfDevices, ...], Meta(min_length=1, max_length=20)] = (
        0.01,
        0.1,
        1.0,
    )
    """Shares of the old run's devices that get the canary, rising; the last is 1."""
    devices: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Connected devices that get it in each step at least, also where the share is fewer."""
    tasks: Positive = 50
    """Tasks of the canary that end in a step before the next one begins."""
    hold: Minutes = 60.0
    """Minutes that each step takes at least."""
    probation: Minutes = 1440.0
    """Minutes that the last step takes at least, before the old run is stopped."""
    patience: Minutes = 1440.0
    """Minutes after which a step whose ``tasks`` have not ended sends the canary back."""
    margin: Difference = 0.05
    """How much larger the canary's share of failed, lost, refused or interrupted tasks may be than
    the old run's."""
    most_failures: Difference = 0.5
    """The largest such share that is allowed whatever the old run's is."""
    slower: Annotated[float, Meta(ge=1, le=1000)] = 2.0
    """How many times the old run's training time of a task the canary's may be."""
    certainty: Annotated[float, Meta(ge=0.5, lt=1)] = 0.999
    """How certain it must be that a bound is exceeded."""

    def check(self) -> None:
        """Raise ValueError where the keys do not fit together."""
        rising = all(before < after for before, after in zip(self.steps, self.steps[1:]))  # noqa: B905
        if not rising or self.steps[-1] != 1:
            given = ", ".join(f"{share:g}" for share in self.steps)
            raise ValueError(
                f"canary.steps = [{given}] was given; shares that rise and end with 1 are "
                "expected, such as [0.01, 0.1, 1]"
            )
        # With fewer tasks the sign test is never certain, even where all of them are slower.
        fewest = ceil(-log2(1 - self.certainty) + 1e-9)
        if self.tasks < fewest:
            raise ValueError(
                f"canary.tasks = {self.tasks} is less than {fewest}: with canary.certainty = "
                f"{self.certainty:g} a step would be over before it can be certain that tasks are "
                "slower"
            )
        if self.patience < self.hold:
            raise ValueError(
                f"canary.patience = {self.patience:g} is less than canary.hold = {self.hold:g}: "
                "a step would be given up before it can be over"
            )
