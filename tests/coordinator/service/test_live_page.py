"""The live page's port: who may look, what is told of a run while it is served, and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.network import admin_listener
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import Failed, Refused
from peers import PlanMaker, plan_text, report_of, update_of
from processes import wait_for
from watched import Browser, Watched


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tries tokens waits; not here."""
    monkeypatch.setattr(admin_listener, "REFUSED_PAUSE", 0.0)


@pytest.fixture
def watched(make_plan: PlanMaker, tmp_path: Path) -> Iterator[Watched]:
    with Watched(tmp_path, make_plan(round__goal=2, round__minimum=1)) as found:
        yield found


@pytest.fixture
def ada(watched: Watched) -> Browser:
    """Somebody who signed in and may operate."""
    found = Browser(watched.address)
    found.sign_in(watched.token("ada"))
    return found


def test_the_page_has_strict_headers_and_is_kept_while_it_is_the_same(watched: Watched) -> None:
    somebody = Browser(watched.address)
    response, content = somebody.send("GET", "/")
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/html; charset=utf-8"
    policy = response.getheader("Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.getheader("X-Content-Type-Options") == "nosniff"
    tag = response.getheader("ETag") or ""
    again, nothing = somebody.send("GET", "/", If_None_Match=tag)
    assert (again.status, nothing) == (304, b"")
    for path in ("/page/", "/page/../admin_api.py", "/page/%2e%2e", "/page/nothing.js", "/x"):
        assert somebody.send("GET", path)[0].status in (401, 404)
    assert somebody.send("POST", "/page/live.js", {})[0].status == 405
    assert b"<script>" not in content, "nothing inline"


def test_who_is_not_signed_in_sees_nothing(watched: Watched) -> None:
    somebody = Browser(watched.address)
    assert somebody.ask("GET", "/v1/session") == (200, {"name": None})
    assert somebody.ask("GET", "/v1/live?topics=host")[0] == 401
    assert somebody.ask("GET", "/v1/devices")[0] == 401
    status, answer = somebody.ask("POST", "/v1/session", {"token": "x" * 43})
    assert (status, answer) == (401, {"error": "this token is not known here, or it has expired"})
    assert somebody.ask("POST", "/v1/session", {"x": 1})[0] == 400
    somebody.cookie = f"fleetlearn-session-{somebody.place.port}={'x' * 43}"
    assert somebody.ask("GET", "/v1/session") == (200, {"name": None})
    assert somebody.ask("GET", "/v1/devices")[0] == 401


def test_the_cookie_is_no_scripts_and_ends_with_the_session(watched: Watched) -> None:
    somebody = Browser(watched.address)
    response, _ = somebody.send("POST", "/v1/session", {"token": watched.token("ada")})
    cookie = response.getheader("Set-Cookie") or ""
    assert cookie.startswith(f"fleetlearn-session-{somebody.place.port}=")
    assert "; HttpOnly; SameSite=Strict" in cookie
    assert "Secure" not in cookie, "this port has no TLS"
    answer = somebody.sign_in(watched.token("eve", "view"))
    assert (answer["name"], answer["role"], answer["several"]) == ("eve", "view", False)
    assert somebody.ask("GET", "/v1/session")[1] == answer
    assert somebody.ask("GET", "/v1/audit")[1][-1]["what"] == "signed in"
    before = somebody.cookie
    assert somebody.ask("POST", "/v1/session/end") == (200, {"name": None})
    somebody.cookie = before
    assert somebody.ask("GET", "/v1/devices")[0] == 401, "the cookie is of no use any more"


def test_changes_need_the_csrf_token_and_the_role(watched: Watched, ada: Browser) -> None:
    other = Browser(watched.address)
    other.sign_in(watched.token("bob"))
    for wrong in ("", "x", other.csrf, "ä"):
        right, ada.csrf = ada.csrf, wrong
        for path in ("/v1/runs/test/evaluate", "/v1/session/end"):
            status, answer = ada.ask("POST", path)
            assert (status, "X-CSRF-Token" in answer["error"]) == (403, True)
        ada.csrf = right
    assert [row["what"] for row in ada.ask("GET", "/v1/audit")[1]].count("evaluation") == 0
    assert ada.ask("POST", "/v1/runs/test/evaluate") == (200, {"name": "test"})
    viewer = Browser(watched.address)
    viewer.sign_in(watched.token("vera", "view"))
    assert viewer.ask("POST", "/v1/runs/test/evaluate") == (
        403,
        {"error": "vera may view; this needs the role operate"},
    )


def test_other_sites_are_refused(watched: Watched, ada: Browser) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://{ada.place.hostname}:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ):
        assert ada.ask("POST", "/v1/runs/test/evaluate", **headers)[0] == 403
        assert ada.ask("GET", "/v1/live", **headers)[0] == 403


def test_a_round_is_seen_as_it_goes(watched: Watched, ada: Browser) -> None:
    """Two devices, of which one fails first, sends what is refused, and is lost in the end."""
    with ada.look("host", "run/test") as look:
        look.until(lambda: "run/test" in look.values)
        run, host = look.values["run/test"], look.values["host"]
        assert (run["served"], run["phase"], run["connected"]) == (True, "gathering", 0)
        assert run["about"]["goal"] == 2
        assert host["run/test"]["phase"] == "gathering"
        first = watched.join("roof-1", tier="board")
        second = watched.join("roof-2")
        look.until(lambda: run["phase"] == "open" and run["leases"] == 2)
        assert run["ends"] > host["time"]
        task, other = watched.do(first.task()), watched.do(second.task())
        watched.do(second.send(report_of(other, update_of(1.0), task=f"{other.task}9")))
        assert watched.do(second.expect(Refused)).code == Code.UNKNOWN_TASK
        watched.do(second.send(Failed(other.task, "diverged", "<script>alert(1)</script>")))
        look.until(lambda: run["causes"] == {"failed: diverged": 1})
        assert run["dropped"] == {"failed: diverged": 1}
        assert run["refusals"] == {"unknown-task": 1}
        notes = look.lists["run/test"]["notes"]
        look.until(lambda: len(notes) == 2)
        assert [note[1:3] for note in notes] == [
            ["roof-2", "refused: unknown-task"],
            ["roof-2", "failed: diverged"],
        ]
        assert notes[1][3] == "<script>alert(1)</script>"
        watched.do(first.upload(task, update_of(1.0)))
        look.until(lambda: run["version"] == 1)
        look.until(lambda: len(look.lists["run/test"]["rounds"]) == 1)
        (row,) = look.lists["run/test"]["rounds"]
        (closed,) = read_status(watched.plan.data_dir).rounds  # type: ignore[union-attr]
        assert (row["number"], row["outcome"], row["reports"]) == (1, "committed", 1)
        assert row["metrics"] == closed.summary["metrics"]
        assert row["dropped"] == {"failed: diverged": 1}
        watched.do(first.do_round(update_of(1.0)))
        look.until(lambda: run["accepted"] == 1)
        watched.do(second.do_round(update_of(2.0)))
        look.until(lambda: run["version"] == 2)
        assert run["tiers"] == {"board": 2, "": 1}
        assert run["staleness"] == {"0": 3}
        samples = look.lists["run/test"]["samples"]
        look.until(lambda: samples and samples[-1][1] == 2 and sum(s[5] for s in samples) == 3)
        received = sum(row["up"] for row in look.lists["run/test"]["rounds"])
        assert received > 3 * update_of(1.0).nbytes, "with their frames"
        look.until(lambda: sum(sample[6] for sample in samples) == received)
        look.until(lambda: len(look.lists["host"]["process"]) > 0)
        assert look.lists["host"]["process"][-1][2] > 10_000_000
        assert look.values["host"]["run/test"]["spark"] == [pytest.approx(0.7)] * 2


def test_what_a_run_did_before_is_there_after_a_restart(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan = make_plan(round__goal=1, stop__rounds=2)
    with Watched(tmp_path, plan) as watched:
        peer = watched.join("a")
        watched.do(peer.do_round(update_of(1.0)))
        token = watched.token("ada")
        browser = Browser(watched.address)
        browser.sign_in(token)
        with browser.look("run/test") as look:
            look.until(lambda: len(look.lists.get("run/test", {}).get("rounds", ())) == 1)
            before = look.lists["run/test"]["rounds"]
            watched.do(measured(watched, 1, {"loss": 0.5}))
            look.until(lambda: look.lists["run/test"]["held_out"] == [[1, {"loss": 0.5}]])
            watched.__exit__()
            look.until(lambda: look.is_over)
            assert not look.ended, "the run is there; the coordinator is not"
    with Watched(tmp_path, plan) as watched:
        restarted = Browser(watched.address)
        # The port is another one now, and so is the cookie's name; its secret is still good.
        secret = browser.cookie.partition("=")[2]
        restarted.cookie = f"fleetlearn-session-{restarted.place.port}={secret}"
        assert restarted.ask("GET", "/v1/session")[1]["csrf"] == browser.csrf
        with restarted.look("run/test") as look:
            look.until(lambda: "run/test" in look.values)
            (row,) = look.lists["run/test"]["rounds"]
            assert {**row, "opened": 0, "closed": 0} == {**before[0], "opened": 0, "closed": 0}
            assert look.values["run/test"]["version"] == 1
            assert look.lists["run/test"]["held_out"] == [[1, {"loss": 0.5}]]
            minutes = look.lists["run/test"]["minutes"]
            assert sum(minute[5] for minute in minutes) == 1, "the report that counted"
            assert max(minute[9] for minute in minutes) == 1, "devices that were present"


async def measured(watched: Watched, version: int, metrics: dict[str, float]) -> None:
    """The process for held-out data has measured a version, and its result is stored."""
    run = watched.server.run
    run.store.storage.held_out.write(version, {"examples": 3, "metrics": metrics})
    watched.server.held_out_measured(version, metrics)


def test_a_topic_that_is_not_there(ada: Browser) -> None:
    status, answer = ada.ask("GET", "/v1/live?topics=run/nowhere")
    assert (status, answer["error"]) == (404, "there is no run called nowhere; there are: test")
    status, answer = ada.ask("GET", f"/v1/live?topics={','.join('abcdef')}")
    assert status == 400


def test_who_is_removed_sees_nothing_more(watched: Watched, ada: Browser) -> None:
    with ada.look("host") as look:
        look.until(lambda: "host" in look.values)
        watched.identities.remove("ada", 0.0)
        look.until(lambda: look.is_over)
    assert ada.ask("GET", "/v1/session") == (200, {"name": None})


def test_viewers_who_do_not_read_are_dropped(
    watched: Watched, ada: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they cost ends; the others see on."""
    monkeypatch.setattr(admin_listener, "CHUNK_TIMEOUT", 0.1)
    monkeypatch.setattr(admin_listener, "MOST_UNSENT", 1)
    topics = watched.server.run  # the run's own state is not what the viewers hold
    assert topics is not None
    connections = [ada.open("GET", "/v1/live?topics=host,run/test")[0] for _ in range(8)]
    with ada.look("host") as look:
        seen = len(look.lists)
        look.until(lambda: look.values.get("host", {}).get("time", 0) > 0)
        assert len(look.lists) > seen
    for connection in connections:
        connection.close()
    with ada.look("host") as look:
        look.until(lambda: "host" in look.values)


def test_several_runs_come_and_go(bundle_path: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        text = plan_text(bundle_path, tmp_path / f"{name}.run", round__goal=1)
        (tmp_path / f"{name}.toml").write_text(text.replace('"test"', f'"{name}"', 1))
    (tmp_path / "runs").mkdir()
    runs = Runs(tmp_path / "runs")
    runs.add("a", tmp_path / "a.toml")
    with Watched(tmp_path, None) as watched:
        browser = Browser(watched.address)
        assert browser.sign_in(watched.token("ada"))["several"] is True
        with browser.look("host") as look:
            look.until(lambda: look.values.get("host", {}).get("run/a", {}).get("served"))
            host = look.values["host"]
            runs.add("b", tmp_path / "b.toml")
            look.until(lambda: host.get("run/b", {}).get("served"))
            assert browser.ask("POST", "/v1/runs/a/stop")[0] == 200
            look.until(lambda: host["run/a"]["wanted"] == "stopped" and not host["run/a"]["served"])
            with browser.look("run/a") as stopped:
                stopped.until(lambda: "run/a" in stopped.values)
                assert stopped.values["run/a"]["served"] is False
                assert browser.ask("POST", "/v1/runs/a/resume")[0] == 200
                stopped.until(lambda: stopped.values["run/a"]["served"])
            look.until(lambda: host["run/a"]["served"])
            assert browser.ask("POST", "/v1/runs/a/remove")[0] == 200
            look.until(lambda: "run/a" not in host)


def test_json_is_what_the_page_shows(watched: Watched, ada: Browser) -> None:
    """Any view is an endpoint: with the cookie as with a token."""
    for name in ("roof-1", "Roof-2", "cellar"):
        watched.join(name, ("north",) if name == "cellar" else ())
    for query, names in (
        ("search=ROOF", ["Roof-2", "roof-1"]),
        ("search=north&state=connected", ["cellar"]),
        ("offset=1&last=1", ["cellar"]),
        ("state=revoked", []),
    ):
        wait_for(lambda: ada.ask("GET", "/v1/devices?search=")[1]["connected"] == 3, "devices")
        status, answer = ada.ask("GET", f"/v1/devices?{query}")
        assert (status, answer["total"]) == (200, 3)
        assert [row["device"] for row in answer["devices"]] == names
    page = ada.ask("GET", "/v1/devices")[1]
    assert [row["device"] for row in page["devices"]] == ["Roof-2", "cellar", "roof-1"]
    assert ada.ask("GET", "/v1/devices?state=odd")[0] == 400
    assert ada.ask("GET", "/v1/devices?offset=-1")[0] == 400
    for path in ("runs", "runs/test", "runs/test/rounds", "runs/test/models", "devices", "audit"):
        status, answer = ada.ask("GET", f"/v1/{path}")
        assert status == 200
        assert json.dumps(answer)


def test_the_last_that_is_told_is_that_a_run_is_finished(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    """A coordinator that ends with its training tells how it ended."""
    with Watched(tmp_path, make_plan(round__goal=1, stop__rounds=1)) as watched:
        browser = Browser(watched.address)
        browser.sign_in(watched.token("ada"))
        with browser.look("run/test") as look:
            look.until(lambda: "run/test" in look.values)
            watched.do(watched.join("a").do_round(update_of(1.0)))
            watched.__exit__()
            look.until(lambda: look.is_over)
            assert look.values["run/test"]["finished"] == "1 rounds done"
            assert [row["number"] for row in look.lists["run/test"]["rounds"]] == [1]
