"""Laws of availability: when devices are online. Ours, and what an own one has to be.

A law says for a moment who is online, from the devices' numbers alone: there is no state and no
history.

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

from collections.abc import Callable, Iterator
from functools import partial
from math import exp, factorial, inf
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.population.devices import Devices
from fleetlearn_simulator.population.traits import Floats, Ids, Ints
from fleetlearn_simulator.scenario.availability_trace import read_trace
from fleetlearn_simulator.scenario.sections import Availability

Flags: TypeAlias = NDArray[np.bool_]
Share: TypeAlias = Callable[[Devices, Floats], "Floats | float"]
HORIZON = 30 * 86400.0
"""Seconds that ``until`` looks ahead, slot by slot. If a device is online for longer, ``until``
returns this."""
_PER_WINDOW = 2.0
_COUNTS = np.cumsum([exp(-_PER_WINDOW) * _PER_WINDOW**k / factorial(k) for k in range(24)])
"""Distribution function of the number of events in a window. A number of 53 bits cannot be beyond
the 24th value."""


@runtime_checkable
class AvailabilityLaw(Protocol):
    """When devices are online. The three functions agree with each other, and what they say of a
    device follows from it and the time alone. Times ``t`` are seconds of the scenario."""

    def online(self, devices: Devices, t: float) -> Flags:
        """Return whether each device is online at the time ``t``: bool, shape (n,)."""

    def until(self, devices: Devices, t: float) -> Floats:
        """Return when each of these devices, which are online at ``t``, goes offline: seconds after
        ``t``'s, float64, shape (n,). Infinite: never. It may be earlier than that, if the device is
        then asked again."""

    def next_online(self, devices: Devices, t: float) -> Floats:
        """Return when each of these devices, which are offline at ``t``, is online again: float64,
        shape (n,). Infinite: never."""


def in_slots(share: float | Share, slot: float = 3600.0) -> AvailabilityLaw:
    """Return a law by which a device is online in a slot of time, or offline, with a probability.

    Each device's slots have their own phase, and what it is in one slot does not depend on others.

    Args:
        share: The probability: a number, or a function that is called with the devices and the
            middles of slots in seconds on the devices' own clocks, which begin at midnight
            (float64, shape (n,) or (slots, n)), and returns a probability for each.
        slot: Seconds of a slot.

    Raises ValueError where a probability is not in [0, 1]; that of a function when it is asked.
    """
    if not slot > 0:
        raise ValueError(f"slot is {slot}; it takes seconds, above 0")
    if callable(share):
        return SlottedLaw(partial(_probability, share), slot)
    return SlottedLaw(float(_in_range(share)), slot)


def _probability(share: Share, devices: Devices, middle: Floats) -> Floats | float:
    return _in_range(share(devices, middle))


def _in_range(found: Floats | float) -> Floats | float:
    values = np.asarray(found)
    wrong = ~((values >= 0) & (values <= 1))  # NaN is wrong too
    if wrong.any():
        raise ValueError(
            f"the probability of being online is {values[wrong][0]}; expected at least 0 and at "
            "most 1"
        )
    return found


def our_law(rule: Availability) -> AvailabilityLaw:
    """Return the law of one of our kinds."""
    match rule.kind:
        case "bernoulli":
            return in_slots(_given(rule.share), _given(rule.slot))
        case "diurnal":
            share = _diurnal(_given(rule.share), _given(rule.swing), _given(rule.peak))
            return SlottedLaw(share, _given(rule.slot))  # above 1 at the peak: always online
        case "markov":
            return _Markov(_given(rule.on), _given(rule.off))
        case "trace":
            return _Trace(str(rule.file), rule.repeat)
    return _Always()


class _Always(AvailabilityLaw):
    def online(self, devices: Devices, t: float) -> Flags:
        return np.ones(len(devices), np.bool_)

    def until(self, devices: Devices, t: float) -> Floats:
        return np.full(len(devices), inf)

    def next_online(self, devices: Devices, t: float) -> Floats:
        return np.full(len(devices), t)


def _diurnal(mean: float, swing: float, peak: float) -> float | Share:
    amplitude = (swing - 1) / (swing + 1)
    if not amplitude:
        return mean

    def share(devices: Devices, middle: Floats) -> Floats:
        hours = middle / 3600
        return np.asarray(mean * (1 + amplitude * np.cos(2 * np.pi / 24 * (hours - peak))))

    return share


class SlottedLaw(AvailabilityLaw):
    """See ``in_slots``. A slot's number is a float, because the times of far slots are large."""

    def __init__(self, share: float | Share, slot: float) -> None:
        self._share, self._slot = share, slot

    def online(self, devices: Devices, t: float) -> Flags:
        phase = self._phase(devices)
        return self._on(devices, phase, np.floor((t + phase) / self._slot))

    def until(self, devices: Devices, t: float) -> Floats:
        if self._share == 1:
            return np.full(len(devices), inf)
        return self._change(devices, t, online=False)

    def next_online(self, devices: Devices, t: float) -> Floats:
        return self._change(devices, t, online=True)

    def _phase(self, devices: Devices) -> Floats:
        return self._slot * keyed_random.uniform(devices.seed, "phase", devices.ids)

    def _on(self, devices: Devices, phase: Floats, slots: Floats) -> Flags:
        """Return whether the devices, along the last axis, are online in these slots."""
        share: Floats | float
        if isinstance(self._share, float):
            share = self._share
        else:  # the middle of a slot decides for all of it
            share = self._share(devices, (slots + 0.5) * self._slot - phase + devices.offset)
        luck = keyed_random.uniform(devices.seed, "slot", devices.ids, slots.astype(np.int64))
        return np.asarray(luck < share)

    def _change(self, devices: Devices, t: float, *, online: bool) -> Floats:
        """Return when the next slot begins in which a device is ``online``, or offline; HORIZON
        ahead at the latest."""
        end = np.full(len(devices), t + HORIZON)
        todo, ahead, block = np.arange(len(devices)), 1, 4
        while todo.size and ahead * self._slot < HORIZON:
            left = devices.select(todo)
            phase = self._phase(left)
            now: Floats = np.floor((t + phase) / self._slot)
            numbers = now + (ahead + np.arange(block, dtype=np.float64)[:, None])
            changed = self._on(left, phase, numbers) == online
            changes = changed.any(axis=0)
            begins = numbers * self._slot - phase
            begin = np.take_along_axis(begins, changed.argmax(axis=0)[None], axis=0)[0]
            end[todo[changes]] = begin[changes]
            # Most devices change within a few slots. The rest look twice as far each time.
            todo, ahead, block = todo[~changes], ahead + block, min(2 * block, 1024)
        return np.asarray(np.clip(end, t, t + HORIZON))


class _Markov(AvailabilityLaw):
    def __init__(self, on: float, off: float) -> None:
        self._on, self._off = on, off

    def online(self, devices: Devices, t: float) -> Flags:
        seed, ids = devices.seed, devices.ids
        turned_on = _last(seed, "turn on", ids, t, self._off)
        return np.asarray(turned_on > _last(seed, "turn off", ids, t, self._on))

    def until(self, devices: Devices, t: float) -> Floats:
        return _next(devices.seed, "turn off", devices.ids, t, self._on)

    def next_online(self, devices: Devices, t: float) -> Floats:
        return _next(devices.seed, "turn on", devices.ids, t, self._off)


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


class _Trace(AvailabilityLaw):
    def __init__(self, file: str, repeat: float | None) -> None:
        self._trace = read_trace(file, repeat)

    def online(self, devices: Devices, t: float) -> Flags:
        return np.asarray(self.until(devices, t) > t)

    def until(self, devices: Devices, t: float) -> Floats:
        offset = devices.offset
        return np.asarray(self._trace.end(devices.ids, t + offset) - offset)

    def next_online(self, devices: Devices, t: float) -> Floats:
        offset = devices.offset
        return np.asarray(self._trace.begin(devices.ids, t + offset) - offset)


def _given(value: float | None) -> float:
    """Return a value that is never None, because its kind has a default."""
    assert value is not None
    return value
