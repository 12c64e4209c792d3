"""Functions of other packages that a scenario names: what the simulator's points have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fleetlearn_coordinator.plan.own_algorithms import POINTS as PLAN_POINTS
from fleetlearn_coordinator.plan.own_algorithms import find_point
from fleetlearn_protocol import extensions
from fleetlearn_protocol.algorithms import LOCAL_ALGORITHM
from fleetlearn_protocol.computations.function_settings import (
    DEVICE_FUNCTION,
    NEXT_STATE,
    FunctionSums,
)
from fleetlearn_protocol.extensions import ExtensionError, ExtensionPoint
from fleetlearn_protocol.origins import Origin, origin_of, used_files
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.sections import AVAILABILITY, DATA, HAZARDS

if TYPE_CHECKING:
    from fleetlearn_simulator.scenario.scenario import Scenario

T = TypeVar("T")

# What an extension must be is checked where it is used: population/ and data/ know the types.
AVAILABILITY_LAW: ExtensionPoint[Any] = ExtensionPoint("availability law", object)
DATA_SOURCE: ExtensionPoint[Any] = ExtensionPoint("data source", object)
PARTITION: ExtensionPoint[Any] = ExtensionPoint("partition", object, is_callable=True)
FAILURE_LAW: ExtensionPoint[Any] = ExtensionPoint("failure law", object, is_callable=True)
POINTS: Mapping[str, ExtensionPoint[Any]] = {
    **PLAN_POINTS,
    **{
        point.name: point
        for point in (AVAILABILITY_LAW, DATA_SOURCE, PARTITION, FAILURE_LAW, DEVICE_FUNCTION)
    },
}
"""What a scenario and its plan may name of other packages, by its name."""


def register(kind: str, name: str, factory: Callable[..., Any]) -> None:
    """Let scenarios and plans name a function by this short name, in this process, without a list
    of modules.

    ``kind``: a key of ``POINTS``, such as ``failure law`` or ``aggregator``. ``factory``: a
    function with keyword parameters that returns one. Worker processes do not know the name: where
    there are several, a data source or a partition is named ``module:function``. Raises
    ExtensionError, a ValueError, on another kind, or a name that is taken.
    """
    extensions.register(find_point(POINTS, kind), name, factory)


def own(point: ExtensionPoint[T], name: str, parameters: Mapping[str, Any] | None, where: str) -> T:
    """Return what an extension's factory makes for these parameters. It is made once in a process.
    Raises SimulatorError. ``where``: the key that names it."""
    try:
        return extensions.make_once(point, name, parameters or {}, where)
    except ExtensionError as error:
        raise SimulatorError(str(error)) from error


def call_own(what: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns. Raises SimulatorError where it raises anything. ``what``: the
    user's function, in words."""
    try:
        return call()
    except ANY_FAILURE as error:
        raise SimulatorError(failure(what, error)) from error


class OwnAlgorithm(NamedTuple):
    """A function of another package that a scenario names."""

    where: str
    """The key that names it."""
    origin: Origin
    files: Mapping[str, Path]
    """What its code is in: module -> file."""

    def __str__(self) -> str:
        return f"{self.where} = {self.origin}"


def own_algorithms(scenario: Scenario, computations: Iterable[object]) -> list[OwnAlgorithm]:
    """Return what a scenario names of other packages. ``computations``: the settings of its
    bundles' computations, which name functions too. Raises SimulatorError."""
    try:
        found = []
        for point, name, where in (*_named(scenario), *_of_bundles(computations)):
            files = used_files(point, name, where)
            found.append(OwnAlgorithm(where, origin_of(files, point, name, where), files))
        return found
    except ExtensionError as error:
        raise SimulatorError(str(error)) from error


def _named(scenario: Scenario) -> Iterator[tuple[ExtensionPoint[Any], str, str]]:
    if scenario.availability.kind not in AVAILABILITY:
        yield AVAILABILITY_LAW, scenario.availability.kind, "availability.kind"
    if scenario.failures.law != HAZARDS:
        yield FAILURE_LAW, scenario.failures.law, "failures.law"
    if scenario.data.kind not in DATA:
        yield DATA_SOURCE, scenario.data.kind, "data.kind"
    if scenario.data.partition is not None:
        yield PARTITION, scenario.data.partition, "data.partition"
    for each in scenario.plan.own_names():
        yield each.point, each.name, f"plan.{each.key}"
    if scenario.plan.local.function is not None:
        yield LOCAL_ALGORITHM, scenario.plan.local.function, "plan.local.algorithm"


def _of_bundles(computations: Iterable[object]) -> Iterator[tuple[ExtensionPoint[Any], str, str]]:
    for settings in computations:
        if isinstance(settings, FunctionSums):
            yield DEVICE_FUNCTION, settings.device, "the bundle's device"
            yield NEXT_STATE, settings.coordinator, "the bundle's coordinator"


def find_local_algorithm(scenario: Scenario) -> None:
    """Find the function that trains, if it is one of another package. Raises SimulatorError."""
    name = scenario.plan.local.function
    try:
        if name is not None:
            extensions.find(LOCAL_ALGORITHM, name, "plan.local.algorithm")
    except ExtensionError as error:
        raise SimulatorError(str(error)) from error


def allow_plugins(scenario: Scenario) -> None:
    """Let the scenario's modules be named in this process, as in the one that read its file. Raises
    SimulatorError."""
    try:
        if scenario.service.plugins is not None:
            scenario.service.plugins.allow()
    except ExtensionError as error:
        raise SimulatorError(str(error)) from error
