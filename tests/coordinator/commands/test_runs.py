"""fleetlearn-coordinator run ...: what the commands write, print, and say about mistakes. No
coordinator runs."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.several.operations import operating
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.runs import Population, Runs
from peers import plan_text, write_test_bundle
from typer.testing import CliRunner

RUNNER = CliRunner()


@pytest.fixture
def service(tmp_path: Path) -> Path:
    """A service file, beside two plans of one bundle."""
    bundle = write_test_bundle(tmp_path / "bundle", 10)
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(plan_text(bundle, tmp_path / f"{name}.run"))
    file = tmp_path / "service.toml"
    file.write_text('runs = "runs"\nidentities = "ids"\n')
    return file


def command(*arguments: object, expected: int = 0) -> str:
    """Return what a command prints, on both streams."""
    done = RUNNER.invoke(app, [str(part) for part in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == expected, done.output
    return done.output


def test_a_run_is_added_changed_and_removed(service: Path, tmp_path: Path) -> None:
    plan = tmp_path / "a.toml"
    said = command(
        "run",
        "add",
        service,
        "a",
        plan,
        "--tag",
        "eu",
        "--tag",
        "roof",
        "--tier",
        "tv",
        "--share",
        0.5,
    )
    assert "a is added; it begins when the service file is served" in said
    with closing(Runs(tmp_path / "runs")) as runs:
        row = runs.runs()[0]
        assert (row.name, row.plan, row.population) == (
            "a",
            plan,
            Population(("eu", "roof"), ("tv",), (), 0.5),
        )
        for verb, state in (
            ("pause", "paused"),
            ("resume", "running"),
            ("drain", "draining"),
            ("stop", "stopped"),
        ):
            command("run", verb, service, "a")
            assert runs.runs()[0].wanted == state
        assert "the run a is stopped" in command("run", "pause", service, "a", expected=1)
        assert "data" not in command("run", "remove", service, "a")
        assert runs.runs() == []
    with closing(Identities(tmp_path / "ids")) as identities:
        events = [(row.what, row.about) for row in identities.events()]
    about = {"run": "a", "who": "command"}
    population = {"tags": ["eu", "roof"], "tiers": ["tv"], "share": 0.5}
    assert events == [
        ("added", {**about, "plan": str(plan), **population}),
        *((what, about) for what in ("paused", "resumed", "drained", "stopped", "removed")),
    ]


@pytest.mark.parametrize("copied", [False, True])
def test_an_operation_whose_process_is_killed_is_in_the_audit_log_once(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """Killed before its row is in the audit log, or after (``copied``) and before the database of
    runs knows so. The next look at the runs finds it."""

    class KilledError(BaseException):
        """Stands for SIGKILL."""

    def kill(*arguments: object) -> None:
        raise KilledError

    with (
        monkeypatch.context() as patch,
        operating(ServiceSettings.load(service), "olga") as operations,
    ):
        patch.setattr(*((Runs, "is_logged") if copied else (Identities, "log_once")), kill)
        with pytest.raises(KilledError):
            operations.add("a", tmp_path / "a.toml", Population())
    for _ in range(2):
        command("run", "list", service)
        with closing(Identities(tmp_path / "ids")) as identities:
            events = [(row.what, row.about) for row in identities.events()]
        assert events == [("added", {"run": "a", "plan": str(tmp_path / "a.toml"), "who": "olga"})]


def test_runs_are_listed(service: Path, tmp_path: Path) -> None:
    command("run", "add", service, "a", tmp_path / "a.toml", "--runtime", "onnx", "--share", 0.25)
    command("run", "add", service, "b", tmp_path / "b.toml")
    command("run", "pause", service, "b")
    with closing(Runs(tmp_path / "runs")) as runs:
        runs.failed(runs.runs()[0], "the disk is full")
    for arguments, expected in ((("run", "list", service), 0), (("status", service), 3)):
        said = command(*arguments, expected=expected)
        assert "no coordinator serves these runs now" in said
        assert "runtime onnx, 25 %" in said
        assert "a failed: the disk is full" in said
        found = json.loads(command(*arguments, "--json", expected=expected))
        rows = found["runs"] if arguments[0] == "status" else found
        assert [(row["name"], row["state"]) for row in rows] == [("a", "failed"), ("b", "paused")]
        assert rows[0]["population"] == "runtime onnx, 25 %"


def test_a_list_in_a_narrow_terminal_is_readable(service: Path, tmp_path: Path) -> None:
    """And a run that has no data directory yet is no error."""
    command("run", "add", service, "a", tmp_path / "a.toml", "--tag", "camera", "--tier", "phone")
    done = RUNNER.invoke(app, ["run", "list", str(service)], env={"COLUMNS": "60"})
    assert "tag camera, tier phone" in done.output
    assert "a.run is not" not in done.output


def test_mistakes_are_named(service: Path, tmp_path: Path) -> None:
    plan, other = tmp_path / "a.toml", tmp_path / "b.toml"
    command("run", "add", service, "a", plan)
    for words, arguments in (
        ("a run called a already", ("run", "add", service, "a", plan)),
        ("the run a has the same data_dir", ("run", "add", service, "c", plan)),
        ("is no name of a run", ("run", "add", service, "a/b", other)),
        ("the plan cannot be read", ("run", "add", service, "c", tmp_path / "none.toml")),
        ("no run called c; there are: a", ("run", "stop", service, "c")),
        ("no run called c; there are: a", ("run", "remove", service, "c")),
        ("no run called c; there are: a", ("run", "roll-back", service, "c", 1)),
        ("is not a coordinator's data directory", ("run", "roll-back", service, "a", 1)),
        ("no run called c; there are: a", ("status", service, "--run", "c")),
        ("no run called a; there are: test", ("status", plan, "--run", "a")),
        ("names no runs", ("run", "list", other.with_name("plain.toml"))),
    ):
        other.with_name("plain.toml").write_text("port = 1\n")
        assert words in command(*arguments, expected=1)
    for words, arguments in (
        ("above 0 and up to 1", ("run", "add", service, "c", other, "--share", 0)),
        ("letters, digits", ("run", "add", service, "c", other, "--tag", "a b")),
        ("are for a plan", ("serve", service, "--stay")),
    ):
        assert words in " ".join(command(*arguments, expected=2).replace("│", "").split())
    with operating(ServiceSettings.load(service)) as operations:
        assert [run.name for run in operations.runs.runs()] == ["a"]
