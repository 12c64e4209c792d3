"""When a device is online. It is computed for a moment from the device's number: there is no state
and no history.

``always``     Every device is always online.
``bernoulli``  Time is cut into slots, with a phase of the device's own. In each slot the device is
               online with probability ``share``, independently of other slots.
``diurnal``    As ``bernoulli``, with a probability that follows the hour h of the device's day,
               share * (1 + a cos(2 pi (h - peak) / 24)), a = (swing - 1) / (swing + 1).
``markov``     Each device has two independent Poisson processes: events that turn it on (on average
               ``off`` seconds apart), and events that turn it off (on average ``on`` seconds
               apart). It is online if the last event turned it on. This is exactly the two-state
               Markov chain in equilibrium, with exponential times of mean ``on`` and ``off``. To
               find the last and the next event without those before, each process is cut into
               windows: each has a Poisson number of events, two on average, at uniform times.
``trace``      The intervals of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, factorial, inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.population.members import may_train
from fleetlearn_simulator.population.traits import Floats, Ids, Ints, offsets
from fleetlearn_simulator.scenario.availability_trace import read_trace
from fleetlearn_simulator.scenario.scenario import Scenario

Flags: TypeAlias = NDArray[np.bool_]
HORIZON = 30 * 86400.0
"""Seconds that ``until`` looks ahead, slot by slot. If a device is online for longer, ``until``
returns this."""
_PER_WINDOW = 2.0
_COUNTS = np.cumsum([exp(-_PER_WINDOW) * _PER_WINDOW**k / factorial(k) for k in range(24)])
"""Distribution function of the number of events in a window. A number of 53 bits cannot be beyond
the 24th value."""


def online(scenario: Scenario, ids: Ids, t: float) -> Flags:
    """Return whether each device may get a task at the time ``t``, in seconds: whether it is
    online, its region has network, it has the memory to train, and a model of the plan fits it."""
    found = _online(scenario, ids, t) & may_train(scenario, ids)
    for outage in scenario.failures.outages:
        if outage.begin <= t < outage.end:
            found &= ids % scenario.failures.regions != outage.region
    return found


def until(scenario: Scenario, ids: Ids, t: float) -> Floats:
    """Return when each device goes offline, in seconds. Outages of its region are not considered.

    The result is ``t`` for a device that is offline, and infinity for a device that never goes
    offline.
    """
    there = _online(scenario, ids, t)
    end = np.full(len(ids), t)
    end[there] = _until(scenario, ids[there], t)
    return end


def next_online(scenario: Scenario, ids: Ids, t: float) -> Floats:
    """Return the first time from ``t`` on at which each device may get a task (see ``online``), in
    seconds. Infinite: never. After an outage of its region a device may be offline again."""
    begin = np.full(len(ids), t)
    away = ~_online(scenario, ids, t)
    begin[away] = _next_online(scenario, ids[away], t)
    for row in sorted(scenario.failures.outages, key=lambda row: row.begin):
        inside = (
            (ids % scenario.failures.regions == row.region)
            & (row.begin <= begin)
            & (begin < row.end)
        )
        begin[inside] = row.end
    begin[~may_train(scenario, ids)] = inf
    return begin


def _online(scenario: Scenario, ids: Ids, t: float) -> Flags:
    rule = scenario.availability
    match rule.kind:
        case "bernoulli" | "diurnal":
            slots = _Slots(scenario, ids)
            return slots.on(slots.at(t))
        case "markov":
            turned_on = _last(scenario.seed, "turn on", ids, t, _given(rule.off))
            return np.asarray(turned_on > _last(scenario.seed, "turn off", ids, t, _given(rule.on)))
        case "trace":
            return _trace_end(scenario, ids, t) > t
    return np.ones(len(ids), np.bool_)


def _until(scenario: Scenario, ids: Ids, t: float) -> Floats:
    """Do what ``until`` does, for devices that are online."""
    rule = scenario.availability
    match rule.kind:
        case "bernoulli" | "diurnal":
            return _slots_change(scenario, ids, t, online=False)
        case "markov":
            return _next(scenario.seed, "turn off", ids, t, _given(rule.on))
        case "trace":
            return _trace_end(scenario, ids, t)
    return np.full(len(ids), inf)


def _next_online(scenario: Scenario, ids: Ids, t: float) -> Floats:
    """Do what ``next_online`` does, for devices that are offline, and without outages."""
    rule = scenario.availability
    match rule.kind:
        case "markov":
            return _next(scenario.seed, "turn on", ids, t, _given(rule.off))
        case "trace":
            offset = offsets(scenario, ids)
            return np.asarray(
                read_trace(str(rule.file), rule.repeat).begin(ids, t + offset) - offset
            )
    return _slots_change(scenario, ids, t, online=True)


class _Slots:
    """The slots of some devices. A slot's number is a float, because the times of far slots are
    large."""

    def __init__(self, scenario: Scenario, ids: Ids) -> None:
        rule = scenario.availability
        self.seed, self.ids = scenario.seed, ids
        self.seconds, self.share, self.peak = (
            _given(rule.slot),
            _given(rule.share),
            rule.peak or 0.0,
        )
        swing = rule.swing or 1.0
        self.amplitude = (swing - 1) / (swing + 1)
        self.phase = self.seconds * keyed_random.uniform(self.seed, "phase", ids)
        self.offset = offsets(scenario, ids)

    def at(self, t: float) -> Floats:
        """Return the slot that each device is in."""
        return np.floor((t + self.phase) / self.seconds)

    def begin(self, slots: Floats) -> Floats:
        """Return when the slots begin, in seconds."""
        return slots * self.seconds - self.phase

    def on(self, slots: Floats) -> Flags:
        """Return whether the devices, along the last axis, are online in these slots."""
        share: float | Floats = self.share
        if self.amplitude:
            # The middle of a slot decides for all of it.
            hours = (self.begin(slots + 0.5) + self.offset) / 3600
            share = self.share * (1 + self.amplitude * np.cos(2 * np.pi / 24 * (hours - self.peak)))
        return np.asarray(
            keyed_random.uniform(self.seed, "slot", self.ids, slots.astype(np.int64)) < share
        )


def _slots_change(scenario: Scenario, ids: Ids, t: float, *, online: bool) -> Floats:
    """Return when the next slot begins in which a device is ``online``, or offline; HORIZON ahead
    at the latest."""
    if scenario.availability.share == 1 and not online:
        return np.full(len(ids), inf)
    end = np.full(len(ids), t + HORIZON)
    todo, ahead, block = np.arange(len(ids)), 1, 4
    while todo.size and ahead * _given(scenario.availability.slot) < HORIZON:
        slots = _Slots(scenario, ids[todo])
        numbers = slots.at(t) + ahead + np.arange(block)[:, None]
        changed = slots.on(numbers) == online
        changes = changed.any(axis=0)
        begin = np.take_along_axis(slots.begin(numbers), changed.argmax(axis=0)[None], axis=0)[0]
        end[todo[changes]] = begin[changes]
        # Most devices change within a few slots. The rest look twice as far each time.
        todo, ahead, block = todo[~changes], ahead + block, min(2 * block, 1024)
    return np.asarray(np.clip(end, t, t + HORIZON))


def _last(seed: int, purpose: str, ids: Ids, t: float, mean: float) -> Floats:
    """Return the time of the last event up to ``t`` of each device's Poisson process. On average
    events are ``mean`` seconds apart."""
    last = np.full(len(ids), -inf)
    todo, window, width = np.arange(len(ids)), int(t // (_PER_WINDOW * mean)), _PER_WINDOW * mean
    while todo.size:
        for rows, fraction in _events(seed, purpose, ids[todo], window):
            when = (window + fraction) * width
            last[todo[rows]] = np.maximum(last[todo[rows]], np.where(when <= t, when, -inf))
        todo, window = todo[last[todo] == -inf], window - 1
    return last


def _next(seed: int, purpose: str, ids: Ids, t: float, mean: float) -> Floats:
    """Return the time of the first event after ``t``."""
    first = np.full(len(ids), inf)
    todo, window, width = np.arange(len(ids)), int(t // (_PER_WINDOW * mean)), _PER_WINDOW * mean
    while todo.size:
        for rows, fraction in _events(seed, purpose, ids[todo], window):
            when = (window + fraction) * width
            first[todo[rows]] = np.minimum(first[todo[rows]], np.where(when > t, when, inf))
        todo, window = todo[first[todo] == inf], window + 1
    return first


def _events(seed: int, purpose: str, ids: Ids, window: int) -> Iterator[tuple[Ints, Floats]]:
    """Yield the events in a window: for the first, the second, ... event of each device that has
    one, the device's row and the event's time, as a fraction of the window."""
    counts = np.searchsorted(
        _COUNTS, keyed_random.uniform(seed, purpose, ids, window), side="right"
    )
    for number in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > number)
        yield rows, keyed_random.uniform(seed, purpose, ids[rows], window, number)


def _trace_end(scenario: Scenario, ids: Ids, t: float) -> Floats:
    rule = scenario.availability
    offset = offsets(scenario, ids)
    return np.asarray(read_trace(str(rule.file), rule.repeat).end(ids, t + offset) - offset)


def _given(value: float | None) -> float:
    """Return a value that is never None, because its kind has a default."""
    assert value is not None
    return value
