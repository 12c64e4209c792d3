"""The models of a clustered run, by the devices that train them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetlearn_protocol.vector import Vector


class ClusterModels(NamedTuple):
    """The models of a round by device, as a back end reads them (``RoundInputs.models``)."""

    models: Sequence[Vector]
    chosen: Mapping[int, int]
    """Device -> the model that it trains. It has all devices of a round once tasks are given."""

    def read(self, row: int) -> Vector:
        return self.models[self.chosen[row]]
