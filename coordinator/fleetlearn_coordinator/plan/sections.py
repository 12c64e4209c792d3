"""The tables of a plan file, and the keys that each takes. plan.py puts them together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fleetlearn_protocol.messages import MAX_EXAMPLES, FunctionName, Name, Number
from msgspec import Meta

from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES, MAX_WEIGHT
from fleetlearn_coordinator.aggregation.robust.rules import Bounds
from fleetlearn_coordinator.aggregation.weighing.fair import MOST_Q
from fleetlearn_coordinator.aggregation.weighing.norm_bound import NormBound
from fleetlearn_coordinator.plan.clusters_section import ClustersSection
from fleetlearn_coordinator.plan.distil_section import DistilSection
from fleetlearn_coordinator.plan.encoding_section import EncodingSection
from fleetlearn_coordinator.plan.privacy_section import PrivacySection
from fleetlearn_coordinator.plan.quality_section import QualitySection
from fleetlearn_coordinator.plan.regions_section import RegionsSection
from fleetlearn_coordinator.plan.schedule_section import (
    ScheduleSection,
    Share,
    StepScheduleSection,
)
from fleetlearn_coordinator.plan.secure_section import SecureSection
from fleetlearn_coordinator.plan.selection_section import SelectionSection
from fleetlearn_coordinator.plan.toml_errors import Positive, Section
from fleetlearn_coordinator.rounds.settings import CohortShare, PaceSettings, RoundSize

Duration = Annotated[float, Meta(gt=0, le=366 * 86400.0)]
Wait = Annotated[float, Meta(ge=0, le=366 * 86400.0)]
Rate = Annotated[float, Meta(gt=0, lt=1e6)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
ROUNDS = 100
"""Committed rounds after which a run is over, by default."""
DEADLINE = 600.0
"""Seconds that a round takes at most, by default."""
CONCURRENCY = 10
"""By default this many times the goal is the most tasks that run at a time, asynchronously; and
this many times the mean staleness is the largest that counts."""


class Local(Section, frozen=True, kw_only=True):
    """[local]: what a device does with a task."""

    epochs: Positive
    """Passes over the device's data. Default: the recipe's."""
    batch_size: Annotated[int, Meta(ge=0, le=MAX_EXAMPLES)]
    """Examples per step; 0: all of the device's in one. Default: the recipe's."""
    lr: Rate | None = None
    """Learning rate of the local step. Default: the bundle's; an error where it has none."""
    schedule: ScheduleSection | None = None
    """How the learning rate changes from round to round. Default: it stays."""
    step_schedule: StepScheduleSection | None = None
    """How it changes from step to step of a task. Default: it stays."""
    mu: Annotated[float, Meta(ge=0, lt=1e6)] | None = None
    """Weight of the proximal term mu/2 * ||w - round's model||^2, or of MOON's contrastive loss; of
    ditto's personal model alone, its lambda; of pfedme's pull between its two models. Default: for
    fedprox, moon, feddyn, ditto and pfedme the bundle's, which must not be 0; else 0."""
    adaptive_mu: bool = False
    """Whether mu follows the loss from round to round, beginning at ``mu``. Default: the
    recipe's."""
    algorithm: str
    """What devices do beside plain training: plain, scaffold (option II of its paper),
    scaffold-gradient (option I), feddyn, fedrep, ditto, pfedme, apfl; or a function of the
    devices' owners, such as my_package:my_algorithm. Default: the recipe's."""
    function: FunctionName | None = None
    """Of algorithm = "own": the function. It is filled in where ``algorithm`` names one."""
    parameters: dict[Name, Number] = msgspec.field(default_factory=dict)
    """Of an own algorithm: the parameters of its function, by name."""
    personal_epochs: Positive | None = None
    """ditto and fedrep: passes over the device's data in which its personal model or parameters are
    trained by themselves. Default: the recipe's (fedrep 10), else as many as ``epochs``."""
    time_budget: Duration | None = None
    """Seconds that training may take on the device, which then reports what it did. Default: until
    the deadline."""
    evaluate: bool = True
    """Whether devices measure the round's model on their own data before training."""
    hyper: dict[Name, Number] = msgspec.field(default_factory=dict)
    """Further hyper-parameters of the bundle's step, by name; pfedme: inner_steps (default 5) and
    outer_lr; apfl: alpha (0.5) and adapt_alpha (0). Default: the bundle's."""


class RoundSection(Section, frozen=True, kw_only=True):
    """[round]: who takes part, and for how long."""

    goal: Annotated[int, Meta(ge=1, le=MAX_UPDATES)]
    """Reports wanted; the round commits as soon as it has them. With ``goal_share``: the most that
    are wanted. Asynchronous: FedBuff's buffer, K."""
    goal_share: Share | None = None
    """Synchronous: a round wants this share of the devices that can take part when it opens,
    rounded up, at least ``minimum`` and at most ``goal``. Default: each round wants ``goal``."""
    over_selection: Annotated[float, Meta(ge=1, le=100)] | None = None
    """Synchronous: tasks given for each report wanted, since some devices will vanish. Default:
    1.3."""
    minimum: Annotated[int, Meta(ge=1)] = 1
    """With fewer reports at the deadline the round is abandoned. Default: half of the goal, rounded
    up; with ``goal_share`` 1, or as many as the aggregator needs. Asynchronous: at its deadline a
    round commits with this many, and goes on with fewer; default: the goal."""
    minimum_share: Share | None = None
    """With ``goal_share``: the same as a share of the round's own goal, rounded up, where that is
    more than ``minimum``. Default: 0.5."""
    deadline: Duration = DEADLINE
    """Seconds from the round's start to its end. Asynchronous, or with late = "carry": a task has
    as long from its own start, or from its round's end."""
    grace: Wait = 10.0
    """Seconds that a device's task outlives its connection, for it to come back; all absences
    together, until the device makes progress."""
    stall: Duration | None = None
    """Seconds that a task lives without progress: no step, no batch of the evaluation, no byte of a
    download or an upload. Default: a fifth of the deadline, but at most 300; at least 30 and four
    heartbeats."""
    gather: Wait | None = None
    """Synchronous: seconds to wait for ``goal`` devices once ``minimum`` are there. Default: 5."""
    max_weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)] = 1_000_000
    """Most examples that count as an update's weight, whatever a device claims to have."""
    weighting: Literal["examples", "uniform", "inverse-participation"]
    """Whether an update weighs as much as its device has examples, or all weigh the same, or
    (asynchronous) the less, the more updates of its device count
    (aggregation/participation_rates.py). Default: uniform with [privacy], with [secure], and with
    an aggregator other than the mean, which bounds what one device can do; else the recipe's."""
    participation: Literal["synchronous", "asynchronous"]
    """Whether a round waits for the devices that it gave tasks to, or tasks are given at any time
    and go on when a round ends, so that updates may be stale. Default: the recipe's."""
    concurrency: Annotated[int, Meta(ge=1, le=MAX_UPDATES)] | None = None
    """Asynchronous: most tasks that run at a time. Default: ten times the goal."""
    max_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Asynchronous: largest share of a goal's updates that one device may have. Default: fast
    devices are not held back."""
    late: Literal["discard", "carry"] | None = None
    """Synchronous: what becomes of an update that comes after its round has ended: it does not
    count, or it counts in the next round, as a stale one."""

    @property
    def asynchronous(self) -> bool:
        return self.participation == "asynchronous"

    @property
    def cohort(self) -> int:
        """Most tasks in a round: goal * over_selection, rounded up. Asynchronous: most tasks that
        run at a time."""
        if self.asynchronous:
            return self.concurrency or min(CONCURRENCY * self.goal, MAX_UPDATES)
        # as written: 100 * 1.1 is 110, not 111
        return math.ceil(self.goal * Decimal(str(self.over_selection)))

    @property
    def share(self) -> CohortShare | None:
        """What a round's goal is a share of; None: each round wants ``goal``."""
        if self.goal_share is None or self.over_selection is None or self.minimum_share is None:
            return None
        return CohortShare(
            self.goal_share, self.goal, self.minimum, self.over_selection, self.minimum_share
        )

    @property
    def size(self) -> RoundSize:
        """How large a round is; with ``goal_share``, the largest."""
        if self.share is None:
            return RoundSize(self.goal, self.cohort, self.minimum)
        return self.share.size_of_goal(self.goal)


class Staleness(Section, frozen=True, kw_only=True):
    """[staleness]: what an update counts whose model is tau versions old, where updates may be
    stale: asynchronously, or with round.late = "carry"."""

    function: str | None = None
    """Its factor: constant 1, polynomial (1 + tau)^-a, or hinge: 1 up to tau = b, then 1 / (a
    (tau - b) + 1); or an own one, "my_package:my_function". Default: polynomial."""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of an own staleness function: its factory's parameters."""
    a: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """Default: polynomial 0.5, hinge 10."""
    b: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """The b of the function hinge. Default: 4."""
    max: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    """The largest staleness that counts. A task whose update would be older is cancelled. Default:
    asynchronous ten times the mean that is to be expected, concurrency / goal rounded up; else
    1."""


class Aggregation(Section, frozen=True, kw_only=True):
    """[aggregation]: how a round's updates become one."""

    aggregator: str = "mean"
    """mean, or one that bounds what hostile devices can do: median, trimmed-mean, krum, multi-krum,
    bulyan, geometric-median, centred-clipping; or an own one, "my_package:my_aggregator". Default:
    the recipe's."""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of an own aggregator: its function's parameters."""
    weighing: str | None = None
    """An own weighing rule, "my_package:my_rule". For the mean. Default: none but ``normalise`` and
    ``q``."""
    weighing_parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of the own weighing rule: its function's parameters."""
    hostile: Annotated[float, Meta(ge=0, lt=0.5)] | None = None
    """For trimmed-mean, krum, multi-krum and bulyan: the largest share of the devices that may be
    hostile, and send anything. Default: 0.2."""
    radius: Annotated[float, Meta(gt=0, le=1e30)] | None = None
    """For centred-clipping: the longest difference of an update from the centre that counts whole
    (L2 norm)."""
    max_norm: Annotated[float, Meta(gt=0, le=1e30)] | None = None
    """The longest update that counts whole (L2 norm of all of its elements), with any aggregator.
    Default: any."""
    norm_action: Literal["clip", "refuse"] | None = None
    """Whether a longer one is multiplied by max_norm / its norm, or its report is refused. Default:
    clip."""
    norm_quantile: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """The bound follows the updates, so that this share of them is within it; max_norm is where it
    begins. Default: it stays where it is."""
    norm_rate: Annotated[float, Meta(gt=0, le=10)] | None = None
    """How fast it follows them. Default: 0.2."""
    normalise: bool = False
    """FedNova: whether updates are divided by the local work that made them. For the mean. Default:
    the recipe's."""
    q: Annotated[float, Meta(ge=0, le=MOST_Q)] | None = None
    """q-FedAvg: the power of a device's loss with which its update counts. For the mean. Default:
    the recipe's."""

    rows: Literal["all", "touched", "whole"] | None = None
    """For a bundle with sparse tables: what the sum of a row is divided by, the weight of all
    updates ("all": Federated Averaging) or of those that have the row ("touched": FedSubAvg's
    correction); or "whole": devices fetch and send whole tables. Default: all."""

    @property
    def has_rule(self) -> bool:
        """Whether updates are weighed by a rule, FedNova's, q-FedAvg's or an own one."""
        return self.normalise or self.q is not None or self.weighing is not None

    @property
    def norm_bound(self) -> NormBound | None:
        if self.max_norm is None:
            return None
        return NormBound(
            self.max_norm, self.norm_action or "clip", self.norm_quantile, self.norm_rate or 0.2
        )

    @property
    def bounds(self) -> Bounds:
        values = {key: getattr(self, key) for key in Bounds._fields}
        return Bounds(**{key: value for key, value in values.items() if value is not None})


class PaceSection(Section, frozen=True, kw_only=True):
    """[pace]: pace steering. How many devices stay connected, and when the others come back."""

    connected: Positive | None = None
    """Most devices that stay connected; a device with a task always does. The others are told when
    to come back. Default: no pace steering; all stay, up to ``max_connections`` of the service."""
    longest: Annotated[float, Meta(ge=1, le=30 * 86400.0)] = 43200.0
    """Seconds after which a device is told to come back at the latest, unless more than
    ``check_ins`` would come."""
    check_ins: Annotated[float, Meta(gt=0, le=1e5)] = 100.0
    """Most devices per second that are told to come back at a time."""
    finished: Annotated[float, Meta(ge=1, le=30 * 86400.0)] = 60.0
    """Seconds after which the devices of a finished run are told to come back: it goes on with them
    if its stop rules were changed by then. Of many devices one a second comes, up to an hour
    later."""

    @property
    def rules(self) -> PaceSettings | None:
        """What the engine needs of this; None without pace steering."""
        return (
            None
            if self.connected is None
            else PaceSettings(self.connected, self.longest, self.check_ins)
        )


class Server(Section, frozen=True, kw_only=True):
    """[server]: the server optimizer. Defaults: the recipe's; for another optimizer than the
    recipe's, that one's."""

    optimizer: str
    """sgd, momentum, adagrad, adam, yogi, feddyn, or an own one, "my_package:my_optimizer"."""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of an own optimizer: its function's parameters, in place of those below."""
    lr: Rate | None = None
    """Learning rate (the papers' eta; FedAsync's mixing rate alpha)."""
    mix: bool = False
    """Whether the model moves towards the device's model, not by its update, as FedAsync's does.
    For a goal of 1 in asynchronous rounds. Default: the recipe's."""
    devices: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    """scaffold and feddyn: how many devices may take part at all, N. A larger number makes both of
    them more careful; with one that is too small they overshoot."""
    momentum: Decay | None = None
    """For the optimizer momentum: the part of the last step that goes into the next."""
    beta1: Decay | None = None
    """Decay of the mean update (adagrad, adam, yogi)."""
    beta2: Decay | None = None
    """Decay of its square (adam, yogi)."""
    tau: Annotated[float, Meta(ge=1e-12, le=1e6)] | None = None
    """Added to the square root of the second moment (adagrad, adam, yogi): larger is less
    adaptive."""

    @property
    def hyper(self) -> dict[str, float]:
        """The hyper-parameters given to the optimizer."""
        values = {key: getattr(self, key) for key in ("lr", "momentum", "beta1", "beta2", "tau")}
        return {key: value for key, value in values.items() if value is not None}


class Stop(Section, frozen=True, kw_only=True):
    """[stop]: when training is over. Whichever comes first."""

    rounds: Annotated[int, Meta(ge=1, le=2**31)] = ROUNDS
    """Committed rounds. A roll back counts as one. The default of a computation, which ends when it
    is done, is a million."""
    metric: Name | None = None
    """A metric of the bundle, or "loss": the devices' evaluation of the round's model, weighted by
    examples."""
    target: Number | None = None
    """The metric's value at which to stop."""
    patience: Positive | None = None
    """Early stopping: measured models without an improvement of the metric after which to stop. The
    best of them is named, and kept."""
    least: Annotated[float, Meta(ge=0, le=1e30)] | None = None
    """With ``patience``: an improvement is more than this, beyond the last improvement's value.
    Default: 0."""
    direction: Literal["above", "below"] = "above"
    """Whether to stop at or above the target, or at or below it. Default: below for the loss, else
    above."""
    bounds: tuple[Number, Number] | None = None
    """The least and the greatest value that the metric can have for one example. A device whose
    mean is beyond them is left out of the metric. Default: no more than 1 for a target of up to 1
    that is to be reached from below, no less than 0 for one of at least 0 that is to be reached
    from above; else the plan must say."""
    measured_by: Literal["round", "evaluation", "held-out"] = "round"
    """Where the metric comes from: the devices of each round, before they train; the devices of an
    evaluation; or held-out data."""
    epsilon: Annotated[float, Meta(gt=0, le=1e30)] | None = None
    """Stop when a round changes the model by less than this (L2 norm)."""
    rule: str | None = None
    """An own stop rule, "my_package:my_rule", which may stop the run as well. Default: none."""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of the own stop rule: its function's parameters."""


class EvaluationSection(Section, frozen=True, kw_only=True):
    """[evaluation]: measuring the model on devices' own data, beside the training rounds."""

    every: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    """Committed rounds from one evaluation to the next; the last model is evaluated too. Default:
    only when somebody asks for it (``fleetlearn-coordinator evaluate``)."""
    devices: Annotated[int, Meta(ge=1, le=MAX_UPDATES)]
    """Devices that measure. Default: round.goal."""
    minimum: Annotated[int, Meta(ge=1)]
    """An evaluation is valid if at least this many devices measured. Default: half of the devices,
    rounded up."""
    deadline: Duration
    """Seconds after which an evaluation ends with what there is. Default: round.deadline."""
    data: Path | None = None
    """Held-out data, an .npz file of the bundle's arrays, relative to the plan file: a process
    beside the coordinator measures the models on it. Default: none does."""
    data_every: Positive = 1
    """Committed rounds from one model that is measured on held-out data to the next."""


class Models(Section, frozen=True, kw_only=True):
    """[models]: which versions of the model are kept, and who may have the newest. Beside these the
    initial model is kept, and what open tasks and measurements still need."""

    last: Positive = 3
    """The newest ones, this many."""
    every: Positive | None = None
    """Each version that this number divides. Default: none for that."""
    best: Positive | None = None
    """This many, the best by ``metric``. Default: none for that."""
    metric: Name | None = None
    """A metric of the bundle, or "loss". Default: stop.metric."""
    direction: Literal["above", "below"] = "above"
    """Whether a larger value is better, or a smaller one. Default: as for ``stop``."""
    measured_by: Literal["round", "evaluation", "held-out"]
    """Where the metric comes from, as for ``stop``: the devices of the round that begins from the
    version, an evaluation of it, or held-out data. Default: stop.measured_by."""
    give: bool = False
    """Whether devices that take no part may fetch the newest model too, also when the training is
    finished. Those that take part are sent it with each task."""


SECTIONS: Mapping[str, type[Section]] = {
    "local": Local,
    "round": RoundSection,
    "staleness": Staleness,
    "aggregation": Aggregation,
    "encoding": EncodingSection,
    "pace": PaceSection,
    "server": Server,
    "stop": Stop,
    "selection": SelectionSection,
    "evaluation": EvaluationSection,
    "models": Models,
    "privacy": PrivacySection,
    "secure": SecureSection,
    "distil": DistilSection,
    "clusters": ClustersSection,
    "quality": QualitySection,
    "regions": RegionsSection,
}
OPTIONAL = ("privacy", "secure", "distil", "clusters", "quality", "regions")
"""Sections without which a plan is another plan, and not the same with defaults."""
