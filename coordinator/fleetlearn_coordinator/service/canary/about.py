"""What a canary is, as its row has it: never changes."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

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
