"""Data that the user has: the arrays of an .npz file, divided among the devices, or drawn from by each of them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_device.checks import DataError, check_batch
from fleetlearn_protocol.manifest import Input
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random as draw
from fleetlearn_simulator.data import partitions
from fleetlearn_simulator.data.generators import Arrays, Ids, power_law
from fleetlearn_simulator.data.partitions import Groups, Places
from fleetlearn_simulator.data.sources import Divided, Drawn, Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.sections import Data


class Pool(NamedTuple):
    """What there is to be had."""

    path: Path
    arrays: Arrays
    """All examples."""
    values: NDArray[np.int64]
    """What they are parted by, labels or the column's values; 0 where by nothing: int64 (examples,)."""
    places: Places
    """Of those to train on, in a random order."""
    test: Arrays | None


def partition(settings: Data, seed: int, population: int, inputs: Sequence[Input], base: Path) -> Source:
    """The devices' parts of the file ``arrays``.

    Without ``examples`` all of the file is divided: each example is on one device. With it, a device has so many, each
    on no other device if the file has enough of them. If it has not, and where ``examples`` comes with ``power`` or a
    column, each device draws its examples itself, with replacement and whatever the others have, so that any number of
    devices can be had. With a column and without ``examples``, device i has all examples with the i-th value.

    The test set is the file's arrays ``test_NAME``, for each NAME of the batch. Where it has none, it is the share
    ``test`` of the examples (of a column, of each value's), which no device has. Raises SimulatorError.
    """
    pool = _pool(settings, seed, inputs, base)
    size, total = settings.examples, len(pool.places)
    if size is None and settings.kind == "column":
        return _by_value(settings, population, pool)
    if size is not None and (settings.power is not None or settings.kind == "column" or size * population > total):
        return _drawn(settings, seed, size, pool)
    return _divided(settings, seed, population, pool._replace(places=pool.places[: size and size * population]))


def given(settings: Data, key: str) -> Any:
    """A key's value. Raises SimulatorError where there is none."""
    value = getattr(settings, key)
    if value is None:
        raise SimulatorError(f'data.{key} is missing; data.kind = "{settings.kind}" needs it')
    return value


def _by_value(settings: Data, population: int, pool: Pool) -> Source:
    groups = partitions.group(pool.values[pool.places])
    if population > len(groups.sizes):
        raise SimulatorError(
            f"population.size = {population}, and the array {settings.column} of {pool.path} has {len(groups.sizes)} "
            f"values, one for a device. Make it {len(groups.sizes)} at most, or set data.examples: then device i draws "
            f"so many examples of value i modulo {len(groups.sizes)}"
        )
    return Divided(pool.arrays, Groups(pool.places[groups.order], groups.starts), pool.test)


def _divided(settings: Data, seed: int, population: int, pool: Pool) -> Source:
    random, total, values = draw.generator(seed, "data.partition"), len(pool.places), pool.values[pool.places]
    pieces = given(settings, "shards") if settings.kind == "shards" else 1
    if population * pieces > total:
        who = f"{population} devices" + (f" with {pieces} shards each" if pieces > 1 else "")
        raise SimulatorError(
            f"{pool.path} has {total} examples to train on, too few to be divided among {who}. Make population.size "
            "smaller, or set data.examples: then each device draws so many of them, with replacement"
        )
    starts = partitions.equal(total, population)
    if settings.power is not None:
        starts = partitions.power_starts(random, total, population, settings.power)
    if settings.kind == "dirichlet":
        groups = partitions.dirichlet(random, values, starts, _concentration(settings))
    elif settings.kind == "shards":
        groups = partitions.shards(random, values, population, pieces)
    else:
        groups = partitions.iid(random, starts)
    return Divided(pool.arrays, Groups(pool.places[groups.order], groups.starts), pool.test)


def _drawn(settings: Data, seed: int, size: int, pool: Pool) -> Source:
    values = pool.values[pool.places]
    found = partitions.group(values)
    groups = Groups(pool.places[found.order], found.starts)
    kind, power, pieces = settings.kind, settings.power, settings.shards or 1
    prior = partitions.prior(values, _concentration(settings)) if kind == "dirichlet" else np.empty(0)

    def sizes(ids: Ids) -> NDArray[np.int64]:
        if power is None:
            return np.full(np.shape(ids), size, np.int64)
        return power_law(seed, ids, size, power, settings.largest or 100 * size)

    def places(device: int, count: int) -> Places:
        random = draw.generator(seed, "data.places", device)
        if kind == "dirichlet":
            return partitions.drawn_dirichlet(random, groups, prior, count)
        if kind == "shards":
            return partitions.drawn_shards(random, groups.order, pieces, count)
        own = groups.of(device % len(groups.sizes)) if kind == "column" else groups.order
        return own[random.integers(len(own), size=count)]

    return Drawn(pool.arrays, sizes, places, pool.test)


def _pool(settings: Data, seed: int, inputs: Sequence[Input], base: Path) -> Pool:
    path = base / given(settings, "arrays")
    label = settings.label or inputs[-1].name
    by: str | None = None
    if settings.kind != "iid":
        by = given(settings, "column") if settings.kind == "column" else label
    names = [row.name for row in inputs]
    content = _load(path, names, by)
    arrays = _fitting(path, content, inputs)
    total = len(arrays[0])
    values = np.zeros(total, np.int64) if by is None else _integers(path, by, content[by], total)
    mixed = draw.generator(seed, "data.order").permutation(total)
    tests = {name: f"test_{name}" for name in names}
    if there := [name for name in tests.values() if name in content]:
        if len(there) < len(tests):
            raise SimulatorError(f"{path} has the test arrays {there}; expected all of {list(tests.values())}, or none")
        test = _fitting(path, {name: content[key] for name, key in tests.items()}, inputs)
        return Pool(path, arrays, values, mixed, test)
    groups = partitions.group(values[mixed] if settings.kind == "column" else np.zeros(total, np.int64))
    kept = groups.sizes - np.floor(groups.sizes * settings.test + 1e-9).astype(np.int64)
    out = np.empty(total, bool)
    rank = np.arange(total) - np.repeat(groups.starts[:-1], groups.sizes)
    out[groups.order] = rank >= np.repeat(kept, groups.sizes)
    held = mixed[out]
    return Pool(path, arrays, values, mixed[~out], tuple(array[held] for array in arrays) if len(held) else None)


def _load(path: Path, names: Sequence[str], by: str | None) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file with these names, and the test arrays that it has."""
    wanted = {*names, *([by] if by else [])}
    try:
        # Through a file of our own: np.load leaves the file open when the content is damaged.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array; write one with numpy.savez(path, x=..., y=...)")
            if missing := sorted(wanted - set(archive.files)):
                raise SimulatorError(
                    f"{path} has the arrays {sorted(archive.files)}, and not {missing}; expected {sorted(wanted)}: the "
                    "bundle's batch by its names, and what the examples are parted by"
                )
            wanted |= {f"test_{name}" for name in names}
            return {name: archive[name] for name in archive.files if name in wanted}
    except FileNotFoundError:
        raise SimulatorError(f"data.arrays: {path} does not exist; expected an .npz file") from None
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise SimulatorError(f"data.arrays: {path} is not an .npz file of plain arrays: {error}") from None


def _fitting(path: Path, content: Mapping[str, NDArray[Any]], inputs: Sequence[Input]) -> Arrays:
    try:
        return check_batch({row.name: content[row.name] for row in inputs}, inputs)
    except DataError as error:
        raise SimulatorError(f"{path}: {error}") from None


def _integers(path: Path, name: str, array: NDArray[Any], total: int) -> NDArray[np.int64]:
    if array.dtype.kind not in "iub" or array.size != total:
        raise SimulatorError(
            f"{path}: the array {name} is {array.dtype} of shape {array.shape}; expected an integer for each of the "
            f"{total} examples, to part them by"
        )
    return array.reshape(total).astype(np.int64)


def _concentration(settings: Data) -> float:
    alpha: float = given(settings, "alpha")
    if not alpha > 0:
        raise SimulatorError(
            f"data.alpha = {alpha}: a Dirichlet distribution takes a number above 0; 0.1 is very uneven"
        )
    return alpha
