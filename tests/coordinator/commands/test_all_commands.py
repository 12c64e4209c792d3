"""Every command, as a person types it: over the administrators' port, by the files of a coordinator
that runs, and by its files when it is down. What they print as JSON is what the schema says."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
from answering import Fleet
from commands_typed import SCHEMA, check, typed
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.commands import schemas
from fleetlearn_coordinator.commands.exits import MEANINGS, ExitStatus
from fleetlearn_coordinator.commands.table import ALIASES, GROUPS, find_command
from fleetlearn_coordinator.storage.identities import DATABASE
from live_host import WRONG, LiveHost, live_host
from peers import plan_text
from processes import processes, wait_for
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/operate/command-line.md"
ALL = [each.name for group in GROUPS.values() for each in group]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveHost]:
    with live_host(tmp_path_factory.mktemp("host")) as host:
        yield host


@pytest.fixture(params=["port", "files"])
def way(request: pytest.FixtureRequest, host: LiveHost) -> dict[str, str]:
    """What the environment has, and where the coordinator is, by its port or its files."""
    if request.param == "files":
        return {"where": str(host.service)}
    return {"where": host.url, "FLEETLEARN_TOKEN": host.host.token(request.node.name)}


def test_what_there_is_to_see(host: LiveHost, way: dict[str, str]) -> None:
    where = way.pop("where")
    (run,) = check("status", typed("status", where, "digits", "--json", **way))
    assert (run["state"], run["connected"], run["leases"]) == ("running", 1, 1)
    assert run["deadline"] is not None
    assert [row["number"] for row in run["rounds"]] == [1, 2]
    (whole,) = check("status", typed("status", where, "--json", **way))
    assert whole["name"] == "digits", "the only run is the one that is meant"
    (runs,) = check("runs", typed("runs", where, "--json", **way))
    assert [each["name"] for each in runs] == ["digits"]
    (rounds,) = check("rounds", typed("rounds", where, "--json", "--last", 1, **way))
    assert [row["number"] for row in rounds] == [2]
    (turns,) = check("rounds", typed("rounds", where, "--round", "open", "--json", **way))
    assert [(row["device"], row["state"]) for row in turns["tasks"]] == [("roof-7", "assigned")]
    (turns,) = check("rounds", typed("rounds", where, "digits", "--round", 1, "--json", **way))
    assert ("roof-8", "failed: bad-data") in [
        (row["device"], row["state"]) for row in turns["tasks"]
    ]
    (devices,) = check("devices", typed("devices", where, "--json", **way))
    seen = {row["device"]: row for row in devices}
    assert [(row["connected"], row["done"]) for row in seen.values()] == [(True, 2), (False, 0)]
    assert seen["roof-8"]["error"] == f"bad-data: {WRONG}"
    assert seen["roof-8"]["tags"] == ["roof"]
    (models,) = check("models", typed("models", where, "digits", "--json", **way))
    assert [row["version"] for row in models] == [0, 1, 2]
    events = check("tail", typed("tail", where, "--once", "--json", **way), lines=True)
    assert "round-closed" in [event["what"] for event in events]
    rows = check("audit", typed("audit", where, "--json", "--last", 5, **way), lines=True)
    assert len(rows) == 5


def test_the_same_for_people(host: LiveHost, way: dict[str, str]) -> None:
    where = way.pop("where")
    status = typed("status", where, **way)
    assert "not finished; running at ws://127.0.0.1:" in status
    assert "round 3, open since " in status
    assert "deadline " in status
    assert "rounds an hour; stop.rounds = 50 at " in status
    assert "loss 0.7, +0 in 2 rounds" in status
    assert f"bad-data: {WRONG}" in typed("devices", where, "--failing", **way)
    assert "roof-8" not in typed("devices", where, "--connected", **way)
    shown = typed("devices", where, "--device", "roof-8", **way)
    assert "roof-8: not connected; enrolled " in shown
    assert f"bad-data: {WRONG}" in shown
    assert "1 failed: bad-data" in typed("rounds", where, **way)
    assert "roof-7" in typed("rounds", where, "--round", "open", **way)
    assert "round 2 committed: 1 reports" in typed("tail", where, "--once", **way)
    for text in (status, shown):
        assert "\x1b" not in text, "no colours where nobody looks"
        assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_what_there_is_to_do(host: LiveHost, way: dict[str, str]) -> None:
    where = way.pop("where")
    for verb, word in (("pause", "paused"), ("resume", "resumed"), ("drain", "drained")):
        (done,) = check(verb, typed(verb, where, "digits", "--json", **way))
        assert (done["what"], done["name"], done["when"]) == (word, "digits", "within a second")
    typed("resume", where, "digits", **way)
    (done,) = check("evaluate", typed("evaluate", where, "--json", **way))
    assert done["what"] == "evaluation"
    (made,) = check("enrol", typed("enrol", where, "--tag", "roof", "--json", **way))
    known = host.host.identities.enrol("new", "n" * 43, made["token"], made["until"] - 1)
    assert known.tags == ("roof",)
    (done,) = check("revoke", typed("revoke", where, "new", "--json", **way))
    assert done["what"] == "revoked"
    assert "new" not in [row.device for row in host.host.identities.devices()]
    typed("revoke", where, "nobody", expected=1, **way)
    typed("rollback", where, "99", expected=1, **way)
    typed("stop", where, "other", expected=1, **way)


def test_where_it_is_comes_from_the_environment(
    host: LiveHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    token = host.host.token("erin")
    own = {"FLEETLEARN_ADMIN": host.url, "FLEETLEARN_TOKEN": token}
    assert json.loads(typed("devices", "--json", **own))
    assert json.loads(typed("rounds", "digits", "--json", **own))
    assert "say where the coordinator is" in CliRunner().invoke(app, ["status"]).stderr
    (tmp_path / "plan.toml").write_text(host.plan.read_text())
    assert json.loads(typed("status", "--json"))["name"] == "digits"


def test_who_may_not_is_told_so(host: LiveHost) -> None:
    view = {"FLEETLEARN_TOKEN": host.host.token("victor", "view")}
    assert "digits" in typed("runs", host.url, **view)
    typed("pause", host.url, "digits", expected=ExitStatus.NOT_ALLOWED, **view)
    typed("runs", host.url, expected=ExitStatus.NOT_ALLOWED, FLEETLEARN_TOKEN="x")
    typed("runs", host.url, expected=ExitStatus.ERROR)
    nowhere = "http://127.0.0.1:1"
    typed("runs", nowhere, expected=ExitStatus.UNREACHABLE, **view)


def test_a_service_file_with_a_token_asks_the_port(host: LiveHost) -> None:
    """So a person who may not change files may change runs, in his own name."""
    own = {"FLEETLEARN_TOKEN": host.host.token("olaf")}
    typed("resume", host.service, "digits", **own)
    (row,) = host.host.identities.last_events(1)
    assert (row.what, row.about["who"]) == ("resumed", "olaf")


def test_when_the_coordinator_is_down(tmp_path: Path) -> None:
    with live_host(tmp_path) as host:
        token = host.host.token("olga")
    status = ExitStatus.NOT_RUNNING
    for where in (host.service, host.plan, host.data):
        (run,) = check("status", typed("status", where, "--json", expected=status))
        assert (run["running"], run["connected"], run["version"]) == (False, 0, 2)
        (devices,) = check("devices", typed("devices", where, "--json"))
        assert [row["done"] for row in devices] == [2, 0]
        assert not any(row["connected"] for row in devices)
        (rounds,) = check("rounds", typed("rounds", where, "--json"))
        assert len(rounds) == 2
    shown = typed("status", host.plan, expected=status)
    assert "the coordinator was stopped at " in shown
    # a token is of no use where nobody listens: the files are
    typed("pause", host.service, "digits", FLEETLEARN_TOKEN=token)
    (done,) = check("rollback", typed("rollback", host.service, "digits", "1", "--json"))
    assert (done["version"], done["when"]) == (1, "when the service file is served")
    (runs,) = check("runs", typed("runs", host.service, "--json"))
    assert runs[0]["state"] == "paused"
    (one,) = check("compare-models", typed("compare-models", host.plan, 0, 1, "--json"))
    assert one["versions"] == [0, 1]
    (made,) = check("administrator list", typed("administrator", "list", host.service, "--json"))
    assert made[0]["name"] == "olga"
    (checks,) = check("doctor", typed("doctor", host.service, "--json"))
    assert checks
    (own,) = check("algorithms", typed("algorithms", host.service, "--json"))
    assert own == [], "fleetlearn itself brings none"
    copy = tmp_path / "copy"
    (kept,) = check("backup", typed("backup", host.service, copy, "--json"))
    assert kept["runs"]
    check("restore", typed("restore", copy, tmp_path / "restored", "--json"))
    (written,) = check(
        "init", typed("init", tmp_path / "new", "--bundle", tmp_path / "test.bundle", "--json")
    )
    assert len(written["written"]) == 2


def test_the_audit_log_is_checked_over_the_port_too(host: LiveHost) -> None:
    access = {"FLEETLEARN_TOKEN": host.host.token("auditor")}

    def audit(*words: object, status: int = 0) -> tuple[list[int], str]:
        done = CliRunner(env=access).invoke(app, ["audit", host.url, *map(str, words)])
        assert done.exit_code == status, done.output
        return [int(row.split()[0]) for row in done.stdout.splitlines()], done.stderr

    whole, said = audit()
    assert whole == [*range(1, len(whole) + 1)]
    assert f"{len(whole)} rows, none changed; the newest has the hash" in said
    newest, said = audit("--last", 2)
    assert newest == whole[-2:]
    assert f"those before row {newest[0] - 1} not looked at" in said
    path = host.folder / "ids" / DATABASE
    with closing(sqlite3.connect(path)) as database, database:
        (was,) = database.execute("SELECT what FROM audit WHERE number=?", newest[:1]).fetchone()
        database.execute("UPDATE audit SET what='nothing' WHERE number=?", newest[:1])
    try:
        for words, shown in (((), whole[: newest[0] - 1]), (("--last", 2), [newest[0] - 1])):
            rows, said = audit(*words, status=1)
            assert rows == shown
            assert f"row {newest[0]} of the audit log was changed" in said
    finally:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE audit SET what=? WHERE number=?", (was, newest[0]))


@pytest.mark.parametrize("command", ["status", "rounds", "devices", "runs", "models", "doctor"])
def test_who_looks_waits_for_no_library_that_trains(
    command: str, tmp_path: Path, bundle_path: Path
) -> None:
    """numpy takes a fifth of a second on a small machine, asyncio a tenth. Two commands read the
    whole plan, whose rules are numpy's."""
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(bundle_path, tmp_path / "run"))
    Fleet(Plan.load(path)).store.close()
    script = (
        "import sys; from fleetlearn_coordinator.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    words = [sys.executable, "-c", script, command, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    modules = {*done.stderr.split()}
    assert "sqlite3" in modules
    heavy = {"asyncio", "websockets", "cryptography", "http.client"}
    heavy |= set() if command in ("models", "doctor") else {"numpy", "safetensors"}
    assert not heavy & modules


def test_nothing_is_asked_of_a_run_that_has_not_begun(tmp_path: Path, bundle_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(bundle_path, tmp_path / "run"))
    for words, said in (
        (["evaluate", plan], "serve the plan first"),
        (["rollback", plan, 1], "is not a coordinator's data directory"),
    ):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == ExitStatus.ERROR
        assert said in done.stderr


# What holds pages, table, schema and code together


def test_the_schema_is_that_of_the_code() -> None:
    module = "fleetlearn_coordinator.commands.schemas"
    assert SCHEMA.read_text() == schemas.text(), f"run python -m {module} {SCHEMA}"
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize("change", ["a field more", "a field less", "another type"])
def test_output_that_is_not_by_the_schema_is_found(change: str) -> None:
    token: dict[str, Any] = {"token": "x", "until": 1.0, "link": None}
    check("enrol", json.dumps(token))
    if change == "a field more":
        token["more"] = 1
    elif change == "a field less":
        del token["link"]
    else:
        token["until"] = "soon"
    with pytest.raises(jsonschema.ValidationError):
        check("enrol", json.dumps(token))


def commands() -> dict[str, Any]:
    """Return all commands by what a person types, those under a word included."""
    group = typer.main.get_group(app)
    found = {}
    for name in ALL:
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            each = command.commands.items()
            found |= {f"{name} {own}": of for own, of in each if not of.hidden}
        else:
            found[name] = command
    return found


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {
        name
        for name, command in commands().items()
        if any("--json" in each.opts for each in command.params)
    }
    assert with_json == set(schemas.OUTPUTS)


def test_each_command_is_found_under_its_names() -> None:
    group = typer.main.get_group(app)
    for name in (*ALL, *ALIASES):
        command = group.get_command(None, name)
        assert command is not None
        assert command.name == ALIASES.get(name, name)
    assert group.get_command(None, "nothing") is None
    assert find_command("token") == find_command("enrol")
    run = group.get_command(None, "run")
    assert [name for name, each in run.commands.items() if each.hidden] == [
        "pause", "resume", "drain", "stop", "roll-back", "list",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_has_no_broken_lines(width: int) -> None:
    text = typed("--help", COLUMNS=str(width), TERMINAL_WIDTH=str(width))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line[2].isalpha()]
    assert [name for name in listed if name in ALL] == ALL, "each has a line, in its order"
    for title, group in GROUPS.items():
        begin = lines.index(f"{title}:")
        for row, each in enumerate(group, start=begin + 1):
            assert lines[row].split(maxsplit=1) == [each.name, each.help], "and one line alone"
    assert not [name for name in ALIASES if f"  {name} " in text]


def test_the_help_of_each_command_is_plain() -> None:
    names = [*commands(), *(each for each in ALL if each not in commands())]
    for name in names:
        text = typed(*name.split(), "--help", COLUMNS="80")
        assert text.startswith(f"Usage: root {name}"), name
        assert "╭" not in text, "what is in brackets would be taken for markup"
        for line in text.splitlines():
            assert len(line) <= 80 or " " not in line.strip(), f"{name}: {line}"
    assert "[alerts]" in typed("prometheus-rules", "--help")


def test_the_page_has_every_command_and_status() -> None:
    text = PAGE.read_text()
    for name in commands():
        assert f"fleetlearn-coordinator {name}" in text, name
    rows = {
        int(line.split("|")[1]): line.split("|")[2].strip()
        for line in text.splitlines()
        if line.startswith("| ") and line.split("|")[1].strip().isdecimal()
    }
    assert rows == {int(status): meaning for status, meaning in MEANINGS.items()}
    assert set(MEANINGS) == set(ExitStatus)


ENDLESS = {
    "serve service.toml": "",
    "serve-gateway gateway.toml": "",
    "status digits.toml --watch": "digits: running",
    "tail service.toml": "round 1 begins",
    "view digits.run": "http://127.0.0.1:",
    "helper serve helper/helper.toml": "",
}
"""Commands of the page that go on until they are ended -> what they say at once. A coordinator is
served already, and a gateway on another machine needs NATS and an object store."""


def test_the_page_s_commands_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Path
) -> None:
    """In their order, in the folder of a host that runs."""
    begin = "    fleetlearn-coordinator "
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(begin)]
    typed_lines = [line.removeprefix(begin).partition(" >")[0] for line in lines]
    monkeypatch.chdir(tmp_path)
    with live_host(tmp_path) as host:
        monkeypatch.setenv("FLEETLEARN_ADMIN", host.url)
        monkeypatch.setenv("FLEETLEARN_TOKEN", host.host.token("olga"))
        text = host.plan.read_text()
        Path("night.toml").write_text(text.replace("digits.run", "night.run"))
        Path("test.bundle").rename("digits.bundle")
        Path("test.bundle").symlink_to("digits.bundle")
        Path("roster.txt").write_text(f"roof-9 {'0' * 64}\n")
        for line in typed_lines:
            if line not in ENDLESS:
                done = CliRunner().invoke(app, line.split())
                assert done.exit_code == 0, f"{line}: {done.output}"
        for line, said in ENDLESS.items():
            if said:
                assert said in first_line(line, warm, tmp_path), line
    assert {*ENDLESS} <= {*typed_lines}


def first_line(line: str, warm: Path, folder: Path) -> str:
    """Return the first line that a command prints which goes on; end it then."""
    with processes(folder, warm) as running:
        name = line.split()[0]
        running.start(name, sys.executable, "-m", "fleetlearn_coordinator", *line.split())
        wait_for(lambda: "\n" in running.log(name), "the first line")
        return running.log(name)
