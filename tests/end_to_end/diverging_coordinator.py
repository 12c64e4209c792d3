"""``fleetlearn-coordinator`` with a server optimizer that diverges: Yogi's gets updates that are
far too large."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_coordinator.__main__ import main
from fleetlearn_coordinator.aggregation.optimizers import Optimizer

apply = Optimizer.apply


def diverge(self: Optimizer, state: Any, delta: Any, *arguments: Any) -> Any:
    """Do what ``Optimizer.apply`` does."""
    return apply(
        self, state, delta.astype(np.float64) * (1e200 if self.name == "yogi" else 1.0), *arguments
    )


if __name__ == "__main__":
    Optimizer.apply = diverge  # type: ignore[method-assign]
    main()
