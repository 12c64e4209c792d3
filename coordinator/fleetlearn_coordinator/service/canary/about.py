"""What a canary is, as its row has it: never changes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fleetlearn_coordinator.plan.canary_settings import CanarySettings
from fleetlearn_coordinator.service.canary.decision import CanaryState
from fleetlearn_coordinator.storage.canaries import CanaryRow

TakeOver: TypeAlias = Literal["newest", "own"]
"""The model in the last step: the old run's newest, or the canary's own."""


class FirstModel(msgspec.Struct, frozen=True):
    """Where a canary's first model comes from."""

    version: int | None = None
    """Of the old run. None: its newest, unless one of the following is said."""
    file: str | None = None
    """A safetensors file."""
    of_bundle: bool = False
    """The values with which the canary's bundle begins: the old run's parameters do not fit."""
    take_over: TakeOver = "newest"

    @property
    def words(self) -> str:
        """Which model it is, for people."""
        if self.of_bundle:
            return "the initial values of its bundle"
        if self.file is not None:
            return self.file
        return "the newest model" if self.version is None else f"version {self.version}"


ALONE = (
    "is one run that is served alone, and a canary is a second run beside it. Move the run to a "
    'host of several: end its coordinator (SIGTERM), write runs = "runs" into its service file, '
    "`fleetlearn-coordinator run add SERVICE.toml NAME PLAN.toml`, and serve SERVICE.toml. Its "
    "data directory and its devices go on (docs/operate/canary.md)"
)
"""Why a run has no canary, after its name, and what to do."""


class CanaryAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A canary of a run. At least one of ``plan``, ``bundle`` and ``model`` is given; ``plan`` and
    ``bundle`` exclude each other."""

    plan: str = ""
    """The file of another plan."""
    bundle: str = ""
    """Another bundle, with the old run's plan."""
    model: str = ""
    """A version of the old run's model, or a safetensors file. Empty: the newest version."""
    name: str = ""
    """Of the canary's run. Empty: the old run's, with ``.canary`` behind it."""
    tags: tuple[str, ...] = ()
    """Tags of the devices that have it before the last step."""
    take_over: TakeOver | None = None
    """The model of the last step. None: the old run's newest, or the canary's own where a model was
    named or the old one does not fit."""
    settings: Annotated[dict[str, Any], Meta(max_length=20)] = {}
    """Keys of [canary], in place of the service file's."""


class CanaryAbout(msgspec.Struct, frozen=True):
    """A canary, as it was begun."""

    settings: CanarySettings
    first: FirstModel
    began: float
    """Unix time."""
    who: str
    """Who began it."""


def about_of(row: CanaryRow) -> CanaryAbout:
    """Return what a canary is."""
    return msgspec.json.decode(row.about, type=CanaryAbout)


def state_of(row: CanaryRow) -> CanaryState:
    """Return where a canary is."""
    return msgspec.json.decode(row.state, type=CanaryState)


def encoded(value: CanaryAbout | CanaryState) -> str:
    """Return what a row has of it."""
    return msgspec.json.encode(value).decode()
