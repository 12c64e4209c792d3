"""What the Tab key offers, asked as bash asks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from secrets import token_urlsafe

import pytest
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.commands import completion
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.runs import Runs
from peers import plan_text
from typer.testing import CliRunner


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two runs, which is not served, and three enrolled devices: here."""
    (tmp_path / "service.toml").write_text('runs = "runs"\nidentities = "ids"\n')
    (tmp_path / "digits.toml").write_text(plan_text(tmp_path / "bundle", tmp_path / "digits.run"))
    with closing(Runs(tmp_path / "runs")) as runs:
        runs.add("digits", tmp_path / "digits.toml")
        runs.add("faces", tmp_path / "digits.toml")
    with closing(Identities(tmp_path / "ids")) as identities:
        token = identities.make_token(3, 100.0, [], 0.0)
        for name in ("roof-7", "roof-8", "attic"):
            identities.enrol(name, token_urlsafe(32), token, 0.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complete(words: str) -> list[str]:
    own = {
        "_FLEETLEARN_COORDINATOR_COMPLETE": "complete_bash",
        "COMP_WORDS": f"fleetlearn-coordinator {words}",
        "COMP_CWORD": str(1 + words.count(" ")),
    }
    done = CliRunner().invoke(app, [], prog_name="fleetlearn-coordinator", env=own)
    assert done.exit_code == 0, done.output
    assert not done.stderr
    return done.stdout.split()


def test_commands_and_options() -> None:
    assert complete("ro") == ["rounds", "rollback"]
    assert {*complete("re")} == {"resume", "result", "results", "restore", "revoke"}
    assert "--round" in complete("rounds --ro")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["status", "rounds", "models", "tail", "pause", "results"])
def test_runs_after_the_place_or_without_one(command: str) -> None:
    assert complete(f"{command} service.toml ") == ["digits", "faces"]
    assert complete(f"{command} service.toml f") == ["faces"]
    assert complete(f"{command} ") == ["digits", "faces", "digits.toml", "service.toml"]
    assert complete(f"{command} d") == ["digits", "digits.toml"]
    assert complete(f"{command} digits ") == [], "a run is named"


@pytest.mark.usefixtures("folder")
def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete("revoke service.toml ") == ["attic", "roof-7", "roof-8"]
    assert complete("revoke service.toml ro") == ["roof-7", "roof-8"]
    assert complete("revoke service.toml r%") == []
    monkeypatch.setattr(completion, "MOST", 2)
    assert complete("revoke service.toml ") == ["attic", "roof-7"], "of very many the first"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "words",
    ["status ./", "status no-such.toml ", "serve di", "view di", "revoke digits.toml ", "backup s"],
)
def test_where_nothing_is_offered_the_shell_offers_files(words: str) -> None:
    assert complete(words) == []


def test_what_cannot_be_read_fills_no_line(folder: Path) -> None:
    (folder / "service.toml").write_text("runs = [")
    assert complete("status service.toml ") == []
    assert complete("status http://127.0.0.1:1 ") == [], "nothing far away is asked"
    assert not (folder / "made").exists()
    (folder / "service.toml").write_text('runs = "made"\nidentities = "made-too"\n')
    assert complete("status service.toml ") == []
    assert {path.name for path in folder.iterdir()}.isdisjoint({"made", "made-too"})
