"""The commands of a canary, as a person types them: over the administrators' port, by the files of
a host that runs, and by its files when it is down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands_typed import check, typed
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.commands.exits import ExitStatus
from live_host import SIZE, LiveHost, live_host
from peers import plan_text, write_test_bundle
from processes import wait_for
from typer.testing import CliRunner


@pytest.fixture(params=["port", "files"])
def canary_host(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with live_host(tmp_path) as host:
        where: dict[str, str] = {"where": str(host.service)}
        if request.param == "port":
            where = {"where": host.url, "FLEETLEARN_TOKEN": host.host.token("olga")}
        yield host, where


def states(where: str, **way: str) -> dict[str, str]:
    rows = json.loads(typed("runs", where, "--json", **way))
    return {row["name"]: row["state"] for row in rows}


def test_a_canary_from_its_begin_to_its_end(canary_host: tuple[LiveHost, dict[str, str]]) -> None:
    host, way = canary_host
    where = way.pop("where")
    assert typed("canary", "status", where, **way) == "there is no canary\n"
    options = ("--model", 1, "--step", 0.5, "--step", 1, "--tasks", 15, "--hold", 0.5)
    (done,) = check(
        "canary start", typed("canary", "start", where, "digits", *options, "--json", **way)
    )
    assert (done["what"], done["name"]) == ("canary began", "digits.canary")
    wait_for(lambda: states(where, **way)["digits.canary"] == "running", "the canary's run")
    (found,) = check("canary status", typed("canary", "status", where, "--json", **way))
    (one,) = found
    assert (one["of"], one["phase"], one["steps"], one["model"]) == (
        "digits", "running", [0.5, 1.0], "version 1",
    )  # fmt: skip
    shown = typed("canary", "status", where, "digits", **way)
    assert "step 1 of 2 (50 %, 100 %)" in shown
    assert "waits for 15 more tasks and 0." in shown
    assert "the old run's" in shown
    assert "all but the canary's 50 %" in typed("runs", where, **way)
    typed("run", "remove", host.service, "digits", expected=1)
    typed("canary", "finish", where, "digits", expected=ExitStatus.ERROR, **way)
    (done,) = check("canary widen", typed("canary", "widen", where, "digits", "--json", **way))
    assert done["what"] == "canary widened"
    wait_for(lambda: states(where, **way)["digits"] == "paused", "the old run's pause")
    typed("canary", "widen", where, "digits", expected=ExitStatus.ERROR, **way)
    (done,) = check("canary back", typed("canary", "back", where, "digits.canary", "--json", **way))
    assert done["what"] == "canary went back"
    wait_for(lambda: states(where, **way)["digits"] == "running", "the old run's devices")
    assert states(where, **way)["digits.canary"] == "stopped"
    assert "went back in step 2 of 2 (50 %, 100 %): asked by" in typed(
        "canary", "status", where, **way
    )
    typed("run", "remove", host.service, "digits.canary")
    rows = [json.loads(line) for line in typed("audit", host.service, "--json").splitlines()]
    who = "olga" if way else "command"
    did = [(row["what"], row["about"]["who"]) for row in rows if "canary" in row["what"]]
    assert did == [
        ("canary began", who), ("canary widened", who), ("canary went back", who)
    ]  # fmt: skip


def test_a_canary_of_another_plan_while_nobody_serves(tmp_path: Path) -> None:
    with live_host(tmp_path) as host:
        pass
    bundle = write_test_bundle(tmp_path / "other.bundle", SIZE)
    plan = tmp_path / "other.toml"
    plan.write_text(plan_text(bundle, tmp_path / "other.run", round__goal=3))
    words = ("canary", "start", host.service, "digits", "--plan", plan, "--name", "next", "--json")
    (done,) = check("canary start", typed(*words, "--tag", "beta"))
    assert (done["name"], done["when"]) == ("next", "when the service file is served")
    (found,) = check("canary status", typed("canary", "status", host.service, "--json"))
    assert (found[0]["tags"], found[0]["model"]) == (["beta"], "the newest model")
    check("canary back", typed("canary", "back", host.service, "next", "--json"))
    typed("canary", "back", host.service, "next", expected=ExitStatus.ERROR)


def test_a_run_that_is_served_alone_has_no_canary(tmp_path: Path) -> None:
    with live_host(tmp_path) as host:
        pass
    assert typed("canary", "status", host.plan) == "there is no canary\n"
    words = ["canary", "start", str(host.plan), "digits", "--model", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == ExitStatus.ERROR
    assert "run add SERVICE.toml NAME PLAN.toml" in done.stderr


def test_over_the_port_files_are_those_below_the_runs(tmp_path: Path) -> None:
    with live_host(tmp_path / "host") as host:
        own = {"FLEETLEARN_TOKEN": host.host.token("olga")}
        write_test_bundle(tmp_path / "out.bundle", SIZE)
        write_test_bundle(tmp_path / "host" / "in.bundle", SIZE)
        start = ("canary", "start", host.url, "digits")
        for option in ("--bundle", "--plan", "--model"):
            typed(*start, option, "../out.bundle", expected=ExitStatus.ERROR, **own)
        view = {"FLEETLEARN_TOKEN": host.host.token("victor", "view")}
        typed(*start, "--model", 1, expected=ExitStatus.NOT_ALLOWED, **view)
        typed(*start, "--bundle", "in.bundle", **own)
        assert json.loads(typed("canary", "status", host.url, "--json", **view))
