"""[local.schedule] of a plan: how the learning rate changes from round to round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Positive, Section

Share = Annotated[float, Meta(gt=0, le=1)]
OF_KIND = {"every": ("step",), "factor": ("step", "exponential"), "rounds": ("cosine",)}
"""Key -> the kinds of schedule that have it."""
NEEDED: Mapping[str, Mapping[str, float]] = {
    "step": {"every": 30},
    "exponential": {"factor": 0.98},
}
"""Kind -> the keys that have no default, each with an example."""


class ScheduleSection(Section, frozen=True, kw_only=True):
    """[local.schedule]: what the learning rate is multiplied by in each round. A round's number
    here is the version of the model that its tasks begin from: 0 in the first one. An abandoned
    round does not count, a roll back does. Devices are told the product: they know no schedule."""

    kind: Literal["constant", "step", "exponential", "cosine"] = "constant"
    """After the warm-up: the same; ``factor`` after each ``every`` rounds; ``factor`` after each
    round; half a cosine wave down to ``least``, which it has after ``rounds`` rounds."""
    warm_up: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Rounds in which the learning rate rises in equal steps, from ``start`` on."""
    start: Share = 1 / 3
    """The factor of the first round of the warm-up."""
    every: Positive | None = None
    """step: rounds from one change to the next. It has no default."""
    factor: Share | None = None
    """step: default 0.1. exponential: it has no default."""
    rounds: Positive | None = None
    """cosine: rounds from the end of the warm-up to ``least``. Default: as many as are left until
    stop.rounds."""
    least: Share = 1e-4
    """No factor after the warm-up is smaller. It is above 0: SCAFFOLD divides by the learning
    rate."""

    def factor_of(self, version: int) -> float:
        """Return what the learning rate of tasks that begin from this version is multiplied by.

        The formulas are those of torch.optim.lr_scheduler: LinearLR, then StepLR, ExponentialLR or
        CosineAnnealingLR (Loshchilov and Hutter, arXiv 1608.03983, equation 5, without restarts).
        """
        if version < self.warm_up:
            return self.start + (1.0 - self.start) * version / self.warm_up
        after = version - self.warm_up
        return max(self.least, self._factor_after_warm_up(after))

    def _factor_after_warm_up(self, after: int) -> float:
        match self.kind:
            case "step":
                assert self.factor is not None
                assert self.every is not None
                return self.factor ** (after // self.every)
            case "exponential":
                assert self.factor is not None
                return self.factor**after
            case "cosine":
                assert self.rounds is not None
                if after >= self.rounds:
                    return self.least
                wave = (1.0 + math.cos(math.pi * after / self.rounds)) / 2.0
                return self.least + (1.0 - self.least) * wave
        return 1.0


def fill_schedule(schedule: dict[str, Any], rounds: object) -> None:
    """Put in what depends on the kind. ``rounds``: stop.rounds, as the author gave it. Raises
    ValueError on a key of another kind and on one that is missing."""
    kind, warm_up = str(schedule.get("kind", "constant")), schedule.get("warm_up", 0)
    for key, kinds in OF_KIND.items():
        if key in schedule and kind not in kinds:
            raise ValueError(
                f"local.schedule.{key} = {schedule[key]!r} is of kind = "
                f"{' and '.join(map(repr, kinds))}; here it is {kind!r}"
            )
    if kind == "step":
        schedule.setdefault("factor", 0.1)
    for key in NEEDED.get(kind, ()):
        if key not in schedule:
            example = f"{key} = {NEEDED[kind][key]}"
            raise ValueError(
                f'local.schedule.{key} is missing: kind = "{kind}" needs it, such as {example}'
            )
    if kind == "cosine" and isinstance(rounds, int) and isinstance(warm_up, int):
        if rounds <= warm_up and "rounds" not in schedule:
            raise ValueError(
                f"local.schedule.warm_up = {warm_up} and stop.rounds = {rounds}: no round is left "
                "for the cosine. Expected a shorter warm-up, or local.schedule.rounds"
            )
        schedule.setdefault("rounds", rounds - warm_up)
