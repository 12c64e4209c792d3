"""The test kit: what a package with own laws, sources and partitions calls from its tests. Each
function makes the checks that ours pass, and raises AssertionError with what was asked and what
came.

from fleetlearn_simulator.testing import check_failures
def test_my_law() -> None:
    check_failures(tunnels(chance=0.3))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.data.own_source import DeviceData
from fleetlearn_simulator.data.partitions import Partition, own_groups
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.population.availability import CheckedLaw
from fleetlearn_simulator.population.availability_laws import AvailabilityLaw
from fleetlearn_simulator.population.devices import Devices
from fleetlearn_simulator.population.failure_laws import (
    PHASES,
    FailureLaw,
    VanishingTasks,
    vanishing,
)
from fleetlearn_simulator.scenario.scenario import Scenario

NAME = "the one under test"
DAY = 86400.0
COUNT = 200
"""Devices, or tasks, that are asked about."""


def small_scenario(seed: int = 1, size: int = 1000) -> Scenario:
    """Return a scenario for tests, with two tiers (``fast``, ``slow``) and two time zones."""
    tables = {
        "seed": seed,
        "plan": {"bundle": "none.bundle", "round": {"goal": 4}},
        "population": {"size": size},
        "tiers": {"fast": {"share": 0.5}, "slow": {"share": 0.5, "speed": 0.1}},
        "availability": {"kind": "diurnal", "zones": [{"hours": 0.0}, {"hours": -6.0}]},
    }
    return Scenario.read(tables, Path.cwd())


def check_failures(law: FailureLaw, scenario: Scenario | None = None) -> None:
    """Check a law of failures.

    It returns float64 of shape (3, n), at least 0 and no NaN, also for no tasks and for one; what
    it says of a task is the same at each call, alone or among others, in any order; what it was
    given is as it was.
    """
    scenario = scenario or small_scenario()
    ids = np.arange(COUNT, dtype=np.int64) * 3
    for kind, now in (("train", 0.0), ("train", 9.5 * DAY), ("evaluation", 3600.0)):
        tasks = _tasks(scenario, kind, now, ids, ids % 5 + 1)
        whole = _vanishing(law, tasks)
        _same(_vanishing(law, tasks), whole, "the law said something else when it was asked again")
        for rows in _blocks(COUNT):
            part = _vanishing(law, _select(scenario, tasks, rows))
            _same(part, whole[:, rows], f"of {len(rows)} of the tasks the law said something else")
        untouched = _tasks(scenario, kind, now, ids, ids % 5 + 1)
        for what, given, before in (
            ("seconds", tasks.seconds, untouched.seconds),
            ("luck", tasks.luck, untouched.luck),
            ("turn", tasks.turn, untouched.turn),
            ("devices.ids", tasks.devices.ids, untouched.devices.ids),
        ):
            _same(given, before, f"the law changed tasks.{what}, which others use too")


def check_availability(law: AvailabilityLaw, scenario: Scenario | None = None) -> None:
    """Check a law of availability.

    Its functions return bool, or times from then on, of shape (n,), also for no devices and for
    one; what they say of a device is the same at each call, alone or among others, in any order;
    and they agree: a device is online until ``until`` says, and again when ``next_online`` says.
    """
    scenario = scenario or small_scenario()
    assert isinstance(law, AvailabilityLaw), (
        f"a {type(law).__name__} has not the functions online, until and next_online; "
        "fleetlearn_simulator.in_slots makes them of a probability"
    )
    checked = CheckedLaw(NAME, law)
    everyone = Devices(scenario, np.arange(COUNT, dtype=np.int64) * 7)
    for t in (0.0, 1234.5, 3.3 * DAY, 400.25 * DAY):
        there = _ask(partial(checked.online, everyone, t))
        _same(
            _ask(partial(checked.online, everyone, t)),
            there,
            f"online() said something else when it was asked again, at {t} s",
        )
        for rows in _blocks(COUNT):
            _same(
                _ask(partial(checked.online, everyone.select(rows), t)),
                there[rows],
                f"of {len(rows)} of the devices online() said something else, at {t} s",
            )
        _check_times(checked, "until", everyone.select(np.flatnonzero(there)), t)
        _check_times(checked, "next_online", everyone.select(np.flatnonzero(~there)), t)


def check_source(data: DeviceData, devices: int = 50, seed: int = 1) -> None:
    """Check a source of data.

    ``examples`` returns integers, at least 0, in the shape it is asked in, as many as the arrays
    have; all arrays of a device have as many rows; all devices' have the same names, dtypes and
    shapes; what it says of a device is the same at each call, alone or among others, in any order,
    and another for another seed or device.
    """
    assert isinstance(data, DeviceData), (
        f"a {type(data).__name__} has not the functions examples, arrays and test"
    )
    ids = np.arange(devices, dtype=np.int64)
    counts = np.asarray(data.examples(ids, seed))
    assert counts.shape == (devices,), (
        f"examples() of {devices} devices returned shape {counts.shape}; expected ({devices},)"
    )
    assert counts.dtype.kind in "iu", f"examples() returned {counts.dtype}; expected integers"
    assert (counts >= 0).all(), f"examples() returned {counts.min()}; expected at least 0"
    assert counts.any(), "no device has an example"
    for rows in _blocks(devices):
        _same(
            np.asarray(data.examples(ids[rows], seed)),
            counts[rows],
            f"of {len(rows)} of the devices examples() said something else",
        )
    first = {device: _columns(data, device, seed) for device in range(devices) if counts[device]}
    form = None
    for device in reversed(first):  # in another order than before
        columns = _columns(data, device, seed)
        for name, column in columns.items():
            before = first[device].get(name)
            assert before is not None, f"arrays({device}) had no {name} when it was asked first"
            _same(column, before, f"arrays({device})[{name!r}] was another when it was asked again")
            assert len(column) == counts[device], (
                f"arrays({device})[{name!r}] has {len(column)} rows, and examples() says "
                f"{counts[device]}"
            )
        own = {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
        form = form or own
        assert own == form, f"arrays({device}) has {own}, and another device's arrays have {form}"
    drawn = [*first.values()]
    if len(drawn) > 1:
        assert any(not _equal(one, other) for one, other in pairwise(drawn)), (
            "all devices have the same examples"
        )
    other = {device: _columns(data, device, seed + 1) for device in [*first][:5]}
    assert any(not _equal(first[device], columns) for device, columns in other.items()), (
        "another seed makes the same examples: the data's seed has no effect"
    )
    test = data.test(seed)
    if test is not None:
        held_out = _named(test)
        assert len({len(column) for column in held_out.values()}) == 1, "rows of test() differ"
        own = {name: (column.dtype, column.shape[1:]) for name, column in held_out.items()}
        assert own == form, f"test() has {own}, and the devices' arrays have {form}"


def check_partition(partition: Partition, devices: int = 20, examples: int = 1000) -> None:
    """Check a partition of examples, with labels of ten kinds.

    It returns a part for each device; each example is in one part at most; the same random numbers
    give the same parts, whatever was divided before; it does not change the labels.
    """
    labels = np.random.default_rng(7).integers(10, size=examples)

    def divided(seed: int) -> list[NDArray[np.int64]]:
        random = keyed_random.generator(seed, "data.partition")
        try:
            groups = own_groups(NAME, partition, labels, devices, random)
        except SimulatorError as error:
            raise AssertionError(error.text) from error
        return [groups.of(device) for device in range(devices)]

    first, _, again = divided(1), divided(2), divided(1)
    for device, (one, other) in enumerate(zip(first, again, strict=True)):
        _same(other, one, f"the same generator gave device {device} another part")
    assert any(part.size for part in first), "no device has an example"
    given, random = labels.copy(), keyed_random.generator(1, "data.partition")
    partition(given, devices, random)
    _same(given, labels, "the partition changed the labels")


def _tasks(
    scenario: Scenario, kind: str, now: float, ids: NDArray[np.int64], turn: NDArray[np.int64]
) -> VanishingTasks:
    luck = keyed_random.uniform(scenario.seed, "fate", ids, turn, keyed_random.COLUMN[:3])
    seconds = 1 + 100 * keyed_random.uniform(3, "seconds", ids, keyed_random.COLUMN[:3])
    return VanishingTasks(Devices(scenario, ids.copy()), turn.copy(), kind, now, seconds, luck)


def _select(scenario: Scenario, tasks: VanishingTasks, rows: NDArray[np.int64]) -> VanishingTasks:
    return _tasks(scenario, tasks.kind, tasks.now, tasks.devices.ids[rows], tasks.turn[rows])


def _vanishing(law: FailureLaw, tasks: VanishingTasks) -> NDArray[np.float64]:
    rows = _ask(lambda: vanishing(law, NAME, tasks))
    found: NDArray[np.float64] = np.array(rows).reshape(len(PHASES), len(tasks.devices))
    return found


def _check_times(law: CheckedLaw, what: str, devices: Devices, t: float) -> None:
    """Check the times at which these devices, which are all online or all offline, change."""
    ask: Callable[[Devices, float], NDArray[np.float64]] = getattr(law, what)
    times = _ask(partial(ask, devices, t))
    for rows in _blocks(len(devices)):
        _same(
            _ask(partial(ask, devices.select(rows), t)),
            times[rows],
            f"of {len(rows)} of the devices {what}() said something else, at {t} s",
        )
    online = what == "until"
    for row in np.flatnonzero(np.isfinite(times))[:20]:
        one, end = devices.select(np.array([row])), float(times[row])
        device = int(devices.ids[row])
        for part in (0.0, 0.3, 0.9):
            at = t + part * (end - t)
            if end - at > 1e-3:
                state = bool(_ask(partial(law.online, one, at))[0])
                assert state == online, (
                    f"{what}({device}, {t} s) = {end} s, and at {at} s online() says {state}"
                )
        if not online:
            state = bool(_ask(partial(law.online, one, end + 1e-3))[0])
            assert state, (
                f"next_online({device}, {t} s) = {end} s, and just after it online() says False"
            )


def _blocks(count: int) -> list[NDArray[np.int64]]:
    """Return rows: none, one, a few in another order, one twice, and all from the last."""
    rows = np.arange(count)
    if not count:
        return [rows]
    return [rows[:0], rows[-1:], rows[::-7], rows[[0, 0]], rows[::-1]]


def _columns(data: DeviceData, device: int, seed: int) -> dict[str, NDArray[Any]]:
    return {name: column.copy() for name, column in _named(data.arrays(device, seed)).items()}


def _named(columns: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    if isinstance(columns, Mapping):
        return {name: np.asarray(column) for name, column in columns.items()}
    return {str(place): np.asarray(column) for place, column in enumerate(columns)}


def _equal(one: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def _ask(function: Callable[[], Any]) -> Any:
    """Return what it returns; what the simulator would refuse is an AssertionError."""
    try:
        return function()
    except SimulatorError as error:
        raise AssertionError(error.text) from error


def _same(found: NDArray[Any], expected: NDArray[Any], text: str) -> None:
    """Raise AssertionError unless both have the same bits."""
    same = found.shape == expected.shape and found.dtype == expected.dtype
    assert same and found.tobytes() == expected.tobytes(), text  # noqa: PT018
