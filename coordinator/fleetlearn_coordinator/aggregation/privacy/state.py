"""What the releases of a run so far leave for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffers: TypeAlias = Mapping[str, NDArray[Any]]
"""What correlated noise remembers of the releases before, by name."""


@dataclass(frozen=True, eq=False)
class PrivacyState:
    """The state of a private run between two releases."""

    secret: bytes = field(repr=False)
    """32 bytes, the same in the whole run: all noise follows from it. Who knows it can take the
    noise away from every release, so it is in no log, answer, page or file but the run's own
    ledger."""
    releases: int
    """How many releases were made. A roll back takes none of them back."""
    clip: float
    """C, the L2 norm to which the updates of the next release are clipped."""
    began: int = 0
    """How many releases were made before those whose noise is in ``buffers``: correlated noise
    begins from the beginning where the rules have changed."""
    buffers: Buffers = field(default_factory=dict)
    """What correlated noise remembers; empty where each release has noise of its own."""


class Drawn(NamedTuple):
    """The noise of one release."""

    noise: NDArray[np.int64]
    """In units of the grid, (P,)."""
    buffers: Buffers
    """For the next release."""
