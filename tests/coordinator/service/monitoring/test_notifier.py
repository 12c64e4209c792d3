"""Who is told of alerts: a real HTTP server, real TLS, real processes."""

from __future__ import annotations

import json
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.plan.service_settings import AlertSettings
from fleetlearn_coordinator.service.monitoring import notifier as module
from fleetlearn_coordinator.service.monitoring.alerts import AlertNotice
from fleetlearn_coordinator.service.monitoring.notifier import MOST_WAITING, Notifier
from fleetlearn_coordinator.service.private_ca import make_certificate
from processes import wait_for

NOTICE = AlertNotice("NoRound", "firing", "warning", "a", "run a: ...", 7.0, 5.0, 1.0, 2.0, "host")


class Hook:
    """A webhook's server, which answers with these statuses, then 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.got = list(statuses), list[dict[str, Any]]()
        self.release = threading.Event()
        self.release.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.release.wait(20)
                hook.got.append({"type": self.headers["Content-Type"], **json.loads(body)})
                status = hook.statuses.pop(0) if hook.statuses else 200
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])


@contextmanager
def served(hook: Hook) -> Iterator[Hook]:
    thread = threading.Thread(target=hook.server.serve_forever)
    thread.start()
    try:
        yield hook
    finally:
        hook.server.shutdown()
        thread.join()
        hook.server.server_close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0, 0.0))


@pytest.mark.usefixtures("quick")
def test_a_webhook_gets_json_and_is_tried_again() -> None:
    with served(Hook(500, 503)) as hook:
        notifier = Notifier(AlertSettings(webhook=f"http://127.0.0.1:{hook.port}/hook"))
        notifier.tell(NOTICE)
        wait_for(lambda: len(hook.got) == 3, "a notice")
        notifier.close()
    assert hook.got == 3 * [
        {
            "type": "application/json", "alert": "NoRound", "state": "firing",
            "severity": "warning", "run": "a", "text": "run a: ...", "value": 7.0, "limit": 5.0,
            "since": 1.0, "at": 2.0, "coordinator": "host",
        }
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_tries_are_bounded_and_the_secret_part_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with served(Hook(500, 500, 500, 500)) as hook:
        notifier = Notifier(AlertSettings(webhook=f"http://127.0.0.1:{hook.port}/a-secret"))
        notifier.tell(NOTICE)
        notifier.tell(NOTICE)
        wait_for(lambda: len(hook.got) == 5, "a notice")
        notifier.close()
    assert len(hook.got) == 5, "four times the first notice, once the second"
    assert len(caplog.messages) == 4
    assert caplog.messages[0] == (
        "the webhook at 127.0.0.1 could not be told of an alert: it answered 500; it is tried "
        "again in 0 s"
    )
    assert "secret" not in caplog.text


def test_redirections_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    with served(Hook(302)) as hook:
        notifier = Notifier(AlertSettings(webhook=f"http://127.0.0.1:{hook.port}/"))
        notifier.tell(NOTICE)
        wait_for(lambda: bool(caplog.messages), "a notice")
        notifier.close()
    assert len(hook.got) == 1
    assert "it answered 302" in caplog.messages[0]


def test_a_certificate_is_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], 30)
    hook = Hook()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    hook.server.socket = context.wrap_socket(hook.server.socket, server_side=True)
    url = f"https://127.0.0.1:{hook.port}/"
    with served(hook):
        for settings, expected in (
            (AlertSettings(webhook=url), 0),
            (AlertSettings(webhook=url, webhook_ca=tmp_path / "ca.pem"), 1),
        ):
            notifier = Notifier(settings)
            notifier.tell(NOTICE)
            wait_for(lambda: bool(caplog.messages), "a notice")
            notifier.close()
            assert len(hook.got) == expected
    assert "certificate" in caplog.messages[0]


def test_a_command_has_the_json_as_its_input(tmp_path: Path) -> None:
    program = f"import sys; open({str(tmp_path / 'told')!r}, 'a').write(sys.stdin.read() + '\\n')"
    notifier = Notifier(AlertSettings(command=(sys.executable, "-c", program)))
    notifier.tell(NOTICE)
    notifier.tell(NOTICE)
    notifier.close()
    lines = (tmp_path / "told").read_text().splitlines()
    assert [json.loads(line)["alert"] for line in lines] == ["NoRound", "NoRound"]


def test_a_command_that_fails_or_hangs_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND_TIMEOUT", 0.2)
    for program, words in (
        ("import time; time.sleep(60)", "it was killed after 0 s"),
        ("import sys; sys.exit('no such room')", "it ended with status 1: no such room"),
    ):
        caplog.clear()
        monkeypatch.setattr(module, "COMMAND_TIMEOUT", 0.2 if "sleep" in program else 20.0)
        notifier = Notifier(AlertSettings(command=(sys.executable, "-c", program)))
        notifier.tell(NOTICE)
        notifier.close()
        assert words in caplog.messages[0]


def test_who_does_not_answer_holds_up_neither_the_caller_nor_the_other_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = f"import sys; open({str(tmp_path / 'told')!r}, 'w').write('x')"
    with served(Hook()) as hook:
        hook.release.clear()
        settings = AlertSettings(
            webhook=f"http://127.0.0.1:{hook.port}/", command=(sys.executable, "-c", program)
        )
        notifier = Notifier(settings)
        notifier.tell(NOTICE)
        wait_for(lambda: (tmp_path / "told").exists(), "a notice")
        webhook = notifier._ways[0]
        for _ in range(MOST_WAITING + 5):
            webhook.put(b"{}")
        dropped = [message for message in caplog.messages if "is dropped" in message]
        assert 4 <= len(dropped) <= 5, "one is being told"
        hook.release.set()
        notifier.close()
