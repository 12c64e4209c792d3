"""Which member of a family a device trains, and what follows for the population."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.plan.family_section import FamilyMember
from fleetlearn_coordinator.service.training_run.members import first_fit
from fleetlearn_protocol.messages import CheckIn
from fleetlearn_simulator.population import members
from fleetlearn_simulator.population.availability import next_online, online
from fleetlearn_simulator.population.members import (
    count_members,
    may_train,
    members_of,
    step_seconds_of,
)
from fleetlearn_simulator.population.statements import statements_of
from fleetlearn_simulator.population.traits import tiers_of
from fleetlearn_simulator.scenario.family_rules import NO_MEMBER
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import write_scenario

SIZE = 200
TIERS: dict[str, Any] = {
    "gateway": {"share": 0.2, "memory": 600.0, "tags": ["gate"]},
    "sensor": {"share": 0.3, "memory": 100.0},
    "unknown": {"share": 0.5},
}


def scenario(folder: Path, last: dict[str, Any], **more: Any) -> Scenario:
    """Three members, for gateways with 512 MiB, for the devices of a region, and ``last``."""
    family = {
        "large": {"bundle": "a.bundle", "memory": 512 * 2**20, "tags": ["gate"]},
        "third": {"bundle": "b.bundle", "memory": 1, "tags": ["region-2"]},
        "last": {"bundle": "c.bundle", **last},
    }
    path = write_scenario(
        folder, None, SIZE, tiers=TIERS, plan__family=family, failures={"regions": 3}, **more
    )
    return Scenario.load(path)


def test_members_are_those_that_a_coordinator_would_choose(tmp_path: Path) -> None:
    found = scenario(tmp_path, {"memory": 2**20})
    ids = np.arange(SIZE)
    family: dict[str, FamilyMember] = found.plan.family
    names = [*family]
    stated = statements_of(found, ids, np.full(SIZE, 5))
    expected = []
    for each in stated:
        tags = tuple(label[4:] for label in each.labels if label.startswith("tag:"))
        fits = first_fit(family, CheckIn(1, "x", 5, memory=each.memory, tags=tags))
        expected.append(NO_MEMBER if fits is None else names.index(fits))
    assert members_of(found, ids).tolist() == expected
    assert {*expected} == {NO_MEMBER, 0, 1, 2}
    # A device alone is told the same as among others.
    assert [int(members_of(found, ids[[at]])[0]) for at in range(SIZE)] == expected


def test_a_device_that_fits_no_member_never_takes_part(tmp_path: Path) -> None:
    found = scenario(tmp_path, {"memory": 2**20})
    ids = np.arange(SIZE)
    none = members_of(found, ids) == NO_MEMBER
    assert none.tolist() == (tiers_of(found, ids) == 2).tolist(), "who says no memory fits none"
    assert may_train(found, ids).tolist() == (~none).tolist()
    assert online(found, ids, 5.0).tolist() == (~none).tolist()
    assert np.isinf(next_online(found, ids, 5.0)).tolist() == none.tolist()


def test_a_population_is_counted_by_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "TOGETHER", 64)
    found = scenario(tmp_path, {"memory": 2**20})
    each = members_of(found, np.arange(SIZE)).tolist()
    counts, none = count_members(found)
    assert counts == {name: each.count(at) for at, name in enumerate(("large", "third", "last"))}
    assert none == each.count(NO_MEMBER) > 0
    assert count_members(scenario(tmp_path, {}))[1] == 0, "a member without conditions"


def test_steps_of_members_take_their_own_time(tmp_path: Path) -> None:
    seconds = {"large": 4.0, "third": 2.0, "last": 0.5}
    found = scenario(tmp_path, {}, compute={"step_seconds": seconds})
    ids = np.arange(SIZE)
    expected = np.array([4.0, 2.0, 0.5])[members_of(found, ids)]
    np.testing.assert_array_equal(step_seconds_of(found, ids), expected)
    assert step_seconds_of(scenario(tmp_path, {}), ids) == 10.0


def test_without_a_family_there_is_one(tmp_path: Path, line: Path) -> None:
    found = Scenario.load(write_scenario(tmp_path, line, 3))
    assert members_of(found, np.arange(3)).tolist() == [0, 0, 0]
