"""The factors of learning rates that change from step to step, of many devices."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from fleetlearn_protocol.learning_rates import factor_at
from fleetlearn_protocol.messages import StepSchedule
from numpy.typing import NDArray


def factors_of(
    schedule: StepSchedule | None, whole: NDArray[np.int64], most: int
) -> NDArray[np.float64]:
    """Return what the first ``most`` steps multiply the learning rate by, (lanes, most). whole: how
    many steps each lane would do at all, int64, shape (lanes,)."""
    if schedule is None:
        return np.ones((len(whole), max(1, most)))
    return np.stack([_factors_of(schedule, steps, max(1, most)) for steps in whole.tolist()])


@lru_cache(maxsize=1024)
def _factors_of(schedule: StepSchedule, whole: int, most: int) -> NDArray[np.float64]:
    return np.array([factor_at(schedule, step, whole) for step in range(most)])
