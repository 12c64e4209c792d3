"""A coordinator over its administrators' port: streams that go on, and what ends them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from fleetlearn_coordinator.commands import remote
from fleetlearn_coordinator.commands.exits import NoAnswerError, NotAllowedError
from fleetlearn_coordinator.commands.remote import RemoteTarget
from fleetlearn_coordinator.network import admin_listener
from fleetlearn_protocol import FleetError
from live_host import LiveHost, live_host
from peers import update_of


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveHost]:
    with live_host(tmp_path_factory.mktemp("host")) as host:
        yield host


def target(host: LiveHost, name: str) -> RemoteTarget:
    return RemoteTarget(host.url, host.host.token(name), None)


def test_what_changes_comes_over_the_same_connection(host: LiveHost) -> None:
    olga = target(host, "olga")
    looks = olga.watch_run("digits", 5)
    assert next(looks).state == "running"
    olga.change("digits", "paused")
    assert "paused" in [run.state for run in islice(looks, 2)]
    olga.change("digits", "resumed")
    looks.close()  # type: ignore[attr-defined]


def test_events_come_once_and_in_their_order(host: LiveHost) -> None:
    events = target(host, "evan").events("digits")
    first = next(events)
    assert [event.text.partition(":")[0] for event in first if event.what == "round-closed"] == [
        "round 1 committed",
        "round 2 committed",
    ]
    peer = host.peer
    host.host.do(peer.upload(host.task, update_of(1.0, 10)))
    seen = []
    while not any(event.what == "round-closed" for event in seen):
        seen += next(events)
    assert "round 3 committed" in next(event.text for event in seen if event.what == "round-closed")
    assert not {event.text for event in seen} & {
        event.text for event in first if event.what == "round-closed"
    }
    events.close()  # type: ignore[attr-defined]


def test_devices_come_in_pages(host: LiveHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one alone where a name is given."""
    ada = target(host, "ada")
    monkeypatch.setattr(remote, "_rows", lambda last: "1")
    asked: list[str] = []
    ask = ada._ask
    monkeypatch.setattr(ada, "_ask", lambda method, path: asked.append(path) or ask(method, path))
    assert [row.device for row in ada.devices()] == ["roof-7", "roof-8"]
    assert [row.device for row in ada.devices("roof-8")] == ["roof-8"]
    assert ada.devices("roof") == [], "a part of a name is none"
    offsets = [dict(parse_qsl(path.partition("?")[2]))["offset"] for path in asked]
    assert offsets == ["0", "1", "0", "0", "1"]


def test_a_token_that_is_taken_away_ends_its_streams(host: LiveHost) -> None:
    looks = target(host, "mallory").watch_host()
    assert next(looks).running
    host.host.identities.remove("mallory", 0.0)
    with pytest.raises(NotAllowedError, match="not known here"):
        list(islice(looks, 5))


def test_a_stream_that_the_port_ends_goes_on_in_the_next_connection(
    host: LiveHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_listener, "VIEWER_LIFE", 0.0)
    events = target(host, "nina").events("digits")
    before = next(events)
    for _ in range(3):
        assert not {event.text for event in next(events)} & {
            event.text for event in before if event.what == "round-closed"
        }, "the last rounds are not told of again"
    events.close()  # type: ignore[attr-defined]


def test_addresses_that_are_none(tmp_path: Path) -> None:
    for url in ("ftp://x", "http://", "http://x/path", "https://"):
        with pytest.raises(FleetError, match="is no address of an administrators' port"):
            RemoteTarget(url, "t", None)
    with pytest.raises(NoAnswerError, match=r"no coordinator answers at http://127\.0\.0\.1:1"):
        RemoteTarget("http://127.0.0.1:1", "t", None).runs()
