"""The drills and the changes of keys of docs/operate/operating.md, with real processes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typed
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.service.private_ca import make_certificate
from peers import plan_text
from processes import ROOT, Processes, free_port, status_of, wait_for

PAGE = (ROOT / "docs" / "operate" / "operating.md").read_text()
HERE = "127.0.0.1"


class Fleet:
    """A coordinator with TLS and identities, and one device that trains for ever."""

    def __init__(self, run: Processes, bundle: Path, data: Path) -> None:
        self.run, self.folder, self.data, self.port = run, run.folder, data, free_port()
        shutil.copytree(bundle, self.folder / "model.bundle")
        settings = {"local__lr": 0.1, "round__goal": 1, "stop__rounds": 1_000_000}
        (self.folder / "plan.toml").write_text(plan_text(Path("model.bundle"), "data", **settings))
        make_certificate(self.folder / "tls", [HERE], 30)
        self.token = ""

    def serve(self, tls: str = "tls", *, folder: Path | None = None, more: str = "") -> None:
        """(Re)start the coordinator with the certificate of this folder."""
        folder = folder or self.folder
        self.stop()
        (folder / "service.toml").write_text(
            f'port = {self.port}\nidentities = "ids"\n{more}[tls]\n'
            f'certificate = "{tls}/certificate.pem"\nkey = "{tls}/key.pem"\n'
        )
        self.run.coordinator(folder / "plan.toml")
        if not self.token:
            made = self.run.command("token", "service.toml", cwd=folder)
            self.token = made.stdout.strip()

    def stop(self) -> None:
        if (process := self.run.running.get("coordinator")) and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert self.run.wait("coordinator") == 0, self.run.log("coordinator")

    def device(self, ca: str, *options: str) -> None:
        """(Re)start the device with this file of CAs."""
        if (process := self.run.running.get("a")) and process.poll() is None:
            self.run.kill("a")
        self.run.start(
            "a", sys.executable, "-m", "fleetlearn_device", "run", "--name", "a",
            "--coordinator", f"wss://{HERE}:{self.port}", "--ca", self.folder / ca,
            "--data", self.data, "--state", self.folder / "a.state", "--token", self.token,
            *options,
        )  # fmt: skip

    def trains_on(self, folder: Path | None = None) -> None:
        data = (folder or self.folder) / "data"
        wait_for(lambda: status_of(data) is not None, "the coordinator")
        before = read_status(data).version
        wait_for(lambda: read_status(data).version > before + 1, f"rounds: {self.run.log('a')}")


@pytest.fixture
def fleet(run: Processes, bundle_path: Path, shards: list[Path]) -> Fleet:
    return Fleet(run, bundle_path, shards[0])


def test_a_new_ca_step_by_step(fleet: Fleet) -> None:
    fleet.serve()
    fleet.device("tls/ca.pem")
    fleet.trains_on()
    commands = typed.commands(PAGE)
    assert [each.text.split()[0] for each in commands] == ["fleetlearn-coordinator", "cat"]
    for each in commands:
        subprocess.run(
            ["bash", "-c", each.text], cwd=fleet.folder, env=typed.environment(), check=True
        )
    fleet.device("both.pem")
    fleet.trains_on()
    fleet.serve("tls-new")
    fleet.trains_on()
    fleet.device("tls-new/ca.pem")
    fleet.trains_on()
    # The old CA is worth nothing: neither to the device that has left it, nor to one that has not.
    fleet.device("tls/ca.pem", "--until-finished")
    assert fleet.run.wait("a") == 5, fleet.run.log("a")
    fleet.device("tls-new/ca.pem", "--until-finished")
    fleet.trains_on()
    fleet.run.kill("a")
    fleet.serve("tls")
    fleet.device("tls-new/ca.pem", "--until-finished")
    assert fleet.run.wait("a") == 5, fleet.run.log("a")


def test_a_certificate_that_has_ended_is_renewed_while_the_coordinator_runs(fleet: Fleet) -> None:
    make_certificate(fleet.folder / "tls", [HERE], 0)
    fleet.serve()
    fleet.device("tls/ca.pem", "--until-finished")
    assert fleet.run.wait("a") == 5, fleet.run.log("a")
    wait_for(lambda: "ended on" in fleet.run.log("coordinator"), "the cause in the log")
    fleet.device("tls/ca.pem")
    wait_for(lambda: fleet.run.log("a").count("certificate") > 1, "a second refusal")
    fleet.run.command("certificate", HERE, cwd=fleet.folder)
    fleet.trains_on()


def test_a_lost_tls_key_is_replaced_and_devices_notice_nothing(fleet: Fleet) -> None:
    fleet.serve()
    fleet.device("tls/ca.pem")
    fleet.trains_on()
    fleet.stop()
    (fleet.folder / "tls" / "key.pem").unlink()
    fleet.run.coordinator(fleet.folder / "plan.toml")
    assert fleet.run.wait("coordinator") == 1
    assert "key.pem" in fleet.run.log("coordinator").splitlines()[-1]
    fleet.run.command("certificate", HERE, cwd=fleet.folder)
    fleet.serve()
    fleet.trains_on()


def test_a_lost_machine_and_a_damaged_database_are_made_good_by_a_backup(fleet: Fleet) -> None:
    fleet.serve()
    fleet.device("tls/ca.pem")
    fleet.trains_on()
    words = ("--service", "service.toml")
    fleet.run.command("backup", "plan.toml", "backup", *words, cwd=fleet.folder)
    fleet.trains_on()
    fleet.stop()
    database = fleet.folder / "data" / "coordinator.sqlite3"
    database.write_bytes(b"\0" * database.stat().st_size)
    fleet.run.coordinator(fleet.folder / "plan.toml")
    assert fleet.run.wait("coordinator") == 1
    assert "coordinator.sqlite3" in fleet.run.log("coordinator").splitlines()[-1]
    done = fleet.run.command("restore", "backup", "again", cwd=fleet.folder)
    assert "put the secret file back first, which the backup does not have: again/tls/key.pem" in (
        done.stderr
    )
    again = fleet.folder / "again"
    version = read_model(again / "data")[0]
    # The new machine has the CA's key, which was kept elsewhere, and the old one's address.
    shutil.copy(fleet.folder / "tls" / "ca-key.pem", again / "tls")
    shutil.copy(fleet.folder / "tls" / "ca.pem", again / "tls")
    fleet.run.command("certificate", HERE, cwd=again)
    fleet.serve(folder=again)
    fleet.trains_on(again)
    assert read_status(again / "data").version > version, "the device is enrolled there"


def test_a_lost_signing_key_is_replaced_on_each_device(fleet: Fleet) -> None:
    fleet.run.command("signing-key", "old.pem", cwd=fleet.folder)
    fleet.serve(more='signing_keys = ["old.pem"]\n')
    fleet.device("tls/ca.pem")
    fleet.trains_on()
    (fleet.folder / "old.pem").unlink()
    key = fleet.run.command("signing-key", "new.pem", cwd=fleet.folder).stdout.strip()
    fleet.serve(more='signing_keys = ["new.pem"]\n')
    wait_for(lambda: "does only tasks signed with" in fleet.run.log("a"), "the device's refusal")
    fleet.run.kill("a")
    words = ["trust", "--state", fleet.folder / "a.state", key]
    subprocess.run([sys.executable, "-m", "fleetlearn_device", *words], check=True)
    fleet.device("tls/ca.pem")
    fleet.trains_on()


def test_each_test_that_the_page_names_is_there() -> None:
    import re

    for name in set(re.findall(r"`((?:[a-z_]+/)*test_[a-z_]+\.py)`", PAGE)):
        below = ROOT if name.startswith("tests/") else ROOT / "tests" / "end_to_end"
        assert (below / name).is_file(), name
