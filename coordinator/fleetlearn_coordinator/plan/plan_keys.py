"""The keys of a plan file, with the recipe filled in, and what follows from them alone."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from fleetlearn_protocol.messages import Identifier
from msgspec import Meta

from fleetlearn_coordinator.plan.clusters_section import ClustersSection
from fleetlearn_coordinator.plan.distil_section import DistilSection
from fleetlearn_coordinator.plan.encoding_section import EncodingSection
from fleetlearn_coordinator.plan.family_section import FamilyMember, MemberName
from fleetlearn_coordinator.plan.local_algorithms import (
    ALGORITHMS,
    LocalAlgorithm,
    with_parameters,
)
from fleetlearn_coordinator.plan.privacy_section import PrivacySection
from fleetlearn_coordinator.plan.quality_section import QualitySection
from fleetlearn_coordinator.plan.regions_section import RegionsSection
from fleetlearn_coordinator.plan.sections import (
    Aggregation,
    EvaluationSection,
    Local,
    Models,
    PaceSection,
    RoundSection,
    Server,
    Staleness,
    Stop,
)
from fleetlearn_coordinator.plan.secure_section import SecureSection
from fleetlearn_coordinator.plan.selection_section import SelectionSection
from fleetlearn_coordinator.plan.toml_errors import Section


class PlanKeys(Section, frozen=True, kw_only=True):
    """What a plan says. ``contradictions.py`` checks that its keys go together; ``Plan`` adds what
    the bundle has to do with it."""

    name: Identifier
    """The run's name: letters, digits, ``._-``."""
    bundle: Path
    """The training bundle, relative to the plan file. With [family] the first member's."""
    recipe: str = "fedavg"
    """Where the defaults of [local] and [server] come from."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Makes the choice of devices and the order of their examples repeatable."""
    data_dir: Path
    """Where the run is kept: a folder, relative to the plan file, or a store's URL. Default:
    ``<name>.run`` beside it."""
    durable: Literal["process", "power"] = "process"
    """What an acknowledged update survives: the process's death, or also the machine's (an fsync
    for each update). Default: process; with [privacy] power, so that no release that was seen is
    forgotten."""
    initial: Path | None = None
    """The model that a new run begins with (a warm start): a safetensors file that has each of the
    model's parameters by its name, relative to the plan file. Default: the bundle's."""
    local: Local
    round: RoundSection
    staleness: Staleness
    aggregation: Aggregation
    encoding: EncodingSection
    pace: PaceSection
    server: Server
    stop: Stop
    selection: SelectionSection
    evaluation: EvaluationSection
    models: Models
    privacy: PrivacySection | None = None
    """Default: no differential privacy."""
    secure: SecureSection | None = None
    quality: QualitySection | None = None
    """Default: the coordinator sees each update."""
    family: dict[MemberName, FamilyMember] = msgspec.field(default_factory=dict)
    """The run's several models by name, in the order of preference. Empty: it has the one of
    ``bundle``."""
    distil: DistilSection | None = None
    """Default: the model is the mean."""
    clusters: ClustersSection | None = None
    """Default: a device does not choose among models by its data."""
    regions: RegionsSection | None = None
    """Default: rounds have no regions."""
    file: str
    """Where the plan came from, for messages. Not a key of the file."""

    @property
    def members(self) -> dict[str, Path]:
        """Name of each of the run's models -> its bundle, in order. A run with one model has the
        name ""."""
        if self.clusters is not None:
            return dict.fromkeys(self.clusters.names, self.bundle)
        if not self.family:
            return {"": self.bundle}
        return {name: member.bundle for name, member in self.family.items()}

    @property
    def is_family(self) -> bool:
        """Whether the run has several models, which have names."""
        return [*self.members] != [""]

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """The metric that may stop the run -> the least and the greatest that a device's mean can
        be."""
        stop = self.stop
        if stop.metric is None:
            return {}
        by_devices = stop.measured_by != "held-out"
        if stop.target is None and stop.bounds is None and not by_devices:
            return {}
        # By default only on the side where one device's word would stop the run.
        return {
            stop.metric: stop.bounds
            or ((0.0, math.inf) if stop.direction == "below" else (-math.inf, 1.0))
        }

    @property
    def hides_devices(self) -> bool:
        """Whether what single devices measure is shown to nobody."""
        return self.privacy is not None or self.secure is not None

    @property
    def hidden_metrics(self) -> Literal["none", "noised"] | None:
        """What people see of what devices measure: none of it, or with noise. None: all of it."""
        if self.privacy is not None:
            return self.privacy.metrics
        return None if self.secure is None else "none"

    @property
    def most_updates_of_a_device(self) -> int | None:
        """How many updates of one device count in a round at most. None: any number."""
        rule = self.round
        # With [secure] the helper wants different devices, and takes one update of each from a
        # model.
        if not rule.asynchronous or self.secure is not None:
            return 1
        # As written: 100 * 0.29 is 29, not 28.
        return None if rule.max_share is None else int(rule.goal * Decimal(str(rule.max_share)))

    @property
    def keeps_device_models(self) -> bool:
        """Whether the devices' own models are needed at a round's end."""
        measures = self.quality is not None and self.quality.contributions is not None
        return measures or (self.distil is not None and self.distil.teachers == "devices")

    @property
    def algorithm(self) -> LocalAlgorithm:
        """What the devices' algorithm needs."""
        if self.local.function is not None:
            return with_parameters(self.local.parameters)
        return ALGORITHMS[self.local.algorithm]
