"""The bundles that a run's devices train: one, or one for each member of the plan's family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.training_run.members import open_bundles
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import Input
from numpy.typing import NDArray

from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.data.generators import Arrays, Ids
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.population.members import members_of
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import LocalSettings, local_settings

LOOKED_AT = 100_000
"""Devices among which some of each member are looked for."""
SAMPLED = 100
"""Devices of each member that are found so."""


class RunBundle(NamedTuple):
    """One of a run's bundles. Clusters, several models of one bundle, have one."""

    member: str
    """The name of the family's member; empty where the run has one bundle."""
    scenario: Scenario
    """The run's, with a plan of this bundle alone."""
    bundle: Bundle
    local: LocalSettings
    source: Source
    """The data of all devices, in the arrays that this bundle takes."""
    devices: Sequence[int]
    """Some devices that train it, or some of all where none of the first ones does."""


def run_bundles(scenario: Scenario) -> tuple[RunBundle, ...]:
    """Open the bundles of a scenario's plan, in the plan's order. Raises BundleError, and PlanError
    and SimulatorError where they do not fit the plan, its data or each other."""
    plan = scenario.plan
    opened = open_bundles(plan)
    plan.check_family({name: bundle.manifest for name, bundle in opened.items()})
    if not plan.family:
        bundle = next(iter(opened.values()))
        source = source_of(scenario, bundle)
        looked_at = range(min(scenario.population.size, SAMPLED))
        local = local_settings(plan, bundle)
        return (RunBundle("", scenario, bundle, local, source, looked_at),)
    first = np.arange(min(scenario.population.size, LOOKED_AT))
    members = members_of(scenario, first)
    sources = dict[tuple[Sequence[Input], ...], Source]()
    found = []
    for number, (name, bundle) in enumerate(opened.items()):
        key = bundle.manifest.batch, bundle.manifest.outputs
        if key not in sources:  # members with the same arrays share them
            sources[key] = source_of(scenario, bundle)
        own = first[members == number][:SAMPLED].tolist() or first[:SAMPLED].tolist()
        alone = msgspec.structs.replace(scenario, plan=plan_of_member(plan, name))
        local = local_settings(alone.plan, bundle)
        found.append(RunBundle(name, alone, bundle, local, sources[key], own))
    return tuple(found)


def plan_of_member(plan: Plan, member: str) -> Plan:
    """Return the plan of a family with one member's bundle alone."""
    return msgspec.structs.replace(plan, bundle=plan.family[member].bundle, family={})


def numbers_of(scenario: Scenario) -> Callable[[Sequence[int]], Sequence[int]] | None:
    """Return a function: devices -> the number of each one's bundle. None: the run has one."""
    if not scenario.plan.family:
        return None
    return lambda devices: members_of(scenario, np.array(devices, np.int64)).tolist()


def bundles_by_member(bundles: Sequence[RunBundle]) -> dict[str, Bundle]:
    """Return the bundles by the names of their members."""
    return {each.member: each.bundle for each in bundles}


class FamilySource(Source):
    """The data of all devices, each in the arrays that its member's bundle takes."""

    def __init__(self, scenario: Scenario, sources: Sequence[Source]) -> None:
        """``sources``: of the members, in the plan's order."""
        self._scenario, self._sources = scenario, sources

    def examples(self, ids: Ids) -> NDArray[np.int64]:
        distinct = {id(source): source for source in self._sources}
        if len(distinct) == 1:
            return self._sources[0].examples(ids)
        flat = np.ravel(ids)
        # Where no member fits, the device never trains: the last member's number of examples.
        members = members_of(self._scenario, flat) % len(self._sources)
        found = np.zeros(len(flat), np.int64)
        for number, source in enumerate(self._sources):
            found[members == number] = source.examples(flat[members == number])
        return found.reshape(np.shape(ids))

    def arrays(self, device: int) -> Arrays:
        member = int(members_of(self._scenario, np.array([device]))[0])
        return self._sources[member].arrays(device)

    def test(self) -> Arrays | None:
        """Return nothing: each member has its own arrays."""
        return None


def source_of_run(scenario: Scenario, bundles: Sequence[RunBundle]) -> Source:
    """Return the data of all devices."""
    if not scenario.plan.family:
        return bundles[0].source
    return FamilySource(scenario, [each.source for each in bundles])
