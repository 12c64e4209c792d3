"""Everything that is shown of a coordinator, where its data are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from answering import Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.runs import Population, Runs
from fleetlearn_protocol import FleetError
from peers import plan_text, update_of


@pytest.fixture
def plan(tmp_path: Path, bundle_path: Path) -> Plan:
    """A run that stopped at version 1."""
    text = plan_text(bundle_path, tmp_path / "data", round__goal=1)
    (tmp_path / "plan.toml").write_text(text)
    plan = Plan.load(tmp_path / "plan.toml")
    run = Fleet(plan)
    (lease,) = leases(run.check_in("a"))
    run.report(lease, update_of(1.0))
    run.store.close()
    return plan


def test_a_plan_and_its_data_directory_say_the_same(plan: Plan) -> None:
    by_plan, by_data = LocalViews(plan=plan), LocalViews(data=plan.data_dir)
    one, other = by_plan.run(), by_data.run()
    assert (one.name, other.name, other.plan) == ("test", "data", "")
    assert one.stop == other.stop
    assert (one.version, one.goal, one.rounds) == (other.version, other.goal, other.rounds)
    assert by_plan.run("test") == one
    assert [row.version for row in by_plan.models()] == [0, 1]
    with pytest.raises(FleetError, match="this needs the plan's file"):
        by_data.models()
    with pytest.raises(FleetError, match="there is no run called x; there are: test"):
        by_plan.rounds("x")
    with pytest.raises(FleetError, match="there is no audit log"):
        by_plan.audit(5)
    host = by_plan.host()
    assert (host.running, host.enrolled, len(host.runs)) == (False, None, 1)


def test_a_host_names_runs_that_are_new_broken_or_failed(plan: Plan, tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    (tmp_path / "new.toml").write_text(
        (tmp_path / "plan.toml").read_text().replace(str(plan.data_dir), str(tmp_path / "n"))
    )
    runs.add("kept", tmp_path / "plan.toml", Population(tags=("roof",), share=0.5))
    runs.add("new", tmp_path / "new.toml")
    runs.add("broken", tmp_path / "gone.toml")
    runs.add("failed", tmp_path / "new.toml")
    runs.failed(runs.runs()[-1], "the disk is full")
    identities = Identities(tmp_path / "identities")
    token = identities.make_token(1, time.time() + 9, [], 0.0)
    identities.enrol("a", "s" * 43, token, 1.0)
    service = ServiceSettings.read({"runs": "runs", "identities": "identities"}, tmp_path)
    views = LocalViews(service=service, identities=identities)
    host = views.host()
    assert [(run.name, run.state) for run in host.runs] == [
        ("kept", "running"), ("new", "new"), ("broken", "running"), ("failed", "failed")
    ]  # fmt: skip
    kept, new, broken, failed = host.runs
    assert (kept.population, kept.version, kept.error) == ("tag roof, 50 %", 1, "")
    assert (new.error, failed.failed, failed.error) == ("", "the disk is full", "")
    assert "gone.toml" in broken.error
    assert (host.running, host.enrolled) == (False, 1)
    assert [row.device for row in views.devices()] == ["a"]
    assert [row.what for row in views.audit(1)] == ["enrolled"]
    assert views.run("kept").plan == str(tmp_path / "plan.toml")
    with pytest.raises(FleetError, match=r"which run\? Name one; there are: kept, new, broken"):
        views.run()
