"""The schema of what the live page is told: it is the code's, and it finds mistakes. What is really
sent is held to it wherever tests look at the page (tests/support/watched.py)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from fleetlearn_coordinator.dashboard.live_feed import Topic, Viewer
from fleetlearn_coordinator.dashboard.live_records import Minute
from fleetlearn_coordinator.dashboard.run_history import (
    FleetNow,
    RunHistory,
    evaluation_row,
    round_row,
)
from fleetlearn_coordinator.service import live_schema
from live_schema import SCHEMA, check_event, validator
from peers import PlanMaker, update_of
from watched import Browser, Watched

Change = Callable[[dict[str, Any]], object]
SUMMARY = {"reports": 2, "dropped": {"lost": 1}, "metrics": {"loss": 0.5, "error": float("nan")}}
VALUES = {
    "name": "test",
    "served": False,
    "about": {"goal": 2, "rounds": None, "metric": "error", "target": 0.1},
    "version": 1,
    "round": 2,
    "finished": None,
    "members": {"large": 1},
}


def events() -> list[dict[str, Any]]:
    """Return a run's document, and what changes then."""
    history = RunHistory()
    topic = Topic("run/test", lambda: {**VALUES, **history.totals()}, history.lists)
    viewer = Viewer()
    topic.join(viewer)
    history.counted(3, "board")
    history.refused(1.0, "a", "bad-report", "no")
    history.sample(1.5, FleetNow(3, 1, 1, 0))
    history.minutes.add(Minute(60, 3, 1, 1, 0, 1, 40, 50, {"lost": 1}, 4))
    member = {"reports": 2, "metrics": {"loss": 0.5}, "change": 0.25, "partial": 0}
    members = {"members": {"large": member}}
    history.rounds.add(round_row(1, "committed", 0.0, 2.0, SUMMARY | members, version=1))
    history.rounds.add(round_row(2, "abandoned", 2.0, 3.0, {}, "too few devices"))
    history.evaluations.add(evaluation_row(1, 1, True, 2.5, SUMMARY))
    history.held_out.add([1, {"loss": 0.25}])
    topic.tell()

    async def read() -> list[bytes | None]:
        return [await viewer.next(), await viewer.next()]

    found = asyncio.run(read())
    return [json.loads((each or b"").removeprefix(b"data: ")) for each in found]


def test_the_schema_is_that_of_the_code() -> None:
    module = live_schema.__name__
    assert SCHEMA.read_text() == live_schema.text(), f"run python -m {module} {SCHEMA}"
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))


def test_a_document_and_its_change_are_as_the_schema_says() -> None:
    document, change = events()
    assert set(change["set"]) == {"refusals", "staleness", "tiers"}
    assert len(change["add"]) == 6, "each list has something new"
    for event in (document, change, {"topic": "run/test", "ended": True}):
        check_event(event)
        validator("event").validate(event)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda event: event.update(more=1),
        lambda event: event.pop("most"),
        lambda event: event["values"].pop("about"),
        lambda event: event["values"].update(more=1),
        lambda event: event["values"].update(version="1"),
        lambda event: event["values"]["about"].pop("goal"),
        lambda event: event["values"].update(bytes=[1]),
        lambda event: event["lists"].pop("held_out"),
        lambda event: event["lists"].update(seconds=[]),
    ],
)
def test_a_document_with_a_mistake_is_found(spoil: Change) -> None:
    document, _ = events()
    spoil(document)
    with pytest.raises(jsonschema.ValidationError):
        check_event(document)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda event: event.pop("gone"),
        lambda event: event["set"].update(more=1),
        lambda event: event["set"].update(phase=None),
        lambda event: event["set"].update(tiers={"board": "2"}),
        lambda event: event["add"]["samples"][0].pop(),
        lambda event: event["add"]["samples"][0].append(1),
        lambda event: event["add"]["minutes"][0].__setitem__(8, 3),
        lambda event: event["add"]["rounds"][0].update(outcome="lost"),
        lambda event: event["add"]["rounds"][0].pop("version"),
        lambda event: event["add"]["evaluations"][0].update(more=1),
        lambda event: event["add"]["held_out"][0].__setitem__(1, [0.25]),
        lambda event: event["add"]["notes"][0].__setitem__(0, "now"),
    ],
)
def test_a_change_with_a_mistake_is_found(spoil: Change) -> None:
    _, change = events()
    spoil(change)
    with pytest.raises(jsonschema.ValidationError):
        check_event(change)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host-document", {"topic": "run/test", "values": {"time": 1}, "lists": {}, "most": {}}),
        ("host-document", {"topic": "host", "values": {}, "lists": {}, "most": {}}),
        (
            "host-document",
            {"topic": "host", "values": {"time": 1, "run/a": {}}, "lists": {}, "most": {}},
        ),
        ("run-change", {"topic": "host", "set": {}, "add": {}, "gone": []}),
        ("ended", {"topic": "host", "ended": False}),
    ],
)
def test_another_topic_and_a_run_without_its_state_are_found(name: str, value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator(name).validate(value)


def test_a_run_with_all_rules_is_told_as_the_schema_says(
    make_plan: PlanMaker, tmp_path: Any
) -> None:
    """Selection, pace, and an evaluation that is under way each add something."""
    plan = make_plan(
        recipe="fedavg", round__goal=1, round__minimum=1, selection__tags=["roof"],
        pace__connected=2, evaluation__every=1, evaluation__devices=1,
    )  # fmt: skip
    with Watched(tmp_path, plan) as watched:
        browser = Browser(watched.address)
        browser.sign_in(watched.token("ada"))
        watched.join("cellar-1", ("cellar",))
        with browser.look("host", "run/test") as look:
            look.until(lambda: look.values.get("run/test", {}).get("ineligible") == 1)
            run = look.values["run/test"]
            assert {"ineligible_by", "barred", "sent_away", "away", "all_back_in"} <= set(run)
            watched.do(watched.join("roof-1", ("roof",)).do_round(update_of(1.0)))
            look.until(lambda: run["evaluation"] is not None)
            assert run["exchanges"]["evaluation"] == run["evaluation"]
        for path, kind in (("devices", "devices"), ("devices/roof-1", "device")):
            status, answer = browser.ask("GET", f"/v1/{path}")
            assert status == 200
            validator(kind).validate(answer)
            with pytest.raises(jsonschema.ValidationError):
                validator(kind).validate({**answer, "more": 1})
