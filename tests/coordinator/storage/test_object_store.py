"""Requests to an object store that dies while it answers are made again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.storage import object_store
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.object_store import Objects
from processes import free_port

CONTENT = b"0123456789"
LISTED = b"""<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated><Contents>
<Key>runs/a/b</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"1"</ETag>
<Size>10</Size></Contents></ListBucketResult>"""


class Breaks(BaseHTTPRequestHandler):
    """A store whose first answers break off in the middle."""

    protocol_version = "HTTP/1.1"
    broken: list[str]
    asked: list[str]

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.asked.append(self.command)
        content = CONTENT
        if self.command == "POST":
            content = b"<DeleteResult><Deleted><Key>runs/a</Key></Deleted></DeleteResult>"
        elif "list-type" in self.path:
            content = LISTED
        part = "Range" in self.headers
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes 0-9/{len(CONTENT)}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(0 if self.command == "PUT" else len(content)))
        self.end_headers()
        if self.broken:
            self.broken.pop()
            self.wfile.write(content[:3])
            self.close_connection = True
        elif self.command not in ("HEAD", "PUT"):
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

    def log_message(self, *words: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Breaks]]:
    handler = type("Handler", (Breaks,), {"broken": [], "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret of tests")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_answer_that_breaks_off_is_asked_for_again(store: type[Breaks], tmp_path: Path) -> None:
    objects = Objects("s3://bucket/runs")
    store.broken[:] = ["once", "twice"]
    objects.remove(["a"])
    assert store.asked == ["POST"] * 3
    for ask, found in (
        (lambda: objects.read("a"), CONTENT),
        (lambda: objects.read_range("a", 0, 10), CONTENT),
        (lambda: objects.keys("a"), ["b"]),
        (lambda: objects.fetch("a", tmp_path / "a"), None),
    ):
        store.broken[:] = ["once"]
        assert ask() == found
        assert not store.broken
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_it_is_not_asked_for_ever(store: type[Breaks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PATIENCE", object_store.PATIENCE * 0.02)
    store.broken[:] = ["always"] * 1000
    with pytest.raises(StoreUnavailableError, match="runs/a cannot be removed now"):
        Objects("s3://bucket/runs").remove(["a"])
    assert len(store.asked) > 2


def test_a_bucket_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto")
    from object_server import BUCKET, object_server

    with object_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert Objects(f"s3://{BUCKET}/fleet").keys("") == []
        with pytest.raises(StoreError, match="s3://nobody/fleet: there is no such bucket") as found:
            Objects("s3://nobody/fleet").keys("")
        assert not isinstance(found.value, StoreUnavailableError)


def test_a_store_that_is_not_there_is_said_before_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_store, "SLOW", 0.2)
    monkeypatch.setattr(object_store, "PATIENCE", timedelta(seconds=1))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "tests")
    with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailableError, match="owner"):
        Objects("s3://bucket/fleet").read("owner")
    assert "s3://bucket/fleet: the object store has not answered" in caplog.text
