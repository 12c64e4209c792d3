"""An own source of data: what another package's object has to be that has the devices' examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from fleetlearn_protocol.manifest import Input
from numpy.typing import NDArray

from fleetlearn_simulator.data.generators import Arrays, Ids
from fleetlearn_simulator.data.sources import Source, fitting
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.own_algorithms import call_own

Columns: TypeAlias = "Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]]"
"""The arrays of a batch, by name or in the bundle's order. Their first axis is the examples."""


@runtime_checkable
class DeviceData(Protocol):
    """The devices' examples. What it says of a device follows from its number, the seed and the
    parameters alone: each process that trains asks an object of its own."""

    def examples(self, ids: Ids, seed: int) -> NDArray[np.int64]:
        """Return how many examples these devices train on: int64, shape (n,). 0: the device takes
        no part. With many devices this is asked for all that might connect."""

    def arrays(self, device: int, seed: int) -> Columns:
        """Return a device's training examples."""

    def test(self, seed: int) -> Columns | None:
        """Return examples on which no device trains. None: there are none."""


class OwnSource(Source):
    """``DeviceData`` whose answers are checked."""

    def __init__(self, name: str, data: DeviceData, seed: int, inputs: Sequence[Input]) -> None:
        """``name``: what the scenario calls it."""
        self._data, self._seed, self._inputs = data, seed, inputs
        self._call = f'data.kind = "{name}": '

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        flat = np.ravel(ids)
        call = f"{self._call}examples() of {len(flat)} devices"
        found = np.asarray(call_own(call, lambda: self._data.examples(flat, self._seed)))
        if found.shape != flat.shape or found.dtype.kind not in "iu" or (found < 0).any():
            raise SimulatorError(
                f"{call} returned {found.dtype} of shape {found.shape}; expected integers of shape "
                f"{flat.shape}, at least 0"
            )
        return found.astype(np.int64).reshape(np.shape(ids))

    def arrays(self, device: int) -> Arrays:
        call = f"{self._call}arrays({device}, {self._seed})"
        made = fitting(call, lambda: self._data.arrays(device, self._seed), self._inputs)
        stated = int(self.examples(np.array([device]))[0])
        if len(made[0]) != stated:
            raise SimulatorError(
                f"{call} returned {len(made[0])} examples, and its examples() says {stated}; they "
                "must agree"
            )
        return made

    def test(self) -> Arrays | None:
        call = f"{self._call}test({self._seed})"
        given = call_own(call, lambda: self._data.test(self._seed))
        return None if given is None else fitting(call, lambda: given, self._inputs)
