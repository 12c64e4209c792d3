"""The plan of a split run, in a TOML file that ``fleetlearn-coordinator split init`` writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.manifest import Cut, SplitPart
from fleetlearn_protocol.messages import Name, Number
from fleetlearn_protocol.vector import digest
from fleetlearn_protocol.vertical.messages import MOST_STEPS
from msgspec import Meta

from fleetlearn_coordinator.plan.service_settings import LogFormat, Tls
from fleetlearn_coordinator.plan.toml_errors import Section
from fleetlearn_coordinator.service.vertical.settings import (
    VerticalPartySection,
    check_encoding,
    check_hyper,
    misfit,
    open_top_bundle,
    read_plan_file,
)

KIND = "split plan"
MOST_DEVICES = 32
"""Of a run: the coordinator's process has a copy of the top for each."""


class SplitParts(NamedTuple):
    """The parts of a model that is divided at a layer."""

    top: Bundle
    bottom: Bundle
    cut: Cut


class SplitPlan(Section, frozen=True, kw_only=True):
    """Checked settings of a split run. ``SplitPlan.load`` reads a file."""

    top: Path
    """``top.bundle`` of what ``export_bundle(..., split="layer")`` wrote."""
    bottom: Path
    """``device.bundle`` of the same folder: the coordinator sends its weights to the devices."""
    data_dir: Path
    """Where the run keeps what must survive."""
    rounds: Annotated[int, Meta(ge=1, le=2**31)]
    """How many rounds the run has; in turns: how many turns each device has."""
    devices: dict[Name, VerticalPartySection]
    """By name, in the order of their turns."""
    turns: bool = False
    """Whether one device trains after the other. Otherwise all train at the same time, and are
    averaged (SplitFed)."""
    round_steps: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    """Steps of a device in a round, or a turn. None: an epoch of its rows."""
    batch_size: Annotated[int, Meta(ge=1, le=2**20)] = 32
    checkpoint_every: Annotated[int, Meta(ge=1, le=2**31)] = 1
    """Rounds, or turns of all devices, between checkpoints: the most that are done again when the
    coordinator dies."""
    wait: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Seconds that a device may be gone, or silent, before the others go on without it."""
    least_devices: Annotated[int, Meta(ge=1, le=MOST_DEVICES)] = 1
    """Devices that a round needs, to end without the others."""
    seed: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0
    encoding: str = "float32"
    """How activations and gradients travel."""
    hyper: dict[Name, Number] = msgspec.field(default_factory=dict)
    """Values of the step's hyper-parameters, such as lr."""
    threads: Annotated[int, Meta(ge=1, le=256)] = 1
    """Threads of the top's process."""
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8780
    """TCP port; 0: any that is free."""
    tls: Tls | None = None
    """The coordinator's certificate. Without it devices connect from this machine alone, or with
    --insecure."""
    log_format: LogFormat = "text"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SplitPlan:
        """Read a split plan. Raises VerticalPlanError."""
        plan = read_plan_file(path, KIND, cls)
        check_encoding(path, plan.encoding)
        if not 1 <= len(plan.devices) <= MOST_DEVICES:
            raise misfit(
                f"{path}: there are {len(plan.devices)} devices; a split run has 1 to "
                f"{MOST_DEVICES}, since the coordinator's process has a copy of the top for each. "
                "For more devices use rounds (docs/algorithms/recipes.md)"
            )
        if plan.least_devices > len(plan.devices):
            raise misfit(
                f"{path}: least_devices = {plan.least_devices}, and there are "
                f"{len(plan.devices)} devices"
            )
        if plan.rounds * (plan.round_steps or 1) > MOST_STEPS:
            raise misfit(
                f"{path}: {plan.rounds} rounds of round_steps = {plan.round_steps}; a device can "
                f"do {MOST_STEPS} steps in a run"
            )
        return plan

    @property
    def kind(self) -> str:
        """splitfed or turns."""
        return "turns" if self.turns else "splitfed"

    @property
    def unit(self) -> str:
        """What the run counts."""
        return "turns" if self.turns else "rounds"

    def open_parts(self) -> SplitParts:
        """Return the parts, checked against the plan. Raises BundleError, VerticalPlanError."""
        parts = open_split_parts(self.top, self.bottom)
        check_hyper(parts.top, self.hyper)
        return parts

    def digest(self, parts: SplitParts) -> str:
        """Return the SHA-256 of the terms that tell this run from others."""
        terms: list[Any] = [parts.top.sha256, self.kind, self.rounds, self.round_steps]
        terms += [self.batch_size, self.seed, self.encoding, sorted(self.hyper.items())]
        terms += [list(self.devices)]
        return digest(msgspec.json.encode(terms))


def open_split_parts(top_path: Path, bottom_path: Path) -> SplitParts:
    """Return both parts of a model. Raises BundleError, VerticalPlanError."""
    top, split = open_top_bundle(top_path)
    if len(split.cuts) != 1:
        raise misfit(
            f"top = {str(top_path)!r} is of {len(split.cuts)} parties with different features: "
            "that is a vertical run (`fleetlearn-coordinator vertical`). A split run takes a "
            'model that export_bundle(..., split="layer") divided'
        )
    bottom = open_bundle(bottom_path)
    own = bottom.manifest.split
    if not isinstance(own, SplitPart) or bottom.sha256 != split.cuts[0].bundle:
        raise misfit(
            f"bottom = {str(bottom_path)!r} is not the bottom with which {top_path} was exported: "
            "expected device.bundle of the same folder"
        )
    return SplitParts(top, bottom, split.cuts[0])


def check_new_plan(parts: Path, devices: Sequence[str]) -> None:
    """Raise BundleError or VerticalPlanError unless a plan can be written for these devices and the
    parts in this folder."""
    try:
        names = msgspec.convert(list(devices), list[Name])
    except msgspec.ValidationError as error:
        raise misfit(f"--devices {','.join(devices)}: {error}") from None
    if not 1 <= len(names) <= MOST_DEVICES or len({*names}) < len(names):
        raise misfit(
            f"--devices {','.join(devices)}: expected 1 to {MOST_DEVICES} names, each once: a,b,c"
        )
    if not (parts / "top.bundle").exists():
        raise misfit(
            f"{parts} has no top.bundle: expected the folder NAME.split that "
            'export_bundle(..., split="layer") writes beside the bundle'
        )
    open_split_parts(parts / "top.bundle", parts / "device.bundle")


def split_plan_file(parts: Path, tokens: dict[str, str], *, turns: bool) -> str:
    """Return the text of a new plan. parts: the folder of the exported parts. tokens: device ->
    SHA-256 of its token."""
    devices = "\n".join(
        f'[devices.{name}]\ntoken_sha256 = "{value}"\n' for name, value in tokens.items()
    )
    top, bottom = (
        msgspec.json.encode(str(parts / f"{name}.bundle")).decode() for name in ("top", "device")
    )
    return f"""\
# The plan of `fleetlearn-coordinator split serve`.
top = {top}
bottom = {bottom}
data_dir = "data"

# true: one device trains after the other. false: all at the same time, averaged after each round.
turns = {"true" if turns else "false"}
# Rounds; in turns: turns of each device.
rounds = 50
# round_steps = 10               # steps of a device in a round or turn; without: its epoch
batch_size = 32
# Rounds, or turns of all devices, between checkpoints.
checkpoint_every = 1
# Seconds that a device may be gone, or silent, before the others go on without it.
wait = 60.0
# least_devices = 1              # that a round needs, to end without the others
# seed = 0
# encoding = "float32"           # of activations and gradients; float16: half the bytes

host = "127.0.0.1"
port = 8780

[hyper]
lr = 0.1

# [tls]                          # for devices on other machines
# certificate = "tls/certificate.pem"
# key = "tls/key.pem"

{devices}"""
