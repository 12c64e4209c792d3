"""Data with wrong labels, of devices with the corruption ``labels``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator.data.generators import Arrays, Ids
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.scenario.corruptions import CORRUPTIONS, corruptions_of
from fleetlearn_simulator.scenario.scenario import Scenario

LABELS = CORRUPTIONS.index("labels")


class RelabelledSource(Source):
    """Another source's data. On devices with the corruption each label y, in the last array, is
    ``factor`` - y."""

    def __init__(self, source: Source, scenario: Scenario) -> None:
        self._source, self._scenario = source, scenario

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        return self._source.examples(ids)

    def arrays(self, device: int) -> Arrays:
        *inputs, labels = self._source.arrays(device)
        (code,), (factor,) = corruptions_of(self._scenario, np.array([device]))
        return (*inputs, labels.dtype.type(factor) - labels if code == LABELS else labels)

    def test(self) -> Arrays | None:
        return self._source.test()
