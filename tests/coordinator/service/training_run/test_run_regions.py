"""The regions of a run, as an operator mistakes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.service.training_run.run_regions import RunRegions
from fleetlearn_protocol.messages import CheckIn

PLAN = """
name = "test"
bundle = "test.bundle"
[regions.each]
goal = 2
[regions.named.north]
tags = ["north"]
[regions.named.south]
"""


def check_in(*tags: str) -> CheckIn:
    return CheckIn(protocol=1, device="roof", examples=1, tags=tags)


def test_a_gateway_of_a_region_that_the_plan_does_not_have_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    regions = RunRegions(Plan.parse(PLAN, Path("/plans")))
    assert regions.region_of(check_in(), "south") == "south"
    assert not caplog.text
    assert regions.region_of(check_in("north"), "suoth") == "north"
    assert regions.region_of(check_in(), "suoth") == ""
    assert caplog.text.count('region = "suoth" of a service file: the plan has no such region') == 1
    assert "north, south" in caplog.text
