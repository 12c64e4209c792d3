"""A split run's model, and what the parts of a round make of it.

Thapa, Chamikara, Camtepe, Sun 2020, "SplitFed: When Federated Learning Meets Split Learning",
arXiv 2004.12088, Algorithm 1: bottoms and tops are averaged with the weights n_k / n.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.vector import Vector, check_finite
from fleetlearn_protocol.vertical.kept_part import KeptPart

from fleetlearn_coordinator.aggregation import exact_mean


class WholeModel(NamedTuple):
    """Both parts, each with its optimizer's state."""

    bottom: Vector
    bottom_state: Vector
    top: Vector
    top_state: Vector

    @classmethod
    def initial(cls, bottom: Bundle, top: Bundle) -> WholeModel:
        """Return the model that was exported. Raises BundleError."""
        return cls(bottom.parameters(), bottom.state(), top.parameters(), top.state())

    def as_part(self, round_: int) -> KeptPart:
        """Return the checkpoint after this many rounds: bottom, then top."""
        local = np.concatenate([self.bottom, self.top])
        return KeptPart(round_, local, np.concatenate([self.bottom_state, self.top_state]))

    def of_part(self, part: KeptPart) -> WholeModel:
        """Return the model of a checkpoint, whose parts are as long as this one's."""
        size, state = self.bottom.size, self.bottom_state.size
        return WholeModel(
            part.local[:size], part.state[:state], part.local[size:], part.state[state:]
        )


class RoundSum:
    """What the devices of a round made, added up: the same bits in every order."""

    def __init__(self, start: WholeModel, *, carries_state: bool) -> None:
        """start: the model when the round began. carries_state: whether the optimizers' states go
        on, as they do in turns; then the round has one device."""
        self._start, self._carries = start, carries_state
        self._sum = exact_mean.init(start.bottom.size + start.top.size)
        self._only: WholeModel | None = None

    def add(self, model: WholeModel, rows: int) -> None:
        """Add what a device made, which has trained on this many rows. Raises ProtocolError
        (not-finite, out-of-range), and leaves the sum as it was."""
        parts = [model.bottom, model.top]
        largest = max(float(np.abs(part).max(initial=0.0)) for part in parts)
        exact_mean.check(largest, rows)
        if not self._carries:
            exact_mean.add(self._sum, parts, rows, largest)
        elif self._only is None:
            # The next devices begin with it: of an infinite slot nothing would learn any more.
            check_finite(np.concatenate([model.bottom_state, model.top_state]))
            self._only = model
        else:
            raise ValueError("a turn has one device")

    def mean(self) -> WholeModel:
        """Return the round's model. Of a turn it is the device's own, to the last bit."""
        if self._only is not None:
            return self._only
        whole = exact_mean.mean(self._sum).astype(np.float32)
        size = self._start.bottom.size
        # Each round begins with the initial state, as a device's task does.
        return self._start._replace(bottom=whole[:size], top=whole[size:])
