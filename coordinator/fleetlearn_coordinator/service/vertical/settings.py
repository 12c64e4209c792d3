"""The plan of a vertical run, in a TOML file that ``fleetlearn-coordinator vertical init``
writes."""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.encodings import FLOATS, find_encoding
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, in_words
from fleetlearn_protocol.manifest import SplitPart
from fleetlearn_protocol.messages import Name, Number
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.vector import digest
from msgspec import Meta

from fleetlearn_coordinator.plan.service_settings import LogFormat, Tls
from fleetlearn_coordinator.plan.toml_errors import (
    Section,
    paths_from,
    read_tables,
    refuse_unknown,
)

KIND = "vertical plan"


class VerticalPlanError(FleetError):
    """A vertical plan that cannot be run. ``text`` names the file, the key, what was given and what
    is allowed."""


class VerticalPartySection(Section, frozen=True, kw_only=True):
    """[parties.NAME]: one party."""

    token_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256, in hexadecimal, of the token that the party shows."""


class VerticalPlan(Section, frozen=True, kw_only=True):
    """Checked settings of a vertical run. ``VerticalPlan.load`` reads a file."""

    bundle: Path
    """The top: ``top.bundle`` of what ``export_vertical`` wrote."""
    data_dir: Path
    """Where the run keeps what must survive."""
    steps: Annotated[int, Meta(ge=1, le=2**31)]
    """How many steps the run has, of ``batch_size`` rows each."""
    parties: dict[Name, VerticalPartySection]
    """By name, those of the bundle."""
    labels: Name | None = None
    """The party that has the labels."""
    labels_file: Path | None = None
    """The coordinator's own labels, where no party has them: an .npz that ``fleetlearn-device
    hash-rows`` writes."""
    batch_size: Annotated[int, Meta(ge=1, le=2**20)] = 32
    checkpoint_every: Annotated[int, Meta(ge=1, le=2**31)] = 100
    """Steps between checkpoints: the most steps that are done again when a side dies."""
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
    """The coordinator's certificate. Without it parties connect from this machine alone, or with
    --insecure."""
    log_format: LogFormat = "text"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> VerticalPlan:
        """Read a vertical plan. Raises VerticalPlanError."""
        plan = read_plan_file(path, KIND, cls)
        check_encoding(path, plan.encoding)
        if (plan.labels is None) == (plan.labels_file is None):
            raise misfit(
                f"{path}: one of labels (the party that has the labels) and labels_file (the "
                "coordinator's own) is needed, not both"
            )
        return plan

    def open_top(self) -> tuple[Bundle, SplitPart]:
        """Return the top, checked against the plan. Raises BundleError, VerticalPlanError."""
        bundle, split = open_top_bundle(self.bundle)
        names = [cut.party for cut in split.cuts]
        if sorted(names) != sorted(self.parties):
            raise misfit(
                f"the parties are {', '.join(self.parties)}; those of the bundle are "
                f"{', '.join(names)}"
            )
        if self.labels is not None and self.labels not in names:
            raise misfit(f"labels = {self.labels!r}; expected one of {', '.join(names)}")
        check_hyper(bundle, self.hyper)
        return bundle, split

    def digest(self, bundle: Bundle) -> str:
        """Return the SHA-256 of the terms that tell this run from others."""
        terms: list[Any] = [bundle.sha256, self.steps, self.batch_size, self.checkpoint_every]
        terms += [self.seed, self.encoding, sorted(self.hyper.items()), self.labels]
        return digest(msgspec.json.encode(terms))


P = TypeVar("P", bound=Section)


def read_plan_file(path: str | os.PathLike[str], kind: str, cls: type[P]) -> P:
    """Read a plan. ``kind``: what it is called in errors. Raises VerticalPlanError."""
    try:
        path = in_home(path)
        raw = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise misfit(f"{path}: this is not TOML: {error}") from None
    except (OSError, ValueError) as error:
        raise misfit(f"{path}: the {kind} cannot be read: {in_words(error)}") from None
    try:
        refuse_unknown(raw, kind, cls, {"tls": Tls}, hidden=())
        return read_tables(raw, kind, cls, paths_from(path.absolute().parent))
    except ValueError as error:
        raise misfit(f"{path}: {error}") from None


def check_encoding(path: str | os.PathLike[str], encoding: str) -> None:
    """Raise VerticalPlanError unless activations can travel in that encoding."""
    try:
        find_encoding(encoding)
    except ProtocolError as error:
        raise misfit(f"{path}: encoding: {error.text}") from None
    if encoding not in FLOATS:
        raise misfit(
            f'{path}: encoding = "{encoding}": activations and gradients travel as one of '
            f"{', '.join(FLOATS)}"
        )


def open_top_bundle(path: Path) -> tuple[Bundle, SplitPart]:
    """Return the top of a split model. Raises BundleError, VerticalPlanError."""
    bundle = open_bundle(path)
    split = bundle.manifest.split
    if not isinstance(split, SplitPart) or split.part != "top":
        raise misfit(
            f"bundle = {str(path)!r} is no top of a split model; expected top.bundle of what "
            "export_vertical, or export_bundle with split=, wrote"
        )
    return bundle, split


def check_hyper(bundle: Bundle, given: Mapping[str, float]) -> None:
    """Raise VerticalPlanError unless the step gets the hyper-parameters that it takes."""
    hyper = {row.name: row.default for row in bundle.manifest.hyper}
    unknown = [name for name in given if name not in hyper]
    missing = [name for name, value in hyper.items() if value is None and name not in given]
    if unknown or missing:
        raise misfit(
            f"hyper has {', '.join(given) or 'nothing'}; the bundle's step takes "
            f"{', '.join(hyper)}"
            + (f", and needs a value for {', '.join(missing)}" if missing else "")
        )


def misfit(text: str) -> VerticalPlanError:
    """Return the error."""
    return VerticalPlanError(Code.BAD_MESSAGE, text)


def hash_of_token(token: str) -> str:
    """Return what a plan has of a party's token."""
    return hashlib.sha256(token.encode()).hexdigest()


def vertical_plan_file(bundle: str, tokens: dict[str, str], labels: str) -> str:
    """Return the text of a new plan. tokens: party -> SHA-256 of its token."""
    parties = "\n".join(
        f'[parties.{name}]\ntoken_sha256 = "{value}"\n' for name, value in tokens.items()
    )
    return f"""\
# The plan of `fleetlearn-coordinator vertical serve`.
bundle = {msgspec.json.encode(bundle).decode()}
data_dir = "data"

# The party that has the labels. It sends them with its activations: the coordinator sees them.
labels = "{labels}"

steps = 1000
batch_size = 32
# Steps between checkpoints: the most steps that are done again when a side dies.
checkpoint_every = 100
# seed = 0
# encoding = "float32"            # or float16: half the bytes, and no longer equal to 1e-6

host = "127.0.0.1"
port = 8780

[hyper]
lr = 0.1

# [tls]                           # for parties on other machines
# certificate = "tls/certificate.pem"
# key = "tls/key.pem"

{parties}"""
