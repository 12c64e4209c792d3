"""What a seed chooses: the plan, where ledger and blobs are, which processes there are."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

SMALL, LARGE = "small", "large"
"""The bundles: 650 parameters, and 1.2 MB, which gateways add up."""

PLANS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"recipe": "fedavg"},
    "fedprox": {"recipe": "fedprox", "local__mu": 0.1},
    "fedadam": {"recipe": "fedavg", "server__optimizer": "adam", "server__lr": 0.01},
    "scaffold": {"recipe": "scaffold"},
    "scaffold, top-k": {"recipe": "scaffold", "encoding__up": "topk-0.25-float16"},
    "median": {"recipe": "fedavg", "aggregation__aggregator": "median"},
    "krum": {"recipe": "fedavg", "aggregation__aggregator": "multi-krum"},
    "large": {"recipe": "fedavg", "server__optimizer": "momentum"},
    "secure": {"recipe": "fedavg"},
    "fedbuff": {"recipe": "fedbuff", "server__optimizer": "adam", "server__lr": 0.01},
}
"""Name -> what is in the plan beside what all plans here have."""
SECURE, ASYNCHRONOUS = "secure", "fedbuff"


class Scenario(NamedTuple):
    """A fleet to be disturbed."""

    plan: str
    """A key of PLANS."""
    devices: int
    gateways: int = 0
    standby: bool = False
    """Whether a second coordinator stands by."""
    ledger: str = "sqlite"
    """Or postgresql."""
    blobs: str = "files"
    """Or s3."""
    durable: str = "process"
    distant: int = 0
    """Gateways on machines of their own, over NATS."""

    @property
    def gateways_elsewhere(self) -> Sequence[str]:
        return ["east", "west"][: self.distant]

    @property
    def machines(self) -> Sequence[str]:
        """The machines. The coordinators are on the hub, devices on the fleet, services on the
        store, and each gateway elsewhere has one of its name."""
        return ["hub", "store", "fleet", *self.gateways_elsewhere]

    @property
    def names(self) -> Sequence[str]:
        return [f"d{number}" for number in range(self.devices)]

    @property
    def bundle(self) -> str:
        return LARGE if self.plan == "large" else SMALL

    @property
    def is_marked(self) -> bool:
        """Whether the devices send an update that follows from their names."""
        return self.plan in (SECURE, ASYNCHRONOUS)

    @property
    def coordinators(self) -> Sequence[str]:
        return ["coordinator", "standby"] if self.standby else ["coordinator"]

    @property
    def services(self) -> Sequence[str]:
        """What the run needs beside coordinators and devices."""
        found = ["database"] if self.ledger == "postgresql" else []
        found += ["store"] if self.blobs == "s3" else []
        found += ["bus"] if self.distant else []
        return found + (["helper"] if self.plan == SECURE else [])

    def __str__(self) -> str:
        words = [self.plan, f"{self.devices} devices", self.ledger, self.blobs]
        words += [f"{self.gateways} gateways"] if self.gateways else []
        words += [f"{self.distant} gateways elsewhere"] if self.distant else []
        words += ["standby"] if self.standby else []
        return ", ".join([*words, f"durable = {self.durable}"])


def has_postgres() -> bool:
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return bool(found) and find_spec("psycopg") is not None and shutil.which("setpriv") is not None


def has_store() -> bool:
    return find_spec("moto") is not None and find_spec("obstore") is not None


def has_bus() -> bool:
    return find_spec("nats") is not None and shutil.which("nats-server") is not None


def scenario_of(seed: int) -> Scenario:
    """Return what a seed chooses. Ten seeds in a row have ten different plans."""
    luck = random.Random(f"scenario {seed}")
    plan = [*PLANS][seed % len(PLANS)]
    ledger = luck.choice(["sqlite", "postgresql"])
    blobs = luck.choice(["files", "files", "s3"])
    gateways = luck.choice([0, 0, 1, 2])
    standby = luck.random() < 0.5
    durable = luck.choice(["process", "process", "power"])
    devices = luck.choice([3, 4, 5])
    if plan == "large":
        devices, gateways = 8, luck.choice([0, 1, 1])
    if plan == "krum":
        devices = 6
    distant = luck.choice([0, 0, 1, 2])
    if not (has_bus() and has_store()):
        distant = 0
    if distant:
        blobs, gateways = "s3", luck.choice([0, 0, 1])
    if gateways:
        standby = False
    return Scenario(
        plan,
        devices,
        gateways,
        standby,
        ledger if has_postgres() else "sqlite",
        blobs if has_store() else "files",
        durable,
        distant,
    )
