"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.network import connection, host, listener
from peers import PlanMaker, plan_text, write_test_bundle


@pytest.fixture(autouse=True)
def short_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of most tests do not end a connection that the coordinator ends, so each would wait for
    all of the usual time. The usual times are tried with a coordinator of its own process:
    test_flood."""
    monkeypatch.setattr(connection, "LINGER", 0.2)
    monkeypatch.setattr(listener, "LINGER", 0.2)
    monkeypatch.setattr(host, "STOP_TIMEOUT", 0.5)


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_test_bundle(tmp_path_factory.mktemp("bundle") / "test.bundle")


@pytest.fixture
def make_plan(tmp_path: Path, bundle_path: Path) -> PlanMaker:
    """A plan on this test's data directory; each call gives one on the same directory."""

    def make(recipe: str = "fedavg", **settings: Any) -> Plan:
        return Plan.parse(plan_text(bundle_path, tmp_path / "run", recipe, **settings), tmp_path)

    return make
