"""fleetlearn-coordinator doctor: each thing that can be wrong is planted, and found by name."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.network.process_settings import DescriptorShares
from fleetlearn_coordinator.service import checks
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_coordinator.service.training_run.private_budget import count_releases
from fleetlearn_coordinator.storage.find_storage import STORES, find_storage
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol import extensions, open_bundle
from fleetlearn_protocol.vector import views
from memory_storage import SCHEME, memory_storage
from peers import plan_text, update_of, write_test_bundle
from plans import PRIVATE
from safetensors.numpy import save_file
from typer.testing import CliRunner

DAY = 86400.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan and its service, with which nothing is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "is_clock_set", lambda: True)
    bundle = write_test_bundle(tmp_path / "bundle", 10)
    (tmp_path / "plan.toml").write_text(plan_text(bundle, tmp_path / "run"))
    (tmp_path / "service.toml").write_text('port = 0\nidentities = "ids"\n')
    return tmp_path


def examine(*arguments: str, expected: int = 0) -> dict[str, dict[str, str]]:
    """Return what was found, by what it is about."""
    done = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    assert done.exit_code == expected, done.output
    return {row["what"]: row for row in json.loads(done.stdout)}


def bad(*arguments: str) -> dict[str, str]:
    """Return the one thing that is wrong."""
    found = examine(*arguments, expected=6)
    (row,) = (row for row in found.values() if row["state"] == "bad")
    assert row["do"], "it says what to do"
    return row


def ledger(folder: Path, **values: Any) -> None:
    storage = find_storage(folder)
    with storage.lock(), closing(storage.open_ledger(power=False, any_thread=False)) as opened:
        opened.create({})
        opened.write([Metadata(key, value) for key, value in values.items()])


def test_nothing_is_wrong_and_nothing_is_changed(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    found = examine()  # finds both files itself
    assert {row["state"] for row in found.values()} == {"good"}
    assert [*found] == [
        "python", "libraries", "plan", "bundle", "data", "disk", "run test", "port", "tls",
        "identities", "open files", "clock",
    ]  # fmt: skip
    assert sorted(folder.rglob("*")) == before
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert "plan.toml: test, recipe fedavg" in " ".join(shown.split())


def test_a_run_s_store_that_is_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no disk to look at; a store of a scheme that is not known is what is wrong."""
    plan = folder / "plan.toml"
    plan.write_text(plan_text(folder / "bundle", f"{SCHEME}://run"))
    assert f"{SCHEME}://run: there is no store called {SCHEME}" in bad()["found"]
    monkeypatch.setitem(STORES, SCHEME, memory_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    found = examine()
    assert found["data"]["found"] == f"{SCHEME}://run is a store, and no folder here"
    assert "disk" not in found


@pytest.fixture
def private(folder: Path) -> Path:
    """The plan, with [privacy] at its end."""
    plan = folder / "plan.toml"
    plan.write_text(f"{plan.read_text()}\n{PRIVATE}")
    return plan


def test_a_private_plan_says_what_it_costs(private: Path) -> None:
    assert examine()["privacy"]["found"].startswith("epsilon ")


def test_a_budget_that_is_too_small_for_one_release(private: Path) -> None:
    private.write_text(f"{private.read_text()}epsilon = 4.0\n")
    row = bad()
    assert row["what"] == "privacy"
    assert "privacy.epsilon = 4 does not allow one release" in row["found"]
    assert "fleetlearn-coordinator privacy plan.toml" in row["do"]


def test_a_private_plan_without_the_extra(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    row = bad()
    assert row["what"] == "privacy"
    assert row["do"] == 'pip install "fleetlearn[coordinator,privacy]"'


def test_poisson_sampling_at_a_real_coordinator(private: Path) -> None:
    private.write_text(f'{private.read_text()}sampling = "poisson"\n')
    row = bad()
    assert row["what"] == "plan"
    assert 'privacy.sampling = "poisson" is for the simulator' in row["found"]


def release(file: Path) -> None:
    """Let the run of a plan release a model."""
    fleet = Fleet(Plan.load(file))
    for lease in leases(fleet.check_in("a", "b")):
        fleet.report(lease, update_of(0.1, 10))
    assert fleet.run.engine.version == 1
    fleet.store.close()


def test_privacy_that_is_taken_out_of_a_run(private: Path) -> None:
    release(private)
    assert examine()["run test"]["state"] == "good"
    private.write_text(private.read_text().replace(PRIVATE, ""))
    row = bad()
    assert (row["what"], row["found"]) == (
        "run test",
        "has made 1 release under [privacy], which the plan does not have any more",
    )
    assert "begin another run" in row["do"]


def test_a_copy_of_a_private_run(private: Path) -> None:
    release(private)
    data = private.parent / "run"
    data.rename(data.with_name("elsewhere"))
    shutil.copytree(data.with_name("elsewhere"), data)
    assert examine()["run test"]["state"] == "good"
    private.write_text(private.read_text().replace(str(data), str(data.with_name("elsewhere"))))
    row = bad()
    assert row["what"] == "run test"
    assert f"elsewhere was moved or copied from {data}" in row["found"]
    assert row["do"].startswith("fleetlearn-coordinator count-releases ")
    count_releases(data.with_name("elsewhere"), 0, 1.0, "t")
    assert examine()["run test"]["state"] == "good"


def test_privacy_that_comes_too_late(folder: Path) -> None:
    plan = folder / "plan.toml"
    release(plan)
    assert examine()["run test"]["state"] == "good"
    plan.write_text(f"{plan.read_text()}\n{PRIVATE}")
    assert bad()["found"] == "has released models without [privacy], up to version 1"


def test_a_private_run_s_folder_that_others_may_read(private: Path) -> None:
    data = private.parent / "run"
    data.mkdir()
    for mode, state in ((0o755, "warning"), (0o751, "warning"), (0o750, "good"), (0o700, "good")):
        data.chmod(mode)
        row = examine()["data"]
        assert row["state"] == state, oct(mode)
    data.chmod(0o755)
    row = examine()["data"]
    assert "everybody on this machine may read there" in row["found"]
    assert row["do"] == f"chmod o-rx {data}"
    private.write_text(private.read_text().replace(PRIVATE, ""))
    assert examine()["data"]["state"] == "good"


def test_a_plan_that_cannot_be_read(folder: Path) -> None:
    (folder / "plan.toml").write_text("x")
    assert "this is not TOML" in bad()["found"]


def test_a_bundle_that_was_changed(folder: Path) -> None:
    file = next(path for path in (folder / "bundle").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])
    row = bad()
    assert row["what"] == "bundle"
    assert "export the model again" in row["do"]


def test_a_key_that_changes_nothing(folder: Path) -> None:
    plan = folder / "plan.toml"
    plan.write_text(f"{plan.read_text()}\n[models]\nevery = 1001\n")
    row = examine("plan.toml")["keys"]
    assert row["state"] == "warning"
    assert row["found"].startswith("models.every = 1001 and stop.rounds = ")


def test_the_file_that_a_run_begins_with(folder: Path) -> None:
    """It is needed until the run has begun, and may be gone afterwards."""
    plan, weights = folder / "plan.toml", folder / "weights.safetensors"
    plan.write_text(f'initial = "weights.safetensors"\n{plan.read_text()}')
    row = bad("plan.toml")
    assert row["what"] == "initial"
    assert "no such file" in row["found"]
    bundle = open_bundle(Plan.load(plan).bundle)
    model = bundle.parameters()[: bundle.manifest.size]
    named = {name: row.copy() for name, row in views(model, bundle.manifest.travelling).items()}
    save_file(named, weights)
    assert examine("plan.toml")["initial"]["found"].endswith("the model that a new run begins with")
    Fleet(Plan.load(plan)).store.close()
    weights.unlink()
    row = examine("plan.toml")["initial"]
    assert row["state"] == "good"
    assert row["found"].endswith("The run has begun, and does not need the file any more")


def test_a_plan_that_does_not_fit_the_service(folder: Path) -> None:
    (folder / "service.toml").write_text("port = 0\nmax_connections = 1\n")
    row = examine(expected=6)["plan"]
    assert row["state"] == "bad"
    assert "max_connections = 1" in row["found"]


def test_a_folder_in_which_others_may_write(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run").chmod(0o777)
    row = bad()
    assert row["what"] == "data"
    assert "everybody" in row["found"]


def test_a_folder_in_which_this_user_may_not_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder)
    found = examine(expected=6)
    assert "may not write there" in found["data"]["found"]


def test_a_disk_that_is_too_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [2**40, 2**29, 100]
    monkeypatch.setattr(
        "shutil.disk_usage", lambda place: type("", (), {"free": free[0], "total": 2**41})
    )
    assert examine()["disk"]["state"] == "good"
    free[0] = 2**29
    assert examine()["disk"]["state"] == "warning"
    free[0] = 100
    assert bad()["what"] == "disk"


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (folder / "service.toml").write_text(f"port = {port}\n")
        row = bad()
        assert row["what"] == "port"
        assert f"127.0.0.1:{port}: address already in use" in row["found"]
    assert "is free" in examine()["port"]["found"]


def test_the_certificate_s_days_and_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_certificate(folder / "tls", ["localhost", "127.0.0.1"], 30)
    tls = '[tls]\ncertificate = "tls/certificate.pem"\nkey = "tls/key.pem"\n'
    (folder / "service.toml").write_text(f"port = 0\n{tls}")
    assert examine()["tls"]["found"].startswith("29 days left; for localhost, 127.0.0.1")
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 20 * DAY)
    row = examine()["tls"]
    assert row["state"] == "warning"
    assert "in 9 days" in row["found"]
    monkeypatch.setattr("time.time", lambda: now + 31 * DAY)
    assert "ended on" in bad()["found"]
    monkeypatch.setattr("time.time", lambda: now)
    (folder / "service.toml").write_text(f'host = "127.0.0.2"\nport = 0\n{tls}')
    assert "and not for host" in examine()["tls"]["found"]
    (folder / "tls" / "key.pem").write_text("no key")
    assert "cannot be used for TLS" in bad()["found"]


def test_a_key_that_others_may_read(folder: Path) -> None:
    make_certificate(folder / "tls", ["127.0.0.1"], 30)
    tls = '[tls]\ncertificate = "tls/certificate.pem"\nkey = "tls/key.pem"\n'
    (folder / "service.toml").write_text(f"port = 0\n{tls}")
    (folder / "tls" / "key.pem").chmod(0o644)
    assert bad()["what"] == "tls key"


def test_too_few_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, state in ((20_000, "good"), (500, "warning"), (1, "bad")):
        monkeypatch.setattr(
            checks.process_settings,
            "places",
            lambda asked, *, files, devices=devices: DescriptorShares(1024, devices, 1),
        )
        monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 1024))
        found = examine(expected=6 if state == "bad" else 0)
        assert found["open files"]["state"] == state


def test_the_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, state in ((True, "good"), (False, "warning"), (None, "unknown")):
        monkeypatch.setattr(checks, "is_clock_set", lambda said=said: said)
        assert examine()["clock"]["state"] == state
    live = msgspec.json.encode({"time": time.time() + 3600, "pid": None}).decode()
    ledger(folder / "run", live=live)
    row = bad()
    assert row["what"] == "clock"
    assert "behind what test's coordinator has recorded" in row["found"]


def test_an_audit_log_that_was_changed(folder: Path) -> None:
    with closing(Identities(folder / "ids")) as identities:
        identities.make_token(1, 5.0, [], 1.0)
        identities._db.execute("UPDATE audit SET what='nothing'")
    assert bad()["what"] == "audit log"


def test_libraries_that_are_missing_or_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "nowhere-to-be-found>=1; extra == 'coordinator'"
    needed = ["numpy>=99", ours, "torch; extra == 'export'"]
    monkeypatch.setattr(checks, "requires", lambda name: needed)
    row = bad()
    assert row["what"] == "libraries"
    assert "is older than 99" in row["found"]
    assert "nowhere-to-be-found is not installed" in row["found"]
    assert "torch" not in row["found"]


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Hold the run as a coordinator does."""
    with find_storage(folder).lock():
        yield


def test_whether_a_coordinator_runs(folder: Path) -> None:
    values = {"pid": 1, "time": 5.0, "accepted": 0, "leases": 0, "connected": 0}
    live = msgspec.json.encode({**values, "waits_for": "a round needs 3 devices"}).decode()
    ledger(folder / "run", live=live, address="ws://127.0.0.1:1")
    row = examine()["run test"]
    assert row["state"] == "warning"
    assert "was killed" in row["found"]
    with serving(folder / "run"):
        row = examine()["run test"]
        assert row["found"] == "a coordinator runs at ws://127.0.0.1:1; a round needs 3 devices"


def test_each_run_of_a_host(folder: Path) -> None:
    (folder / "service.toml").write_text('port = 0\nidentities = "ids"\nruns = "runs"\n')
    with closing(Identities(folder / "ids")):
        runs = Runs(folder / "runs")
    runs.add("a", folder / "plan.toml")
    runs.add("b", folder / "gone.toml")
    found = examine("service.toml", expected=6)
    assert found["run a"]["state"] == "good"
    assert "gone.toml" in found["run b"]["found"]


def test_own_algorithms_are_named_with_their_origin(folder: Path) -> None:
    (folder / "doctors_rules.py").write_text("def mean():\n    return lambda updates: 0\n")
    more = {"aggregation__aggregator": "doctors_rules:mean"}
    (folder / "plan.toml").write_text(plan_text(folder / "bundle", folder / "run", **more))
    row = bad()
    assert row["what"] == "plan"
    assert '[plugins] modules = ["doctors_rules"]' in row["found"]
    service = folder / "service.toml"
    service.write_text(f'{service.read_text()}[plugins]\nmodules = ["doctors_rules"]\n')
    with extensions.apart():
        found = examine()["own algorithm"]
    assert found["state"] == "good"
    assert re.fullmatch(
        "aggregation.aggregator = doctors_rules:mean [0-9a-f]{16}", found["found"]
    ), found
