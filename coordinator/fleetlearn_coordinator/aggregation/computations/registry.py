"""The kinds of computations: how a round's total makes the next state, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.computations.function_layout import check_function_sums
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.private_sums import Scaled, unscale
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.computations import (
    boosted_components,
    boosted_trees,
    functions,
    statistics,
)


class Computation(NamedTuple):
    """One kind, on the coordinator's side. A state is float32, shape (P,); the last argument of
    each function is the settings that the bundle has of it."""

    advance: Callable[[Vector, Sums, int, Any], Vector]
    """State, total of the devices' sums (int64, shape (S,)), number of devices that it is of -> the
    next state, in new memory. Raises ValueError where the total cannot be one."""
    is_done: Callable[[Vector, Any], bool]
    """Whether the run is over with this state."""
    result: Callable[[Vector, Any], dict[str, Any]]
    """What is known, as JSON has it."""
    progress: Callable[[Vector, Any], str]
    """Where it stands, in one line."""
    advance_noisy: Callable[[Vector, Sums, int, Any, float], Vector] | None = None
    """As ``advance``, of a total with noise; last the standard deviation of the noise on each
    scaled sum (private_sums.py), in rows. Raises nothing, whatever the noise is. None: the kind
    cannot go on from such a total."""
    check: Callable[[Sums, Any], None] | None = None
    """Raises ValueError where the sums of one device cannot be those of rows, int64, (S,). None:
    whatever a device says can be."""
    unready: Callable[[Any], str | None] = lambda settings: None
    """Why ``advance`` cannot be called in this process, and what to do. None: it can."""


class RunComputation(NamedTuple):
    """The computation of a run."""

    kind: str
    settings: Any
    """As its bundle has them."""

    def advance(self, state: Vector, total: Sums, devices: int) -> Vector:
        """Return the next state. Raises BadTotalError."""
        try:
            return REGISTRY[self.kind].advance(state, total, devices, self.settings)
        except (ValueError, ArithmeticError) as error:
            raise BadTotalError(str(error)) from None

    def advance_noisy(self, state: Vector, scaled: Scaled, devices: int, noise: float) -> Vector:
        """Return the next state. ``scaled``: the total of the scaled sums with noise of the
        standard deviation ``noise``, float64, (S,)."""
        groups, advance = KINDS[self.kind].groups, REGISTRY[self.kind].advance_noisy
        assert groups is not None, "the plan's rules see to that"
        assert advance is not None, "the plan's rules see to that"
        total = unscale(scaled, groups(self.settings, state))
        return advance(state, total, devices, self.settings, noise)

    @property
    def checks_sums(self) -> bool:
        """Whether there are sums that no device can have."""
        return REGISTRY[self.kind].check is not None

    def check(self, sums: Sums) -> None:
        """Raise ProtocolError (out-of-range) where the sums of one device, as they came, cannot be
        those of rows: they would make a total that no round could go on from."""
        check = REGISTRY[self.kind].check
        if check is None:
            return
        missing = KINDS[self.kind].sums(self.settings).size - len(sums)
        try:
            check(np.pad(sums, (0, missing)), self.settings)
        except ValueError as error:
            raise ProtocolError(Code.OUT_OF_RANGE, f"the sums are of no rows: {error}") from None

    def unready(self) -> str | None:
        """Return why no round can make a state in this process, and what to do; None: one can."""
        return REGISTRY[self.kind].unready(self.settings)

    def is_done(self, state: Vector) -> bool:
        return REGISTRY[self.kind].is_done(state, self.settings)

    def result(self, state: Vector) -> dict[str, Any]:
        return REGISTRY[self.kind].result(state, self.settings)

    def progress(self, state: Vector) -> str:
        return REGISTRY[self.kind].progress(state, self.settings)


class BadTotalError(ValueError):
    """What was to be the total of a round's sums can be none. The text says why."""


REGISTRY: Mapping[str, Computation] = {
    "statistics": Computation(
        statistics.advance,
        statistics.is_done,
        statistics.result,
        statistics.progress,
        statistics.advance_noisy,
        statistics.check_sums,
    ),
    "boosted-trees": Computation(
        boosted_trees.advance,
        boosted_trees.is_done,
        boosted_trees.result,
        boosted_trees.progress,
        boosted_trees.advance_noisy,
    ),
    "boosted-components": Computation(
        boosted_components.advance,
        boosted_components.is_done,
        boosted_components.result,
        boosted_components.progress,
    ),
    "function": Computation(
        functions.advance,
        functions.is_done,
        functions.result,
        functions.progress,
        check=check_function_sums,
        unready=functions.unready,
    ),
}
"""By the kind's name."""
