"""The user's own data: the arrays of an .npz file, divided among the devices or drawn from by each
device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_device.runtimes.checks import DataError, check_batch, check_ranges
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.npz import NpzError, read_npz
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.data import partitions
from fleetlearn_simulator.data.generators import Arrays, Ids, power_law
from fleetlearn_simulator.data.partitions import Groups, Indices
from fleetlearn_simulator.data.sources import DividedSource, SampledSource, Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.own_algorithms import PARTITION, own
from fleetlearn_simulator.scenario.sections import DataSection


class Pool(NamedTuple):
    """The examples of a file."""

    path: Path
    arrays: Arrays
    """All examples."""
    values: NDArray[np.int64]
    """What decides which device has an example: its label or the column's value, or 0 for all.
    int64 (examples,)."""
    training: Indices
    """Indices of the examples to train on, in a random order."""
    test: Arrays | None


def npz_source(
    settings: DataSection, seed: int, population: int, inputs: Sequence[Input], base: Path
) -> Source:
    """Make the source for the file ``arrays``.

    Without ``examples`` the whole file is divided: each example is on one device. With a column,
    device i then has all examples with the i-th value.

    With ``examples`` each device has this many. If the file has enough of them, each example is on
    one device at most. If it has not, or if ``examples`` comes with ``power`` or a column, each
    device draws its examples itself, with replacement and independently of the other devices. So
    there can be any number of devices.

    The test set is the file's arrays ``test_NAME``, for each NAME of the batch. If the file has
    none, the test set is the share ``test`` of the examples (with a column: of each value's
    examples), which no device has.

    Raises SimulatorError.
    """
    pool = _pool(settings, seed, inputs, base)
    size, total = settings.examples, len(pool.training)
    if size is None and settings.kind == "column":
        return _by_value(settings, population, pool)
    if size is not None and (
        settings.power is not None or settings.kind == "column" or size * population > total
    ):
        return _drawn(settings, seed, size, pool)
    return _divided(
        settings,
        seed,
        population,
        pool._replace(training=pool.training[: size and size * population]),
    )


def required(settings: DataSection, key: str) -> Any:
    """Return a key's value. Raises SimulatorError if it is missing."""
    value = getattr(settings, key)
    if value is None:
        raise SimulatorError(f'data.{key} is missing; data.kind = "{settings.kind}" needs it')
    return value


def _by_value(settings: DataSection, population: int, pool: Pool) -> Source:
    groups = partitions.group(pool.values[pool.training])
    if population > len(groups.sizes):
        raise SimulatorError(
            f"population.size = {population}, and the array {settings.column} of {pool.path} has "
            f"{len(groups.sizes)} values, one for each device. Make population.size at most "
            f"{len(groups.sizes)}, or set data.examples: then device i draws this many examples of "
            f"value i modulo {len(groups.sizes)}"
        )
    return DividedSource(pool.arrays, Groups(pool.training[groups.order], groups.starts), pool.test)


def _divided(settings: DataSection, seed: int, population: int, pool: Pool) -> Source:
    random = keyed_random.generator(seed, "data.partition")
    total, values = len(pool.training), pool.values[pool.training]
    pieces = required(settings, "shards") if settings.kind == "shards" else 1
    if population * pieces > total:
        who = f"{population} devices" + (f" with {pieces} shards each" if pieces > 1 else "")
        raise SimulatorError(
            f"{pool.path} has {total} examples to train on, too few to be divided among {who}. "
            "Make population.size smaller, or set data.examples: then each device draws this many "
            "of them, with replacement"
        )
    starts = partitions.equal(total, population)
    if settings.power is not None:
        starts = partitions.power_starts(random, total, population, settings.power)
    if settings.kind == "dirichlet":
        groups = partitions.dirichlet(random, values, starts, _concentration(settings))
    elif settings.kind == "shards":
        groups = partitions.shards(random, values, population, pieces)
    elif settings.kind == "partition":
        name: str = required(settings, "partition")
        divide = own(PARTITION, name, settings.parameters, "data.partition")
        groups = partitions.own_groups(name, divide, values, population, random)
    else:
        groups = partitions.iid(random, starts)
    return DividedSource(pool.arrays, Groups(pool.training[groups.order], groups.starts), pool.test)


def _drawn(settings: DataSection, seed: int, size: int, pool: Pool) -> Source:
    values = pool.values[pool.training]
    found = partitions.group(values)
    groups = Groups(pool.training[found.order], found.starts)
    kind, power, pieces = settings.kind, settings.power, settings.shards or 1
    prior = (
        partitions.prior(values, _concentration(settings)) if kind == "dirichlet" else np.empty(0)
    )

    def sizes(ids: Ids) -> NDArray[np.int64]:
        if power is None:
            return np.full(np.shape(ids), size, np.int64)
        return power_law(seed, ids, size, power, settings.largest or 100 * size)

    def draw(device: int, count: int) -> Indices:
        random = keyed_random.generator(seed, "data.places", device)
        if kind == "dirichlet":
            return partitions.drawn_dirichlet(random, groups, prior, count)
        if kind == "shards":
            return partitions.drawn_shards(random, groups.order, pieces, count)
        # With more devices than values in the column, several devices share one.
        own = groups.of(device % len(groups.sizes)) if kind == "column" else groups.order
        return own[random.integers(len(own), size=count)]

    return SampledSource(pool.arrays, sizes, draw, pool.test)


def _pool(settings: DataSection, seed: int, inputs: Sequence[Input], base: Path) -> Pool:
    path = base / required(settings, "arrays")
    label = settings.label or inputs[-1].name
    by: str | None = None
    if settings.kind != "iid":
        by = required(settings, "column") if settings.kind == "column" else label
    names = [input_.name for input_ in inputs]
    content = _load(path, names, by)
    arrays = _fitting(path, content, inputs)
    total = len(arrays[0])
    values = np.zeros(total, np.int64) if by is None else _integers(path, by, content[by], total)
    mixed = keyed_random.generator(seed, "data.order").permutation(total)
    tests = {name: f"test_{name}" for name in names}
    if there := [name for name in tests.values() if name in content]:
        if len(there) < len(tests):
            raise SimulatorError(
                f"{path} has the test arrays {there}; expected all of {list(tests.values())}, or "
                "none"
            )
        test = _fitting(path, {name: content[key] for name, key in tests.items()}, inputs)
        return Pool(path, arrays, values, mixed, test)
    groups = partitions.group(
        values[mixed] if settings.kind == "column" else np.zeros(total, np.int64)
    )
    # 1e-9: a tenth of ten is one, and not 0.9999999999.
    training_sizes = groups.sizes - np.floor(groups.sizes * settings.test + 1e-9).astype(np.int64)
    out = np.empty(total, bool)
    rank = np.arange(total) - np.repeat(groups.starts[:-1], groups.sizes)
    out[groups.order] = rank >= np.repeat(training_sizes, groups.sizes)
    held = mixed[out]
    return Pool(
        path,
        arrays,
        values,
        mixed[~out],
        tuple(array[held] for array in arrays) if len(held) else None,
    )


def _load(path: Path, names: Sequence[str], by: str | None) -> dict[str, NDArray[Any]]:
    """Read the arrays with these names from an .npz file, and its test arrays."""
    wanted = {*names, *([by] if by else [])}

    def choose(found: list[str]) -> list[str]:
        if missing := sorted(wanted - set(found)):
            raise SimulatorError(
                f"{path} has the arrays {sorted(found)}, and not {missing}; expected "
                f"{sorted(wanted)}: the bundle's batch by its names, and the array that divides "
                "the examples among devices"
            )
        tests = {f"test_{name}" for name in names}
        return [name for name in found if name in wanted | tests]

    try:
        return read_npz(path, choose)
    except NpzError as error:
        raise SimulatorError(f"data.arrays: {error}") from None


def _fitting(path: Path, content: Mapping[str, NDArray[Any]], inputs: Sequence[Input]) -> Arrays:
    try:
        arrays = check_batch({input_.name: content[input_.name] for input_ in inputs}, inputs)
        check_ranges(arrays, inputs)
        return arrays
    except DataError as error:
        raise SimulatorError(f"{path}: {error}") from None


def _integers(path: Path, name: str, array: NDArray[Any], total: int) -> NDArray[np.int64]:
    if array.dtype.kind not in "iub" or array.size != total:
        raise SimulatorError(
            f"{path}: the array {name} is {array.dtype} of shape {array.shape}; expected one "
            f"integer for each of the {total} examples, which divides them among devices"
        )
    return array.reshape(total).astype(np.int64)


def _concentration(settings: DataSection) -> float:
    alpha: float = required(settings, "alpha")
    if not alpha > 0:
        raise SimulatorError(
            f"data.alpha = {alpha}: a Dirichlet distribution takes a number above 0; 0.1 is very "
            "uneven"
        )
    return alpha
