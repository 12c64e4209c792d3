"""For tests: a host of the page for people, with the headers of the coordinator's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from browser import served
from processes import status_of
from web_sdk import FOLDER, build

EXAMPLE = FOLDER / "page" / "test" / "status.json"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self' wss: ws:; "
        "worker-src 'self'; img-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@cache
def built_page() -> Path:
    """The page's folder."""
    build("build:page", "page", "src", "scripts")
    return FOLDER / "build" / "page"


class PageSite(ThreadingHTTPServer):
    """Serves the built page with a page.json and a status.json of the test's."""

    daemon_threads = True

    def __init__(
        self, coordinator: str, status: Callable[[], Any] | None, folder: Path, port: int
    ) -> None:
        super().__init__(("127.0.0.1", port), partial(Handler, directory=str(folder)))
        self.origin = f"http://127.0.0.1:{self.server_address[1]}"
        self.status = status
        self.settings: dict[str, Any] | None = {
            "coordinator": coordinator,
            "status": "status.json" if status else None,
            "title": "Handwritten digits",
            "about": (
                "Together we train a small model that reads handwritten digits. Nobody sees what "
                "you draw."
            ),
            "task": "digits",
        }


class Handler(SimpleHTTPRequestHandler):
    server: PageSite

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/page.json" and self.server.settings is not None:
            self._answer(self.server.settings)
        elif path == "/status.json" and self.server.status is not None:
            self._answer(self.server.status())
        else:
            super().do_GET()

    def _answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def page_site(
    coordinator: str,
    status: Callable[[], Any] | None = None,
    *,
    folder: Path | None = None,
    port: int = 0,
) -> Iterator[PageSite]:
    """``folder``: of a built page; left out: the page as it is now. ``port`` 0: any."""
    site = PageSite(coordinator, status, folder or built_page(), port)
    with served(site):
        yield site


def public_status(data_dir: Path) -> dict[str, Any]:
    """What the coordinator's own page port says of a run."""
    status = status_of(data_dir)
    live: dict[str, Any] = {} if status is None else status.live
    rounds = (
        []
        if status is None
        else [closed for closed in status.rounds if closed.outcome == "committed"]
    )
    return {
        "run": "test",
        "state": "running",
        "round": live.get("round", 0),
        "rounds": None,
        "reports": live.get("accepted", 0),
        "goal": 1,
        "connected": live.get("connected", 0),
        "history": [
            {
                "round": closed.number,
                "loss": closed.summary["metrics"].get("loss"),
                "accuracy": closed.summary["metrics"].get("accuracy"),
                "devices": closed.summary["reports"],
            }
            for closed in rounds
        ],
    }


def write_service(folder: Path, port: int, site: PageSite) -> str:
    """The service file of a coordinator that takes enrolled devices alone. Returns a token."""
    service = folder / "service.toml"
    service.write_text(f'port = {port}\nidentities = "identities"\norigins = ["{site.origin}"]\n')
    command = [sys.executable, "-m", "fleetlearn_coordinator", "token", service, "--uses", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
