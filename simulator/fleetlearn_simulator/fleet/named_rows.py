"""Which rows of a bundle's sparse tables simulated devices have in their data.

Devices are trained with whole tables, whose other rows take no gradient. What they would fetch and
send of the tables is counted, encoded and added up as for real devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fleetlearn_coordinator.aggregation.updates import SelectedRows, Update
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_protocol.encodings import FLOAT16, FLOAT32, UINT32, Encoding
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.sparse_rows import RowLayout, Rows, put_back, row_layout, select
from fleetlearn_protocol.vector import Vector
from msgspec import UNSET
from numpy.typing import NDArray

from fleetlearn_simulator.data.sources import Source


class NamedRows:
    """The rows of each device, looked up when they are first needed."""

    def __init__(self, plan: Plan, manifest: Manifest, layout: RowLayout, source: Source) -> None:
        sparse = manifest.sparse
        assert sparse is not UNSET
        self.layout, self._source = layout, source
        self._arrays = [
            place for place, array in enumerate(manifest.batch) if array.name in sparse.arrays
        ]
        self._down = FLOAT16 if plan.encoding.down == FLOAT16.name else FLOAT32
        self._up = plan.up
        self._rows: dict[int, NDArray[np.uint32]] = {}

    def of(self, device: int) -> Rows:
        """Return a device's rows, ascending."""
        found = self._rows.get(device)
        if found is None:
            arrays = self._source.arrays(device)
            named = [arrays[place].reshape(-1) for place in self._arrays]
            found = self._rows[device] = np.unique(np.concatenate(named)).astype(np.uint32)
        return found.astype(np.int64)

    def down(self, devices: Sequence[int]) -> NDArray[np.int64]:
        """Return the bytes of the model that each device fetches, (n,)."""
        counts = [len(self.of(device)) for device in devices]
        sizes = [self._down.size(self.layout.elements(count)) for count in counts]
        return np.array(sizes, np.int64)

    def up(self, devices: Sequence[int]) -> NDArray[np.int64]:
        """Return the bytes that each device reports, (n,)."""
        counts = [len(self.of(device)) for device in devices]
        sizes = [
            self._up.size(self.layout.elements(count)) + UINT32.size(count) for count in counts
        ]
        return np.array(sizes, np.int64)

    def encoded(self, encoding: Encoding, update: Vector, device: int, seed: int) -> Vector:
        """Return an update as the coordinator reads it. Raises ProtocolError."""
        rows, after = self.of(device), np.zeros_like(update)
        selected = select(update, self.layout, rows)
        sent = encoding.decode(encoding.encode(selected, seed), len(selected))
        put_back(after, self.layout, rows, sent)
        return after

    def updates(self, updates: NDArray[np.float32], devices: Sequence[int]) -> list[Update]:
        """Return the updates as the aggregator of rows takes them. updates: (n, P)."""
        found = list[Update]()
        for update, device in zip(updates, devices, strict=True):
            rows = self.of(device)
            found.append(SelectedRows(select(update, self.layout, rows), rows))
        return found


def named_rows(plan: Plan, manifest: Manifest, source: Source) -> NamedRows | None:
    """Return what devices have of the bundle's sparse tables; None: whole tables travel."""
    layout = row_layout(manifest) if plan.sends_rows(manifest) else None
    return None if layout is None else NamedRows(plan, manifest, layout, source)
