"""The models that devices trained in a round, one by one: the teachers of ensemble distillation.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning" (2020), arXiv
2006.07242. How a model learns from them is in the device SDK's ``distil.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetlearn_protocol.messages import BUFFERS, UPDATE
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Update


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModel:
    """A model as a device trained it: the round's model and the device's update, with the device's
    values of the buffers."""

    base: Vector
    """The round's model, float32, shape (P,)."""
    update: Update
    places: Sequence[slice]
    """Of the buffers, in the model."""
    values: Vector
    """Of the buffers, shape (B,)."""

    def read(self, start: int, stop: int) -> Vector:
        """Return the elements from ``start``, a multiple of ``updates.ALIGNMENT``, up to ``stop``.
        Raises what reading the update raises."""
        part: Vector = self.base[start:stop] + self.update.read(start, stop)
        begin = 0
        for place in self.places:
            first, last = max(place.start, start), min(place.stop, stop)
            if first < last:
                values = self.values[begin + first - place.start : begin + last - place.start]
                part[first - start : last - start] = values
            begin += place.stop - place.start
        return part


def device_model(
    base: Vector, reports: ReportColumns, row: int, buffers: Sequence[slice]
) -> DeviceModel | None:
    """Return the model of the device of one report, to be read for as long as its parts are there.

    ``base``: the model that the round began from. ``buffers``: places of the model's elements that
    are no trained parameters. None: nothing but the report's numbers is there, since its parts were
    added up and are gone.
    """
    if UPDATE not in reports.parts:
        return None
    values = NO_VALUES.present
    if buffers:
        size = sum(place.stop - place.start for place in buffers)
        values = reports.update(BUFFERS, row).read(0, size)
    return DeviceModel(base, reports.update(UPDATE, row), buffers, values)
