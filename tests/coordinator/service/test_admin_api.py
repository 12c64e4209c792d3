"""The administrators' endpoints: who may use which, what each does, and its row in the audit
log."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.network.admin_listener import Request
from fleetlearn_coordinator.network.gate import public_keys
from fleetlearn_coordinator.network.http_port import RefusedError
from fleetlearn_coordinator.network.signing import make_signing_key
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.admin_api import AdminApi
from fleetlearn_coordinator.storage.administrators import Administrators
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import EnrolmentError
from fleetlearn_coordinator.storage.runs import Runs
from peers import plan_text, update_of

OPERATIONS = [
    ("tokens", {}),
    ("devices/a/revoke", {}),
    ("runs", {"name": "b", "plan": "plan.toml"}),
    *(
        (f"runs/test/{word}", {})
        for word in ("pause", "resume", "drain", "stop", "remove", "evaluate")
    ),
    ("runs/test/roll-back", {"version": 1}),
]
VIEWS = ["status", "runs", "runs/test", "runs/test/rounds", "runs/test/models", "devices", "audit"]


class Caller:
    """Somebody with a token."""

    def __init__(self, api: AdminApi, token: str) -> None:
        self.api, self.token = api, token

    def ask(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """Return what is answered, as it is when it has become JSON."""
        content = b"" if body is None else msgspec.json.encode(body)
        found = self.api.answer(
            Request(method, ("v1", *path.split("/")), query, self.token, content)
        )
        return json.loads(msgspec.json.encode(found))

    def get(self, path: str, **query: str) -> Any:
        return self.ask("GET", path, **query)

    def post(self, path: str, **body: Any) -> Any:
        return self.ask("POST", path, body)

    def refused(self, method: str, path: str, body: Any = None, **query: str) -> tuple[int, str]:
        with pytest.raises(RefusedError) as found:
            self.ask(method, path, body, **query)
        return int(found.value.status), found.value.text


@pytest.fixture
def administrators(tmp_path: Path) -> Administrators:
    return Administrators(tmp_path / "identities")


@pytest.fixture
def plan(tmp_path: Path, bundle_path: Path) -> Plan:
    """A run that stopped at version 2."""
    (tmp_path / "plan.toml").write_text(plan_text(bundle_path, tmp_path / "run", round__goal=1))
    plan = Plan.load(tmp_path / "plan.toml")
    fleet = Fleet(plan)
    commands = fleet.check_in("a")
    for _ in range(2):
        (lease,) = leases(commands)
        commands = fleet.report(lease, update_of(1.0))
    fleet.store.close()
    return plan


@pytest.fixture
def short(tmp_path: Path, plan: Plan, administrators: Administrators) -> dict[str, Caller]:
    """``serve PLAN.toml``: the callers by their role."""
    service = ServiceSettings.read({"identities": "identities"}, tmp_path)
    return callers(AdminApi(service, tmp_path / "identities", plan), administrators)


@pytest.fixture
def host(tmp_path: Path, plan: Plan, administrators: Administrators) -> dict[str, Caller]:
    """``serve SERVICE.toml``, with one run: the callers by their role."""
    Runs(tmp_path / "runs").add("test", tmp_path / "plan.toml")
    service = ServiceSettings.read({"identities": "identities", "runs": "runs"}, tmp_path)
    return callers(AdminApi(service, tmp_path / "identities", None), administrators)


def callers(api: AdminApi, administrators: Administrators) -> dict[str, Caller]:
    now = time.time()
    return {
        "operate": Caller(api, administrators.add("olga", "operate", None, now)),
        "view": Caller(api, administrators.add("vera", "view", None, now)),
        "nobody": Caller(api, ""),
        "stranger": Caller(api, "x" * 43),
        "expired": Caller(api, administrators.add("earl", "operate", now - 1.0, now)),
        "device": Caller(api, administrators.make_token(1, now + 1000.0, [], now)),
    }


def test_who_may_do_what(host: dict[str, Caller], administrators: Administrators) -> None:
    before = administrators.events()
    for caller in ("nobody", "stranger", "expired", "device"):
        for path in VIEWS:
            assert host[caller].refused("GET", path)[0] == 401
        for path, body in OPERATIONS:
            assert host[caller].refused("POST", path, body)[0] == 401
        assert host[caller].refused("GET", "nowhere")[0] == 401, (
            "who may not look learns nothing of the paths"
        )
    for path, body in OPERATIONS:
        assert host["view"].refused("POST", path, body) == (
            403,
            "vera may view; this needs the role operate",
        )
    assert administrators.events() == before, "what is refused changes nothing"
    for path in VIEWS:
        assert host["view"].get(path) is not None
        assert host["operate"].get(path) is not None


def test_what_is_there_to_see(short: dict[str, Caller], administrators: Administrators) -> None:
    vera = short["view"]
    (run,) = vera.get("runs")
    assert (run["name"], run["running"], run["version"], run["finished"]) == (
        "test",
        False,
        2,
        None,
    )
    assert vera.get("status")["runs"] == [run]
    assert vera.get("runs/test")["version"] == 2
    assert [row["number"] for row in vera.get("runs/test/rounds")] == [1, 2]
    assert [row["number"] for row in vera.get("runs/test/rounds", last="1")] == [2]
    assert [(row["version"], row["kept"]) for row in vera.get("runs/test/models")] == [
        (0, "initial"), (1, "last"), (2, "newest")
    ]  # fmt: skip
    token = administrators.make_token(1, time.time() + 100, ["roof"], 0.0)
    administrators.enrol("a", "s" * 43, token, time.time())
    page = vera.get("devices")
    assert (page["total"], page["matching"]) == (1, 1)
    assert [(row["device"], row["tags"]) for row in page["devices"]] == [("a", ["roof"])]
    assert [row["what"] for row in vera.get("audit", last="2")] == ["token", "enrolled"]
    for last in ("0", "1001", "x", "-1", "99999"):
        assert vera.refused("GET", "audit", last=last)[0] == 400
    assert vera.refused("GET", "runs/other") == (
        404,
        "there is no run called other; there are: test",
    )
    status, text = vera.refused("GET", "runs/test/tasks")
    assert status == 404
    assert "there is no GET /v1/runs/test/tasks; there are: GET /v1/status" in text
    assert vera.refused("POST", "status")[0] == 404


def test_devices_are_enrolled_and_revoked(
    short: dict[str, Caller], administrators: Administrators
) -> None:
    olga = short["operate"]
    made = olga.post("tokens", uses=2, hours=1, tags=["roof"])
    known = administrators.enrol("a", "s" * 43, made["token"], time.time())
    assert known.tags == ("roof",)
    assert made["until"] == pytest.approx(time.time() + 3600, abs=60)
    assert olga.post("devices/a/revoke") == {"device": "a", "revoked": True}
    assert olga.refused("POST", "devices/a/revoke")[0] == 404
    assert administrators.devices() == []
    rows = [(row.what, row.about.get("who")) for row in administrators.events()[-3:]]
    assert rows == [("token", "olga"), ("enrolled", None), ("revoked", "olga")]
    for body in (
        {"uses": 0},
        {"uses": "1"},
        {"tags": ["a b"]},
        {"hours": 1e9},
        {"what": 1},
        [],
        "x",
    ):
        assert olga.refused("POST", "tokens", body)[0] == 400
    assert administrators.broken_at() is None


def test_tokens_bring_keys_and_certificates_are_revoked(
    tmp_path: Path, plan: Plan, administrators: Administrators
) -> None:
    make_signing_key(tmp_path / "key.pem")
    tls = {"certificate": "tls/certificate.pem", "key": "tls/key.pem", "clients": "tls/ca.pem"}
    given = {"identities": "identities", "signing_keys": ["key.pem"], "tls": tls}
    service = ServiceSettings.read(given, tmp_path)
    olga = callers(AdminApi(service, tmp_path / "identities", plan), administrators)["operate"]
    secret, *keys = olga.post("tokens")["token"].split(".")
    assert keys == [*public_keys([tmp_path / "key.pem"])]
    now = time.time()
    assert administrators.enrol("a", "s" * 43, secret, now).device == "a"
    assert olga.post("devices/b/revoke")["revoked"], (
        "it may have a certificate, and not have connected yet"
    )
    with pytest.raises(EnrolmentError, match="the certificate of b was revoked"):
        administrators.certified("b", now - 1.0, now)


def test_one_plan_is_rolled_back_and_evaluated(
    short: dict[str, Caller], plan: Plan, administrators: Administrators
) -> None:
    olga = short["operate"]
    assert olga.post("runs/test/roll-back", version=1) == {"name": "test", "version": 1}
    request = find_storage(plan.data_dir).requests.roll_back()
    assert request is not None
    assert request[1:] == (1, "olga")
    assert olga.post("runs/test/evaluate") == {"name": "test"}
    assert find_storage(plan.data_dir).requests.evaluation() is not None
    rows = administrators.events()[-1:]  # the run says that it rolled back, when it has
    assert [(row.what, row.about) for row in rows] == [
        ("evaluation", {"run": "test", "who": "olga"})
    ]
    for version in (2, 9):
        status, text = olga.refused("POST", "runs/test/roll-back", {"version": version})
        assert status == 404
        assert f"cannot be rolled back to version {version}" in text
    assert olga.refused("POST", "runs/test/roll-back", {"version": "1"})[0] == 400
    assert olga.refused("POST", "runs/test/roll-back")[0] == 400
    for word in ("pause", "resume", "drain", "stop", "remove"):
        status, text = olga.refused("POST", f"runs/test/{word}")
        assert status == 400
        assert "this coordinator serves one plan" in text
    assert len(administrators.events()) == len(administrators.last_events(1000))
    assert administrators.events()[-1:] == rows, "what is refused is no row"


def test_runs_of_a_host_are_operated(
    host: dict[str, Caller], tmp_path: Path, administrators: Administrators
) -> None:
    olga, runs = host["operate"], Runs(tmp_path / "runs")
    for word, state in (
        ("pause", "paused"),
        ("resume", "running"),
        ("drain", "draining"),
        ("stop", "stopped"),
    ):
        assert olga.post(f"runs/test/{word}") == {"name": "test", "wanted": state}
        assert runs.runs()[0].wanted == state
    assert olga.refused("POST", "runs/test/pause")[0] == 400, "it is stopped"
    asked = runs.runs()[0].asked
    assert olga.post("runs/test/roll-back", version=1)["version"] == 1
    request = find_storage(tmp_path / "run").requests.roll_back()
    assert request is not None
    assert request[1:] == (1, "olga")
    assert runs.runs()[0].asked == asked + 1
    text = (tmp_path / "plan.toml").read_text()
    (tmp_path / "other.toml").write_text(
        text.replace(str(tmp_path / "run"), str(tmp_path / "other"))
    )
    added = olga.post("runs", name="b", plan="other.toml", tags=["roof"], share=0.5)
    assert added == {"name": "b", "wanted": "running"}
    assert runs.runs()[1][1:4] == ("b", tmp_path / "other.toml", (("roof",), (), (), 0.5))
    assert [run["name"] for run in olga.get("runs")] == ["test", "b"]
    assert olga.post("runs/test/remove") == {"name": "test", "removed": True}
    rows = [(row.what, row.about["run"], row.about["who"]) for row in administrators.events()[-6:]]
    words = ("paused", "resumed", "drained", "stopped")
    assert rows == [
        *((word, "test", "olga") for word in words),
        ("added", "b", "olga"),
        ("removed", "test", "olga"),
    ]
    before = administrators.events()
    assert olga.refused("POST", "runs/test/pause") == (
        404,
        "there is no run called test; there are: b",
    )
    for body in (
        {"name": "b", "plan": "other.toml"},
        {"name": "c", "plan": "other.toml"},
        {"name": "c", "plan": "../plan.toml"},
        {"name": "c", "plan": "/etc/passwd"},
        {"name": "c", "plan": "nowhere.toml"},
        {"name": "c d", "plan": "plan.toml"},
        {"name": "c"},
        {"name": "c", "plan": "plan.toml", "share": 0},
        {"name": "c", "plan": "plan.toml", "tags": ["a b"]},
        {"name": "c", "plan": "plan\0.toml"},
        {"name": "c", "plan": "other.toml", "tags": ["roof\n"]},
    ):
        assert olga.refused("POST", "runs", body)[0] == 400
    database = {"name": "c", "plan": "identities/identities.sqlite3"}
    assert "whose name ends in .toml" in olga.refused("POST", "runs", database)[1], (
        "it must not be opened"
    )
    assert administrators.events() == before


def test_a_plan_that_cannot_be_read_is_said_so(host: dict[str, Caller], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("x")
    (run,) = host["view"].get("runs")
    assert "this is not TOML" in run["error"]
    assert host["view"].refused("GET", "runs/test")[0] == 400
