"""Tests of a run's models on test data, on which no device trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any, NamedTuple

from fleetlearn_coordinator.aggregation.round_summary import MEMBERS
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.train import DivergedError, evaluate_data
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.data.generators import Arrays
from fleetlearn_simulator.training.backend import means
from fleetlearn_simulator.training.run_bundles import RunBundle


class MemberTest(NamedTuple):
    """What tests one of a run's models."""

    member: str
    """Empty where the run has one model."""
    runtime: Runtime
    data: Arrays


def tested_member(run: RunBundle, provider: ProviderName) -> MemberTest | None:
    """Return what tests the model of a bundle. None: there are no test data, there is no model, or
    nobody says to which cluster test data belong."""
    plan = run.scenario.plan
    data = None if plan.algorithm.computes or plan.clusters is not None else run.source.test()
    if data is None:
        return None
    return MemberTest(run.member, open_runtime(run.bundle, kind="onnx", provider=provider), data)


def add_tests(
    summary: dict[str, Any], tests: Sequence[MemberTest], models: Mapping[str, Vector]
) -> None:
    """Write a round's tests into its summary. In a family each member has its own, and the round
    their means. ``models``: name of each member -> its newest model."""
    found = {test.member: tested(test.runtime, models[test.member], test.data) for test in tests}
    for name, values in found.items():
        if name:
            summary[MEMBERS][name] = {**summary[MEMBERS][name], "test": values}
    rows = [*found.values()]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    summary["test"] = {name: fsum(row[name] for row in rows) / len(rows) for name in names}


def tested(runtime: Runtime, model: Vector, data: Arrays) -> dict[str, float]:
    """Return the means of the model over the test data. Empty if its loss is not a finite
    number."""
    runtime.load(model)
    try:
        return means([evaluate_data(runtime, data)])
    except DivergedError:
        return {}
