"""The secret of a private run's noise is in its ledger, and nowhere else."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from answering import Fleet, leases
from commands_typed import typed
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.network.admin_listener import Request
from fleetlearn_coordinator.network.http_port import RefusedError
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.admin_api import VERSION, AdminApi
from fleetlearn_coordinator.service.training_run.saved_privacy import SECRET
from fleetlearn_coordinator.storage.administrators import Administrators
from peers import plan_text, update_of

NAMES = {"runs/*": "test", "rounds/*": "1", "devices/*": "a"}
"""Before each ``*`` of a path -> what takes its place."""


@pytest.fixture
def private(tmp_path: Path, bundle_path: Path) -> tuple[Plan, str]:
    """A private run that stopped at version 2, and its secret."""
    privacy = {"noise": 1.0, "delta": 1e-6, "population": 100, "clip": 1.0}
    settings = {f"privacy__{name}": value for name, value in privacy.items()}
    text = plan_text(bundle_path, tmp_path / "run", "dp-fedavg", round__goal=1, **settings)
    (tmp_path / "plan.toml").write_text(text)
    plan = Plan.load(tmp_path / "plan.toml")
    fleet = Fleet(plan)
    commands = fleet.check_in("a")
    for _ in range(2):
        (lease,) = leases(commands)
        commands = fleet.report(lease, update_of(1.0))
    secret = fleet.store.ledger.get(SECRET)
    fleet.store.close()
    return plan, secret


def hidden_in(content: bytes, secret: str) -> bool:
    """Whether some content has the secret, as hexadecimal digits or as bytes."""
    return secret.encode() in content.lower() or bytes.fromhex(secret) in content


def files_with(folder: Path, secret: str) -> set[str]:
    """Return the names of the files that have it."""
    return {
        path.name
        for path in folder.rglob("*")
        if path.is_file() and hidden_in(path.read_bytes(), secret)
    }


def answers(plan: Plan, folder: Path) -> Iterator[bytes]:
    """Yield what an administrator is answered, by each path that can be read."""
    administrators = Administrators(folder / "identities")
    token = administrators.add("vera", "view", None, time.time())
    service = ServiceSettings.read({"identities": "identities"}, folder)
    api = AdminApi(service, folder / "identities", plan)
    for route in api._routes:
        if route.method == "GET":
            path = route.path
            for place, name in NAMES.items():
                path = path.replace(place, place.replace("*", name))
            request = Request("GET", (VERSION, *path.split("/")), {}, token, b"")
            try:
                yield msgspec.json.encode(api.answer(request))
            except RefusedError as error:
                yield error.text.encode()


def test_it_is_in_no_answer_no_log_and_no_listing(
    private: tuple[Plan, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, secret = private
    caplog.set_level(logging.DEBUG)
    fleet = Fleet(plan)  # a restart, with all that it logs
    fleet.store.close()
    shown = [caplog.text.encode(), repr(fleet.run.models.newest).encode()]
    shown += answers(plan, tmp_path)
    assert len(shown) > 10
    for command, status in (("status", 3), ("rounds", 0), ("models", 0)):
        shown.append(typed(command, tmp_path / "plan.toml", expected=status).encode())
    typed("results", tmp_path / "plan.toml", "--rounds", tmp_path / "rounds.jsonl")
    shown.append((tmp_path / "rounds.jsonl").read_bytes())
    shown.append(typed("backup", tmp_path / "plan.toml", tmp_path / "backup", "--json").encode())
    shown.append(typed("backup", "--verify", tmp_path / "backup").encode())
    assert not [text for text in shown if hidden_in(text, secret)]


def test_of_all_files_the_ledger_alone_has_it(private: tuple[Plan, str], tmp_path: Path) -> None:
    """A copy of the ledger in a backup, too: restored elsewhere, the run goes on with its noise."""
    _, secret = private
    found = files_with(tmp_path, secret)
    assert found
    assert found <= {"coordinator.sqlite3", "coordinator.sqlite3-wal"}
    typed("backup", tmp_path / "plan.toml", tmp_path / "backup")
    assert files_with(tmp_path / "backup", secret) == {"coordinator.sqlite3"}
