"""What a plan says of how the reports of a round become the next model. ``Plan.round_rules`` makes
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleetlearn_coordinator.aggregation.optimizers import Optimizer
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.round_summary import Bounds
from fleetlearn_coordinator.aggregation.round_sums import Aggregators
from fleetlearn_coordinator.aggregation.weighing.weighing import Weighing


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """The rules of all rounds of a run. The server and the simulator follow the same."""

    aggregators: Aggregators
    weighing: Weighing
    optimizer: Optimizer
    staleness_factor: Callable[[int], float]
    """An update's staleness -> its factor, above 0 and at most 1."""
    outlive: bool
    """Whether tasks may outlive their rounds, so that updates may be stale."""
    mixing_rate: float | None
    """How far a server that mixes models moves towards a device's: FedAsync's alpha. None: the
    server adds updates."""
    devices: int | None
    """How many devices there are (``server.devices``). None: it is not known."""
    metrics: Sequence[str]
    """Names of what devices measure, ``loss`` among them."""
    bounds: Bounds
    max_weight: int
    """The most examples for which a device counts in the metrics."""
    first_mu: float
    """FedProx's mu of the first round; 0 without a proximal term."""
    adaptive_mu: bool
    """Whether mu follows the loss."""
    most_mu: float
    """Where mu stops rising."""
    privacy: PrivacyRules | None = None
    """What the released models may tell about one device. None: no differential privacy."""

    @property
    def buffers(self) -> Sequence[slice]:
        """The places of the model's elements that are no trained parameters."""
        return self.optimizer.buffers

    def share(self, updates: int) -> float:
        """Return the share of all devices that took part in a round with this many updates. 1 where
        the number of devices is not known."""
        return 1.0 if self.devices is None else updates / self.devices
