"""The tables of a scenario: each key with its bounds, its default and its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fleetlearn_coordinator.plan.toml_errors import Section
from fleetlearn_protocol.messages import Identifier
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=366 * 86400.0)]
Span = Annotated[float, Meta(gt=0, le=366 * 86400.0)]
Time = Annotated[float, Meta(ge=0, le=100 * 366 * 86400.0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Throughput = Annotated[float, Meta(ge=1, le=1e12)]
StepSeconds = Annotated[float, Meta(ge=0, le=1e6)]
Hazard = Annotated[float, Meta(ge=0, le=1e6)]
MAX_POPULATION = 10**7
HAZARDS = "hazards"
"""Our law of failures: ``failures.download``, ``train`` and ``upload``."""
REQUIRED = object()
"""Stands for the default of a key that must be given."""


class PopulationSection(Section, frozen=True, kw_only=True):
    """[population]: how many devices there are. A device costs nothing until it takes part."""

    size: Annotated[int, Meta(ge=1, le=MAX_POPULATION)]
    """Devices, numbered from 0."""
    connected: Annotated[int, Meta(ge=1, le=10**6)]
    """Most devices that are connected at a time. The others are told to come back later, when a
    device has left. If this is less than ``size`` and devices never go offline, the others never
    connect. Default: all, at most ``service.max_connections``. Without effect where
    ``plan.pace.connected`` is given."""


class DataSection(Section, frozen=True, kw_only=True):
    """[data]: what data each device has. ``DATA`` says which keys a kind takes, and their
    defaults."""

    kind: str = "synthetic"
    """Generators: synthetic (Li et al., arXiv 1812.06127), hospitals (four set-ups of logistic
    regression), fcube (Li et al., arXiv 2102.02079). Partitions of ``arrays``: iid, dirichlet,
    shards, column, or an own ``partition``. function: a function beside the scenario. Or an own
    source, "my_package:my_source"."""
    seed: Seed
    """The data's seed. Default: the scenario's."""
    alpha: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """synthetic: standard deviation of the devices' models. dirichlet: concentration; small is more
    heterogeneous."""
    beta: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """synthetic: standard deviation of the means of the devices' inputs."""
    iid: bool | None = None
    """synthetic: whether all devices have the same model and the same distribution of inputs."""
    setup: Literal["balanced", "damaged", "unbalanced", "non-iid"] | None = None
    """hospitals: balanced and iid; one hospital has a damaged sensor; unbalanced and iid;
    unbalanced and not iid."""
    arrays: Path | None = None
    """An .npz file with the arrays of the bundle's batch, by name. Their first axis is the
    examples."""
    label: str | None = None
    """The array of the labels. Default: the last of the bundle's batch."""
    column: str | None = None
    """column: the array whose values say which device has an example."""
    shards: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """shards: pieces of the examples, sorted by label, that each device gets (McMahan et al., arXiv
    1602.05629)."""
    function: Annotated[str, Meta(pattern=r"^[\w.]+:\w+\Z")] | None = None
    """function: "module:function". It is called with a device's number and the data's seed, and
    returns the arrays of the device's examples."""
    path: Path | None = None
    """function: the folder in which the module is looked for. Default: the scenario's."""
    partition: str | None = None
    """partition: an own partition of ``arrays``, "my_package:my_partition"."""
    parameters: dict[str, Any] | None = None
    """Of an own source or partition: its function's parameters."""
    examples: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """Examples of a device; with ``power``, the fewest. Default: the generator's; in a partition,
    all examples are divided among the devices."""
    power: Annotated[float, Meta(gt=0, le=10)] | None = None
    """The numbers of examples follow a power law: a device has more than x with probability
    (``examples`` / x)^power."""
    largest: Annotated[int, Meta(ge=1, le=10**7)] | None = None
    """Most examples on a device. Default: with ``power`` 100 times ``examples``, else no limit."""
    test: Annotated[float, Meta(ge=0, le=0.9)] = 0.1
    """Share of the examples that is not trained on, but kept for the test."""


class Compute(Section, frozen=True, kw_only=True):
    """[compute]: what training costs."""

    step_seconds: StepSeconds | Literal["measure"] | dict[str, StepSeconds] = 0.02
    """Seconds that a step takes on a device of speed 1. "measure" measures a step of the bundle on
    this machine, and writes the result to the run's scenario.toml. Only that file repeats the run:
    each measurement is different. In a plan with [family] it may be a table: member -> seconds."""
    start_seconds: Seconds = 0.0
    """Seconds before the first step, on a device of speed 1."""
    memory: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """MiB that training takes. Devices of a tier with less never take part. ``fleetlearn-export``
    says how many."""


class Weibull(Section, frozen=True, kw_only=True):
    """A hazard that changes with the time t in the phase: the device is still there with
    probability exp(-(rate * t)^shape)."""

    rate: Hazard
    """Per second."""
    shape: Annotated[float, Meta(ge=0.1, le=20)] = 1.0
    """Below 1, most devices vanish early; above 1, most vanish late; 1 is a constant hazard."""


class TierFailures(Section, frozen=True, kw_only=True):
    """[tiers.NAME.failures]: values for this tier, instead of those in [failures]."""

    download: Hazard | Weibull | None = None
    """Hazard of vanishing, per second of the download: a number, or {rate, shape}. Default: the one
    in [failures]."""
    train: Hazard | Weibull | None = None
    """Hazard of vanishing, per second of training."""
    upload: Hazard | Weibull | None = None
    """Hazard of vanishing, per second of the upload."""
    crash: Share | None = None
    """Share of the tasks whose device dies at a uniformly drawn fraction of its training."""


class Tier(Section, frozen=True, kw_only=True):
    """[tiers.NAME]: a kind of device. With ``like``, the defaults are taken from ``PRESETS``."""

    like: str | None = None
    """The name of a preset."""
    share: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Share of the devices, relative to the other tiers' shares."""
    speed: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Median of the training speed. A step takes ``compute.step_seconds`` / speed."""
    download: Throughput = 2.5e6
    """Median of downloaded bytes per second."""
    upload: Throughput = 1.25e6
    """Median of uploaded bytes per second."""
    spread: Annotated[float, Meta(ge=0, le=3)] = 0.0
    """Standard deviation of the logarithms of a device's speed and throughputs, which are
    log-normal. With 0.5, two of three devices are within a factor of 1.65 of the median."""
    latency: Annotated[float, Meta(ge=0, le=3600)] = 0.05
    """Seconds for a message and its answer."""
    memory: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """MiB that training may use. With less than ``compute.memory``, the devices never take part.
    Default: enough. The devices state it as their memory at their check-in, if it is given."""
    tags: Annotated[tuple[Identifier, ...], Meta(max_length=15)] = ()
    """Tags that the devices state."""
    charging: Share | None = None
    """Share of the devices that state that they are charging; the others state that they are not.
    Default: none states it."""
    unmetered: Share | None = None
    """Share of the devices that state an unmetered network; the others state a metered one.
    Default: none states it."""
    failures: TierFailures = TierFailures()


class Zone(Section, frozen=True, kw_only=True):
    """[[availability.zones]]: a time zone."""

    hours: Annotated[float, Meta(ge=-12, le=14)]
    """Hours that its clock is ahead of the scenario's clock, which begins at midnight."""
    share: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Share of the devices, relative to the other zones' shares."""


class Availability(Section, frozen=True, kw_only=True):
    """[availability]: when a device is online. ``AVAILABILITY`` says which keys a kind takes."""

    kind: str = "always"
    """always. bernoulli: in each slot with the same probability. diurnal: with a probability that
    follows the hour of the device's day. markov: on and off for exponentially distributed times.
    trace: as a file says. Or an own law, "my_package:my_law"."""
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """bernoulli, diurnal: mean share of the devices that are online."""
    slot: Annotated[float, Meta(ge=1, le=86400)] | None = None
    """bernoulli, diurnal: seconds for which a device stays online or offline. Each device's slots
    have their own phase."""
    swing: Annotated[float, Meta(ge=1, le=1e6)] | None = None
    """diurnal: the largest share of a day divided by the smallest."""
    peak: Annotated[float, Meta(ge=0, le=24)] | None = None
    """diurnal: the hour of the device's day when most are online."""
    zones: Annotated[tuple[Zone, ...], Meta(max_length=100)] | None = None
    """diurnal, and own laws: the devices' time zones."""
    on: Span | None = None
    """markov: mean seconds online."""
    off: Span | None = None
    """markov: mean seconds offline."""
    file: Path | None = None
    """trace: a CSV file with the columns device, on, off. Each line is a time online, in seconds.
    Device i is the trace's device number i modulo the number of its devices."""
    repeat: Span | None = None
    """trace: seconds after which the trace begins again. Default: it does not, and devices stay
    offline at its end."""
    parameters: dict[str, Any] | None = None
    """Of an own law: its function's parameters."""


class Outage(Section, frozen=True, kw_only=True):
    """[[failures.outages]]: a region without network."""

    region: Annotated[int, Meta(ge=0, le=9999)]
    """Device i is in the region i modulo ``failures.regions``."""
    begin: Time
    """In seconds from the scenario's beginning."""
    end: Time
    """In seconds from the scenario's beginning."""


class Corrupt(Section, frozen=True, kw_only=True):
    """[[failures.corrupt]]: devices that always send bad updates."""

    share: Share
    """Share of the devices."""
    kind: Literal["garbage", "stale", "scaled", "flipped", "labels", "little"]
    """garbage: noise, whose norm is ``factor`` times the update's. stale: trained from the model of
    the round before. scaled: ``factor`` times the update. flipped: minus ``factor`` times the
    update. labels: trained on labels ``factor`` - y in place of y, such as 9 - y for digits.
    little: all send the mean of their updates minus ``factor`` standard deviations in each element,
    those that train together; Baruch, Baruch and Goldberg, A Little Is Enough, arXiv 1902.06156,
    Algorithm 3, where the factor is z."""
    factor: Annotated[float, Meta(gt=0, le=1e9)] = 1.0


class Failures(Section, frozen=True, kw_only=True):
    """[failures]: what goes wrong on devices and in their network."""

    law: str = HAZARDS
    """When devices vanish while they have a task. hazards: as ``download``, ``train`` and
    ``upload`` say. Or an own law, "my_package:my_law"."""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of an own law: its function's parameters."""
    download: Hazard | Weibull = 0.0
    """Hazard of vanishing, per second of the download: a number, or {rate, shape} for one that
    changes."""
    train: Hazard | Weibull = 0.0
    """Hazard of vanishing, per second of training."""
    upload: Hazard | Weibull = 0.0
    """Hazard of vanishing, per second of the upload."""
    crash: Share = 0.0
    """Share of the tasks whose device dies at a uniformly drawn fraction of its training."""
    stragglers: Share = 0.0
    """Share of the tasks that stop early, after a uniformly drawn 1 to E - 1 of the plan's E epochs
    (with one epoch: of the steps), as in Li et al., Federated Optimization in Heterogeneous
    Networks, arXiv 1812.06127, section 5.2."""
    exact_stragglers: bool = False
    """Whether exactly this share of the tasks that are assigned together straggle, rounded, as in
    that section. Default: each task straggles with this probability."""
    discard: bool = False
    """Whether stragglers report nothing, as with FedAvg in that paper. Default: they report their
    partial work, as with FedProx."""
    clock_skew: Annotated[float, Meta(ge=0, le=366 * 86400.0)] = 0.0
    """Standard deviation of the errors of the devices' clocks, in seconds."""
    regions: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Device i is in region i modulo this."""
    outages: Annotated[tuple[Outage, ...], Meta(max_length=10_000)] = ()
    """Times at which a region has no network."""
    corrupt: Annotated[tuple[Corrupt, ...], Meta(max_length=100)] = ()
    """Devices that send bad updates. Their shares add up to at most 1."""


class Coordinator(Section, frozen=True, kw_only=True):
    """[coordinator]: the coordinator's own failures."""

    crashes: Annotated[tuple[Time, ...], Meta(max_length=10_000)] = ()
    """When its process dies, in seconds from the beginning."""
    restart: Seconds = 10.0
    """Seconds until it is started again."""
    limits: bool = False
    """Whether at most ``service.downloads`` devices download at a time, and at most
    ``service.uploads`` upload, while the others wait, as with the server. Default: all transfer at
    once."""
    masks: bool = False
    """Whether devices of a plan with [secure] add masks, which a helper in the simulator's own
    process adds up. Default: updates are in fixed point without masks, which gives the same models
    in less time."""


_SIZES = {"examples": None, "power": None, "largest": None}
DATA: Mapping[str, Mapping[str, Any]] = {
    "synthetic": {"alpha": 0.0, "beta": 0.0, "iid": False, **_SIZES},
    "hospitals": {"setup": "balanced", "examples": None},
    "fcube": {"examples": None},
    "iid": {"arrays": REQUIRED, **_SIZES},
    "dirichlet": {"arrays": REQUIRED, "label": None, "alpha": 0.5, **_SIZES},
    "shards": {"arrays": REQUIRED, "label": None, "shards": 2, "examples": None},
    "column": {"arrays": REQUIRED, "column": REQUIRED, "examples": None},
    "partition": {"arrays": REQUIRED, "label": None, "partition": REQUIRED, "parameters": {}},
    "function": {"function": REQUIRED, "path": ".", "examples": None},
}
"""Kind of data -> the keys that it takes besides ``kind``, ``seed`` and ``test``, and their
defaults."""
AVAILABILITY: Mapping[str, Mapping[str, Any]] = {
    "always": {},
    "bernoulli": {"share": 0.5, "slot": 3600.0},
    "markov": {"on": 3600.0, "off": 10800.0},
    "diurnal": {
        "share": 0.25,
        "slot": 3600.0,
        "swing": 4.0,
        "peak": 3.0,
        "zones": [{"hours": 0.0}],
    },
    "trace": {"file": REQUIRED, "repeat": None},
}
"""Kind of availability -> the keys that it takes, and their defaults. Bonawitz et al., Towards
Federated Learning at Scale, arXiv 1902.01046, section 9: four times as many devices at night as by
day."""
OWN_DATA: Mapping[str, Any] = {"parameters": {}}
"""The keys and defaults of an own source of data."""
OWN_AVAILABILITY: Mapping[str, Any] = {"parameters": {}, "zones": None}
"""The same of an own law of availability."""
PRESETS: Mapping[str, Mapping[str, float]] = {
    "pi-zero-2": {
        "speed": 0.08,
        "download": 3e6,
        "upload": 2e6,
        "latency": 0.05,
        "memory": 256,
        "spread": 0.2,
    },
    "pi-4": {
        "speed": 0.15,
        "download": 6e6,
        "upload": 2.5e6,
        "latency": 0.05,
        "memory": 1024,
        "spread": 0.2,
    },
    "pi-5": {
        "speed": 0.4,
        "download": 6e6,
        "upload": 2.5e6,
        "latency": 0.05,
        "memory": 2048,
        "spread": 0.2,
    },
    "jetson": {
        "speed": 0.28,
        "download": 1.2e7,
        "upload": 2.5e6,
        "latency": 0.03,
        "memory": 4096,
        "spread": 0.2,
    },
    "phone": {
        "speed": 0.4,
        "download": 5e6,
        "upload": 1.2e6,
        "latency": 0.08,
        "memory": 1024,
        "spread": 0.5,
    },
}
"""Name for ``like`` -> values of a tier's keys. They are assumptions to start from, not
measurements.

``speed`` is one core's peak of float32 operations (per cycle, times the clock) over that of a
desktop core (32 at 3 GHz). Pi Zero 2 W: Cortex-A53, 8 at 1 GHz. Pi 4: Cortex-A72, 8 at 1.8 GHz. Pi
5: Cortex-A76, 16 at 2.4 GHz. Jetson Orin Nano: Cortex-A78AE, 16 at 1.7 GHz, without its GPU. Phone:
Cortex-A78, 16 at 2.4 GHz. The throughputs are typical of a home's line over Wi-Fi (for the Pi Zero
2.4 GHz alone), over a cable for a Jetson, and of a mobile network for a phone. ``memory`` is half
of the board's smallest or usual memory. The spread is a guess.
"""
