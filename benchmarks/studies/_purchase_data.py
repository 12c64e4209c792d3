"""Purchases of CDNOW's customers for the study of the next purchase: one customer on each device.

23,570 people who bought there for the first time in the first twelve weeks of 1997, and all that
they bought until the end of June 1998. Day 0 is 1 January 1997.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _packaged_data import Arrays, Source, cached_arrays
from fleetlearn_simulator import VanishingTasks
from numpy.typing import NDArray

CDNOW = Source(
    "Lifetimes",
    "0.11.3",
    "MIT (the package's); the data are published for research and teaching, without a licence",
    "Fader and Hardie 2001, Forecasting Repeat Sales at CDNOW: A Case Study, Interfaces 31(3); "
    "brucehardie.com/datasets",
)
FILES = Path("lifetimes") / "datasets"
BEGIN = dt.date(1997, 1, 1)
CALIBRATION = 272
"""The last day on which anybody trains: 30 September 1997, 39 weeks after the first one."""
END = 545
"""The last day of the data: 30 June 1998."""
WINDOW = 91
"""Days, 13 weeks, in which a customer buys or does not."""
FEATURES = 7
"""Numbers that the network has of a customer."""
LOOKS_BACK = tuple(CALIBRATION - WINDOW - 14 * number for number in range(8))
"""The days from which a device looks ahead to train. On the first, day 83, the last customer bought
for the first time; the window of the last ends with the calibration."""
Floats = NDArray[np.float64]


class Purchases(NamedTuple):
    """All purchases, by customer and day. Who buys twice on a day, buys once."""

    customer: NDArray[np.int64]
    """From 0, in the order of first purchases."""
    day: NDArray[np.int64]
    discs: NDArray[np.int64]
    dollars: Floats
    sample: NDArray[np.int64]
    """The customers of the sample of a tenth, on which models are published."""


class Histories(NamedTuple):
    """What the BG/NBD model knows of each customer, in weeks; shape (customers,) each."""

    x: Floats
    """Days with a purchase after the first one."""
    t_x: Floats
    """From the first purchase to the last."""
    age: Floats
    """From the first purchase to the day of the look; T in the paper."""

    def of(self, chosen: Any) -> Histories:
        """Return those of some customers."""
        return Histories(*(values[chosen] for values in self))


def read_purchases(folder: Path) -> Arrays:
    """Return the fields of ``Purchases``. Raises ValueError for files of another form."""
    master, sample = folder / FILES / "CDNOW_master.txt", folder / FILES / "CDNOW_sample.txt"
    try:
        rows = np.loadtxt(master, skiprows=1, ndmin=2, usecols=range(4))
        chosen = np.loadtxt(sample, dtype=np.int64, ndmin=2, usecols=(0, 1))
        days = np.array([_day(int(date)) for date in rows[:, 1]])
    except ValueError as error:
        raise ValueError(f"{folder / FILES} has other files than CDNOW's: {error}") from error
    number = rows[:, 0].astype(np.int64) - 1
    # Two orders of one customer on one day are one purchase.
    keys, where = np.unique(number * 1000 + days, return_inverse=True)
    customer = keys // 1000
    if not np.array_equal(np.unique(customer), np.arange(customer.max() + 1)):
        raise ValueError(f"{master}: customers are not numbered from 1 without a gap")
    own = np.unique(chosen, axis=0)
    return {
        "customer": customer,
        "day": keys % 1000,
        "discs": np.bincount(where, rows[:, 2]).astype(np.int64),
        "dollars": np.bincount(where, rows[:, 3]),
        "sample": own[np.argsort(own[:, 1]), 0] - 1,
    }


def _day(date: int) -> int:
    """Return the day of a date such as 19970131."""
    day = (dt.date(date // 10000, date // 100 % 100, date % 100) - BEGIN).days
    if not 0 <= day <= END:
        raise ValueError(f"{date} is before 1997 or after June 1998")
    return day


@cache
def purchases() -> Purchases:
    """Return the data. Raises MissingDataError."""
    return Purchases(**cached_arrays(CDNOW, "purchases", 1, read_purchases))


def customers(of: Purchases) -> int:
    """Return how many there are."""
    return int(of.customer[-1]) + 1


def histories(of: Purchases, day: int) -> Histories:
    """Return each customer's history at the end of this day, by which all have bought."""
    seen = of.day <= day
    count, last = np.zeros((2, customers(of)))
    np.add.at(count, of.customer[seen], 1)
    np.maximum.at(last, of.customer[seen], of.day[seen])
    first = of.day[np.unique(of.customer, return_index=True)[1]]
    return Histories(count - 1, (last - first) / 7, (day - first) / 7)


def bought(of: Purchases, after: int, until: int) -> NDArray[np.int64]:
    """Return on how many days each customer bought in (after, until]."""
    inside = (of.day > after) & (of.day <= until)
    return np.bincount(of.customer[inside], minlength=customers(of))


def features(of: Purchases, day: int) -> NDArray[np.float32]:
    """Return what the network knows of each customer at the end of this day: (customers, 7).

    The scales are chosen by hand, so that nobody has to count the data together first.
    """
    x, t_x, age = histories(of, day)
    seen = of.day <= day
    spent, discs = (
        np.bincount(of.customer[seen], values[seen], minlength=customers(of)) / (x + 1)
        for values in (of.dollars, of.discs)
    )
    columns = [
        np.log1p(x) - 0.5,
        np.log1p(age - t_x) - 2.5,
        np.log1p(age) - 3.0,
        4 * x / (age + 4) - 0.5,
        x == 0,
        np.log1p(spent) - 3.5,
        np.log1p(discs) - 1.2,
    ]
    return np.stack(columns, axis=1).astype(np.float32)


@cache
def windows() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the rows on which devices train: (customers, looks, 7), and whether each customer
    bought in the thirteen weeks after that look: (customers, looks), 0 or 1."""
    of = purchases()
    x = np.stack([features(of, day) for day in LOOKS_BACK], axis=1)
    y = np.stack([bought(of, day, day + WINDOW) > 0 for day in LOOKS_BACK], axis=1)
    return x, y.astype(np.float32)


@cache
def calibration(sample: bool) -> Histories:
    """Return the histories that the paper fits: of the sample, or of all customers."""
    found = histories(purchases(), CALIBRATION)
    return found.of(purchases().sample) if sample else found


def own_windows(device: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a customer's eight rows: the data of a simulated device."""
    x, y = windows()
    return x[device], y[device]


def own_history(device: int, seed: int) -> dict[str, Floats]:
    """Return a customer's history, one row. ``seed``, the data's, is 1 for the sample."""
    found = calibration(seed == 1)
    return {name: values[device : device + 1] for name, values in found._asdict().items()}


@cache
def answering(sample: bool, share: float, weeks: float) -> NDArray[np.bool_]:
    """Return which customers' devices answer at all, at the end of the calibration: of the sample,
    or of all customers.

    share: of the customers, whoever they are. weeks: 0, or a device is there still with the
    probability exp(-w / weeks), w weeks after the customer's last purchase.
    """
    since = calibration(sample)
    there = np.full(len(since.x), share)
    if weeks:
        there *= np.exp((since.t_x - since.age) / weeks)
    return np.random.default_rng(1997).random(len(there)) < there


def silent(
    sample: int = 0, share: float = 1.0, weeks: float = 0.0
) -> Callable[[VanishingTasks], Floats]:
    """A law of failures: devices that are not ``answering`` vanish as they begin to train."""
    there = answering(sample == 1, share, weeks)

    def law(tasks: VanishingTasks) -> Floats:
        after = np.full_like(tasks.seconds, np.inf)
        after[1, ~there[tasks.devices.ids]] = 0.0
        return after

    return law
