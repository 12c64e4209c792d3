"""The versions of a run's model, from outside: what is kept and why, what was measured of each, how
two differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.settings import MEASURED_ON
from fleetlearn_coordinator.service.status import read_model, read_status
from fleetlearn_coordinator.service.training_run.kept_models import (
    best_versions,
    measured,
    metrics_of,
)
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage

BLOCK = 2**16
"""Elements that are compared at a time, in float64."""


class ChosenVersion(NamedTuple):
    """A version that somebody asks for by what it is."""

    version: int
    why: str
    """For people: what it is."""


def choose_version(plan: Plan, wanted: str | None) -> ChosenVersion:
    """Return the version of a run's model that is wanted: its number, or one of these words.

    newest: the one that was made last.
    measured: the one whose metric met the target, or is the best with patience, where that ended
        the run; else the newest that was measured, by what the plan's [models] says.
    best: of those that are kept and were measured, the best by the metric of [models], or of
        [stop].
    None: measured, where a target or patience ended the run; else newest.

    Raises StoreError where there is no such version, or what is wanted is none of these.
    """
    status, rule = read_status(plan.data_dir), plan.models
    if wanted is None:
        wanted = "newest" if status.met_by is None else "measured"
    if wanted.isdecimal():
        return ChosenVersion(int(wanted), "as asked")
    if wanted == "newest":
        return ChosenVersion(status.version, "the newest")
    if wanted == "measured" and status.met_by is not None:
        return ChosenVersion(status.met_by, f"{words_of(status.finished_by)}: {status.finished}")
    if wanted not in ("measured", "best"):
        text = f"version {wanted!r}: a version is a number, or one of newest, measured, best"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    if rule.metric is None:
        text = (
            f"{plan.file}: to know the {wanted} version, models.metric or stop.metric must name a "
            "metric"
        )
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    values = measured(plan, find_storage(plan.data_dir).models.model_versions())
    if not values:
        text = (
            f"{plan.data_dir}: no version that is kept was measured by {rule.metric} "
            f"({rule.measured_by}) yet"
        )
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    best = max(best_versions(msgspec.structs.replace(rule, best=1), values), default=max(values))
    version = max(values) if wanted == "measured" else best
    what = "the best" if wanted == "best" else "the newest that was measured"
    return ChosenVersion(
        version, f"{what}: {rule.metric} {values[version]:.6g} on {MEASURED_ON[rule.measured_by]}"
    )


def words_of(finished_by: Mapping[str, Any] | None) -> str:
    """Return what the version is that ended a run (``Status.met_by``), in words."""
    by_patience = finished_by is not None and finished_by["rule"] == "patience"
    return "the best that was measured" if by_patience else "which met the target"


class ParameterChange(msgspec.Struct, frozen=True):
    """How one parameter of the model differs between two versions."""

    name: str
    shape: tuple[int, ...]
    change: float
    """L2 norm of the difference."""
    norm: float
    """L2 norm in the first version."""
    largest: float
    """Largest magnitude of an element's difference."""


class Comparison(msgspec.Struct, frozen=True):
    """Two versions beside each other."""

    versions: tuple[int, int]
    distance: float
    """L2 norm of the difference."""
    cosine: float | None
    """Cosine of the angle between the two parameter vectors. None: one of them is zeros."""
    norms: tuple[float, float]
    parameters: list[ParameterChange]
    """The parameter that changed most first."""
    metrics: dict[str, dict[str, tuple[float | None, float | None]]]
    """Where from -> metric -> its value of each version."""


def compare(plan: Plan, first: int, second: int) -> Comparison:
    """Return how two versions differ, which are kept both. Raises StoreError, BundleError."""
    a, b = (read_model(plan.data_dir, version)[1] for version in (first, second))
    table = _parameters_of(plan)
    edges = [*(begin for _, _, begin in table), len(a)]
    changes = []
    for (parameter, shape, _), (begin, end) in zip(table, pairwise(edges), strict=True):
        squares = _sums(a[begin:end], b[begin:end])
        largest = float(np.abs(a[begin:end].astype(np.float64) - b[begin:end]).max(initial=0.0))
        changes.append(
            ParameterChange(parameter, shape, math.sqrt(squares[0]), math.sqrt(squares[1]), largest)
        )
    changes.sort(key=lambda row: -row.change)
    apart, own, other, dot = _sums(a, b)
    cosine = dot / math.sqrt(own * other) if own and other else None
    measured_of: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for source in MEASURED_ON:
        rows = metrics_of(plan, (first, second), source)
        names = dict.fromkeys(name for metrics in rows.values() for name in metrics)
        if names:
            pairs = {name: (_of(rows, first, name), _of(rows, second, name)) for name in names}
            measured_of[source] = pairs
    norms = math.sqrt(own), math.sqrt(other)
    return Comparison((first, second), math.sqrt(apart), cosine, norms, changes, measured_of)


def _parameters_of(plan: Plan) -> list[tuple[str, tuple[int, ...], int]]:
    """Return name, shape and place of each parameter in the run's vector. Those of a family are
    named MEMBER/NAME."""
    found, begin = [], 0
    for member, path in plan.members.items():
        manifest, prefix = open_bundle(path).manifest, f"{member}/" if member else ""
        found += [(prefix + row.name, row.shape, begin + row.offset) for row in manifest.travelling]
        begin += manifest.size
    return found


def model_of(plan: Plan, member: str | None, model: Vector) -> tuple[Bundle, Vector]:
    """Return the bundle of one of a run's models, and its part of the run's vector. ``member``: its
    name; None where the run has one model, and no other. Raises StoreError where there is no such
    member, BundleError."""
    if member is None and not plan.is_family:
        return open_bundle(plan.bundle), model
    if member not in plan.members:
        what = "the run has several models" if member is None else f"there is no member {member!r}"
        if not plan.is_family:
            text = f"{plan.file} has no [family]: the run has one model. Leave --member out"
            raise StoreError(Code.UNKNOWN_CONTENT, text)
        names = ", ".join(plan.members)
        raise StoreError(Code.UNKNOWN_CONTENT, f"{plan.file}: {what}. Take --member with {names}")
    begin = 0
    for name, path in plan.members.items():
        bundle = open_bundle(path)
        if name == member:
            break
        begin += bundle.manifest.size
    return bundle, model[begin : begin + bundle.manifest.size]


def _of(rows: dict[int, dict[str, Any]], version: int, name: str) -> float | None:
    return rows.get(version, {}).get(name)


def _sums(a: Vector, b: Vector) -> list[float]:
    """Return the sums of (a - b)^2, a^2, b^2 and a b over all elements."""
    found = np.zeros(4)
    for begin in range(0, len(a), BLOCK):
        x, y = (
            a[begin : begin + BLOCK].astype(np.float64),
            b[begin : begin + BLOCK].astype(np.float64),
        )
        found += [np.sum((x - y) ** 2), np.sum(x * x), np.sum(y * y), np.sum(x * y)]
    return [float(each) for each in found]
