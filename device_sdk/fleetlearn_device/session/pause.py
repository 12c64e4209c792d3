"""Why a device does not work now."""

from __future__ import annotations

from typing import NamedTuple


class Pause(NamedTuple):
    """Why the device is paused."""

    names: tuple[str, ...]
    """The conditions that do not hold."""
    text: str
    """Why, for people: ``on battery (12 %, needs 30 %)``."""
    sends: bool = True
    """A finished update may be sent meanwhile."""
    keeps: bool = False
    """A task in training is kept: the device goes on with it afterwards, if its lease lives."""

    @property
    def in_words(self) -> str:
        """What the log and the device's owner are told."""
        return f"paused: {self.text}"
