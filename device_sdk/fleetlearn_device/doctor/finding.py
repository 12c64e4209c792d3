"""What a check found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

State = Literal["good", "warning", "bad", "unknown"]


class Finding(NamedTuple):
    """What is so of one thing."""

    what: str
    """The thing, in a word."""
    state: State
    """``warning``: it works, and will not for long; ``unknown``: it could not be looked at."""
    found: str
    """What is so, for people."""
    do: str = ""
    """What to do. Empty: nothing."""


Findings = Iterator[Finding]
