"""What the engine needs of a plan, and the phases of a run."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from math import ceil, inf
from typing import NamedTuple

from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.selection_rules import SelectionRules

MEASURED_ON = {
    "round": "the devices' training examples",
    "evaluation": "the devices' training examples",
    "held-out": "held-out data",
}
"""Who measured a metric, as a plan's ``measured_by`` says -> whose examples the metric is of, in
words."""


class PaceSettings(NamedTuple):
    """What pace steering (pace.py) needs of a plan."""

    connected: int
    """Most devices that stay connected. Those with a task stay in any case."""
    longest: float = 43200.0
    """Seconds after which a device is to come back at the latest, unless more than ``check_ins``
    would come."""
    check_ins: float = 100.0
    """Most devices per second that are told to come back at a time."""


class EvaluationSettings(NamedTuple):
    """What the engine needs of a plan's [evaluation]."""

    every: int = 0
    """Versions from one evaluation to the next, and one of the last version. 0: only when somebody
    asks for one."""
    devices: int = 1
    """Devices that measure."""
    minimum: int = 1
    """Fewest devices that must have measured for the evaluation to be valid."""
    deadline: float = 600.0
    """Seconds after which an evaluation ends with what there is."""


class PairwiseSettings(NamedTuple):
    """What the engine needs of a plan with pairwise masks."""

    devices: int
    """Devices that agree on masks for a round: as many as its tasks."""
    minimum: int
    """Fewest devices with which the round goes on."""
    unmasking: int
    """Fewest devices that must tell their shares when the round has its updates: with fewer no
    secret can be put together."""
    deadline: float
    """Seconds after which an exchange ends with what there is."""
    graph: str = ""
    """What the neighbours of a round's devices follow from, as text. With another one an open round
    cannot go on."""


class FitSettings(NamedTuple):
    """What the engine needs of a plan with clusters."""

    devices: int
    """Devices that measure the models for a round: as many as its tasks."""
    minimum: int
    """Fewest devices with which the round goes on."""
    deadline: float
    """Seconds after which the exchange ends with what there is."""


class ReleaseBudget(NamedTuple):
    """How many models a private run may release. The engine counts them, and knows nothing of
    epsilon."""

    releases: int
    """Most rounds that may be committed, those of earlier processes included."""
    spent: Finish
    """Why training is over once they are: the rule ``privacy budget``."""
    abandoned: bool = False
    """Whether abandoned rounds count as well: each update was seen as it was sent."""
    if_abandoned: ReleaseBudget | None = None
    """The budget once the open round is abandoned, where that leaves fewer rounds. None: this."""


class RegionSettings(NamedTuple):
    """What the engine needs of a region: a named set of devices with a round of its own within each
    round."""

    name: str
    goal: int
    """Reports that end the region's part of a round."""
    cohort: int
    """Most slots of the region: leases that run plus reports that count."""
    minimum: int
    """Fewest reports with which the region is done at its deadline. With fewer it has failed."""
    deadline: float
    """Seconds from the round's start to the end of the region's part. At most the round's."""


class RegionsSettings(NamedTuple):
    """What the engine needs of a plan's [regions]."""

    regions: tuple[RegionSettings, ...]
    goal: int
    """Regions that close the round when they are done."""
    minimum: int
    """Fewest regions that are done in a round that is committed."""


class RoundSize(NamedTuple):
    """How large a round is: as ``Settings`` of the same names."""

    goal: int
    cohort: int
    minimum: int


class CohortShare(NamedTuple):
    """Rounds whose goal is a share of the devices that can take part when the round opens."""

    share: float
    """Of these devices; above 0, at most 1."""
    most: int
    """The largest goal."""
    least: int
    """The smallest goal, and the fewest reports of a round that is committed."""
    over_selection: float
    """Tasks for each report wanted."""
    minimum_share: float
    """Of a round's goal: the fewest reports with which the round is committed, if they are no fewer
    than ``least``."""

    def size_for(self, devices: int, early: int = 0) -> RoundSize:
        """Return the size of a round that opens while so many devices can take part, ``early`` of
        which have reported already."""
        goal = max(_times(devices, self.share), early, self.least)
        return self.size_of_goal(min(goal, self.most))

    def size_of_goal(self, goal: int) -> RoundSize:
        """Return the size of a round with this goal."""
        minimum = max(self.least, _times(goal, self.minimum_share))
        return RoundSize(goal, _times(goal, self.over_selection), min(goal, minimum))


def _times(count: int, factor: float) -> int:
    """Return the product, rounded up. The factor is as it is written: 100 * 1.1 is 110, not 111."""
    return ceil(count * Decimal(str(factor)))


class Settings(NamedTuple):
    """What the engine needs of a plan. Durations are seconds."""

    goal: int
    """Reports that close the round. With a ``share`` this, ``cohort`` and ``minimum`` are of the
    open round or, where none is open, of one that would open now; at first those of the largest."""
    cohort: int
    """Most slots of a round: leases that run plus reports that count. goal x over-selection.
    Asynchronous: most leases that run."""
    minimum: int
    """Fewest reports of a round that is committed."""
    deadline: float
    """Length of a round. Asynchronous: length of a lease too."""
    grace: float
    """How long a lease outlives its device's connection, all absences together, until the device
    makes progress."""
    gather: float
    """How long to wait for ``goal`` devices once ``minimum`` are there."""
    seed: int = 0
    rounds: int | None = None
    """Stop after this many committed rounds."""
    metric: str | None = None
    """Stop once this metric is at least ``target``, or at most where ``below``."""
    target: float | None = None
    """None: no value of the metric stops the run."""
    below: bool = False
    patience: int | None = None
    """Stop once so many models were measured since the metric improved by more than ``least``
    (improvement.py). None: they do not stop the run."""
    least: float = 0.0
    measured_on: str = MEASURED_ON["round"]
    """Whose examples the metric is of, in words."""
    epsilon: float = 0.0
    """Stop once the L2 norm of the model's change is below this."""
    stall: float = inf
    """How long a lease lives without progress. Infinite: ``progress`` is not told, and no device is
    remembered."""
    asynchronous: bool = False
    """Whether tasks are given at any time and go on across rounds (``BufferedAsynchronous``)."""
    carry: bool = False
    """Whether leases of synchronous rounds outlive their round, so that a late update counts in the
    next."""
    max_staleness: int = 0
    """Where leases outlive their round: an update of a larger staleness does not count."""
    max_updates: int | None = None
    """Asynchronous: most updates of one device in one round. None: any number."""
    selection: SelectionRules | None = None
    """Which devices are given tasks. None: any, each with the same probability."""
    pace: PaceSettings | None = None
    """None: all devices stay connected."""
    evaluation: EvaluationSettings = EvaluationSettings()
    quality: EvaluationSettings | None = None
    """Looks at the devices' data, as evaluations are; None: there are none."""
    pairwise: PairwiseSettings | None = None
    """None: devices agree on no masks."""
    fit: FitSettings | None = None
    """None: a device does not choose among several models by its data."""
    budget: ReleaseBudget | None = None
    """Stop once this many rounds are committed. None: no privacy budget limits them."""
    separation: int = 0
    """Fewest releases from one participation of a device to its next (participation_limits.py). 0:
    devices take part at any time."""
    participations: int | None = None
    """Most participations of a device, where there is a ``separation``. None: any number."""
    one_task: bool = False
    """Whether a device has one task in a round at most, whatever becomes of it: where devices add
    the noise of a private run, each update that is sent tells something. Only where rounds are
    synchronous and discard late updates."""
    regions: RegionsSettings | None = None
    """Hierarchical rounds (regional_rounds.py), in synchronous rounds that discard late updates.
    ``goal``, ``cohort`` and ``minimum`` are then the regions' together. None: rounds have no
    regions."""
    share: CohortShare | None = None
    """In synchronous rounds without regions: each round has a goal of its own. None: all have the
    same."""

    @property
    def size(self) -> RoundSize:
        return RoundSize(self.goal, self.cohort, self.minimum)

    @property
    def own_goal(self) -> int | None:
        """The goal of the open round, where each has its own."""
        return None if self.share is None else self.goal

    @property
    def largest_goal(self) -> int:
        """The goal of every round, or of the largest."""
        return self.goal if self.share is None else self.share.most

    @property
    def limits_participation(self) -> bool:
        """Whether it is limited how often a device takes part, as in a private run."""
        return self.separation > 0

    @property
    def outlive(self) -> bool:
        """Whether leases outlive the round in which they were given."""
        return self.asynchronous or self.carry


class Phase(StrEnum):
    GATHERING = "gathering"
    """No round is open; waiting for enough devices."""
    OPEN = "open"
    COMMITTING = "committing"
    """The round is closed. Exchanges may come before its model (round_exchanges.py); then the
    driver makes the model and calls ``committed``."""
    FINISHED = "finished"
