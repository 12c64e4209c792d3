"""A trace of when devices are online: a CSV file. Each line ``device,on,off`` is a time online, in
seconds."""

from __future__ import annotations

import csv
from functools import lru_cache
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path

import numpy as np
from fleetlearn_protocol.errors import in_words
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError

COLUMNS = ["device", "on", "off"]
MAX_TIME = 100 * 366 * 86400.0
_TICKS = 1000
"""Parts of a second that times are rounded to. A device and a time fit into one integer then."""


class Trace:
    """The intervals of a file. Device i is the file's device number i modulo the number of its
    devices, in the order in which they appear."""

    def __init__(self, rows: NDArray[np.int64], devices: int, repeat: float | None) -> None:
        """``rows``: (n, 3), sorted: the number of the file's device, and on and off in ticks."""
        self._devices, self._repeat = devices, repeat
        self._span = int(rows[:, 2].max(initial=0)) + 1
        self._begins, self._ends = rows[:, 0] * self._span + rows[:, 1], rows[:, 2]
        self._first = np.searchsorted(rows[:, 0], np.arange(devices))

    def end(self, ids: NDArray[np.int64], times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the end of the interval that each device is in at its time, in seconds. -inf: it
        is in none."""
        cycle = (
            np.zeros(len(ids))
            if self._repeat is None
            else np.floor(times / self._repeat) * self._repeat
        )
        ticks = np.floor((times - cycle) * _TICKS)
        row = ids % self._devices
        interval = np.searchsorted(
            self._begins,
            row * self._span + np.clip(ticks, -1, self._span - 1).astype(np.int64),
            side="right",
        )
        interval = np.maximum(interval - 1, 0)
        ends = self._ends[interval]
        inside = (
            (ticks >= 0)
            & (self._begins[interval] <= row * self._span + ticks)
            & (interval >= self._first[row])
            & (ticks < ends)
        )
        return np.where(inside, cycle + ends / _TICKS, -inf)

    def begin(self, ids: NDArray[np.int64], times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when each device's first interval begins that is not over before its time, in
        seconds. Infinite: there is none any more."""
        cycle = (
            np.zeros(len(ids))
            if self._repeat is None
            else np.floor(times / self._repeat) * self._repeat
        )
        row = ids % self._devices
        ticks = np.clip(np.ceil((times - cycle) * _TICKS), 0, self._span - 1).astype(np.int64)
        interval = np.searchsorted(self._begins, row * self._span + ticks, side="left")
        begins = np.append(self._begins, np.iinfo(np.int64).max)
        later = (begins[interval] - row * self._span) / _TICKS
        first = (self._begins[self._first[row]] - row * self._span) / _TICKS
        again = np.full(len(ids), inf) if self._repeat is None else cycle + self._repeat + first
        return np.where(begins[interval] < (row + 1) * self._span, cycle + later, again)


def read_trace(path: str, repeat: float | None) -> Trace:
    """Read a trace. Raises SimulatorError, naming the line and what was expected."""
    try:
        return _read(path, repeat, Path(path).stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SimulatorError(
            f"availability.file = {path!r} cannot be read: {in_words(error)}"
        ) from None


@lru_cache(8)
def _read(path: str, repeat: float | None, changed: int) -> Trace:
    devices: dict[str, int] = {}
    stretches: list[tuple[int, int, int, int]] = []
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        if (header := [word.strip() for word in next(lines, [])]) != COLUMNS:
            raise SimulatorError(
                f"{path}, line 1: {','.join(header)!r}; expected the columns {','.join(COLUMNS)}"
            )
        for words in filter(None, lines):
            where = f"{path}, line {lines.line_num}: {','.join(words)!r}"
            try:
                device, on, off = words[0].strip(), float(words[1]), float(words[2])
            except (ValueError, IndexError):
                raise SimulatorError(
                    f"{where}; expected a device and two times in seconds"
                ) from None
            if (
                len(words) != 3
                or not (isfinite(on) and isfinite(off))
                or not 0 <= on < off <= (repeat or MAX_TIME)
            ):
                limit = f"availability.repeat = {repeat:g}" if repeat else f"{MAX_TIME:g}"
                raise SimulatorError(
                    f"{where}; expected device,on,off with 0 <= on < off <= {limit}"
                )
            number = devices.setdefault(device, len(devices))
            stretches.append((number, round(on * _TICKS), round(off * _TICKS), lines.line_num))
    if not stretches:
        raise SimulatorError(
            f"{path}: no device is ever online; expected a line device,on,off for each time online"
        )
    stretches.sort()
    for before, after in pairwise(stretches):
        if before[0] == after[0] and after[1] < before[2]:
            raise SimulatorError(
                f"{path}: lines {before[3]} and {after[3]} overlap: the times online of a device "
                "must not"
            )
    return Trace(np.array(stretches, np.int64)[:, :3], len(devices), repeat)
