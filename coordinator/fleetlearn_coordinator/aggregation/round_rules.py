"""What a plan says of how the reports of a round become the next model. ``Plan.round_rules`` makes
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fleetlearn_protocol.messages import SUMS, UPDATE

from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.exact_sums import PRIVATE as PRIVATE_SUMS
from fleetlearn_coordinator.aggregation.modular_sum import (
    NAME,
    FixedPoint,
    MaskedNumbers,
    SumWords,
)
from fleetlearn_coordinator.aggregation.optimizers import Optimizer
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.round_summary import Bounds
from fleetlearn_coordinator.aggregation.round_sums import Aggregators
from fleetlearn_coordinator.aggregation.row_mean import NAME as ROWS_MEAN
from fleetlearn_coordinator.aggregation.weighing.norm_bound import NormBound
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
    computation: RunComputation | None = None
    """What devices compute in place of training. None: they train."""
    secure: MaskedNumbers | None = None
    """How updates are written that the coordinator knows the sum of alone. None: it sees each."""

    def __post_init__(self) -> None:
        """Raise ValueError where what a device sends could reach the model of a private round other
        than by the bounded sum of updates, or where a round of masked updates would need to know
        one of them. A plan's author is told so earlier, by the plan's own rules."""
        if self.privacy is not None and (ways := list(_ways_around(self, self.privacy))):
            raise ValueError(f"a private round cannot have {' or '.join(ways)}")
        if needs := list(_needs_of_single_updates(self)):
            raise ValueError(f"a round of masked updates cannot have {' or '.join(needs)}")
        if self.secure is None and any(each.name == NAME for each in self.aggregators.values()):
            raise ValueError(f"the aggregator {NAME} is for rounds of masked updates alone")

    @property
    def has_rows(self) -> bool:
        """Whether devices send the rows of tables that they trained alone."""
        return any(each.name == ROWS_MEAN for each in self.aggregators.values())

    @property
    def clips_sums(self) -> bool:
        """Whether the coordinator sees sums that devices must have clipped, for differential
        privacy. Masked ones it does not see."""
        private = self.computation is not None and self.privacy is not None
        return private and self.secure is None

    @property
    def checks_sums(self) -> bool:
        """Whether the coordinator refuses single reports whose sums no rows can have. Clipped sums
        may have any values."""
        computation = self.computation
        plain = self.privacy is None and self.secure is None
        return computation is not None and plain and computation.checks_sums

    @property
    def buffers(self) -> Sequence[slice]:
        """The places of the model's elements that are no trained parameters."""
        return self.optimizer.buffers

    def share(self, updates: int) -> float:
        """Return the share of all devices that took part in a round with this many updates. 1 where
        the number of devices is not known."""
        return 1.0 if self.devices is None else updates / self.devices


def _ways_around(rules: RoundRules, privacy: PrivacyRules) -> Iterator[str]:
    """Yield what of the rules lets something of a device by the sum that the noise is for."""
    if rules.computation is not None:
        yield from _ways_around_sums(rules, privacy)
        return
    if rules.aggregators.keys() != {UPDATE}:
        yield f"the parts {', '.join(rules.aggregators)}: it takes the update alone"
    elif rules.secure is None and rules.aggregators[UPDATE].name != "mean":
        yield f"the aggregator {rules.aggregators[UPDATE].name}: it takes the mean"
    if rules.buffers:
        yield "buffers that devices report"
    if rules.weighing.rule is not None:
        yield f"updates that are {rules.weighing.rule.name}: their scale follows from the reports"
    if rules.mixing_rate is not None:
        yield "a server that mixes models"
    if rules.devices is not None:
        yield "a share of devices that moves the model"
    if rules.adaptive_mu:
        yield "a mu that follows the loss"
    on_devices = privacy.mechanism == "distributed"
    if on_devices != (rules.secure is not None and rules.secure.noise > 0):
        yield (
            f'the mechanism "{privacy.mechanism}" and masked updates '
            f"{'without' if on_devices else 'with'} the devices' own noise"
        )
    if rules.secure is not None:
        if not isinstance(rules.secure, FixedPoint):
            yield "masked sums, which nobody clips"
        elif rules.secure.bound != privacy.clip:
            yield (
                f"updates that devices clip to {rules.secure.bound:g}, where its noise is for "
                f"{privacy.clip:g}"
            )
    elif privacy.mechanism != "local" and not _clips_to(rules.weighing.bound, privacy):
        yield f"updates that are not clipped to the norm {privacy.clip:g} of its noise"


def _ways_around_sums(rules: RoundRules, privacy: PrivacyRules) -> Iterator[str]:
    """Yield the same of a round of a computation."""
    names = [each.name for each in rules.aggregators.values()]
    wanted = PRIVATE_SUMS if rules.secure is None else NAME
    if rules.aggregators.keys() != {SUMS} or names != [wanted]:
        yield f"the aggregators {', '.join(names)}: it takes {wanted} alone"
    if privacy.mechanism != "gaussian":
        yield f'the mechanism "{privacy.mechanism}": the noise on sums is "gaussian"'
    if privacy.largest_weight != 1:
        yield f"sums that weigh up to {privacy.largest_weight}: they count once"


def _clips_to(bound: NormBound | None, privacy: PrivacyRules) -> bool:
    """Return whether the bound holds what the noise is in proportion to."""
    if bound is None or bound.enforced is None:
        return False
    held = bound.first, bound.enforced.largest_weight
    return held == (privacy.clip, privacy.largest_weight)


def _needs_of_single_updates(rules: RoundRules) -> Iterator[str]:
    """Yield what of the rules looks at single updates, or at what single devices measure, where
    the coordinator knows their sum alone."""
    if rules.secure is None:
        return
    computes = rules.computation is not None
    masked = SUMS if computes else UPDATE
    if rules.aggregators.keys() != {masked}:
        yield f"the parts {', '.join(rules.aggregators)}: only the {masked} part is masked"
    elif rules.aggregators[masked].name != NAME:
        yield f"the aggregator {rules.aggregators[masked].name}: it takes the {NAME}"
    if computes != isinstance(rules.secure, SumWords):
        yield f"{'updates' if computes else 'sums'} of another kind than what devices send"
    if rules.buffers:
        yield "buffers that devices report: they are not masked"
    if rules.weighing.rule is not None:
        yield f"updates that are {rules.weighing.rule.name}: each is weighed by its own numbers"
    if rules.weighing.bound is not None:
        yield "a bound on norms that the coordinator measures: devices clip"
    if rules.mixing_rate is not None:
        yield "a server that mixes models: it takes one update at a time"
    if rules.devices is not None:
        yield "a share of devices that moves the model: devices keep account of unclipped updates"
    if rules.adaptive_mu:
        yield "a mu that follows the loss: devices' losses are not known"
    if rules.privacy is not None:
        if rules.privacy.mechanism == "local":
            yield "noise of each device, which has no largest element that words could hold"
        if rules.privacy.clip_quantile is not None:
            yield "a clip norm that follows the updates: nobody counts how many were longer"
        if rules.privacy.metrics:
            yield "metrics of single devices to which noise would be added"
