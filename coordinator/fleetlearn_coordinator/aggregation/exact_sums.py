"""The aggregator "exact sums": whole numbers of devices, added up without rounding.

Each device's sums are small enough that those of all reports of a round fit into 64 bits. So the
order in which they are added changes nothing, to the last bit. Computations have this aggregator;
no plan names it by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fleetlearn_protocol.computations.fixed_point import MOST
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.private_sums import LENGTH, is_short
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.aggregators import Aggregator, Column, Tensors
from fleetlearn_coordinator.aggregation.reports import PartColumn
from fleetlearn_coordinator.aggregation.updates import (
    NO_VALUES,
    Result,
    Update,
    Values,
    whole_numbers_of,
)

NAME, PRIVATE = "exact sums", "exact sums of clipped ones"


@dataclass(slots=True, eq=False)
class ExactSums:
    """The aggregator's state."""

    total: Sums
    """int64, shape (S,)."""
    devices: int = 0
    """How many devices' sums are in it."""


def exact_sums(size: int, reports: int, *, private: bool = False) -> Aggregator[Any]:
    """Return the aggregator of S = ``size`` sums. ``reports``: the most that a round has.
    ``private``: whether each device's are clipped, as private_sums.py writes them. Its state's
    ``total`` is what a computation goes on from; it has no mean."""
    most = MOST // reports
    return Aggregator(
        name=PRIVATE if private else NAME,
        init=lambda model_size: ExactSums(np.zeros(size, np.int64)),
        check=partial(_check, most),
        passes_check=lambda largest, weights: largest <= most,
        add=partial(_add, reports, private),
        add_many=partial(_add_many, reports, private),
        merge=partial(_merge, reports),
        result=_result,
        to_tensors=lambda state: {
            "total": state.total,
            "devices": np.array([state.devices], np.int64),
        },
        from_tensors=partial(_from_tensors, size, reports),
        keeps_updates=False,
    )


def _check(most: int, largest: float, weight: int) -> None:
    if not largest <= most:
        raise ProtocolError(
            Code.OUT_OF_RANGE,
            f"a sum of {largest:.6g} came; it can be at most {most}, so that all sums of a round "
            "fit into 64 bits",
        )


def _check_factor(factor: float) -> None:
    if factor != 1:
        raise ValueError(f"a factor of {factor:g} was given for sums, which count whole")


def _check_room(state: ExactSums, more: int, reports: int) -> None:
    if state.devices + more > reports:
        raise ValueError(f"{state.devices + more} devices' sums were given; a round has {reports}")


def check_short(sums: Sums) -> None:
    """Raise ProtocolError (norm-too-large) unless a device's sums, (S,), are clipped."""
    if not is_short(sums):
        raise ProtocolError(
            Code.NORM_TOO_LARGE,
            f"sums came whose L2 norm is above {LENGTH}, which is what the clip norm of the task "
            "is in whole numbers; the device's software does not clip sums",
        )


def short_ones(column: PartColumn) -> NDArray[np.bool_]:
    """Return which of the devices' sums are clipped, (n,)."""
    if isinstance(column, np.ndarray):
        return np.array([is_short(row) for row in column], np.bool_)
    return np.array([is_short(read_sums(each)) for each in column], np.bool_)


def read_sums(update: Update) -> Sums:
    """Return all of a device's sums that came, int64; those after them are 0."""
    return np.concatenate([part.copy() for part in whole_numbers_of(update)])


def _add(
    reports: int,
    private: bool,
    state: ExactSums,
    update: Update,
    weight: int,
    largest: float,
    factor: float = 1.0,
    values: Values = NO_VALUES,
) -> None:
    _check_factor(factor)
    _check_room(state, 1, reports)
    # All of it is read first: nothing is added where it cannot be.
    sums = read_sums(update)
    if private:
        check_short(sums)
    if not 0 < len(sums) <= len(state.total):
        raise ValueError(f"{len(sums)} sums were given; the total has {len(state.total)}")
    state.total[: len(sums)] += sums  # those that did not come are 0
    state.devices += 1


def _add_many(
    reports: int,
    private: bool,
    state: ExactSums,
    parts: Sequence[NDArray[Any]],
    weights: NDArray[np.int64],
    largest: Column,
    factors: Column | None = None,
    values: Values = NO_VALUES,
) -> None:
    if factors is not None:
        _check_factor(float(factors.min(initial=1.0)))
    _check_room(state, sum(map(len, parts)), reports)
    for rows in parts:
        if rows.dtype != np.int64:
            raise ValueError(f"sums of type {rows.dtype} were given; expected int64")
        _check_shape(rows.shape[1:], state)
        if private:
            for row in rows:
                check_short(row)
    for rows in parts:
        state.total += rows.sum(axis=0)
        state.devices += len(rows)


def _merge(reports: int, state: ExactSums, other: ExactSums) -> None:
    _check_shape(other.total.shape, state)
    _check_room(state, other.devices, reports)
    state.total += other.total
    state.devices += other.devices


def _check_shape(shape: tuple[int, ...], state: ExactSums) -> None:
    if shape != state.total.shape:
        raise ValueError(f"sums of shape {shape} were given; the total has {state.total.shape}")


def _result(state: ExactSums, present: Vector = NO_VALUES.present) -> Result:
    raise ValueError("the mean of sums was asked for; a computation takes their total")


def _from_tensors(size: int, reports: int, tensors: Tensors) -> ExactSums:
    if tensors.keys() != {"total", "devices"}:
        found = ", ".join(tensors) or "nothing"
        raise ValueError(f"the saved state has {found}: it is no total of sums")
    total, devices = tensors["total"], tensors["devices"]
    if total.dtype != np.int64 or total.shape != (size,):
        raise ValueError(
            f"the saved total is {total.dtype} of shape {total.shape}; expected int64 of ({size},)"
        )
    if devices.dtype != np.int64 or devices.shape != (1,) or not 0 <= devices[0] <= reports:
        raise ValueError("the saved total does not say how many devices' sums it has")
    return ExactSums(total.astype(np.int64), int(devices[0]))
