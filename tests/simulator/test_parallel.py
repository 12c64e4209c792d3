"""Training on several processes: the same results, in the jobs' order, whoever makes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.parallel import Parallel
from fleetlearn_simulator.run import make_backend
from fleetlearn_simulator.scenario import Scenario
from fleetlearn_simulator.training import Job, PerDevice, Result
from virtual import make_scenario

JOBS = [Job(device, 1000 + device, 1 if device % 2 else None) for device in (5, 0, 3, 4, 1, 2, 3)]
"""One device twice, as no round has it, but nothing forbids it."""


def twos(jobs: Any) -> list[list[int]]:
    """Pairs from both ends, so that the order is not the jobs'."""
    places = list(range(len(jobs)))
    return [sorted({first, last}) for first, last in zip(places, places[::-1], strict=True) if first <= last]


@pytest.fixture(scope="module")
def scenario(line: Path, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return make_scenario(tmp_path_factory.mktemp("parallel"), line, 6, plan__local__epochs=2)


@pytest.fixture(scope="module")
def one(scenario: Scenario) -> PerDevice:
    backend = make_backend(scenario, "bundle")
    assert isinstance(backend, PerDevice)
    return backend


@pytest.fixture(scope="module")
def two(scenario: Scenario) -> Iterator[Parallel]:
    backend = Parallel(partial(make_backend, scenario, "bundle"), 2, twos)
    yield backend
    backend.close()


def bits(results: list[Result]) -> list[tuple[Any, ...]]:
    return [(row.update.tobytes(), *row[1:]) for row in results]


def test_two_processes_train_as_one_does(scenario: Scenario, one: PerDevice, two: Parallel) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    expected = one.train(model, JOBS)
    assert [row.examples for row in expected] == [60, 10, 40, 50, 20, 30, 40]
    assert [row.steps for row in expected] == [1, 2, 1, 10, 1, 6, 1]
    assert bits(two.train(model, JOBS)) == bits(expected)
    assert bits(two.train(model, JOBS[:1])) == bits(expected[:1])
    assert two.train(model, []) == []


def test_two_processes_evaluate_as_one_does(scenario: Scenario, one: PerDevice, two: Parallel) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    for devices in ([0, 1, 2, 3, 4, 5], [4], []):
        assert two.evaluate(model, devices) == one.evaluate(model, devices)


def test_each_call_has_its_own_model(scenario: Scenario, one: PerDevice, two: Parallel) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    first = two.train(model, JOBS)
    other = two.train(model + np.float32(0.5), JOBS)
    assert bits(other) == bits(one.train(model + np.float32(0.5), JOBS))
    assert bits(other) != bits(first)


def _fail() -> Any:
    os._exit(3)


def test_processes_that_cannot_begin_are_an_error() -> None:
    """Not a wait without end."""
    backend = Parallel(_fail, 2, twos)
    with pytest.raises(BrokenProcessPool):
        backend.train(np.zeros(5, np.float32), JOBS)
    backend.close()
