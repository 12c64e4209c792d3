"""backup and restore, as a person types them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, StoreError, read_model
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.hosted_run import open_run
from fleetlearn_coordinator.service.several.operations import operating
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import ModelMade
from fleetlearn_coordinator.storage.runs import Population
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import digest
from peers import SIZE, plan_text, update_of
from typer.testing import CliRunner, Result

SECRET = "-----BEGIN PRIVATE KEY-----"


def type_in(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture
def host(tmp_path: Path, bundle_path: Path) -> Iterator[Path]:
    """A host's folder: two runs, one of them never served, identities and keys. Its service file
    and the plan of one run name whole paths."""
    home = tmp_path / "host"
    (home / "plans").mkdir(parents=True)
    (home / "tls").mkdir()
    shutil.copytree(bundle_path, home / "model.bundle")
    for name, data in (("one", str(home / "data" / "one")), ("two", "../data/two")):
        text = plan_text(home / "model.bundle", data).replace('"test"', f'"{name}"')
        (home / "plans" / f"{name}.toml").write_text(text)
    for key in ("tls/key.pem", "sign.pem"):
        (home / key).write_text(SECRET)
    (home / "tls" / "certificate.pem").write_text("public")
    (home / "service.toml").write_text(
        f'runs = "{home}/runs"\nidentities = "ids"\nsigning_keys = ["sign.pem"]\n'
        '[tls]\ncertificate = "tls/certificate.pem"\nkey = "tls/key.pem"\n'
    )
    with operating(ServiceSettings.load(home / "service.toml")) as operations:
        for name in ("one", "two"):
            operations.add(name, home / "plans" / f"{name}.toml", Population())
    store = open_store(home / "data" / "one", open_bundle(bundle_path).sha256)
    vector = np.arange(SIZE, dtype=np.float32)
    store.write(store.write_model(ModelMade(0, digest(vector), 0, 1.0), vector, {}))
    with closing(store):
        yield home


def test_a_host_is_restored_elsewhere_and_uses_nothing_of_the_old_place(
    host: Path, tmp_path: Path
) -> None:
    made = type_in("backup", host / "service.toml", tmp_path / "backup")
    assert made.exit_code == 0, made.output
    assert "run one: model version 0" in made.stdout
    assert "run two: no model yet" in made.stdout
    assert "without these secrets (--keys copies them): sign.pem, tls/key.pem" in made.stderr
    assert type_in("backup", "--verify", tmp_path / "backup").exit_code == 0
    done = type_in("restore", tmp_path / "backup", tmp_path / "elsewhere")
    assert done.exit_code == 0, done.output
    assert f"the secret file back first, which the backup does not have: {tmp_path}" in done.stderr
    assert f"serve {tmp_path / 'elsewhere' / 'service.toml'}" in done.stderr
    model = read_model(host / "data" / "one")
    shutil.rmtree(host)
    settings = ServiceSettings.load(tmp_path / "elsewhere" / "service.toml")
    assert settings.runs == tmp_path / "elsewhere" / "runs"
    with operating(settings) as operations:
        plans = {run.name: run.plan for run in operations.runs.runs()}
    assert plans == {
        name: tmp_path / "elsewhere" / "plans" / f"{name}.toml" for name in ("one", "two")
    }
    plan = Plan.load(plans["one"])
    assert plan.bundle.resolve() == tmp_path / "elsewhere" / "model.bundle"
    assert plan.data_dir.resolve() == tmp_path / "elsewhere" / "data" / "one"
    found = read_model(plan.data_dir)
    assert (found[0], found[1].tobytes()) == (model[0], model[1].tobytes())
    with closing(Identities(tmp_path / "elsewhere" / "ids")) as identities:
        assert [row.what for row in identities.events()] == ["added", "added"]
        assert identities.broken_at() is None


def test_a_backup_is_for_its_owner_alone_and_says_what_is_secret(
    host: Path, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        for keys in ([], ["--keys"]):
            target = tmp_path / f"backup{len(keys)}"
            shown = type_in("backup", host / "service.toml", target, "--json", *keys)
            assert shown.exit_code == 0, shown.output
            modes = {path.stat().st_mode & 0o777 for path in (target, *target.rglob("*"))}
            assert modes == {0o700, 0o600}
            manifest = json.loads(shown.stdout)
            secret = {file["path"] for file in manifest["files"] if file["secret"]}
            assert {"ids/identities.sqlite3", "data/one/coordinator.sqlite3"} <= secret
            assert (
                not {"service.toml", "model.bundle/manifest.json", "tls/certificate.pem"} & secret
            )
            there = [path for path in target.rglob("*.pem") if path.read_text() == SECRET]
            assert len(there) == (2 if keys else 0)
            assert {"sign.pem", "tls/key.pem"} <= secret or not keys
            assert manifest["left_out"] == ([] if keys else ["sign.pem", "tls/key.pem"])
    finally:
        os.umask(before)


def break_content(folder: Path) -> str:
    path = folder / "files" / "model.bundle" / "manifest.json"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "model.bundle/manifest.json is damaged"


def cut_short(folder: Path) -> str:
    path = folder / "files" / "data" / "one" / "coordinator.sqlite3"
    path.write_bytes(path.read_bytes()[:-1])
    return "data/one/coordinator.sqlite3 is damaged"


def remove(folder: Path) -> str:
    (folder / "files" / "data" / "one" / "models" / "v00000000.safetensors").unlink()
    return "v00000000.safetensors is missing"


def add(folder: Path) -> str:
    (folder / "files" / "data" / "one" / "sums" / "c").write_text("")
    return "data/one/sums/c is not the backup's"


def change_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"one"', '"uno"', 1))
    return "manifest.json was changed after it was written"


def cut_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-9])
    return "manifest.json is damaged"


def remove_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "is no backup: it has no manifest.json"


def newer(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    return "is a backup of format 2; this fleetlearn reads format 1. Update it."


@pytest.mark.parametrize(
    "damage",
    [break_content, cut_short, remove, add, change_manifest, cut_manifest, remove_manifest, newer],
)
def test_a_damaged_backup_is_named_and_not_restored(
    host: Path, tmp_path: Path, damage: object
) -> None:
    assert type_in("backup", host / "service.toml", tmp_path / "backup").exit_code == 0
    words = damage(tmp_path / "backup")  # type: ignore[operator]
    for command in (
        ("backup", "--verify", tmp_path / "backup"),
        ("restore", tmp_path / "backup", tmp_path / "elsewhere"),
    ):
        done = type_in(*command)
        assert done.exit_code == 1
        assert words in done.stderr
    assert not (tmp_path / "elsewhere").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["backup", "host"]


def test_a_target_that_is_used_stays_as_it_is(host: Path, tmp_path: Path) -> None:
    assert type_in("backup", host / "service.toml", tmp_path / "backup").exit_code == 0
    for words in (
        ("backup", host / "service.toml", tmp_path / "backup"),
        ("restore", tmp_path / "backup", tmp_path / "backup"),
    ):
        done = type_in(*words)
        assert done.exit_code == 1
        assert "is not empty; name a folder that is not there yet" in done.stderr
    done = type_in("restore", tmp_path / "backup", host)
    assert done.exit_code == 1
    assert "is in use: a coordinator holds" in done.stderr
    assert type_in("backup", "--verify", tmp_path / "backup").exit_code == 0


def test_a_plan_and_a_data_directory_alone(host: Path, tmp_path: Path) -> None:
    assert type_in("backup", host / "plans" / "one.toml", tmp_path / "plan").exit_code == 0
    done = type_in("restore", tmp_path / "plan", tmp_path / "there")
    assert f"serve {tmp_path / 'there' / 'plans' / 'one.toml'}" in done.stderr
    assert Plan.load(tmp_path / "there" / "plans" / "one.toml").data_dir.is_dir()
    assert type_in("backup", host / "data" / "one", tmp_path / "data").exit_code == 0
    assert type_in("restore", tmp_path / "data", tmp_path / "again").exit_code == 0
    assert read_model(tmp_path / "again" / "one")[0] == 0
    done = type_in("backup", host / "data" / "two", tmp_path / "none")
    assert done.exit_code == 1
    assert "two" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verify", "a", "b"], "takes the folder of a backup, and nothing else"),
        (["a"], "a folder to write is expected"),
    ],
)
def test_arguments_that_do_not_go_together(words: list[str], said: str) -> None:
    done = type_in("backup", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", "").split())


def test_a_private_run_s_copy_says_what_it_needs_before_it_is_served(
    bundle_path: Path, tmp_path: Path
) -> None:
    home = tmp_path / "host"
    home.mkdir()
    shutil.copytree(bundle_path, home / "test.bundle")
    text = plan_text(Path("test.bundle"), "run", "dp-fedavg", round__goal=1, privacy__noise=4.0)
    text = text.replace(
        "[privacy]", "[privacy]\nepsilon = 2.3\ndelta = 1e-6\npopulation = 100\nclip = 1.0"
    )
    (home / "plan.toml").write_text(text)
    fleet = Fleet(Plan.load(home / "plan.toml"))
    (task,) = leases(fleet.check_in("a"))
    fleet.report(task, update_of(0.1))
    counting = type_in("count-releases", home / "run", 1)
    assert counting.exit_code == 1
    assert "in use by another coordinator" in counting.output
    made = type_in("backup", home / "plan.toml", tmp_path / "backup", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["runs"][0]["releases"] == 1
    fleet.store.close()
    again = tmp_path / "again"
    done = type_in("restore", tmp_path / "backup", again)
    words = f"fleetlearn-coordinator count-releases {again / 'run'} NUMBER"
    assert done.exit_code == 0, done.output
    assert "run test is private: before it is served, say how many releases" in done.stderr
    assert "since this backup, which has 1" in done.stderr
    assert words in done.stderr
    plan = Plan.load(again / "plan.toml")
    with pytest.raises(StoreError, match="was restored from a backup") as refused:
        open_run(plan, ServiceSettings(), NOW)
    assert words in str(refused.value)
    assert type_in("count-releases", again / "run", -1).exit_code == 2
    counted = type_in("count-releases", again / "run", 2)
    assert counted.exit_code == 0, counted.output
    assert counted.stdout == (
        "3 releases in all, epsilon 1.926 of 2.3 at delta 1e-06; within the budget are 1 more\n"
    )
    fleet = Fleet(plan)
    assert fleet.run.budget.account is not None
    assert (fleet.run.budget.account.releases, fleet.run.budget.account.left) == (3, 1)
    fleet.store.close()
    shutil.rmtree(again)
    shown = type_in("status", home / "plan.toml")
    assert "privacy: epsilon 1.07 of 2.3 (delta 1e-06), 1 release, 3 left" in shown.stdout


def test_releases_are_counted_of_private_runs_alone(host: Path) -> None:
    done = type_in("count-releases", host / "data" / "one", 1)
    assert done.exit_code == 1
    assert "data/one has no private run: there are no releases to count" in done.output
