"""[clusters]: several models of one bundle. Each device trains the one that fits its data
best."""

from __future__ import annotations

from typing import Annotated

from fleetlearn_protocol.messages import MAX_VECTORS
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section


class ClustersSection(Section, frozen=True):
    """Before each round its devices measure all of the models, and tell their losses."""

    count: Annotated[int, Meta(ge=2, le=MAX_VECTORS)]
    """How many models there are, from 2 to 8."""
    spread: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.0
    """How little the models that the clusters begin with are like the bundle's: with 1 half of a
    weight's variance is the bundle's, with 0.1 almost all of it. The first cluster begins with the
    bundle's model itself."""
    deadline: Annotated[float, Meta(gt=0, le=366 * 86400.0)] | None = None
    """Seconds that devices have to measure the models of a round. Default: round.deadline."""

    @property
    def names(self) -> list[str]:
        """Of the clusters, in order: c1, c2, ..."""
        return [f"c{number}" for number in range(1, self.count + 1)]
