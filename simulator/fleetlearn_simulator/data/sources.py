"""Where a device's examples come from: a generator, the user's arrays, or the user's own
function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from fleetlearn_device.runtimes.checks import DataError, check_batch, check_ranges, describe
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.user_errors import ANY_FAILURE, in_one_line
from numpy.typing import NDArray

from fleetlearn_simulator.data.generators import Arrays, Generator, Ids
from fleetlearn_simulator.data.partitions import Groups, Indices
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.own_algorithms import call_own


class Source(Protocol):
    """The devices' data. It depends on the seed and the device's number alone, not on earlier
    calls."""

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        """Return the numbers of training examples of these devices: int64, in the shape of ``ids``.
        A device with 0 takes no part; only a user's function may say so."""

    def arrays(self, device: int) -> Arrays:
        """Return a device's training examples, in the order, dtypes and shapes of the manifest's
        batch. Read only."""

    def test(self) -> Arrays | None:
        """Return examples on which no device trains, in the same form. None: there are none."""

    def examples_at(self, devices: Sequence[int], indices: NDArray[np.int64]) -> Arrays:
        """Return the examples at these indices of these devices. ``indices``: int64 (devices, ...);
        the arrays that are returned begin with its shape. A device may be given twice."""
        return _examples_at([self.arrays(device) for device in devices], indices)


class GeneratedSource(Source):
    """Data that a generator makes, in the dtypes and shapes of the bundle."""

    def __init__(self, generator: Generator, inputs: Sequence[Input]) -> None:
        self.generator, self._inputs = generator, inputs

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        return self.generator.examples(ids)

    def arrays(self, device: int) -> Arrays:
        return self._fit(self.generator.make(device))

    def test(self) -> Arrays | None:
        made = self.generator.test()
        return None if made is None else self._fit(made)

    def _fit(self, made: Arrays) -> Arrays:
        shaped = [
            array.reshape(len(array), *input_.shape)
            for array, input_ in zip(made, self._inputs, strict=True)
        ]
        return check_batch(shaped, self._inputs)


class DividedSource(Source):
    """The user's arrays, divided: each example is on one device at most. Device i has the examples
    of group i."""

    def __init__(self, arrays: Arrays, groups: Groups, test: Arrays | None) -> None:
        self._arrays, self._groups, self._test = arrays, groups, test

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        return self._groups.starts[np.asarray(ids) + 1] - self._groups.starts[ids]

    def arrays(self, device: int) -> Arrays:
        indices = self._groups.of(device)
        return tuple(array[indices] for array in self._arrays)

    def test(self) -> Arrays | None:
        return self._test


class SampledSource(Source):
    """The user's arrays. Each device draws its own examples, at the indices
    ``draw(device, number of examples)``."""

    def __init__(
        self,
        arrays: Arrays,
        sizes: Callable[[Ids], NDArray[np.int64]],
        draw: Callable[[int, int], Indices],
        test: Arrays | None,
    ) -> None:
        self._arrays, self._sizes, self._draw, self._test = arrays, sizes, draw, test

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        return self._sizes(ids)

    def arrays(self, device: int) -> Arrays:
        indices = self._draw(device, int(self._sizes(np.array([device], np.int64))[0]))
        return tuple(array[indices] for array in self._arrays)

    def test(self) -> Arrays | None:
        return self._test


class FunctionSource(Source):
    """Data that the user's function makes. It is called with a device's number and the data's seed,
    and returns the device's arrays, in the manifest's order or by its names.

    Its module may also have ``examples(device, seed)``, which returns the number of a device's
    examples, and ``test(seed)``, which returns the arrays of the test set. With ``size``, each
    device has this many examples. Without ``size`` and ``examples``, a device's arrays are made
    only to count them.
    """

    def __init__(
        self, function: str, seed: int, inputs: Sequence[Input], base: Path, size: int | None = None
    ) -> None:
        self._function, self._seed, self._inputs, self._size = function, seed, inputs, size
        self._sizes: dict[int, int] = {}
        module_name, _, name = function.partition(":")
        try:
            module = _module(module_name, base)
        except ANY_FAILURE as error:
            raise SimulatorError(
                f"data.function = {function!r}: the module cannot be imported, "
                f"{in_one_line(error)}. It is looked for beside the scenario, in {base}, and among "
                "the installed ones"
            ) from error
        if not callable(getattr(module, name, None)):
            raise SimulatorError(
                f"data.function = {function!r}: {module.__file__} has no function {name}; expected "
                f"one that is called as {name}(device, seed) and returns a device's arrays: "
                f"{describe(inputs)}"
            )
        self._make: Callable[[int, int], Any] = getattr(module, name)
        beside = {key: getattr(module, key, None) for key in ("examples", "test") if key != name}
        self._count: Callable[[int, int], Any] | None = beside.get("examples")
        self._test: Callable[[int], Any] | None = beside.get("test")

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        return np.array([self._number(int(device)) for device in np.ravel(ids)], np.int64).reshape(
            np.shape(ids)
        )

    def arrays(self, device: int) -> Arrays:
        call = f"{self._function}({device}, {self._seed})"
        arrays = self._checked(call, lambda: self._make(device, self._seed))
        if (self._size or self._count) is not None and len(arrays[0]) != self._number(device):
            stated = (
                "data.examples" if self._size else f"its module's examples({device}, {self._seed})"
            )
            raise SimulatorError(
                f"{call} returned {len(arrays[0])} examples, and {stated} is "
                f"{self._number(device)}; they must agree"
            )
        return arrays

    def test(self) -> Arrays | None:
        test = self._test
        if test is None:
            return None
        return self._checked(
            f"test({self._seed}) beside {self._function}", lambda: test(self._seed)
        )

    def _number(self, device: int) -> int:
        if self._size is not None:
            return self._size
        if device not in self._sizes:
            count = self._count
            if count is None:
                self._sizes[device] = self._made(device)
            else:
                call = f"examples({device}, {self._seed}) beside {self._function}"
                size = call_own(call, lambda: count(device, self._seed))
                if not isinstance(size, int | np.integer) or size < 0:
                    raise SimulatorError(
                        f"{call} returned {size!r}; expected an integer, at least 0"
                    )
                self._sizes[device] = int(size)
        return self._sizes[device]

    def _made(self, device: int) -> int:
        """Return how many examples the function makes for a device; arrays without any are none."""
        call = f"{self._function}({device}, {self._seed})"
        returned = call_own(call, lambda: self._make(device, self._seed))
        arrays = [*returned.values()] if isinstance(returned, Mapping) else returned
        if (
            isinstance(arrays, tuple | list)
            and arrays
            and all(np.shape(array)[:1] == (0,) for array in arrays)
        ):
            return 0
        return len(self._checked(call, lambda: returned)[0])

    def _checked(self, call: str, function: Callable[[], Any]) -> Arrays:
        return fitting(call, function, self._inputs)


class CachedSource(Source):
    """Another source, whose arrays are kept for the next use.

    The devices' arrays lie one behind the other, so that the examples of many devices are taken in
    one operation. When they would exceed ``limit`` bytes, all of them are forgotten.
    """

    def __init__(self, source: Source, limit: int = 256 * 2**20) -> None:
        self._source, self._limit = source, limit
        self._large: tuple[list[int], list[Arrays]] = [], []
        """The devices of the last call, if their arrays do not all fit, and these arrays: a block
        takes examples of the same devices again and again."""
        self._begin()

    def _begin(self) -> None:
        self._held: list[NDArray[Any]] = []
        self._filled = self._bytes = 0
        """How many of the held examples belong to a device, and their bytes."""
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        """Device -> where its examples begin, and where they end."""

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        return self._source.examples(ids)

    def arrays(self, device: int) -> Arrays:
        if device not in self._begins:
            return self._make(device)
        begin, end = self._begins[device], self._ends[device]
        return tuple(array[begin:end] for array in self._held)

    def examples_at(self, devices: Sequence[int], indices: NDArray[np.int64]) -> Arrays:
        if devices == self._large[0]:
            return _examples_at(self._large[1], indices)
        self._large = [], []
        try:
            begins = [*map(self._begins.__getitem__, devices)]
        except KeyError:  # some must be made first
            for device in devices:
                if device not in self._begins:
                    self._make(device)
            if not self._begins.keys() >= {*devices}:
                self._large = [*devices], [self.arrays(device) for device in devices]
                return _examples_at(self._large[1], indices)
            begins = [self._begins[device] for device in devices]
        rows = np.array(begins).reshape(-1, *[1] * (indices.ndim - 1)) + indices
        return tuple(array.take(rows, axis=0, mode="clip") for array in self._held)

    def test(self) -> Arrays | None:
        return self._source.test()

    def _make(self, device: int) -> Arrays:
        made = self._source.arrays(device)
        size, count = sum(array.nbytes for array in made), len(made[0])
        if size > self._limit:
            return made
        if self._bytes + size > self._limit:
            self._begin()
        begin, end = self._filled, self._filled + count
        if not self._held or end > len(self._held[0]):
            # In new memory: somebody may still use views of the old arrays.
            held, self._held = (
                self._held,
                [np.empty((2 * end, *array.shape[1:]), array.dtype) for array in made],
            )
            for old, new in zip(held, self._held, strict=False):
                new[:begin] = old[:begin]
        for array, own in zip(self._held, made, strict=True):
            array[begin:end] = own
        self._begins[device], self._ends[device] = begin, end
        self._filled, self._bytes = end, self._bytes + size
        return made


def _examples_at(parts: Sequence[Arrays], indices: NDArray[np.int64]) -> Arrays:
    """Return the examples at the indices of each device's arrays."""
    return tuple(
        np.stack([array[rows] for array, rows in zip(column, indices, strict=True)])
        for column in zip(*parts, strict=True)
    )


def _module(name: str, base: Path) -> ModuleType:
    """Import the module from the folder ``base``, where it may import others, or else the installed
    module."""
    file = base.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file) if file.exists() else None
    sys.path.insert(0, str(base))
    try:
        if spec is None or spec.loader is None:
            return importlib.import_module(name)
        # Not through sys.modules: it may hold a module with the same name from another scenario's
        # folder.
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(base))


def fitting(call: str, function: Callable[[], Any], inputs: Sequence[Input]) -> Arrays:
    """Return the arrays that a user's function makes, in the bundle's form. Raises SimulatorError.
    ``call``: it, in words."""
    returned = call_own(call, function)
    try:
        arrays = check_batch(returned, inputs)
        check_ranges(arrays, inputs)
        return arrays
    except DataError as error:
        raise SimulatorError(f"{call} returned what does not fit the bundle: {error}") from None
