"""For tests: a host of the page for people, with the headers of the coordinator's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from browser import served
from filelock import FileLock
from web_sdk import FOLDER, node, npm

EXAMPLE = FOLDER / "page" / "test" / "status.json"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self' wss: ws:; "
    "worker-src 'self'; img-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@cache
def built_page() -> Path:
    """The page's folder, built once for the tests of this process."""
    node()
    with FileLock(FOLDER / "build.lock"):
        done: subprocess.CompletedProcess[str] = npm("run", "--silent", "build:page")
    assert done.returncode == 0, done.stderr
    return FOLDER / "build" / "page"


class PageSite(ThreadingHTTPServer):
    """Serves the built page with a page.json and a status.json of the test's."""

    daemon_threads = True

    def __init__(self, coordinator: str, status: Callable[[], Any] | None, folder: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), partial(Handler, directory=str(folder)))
        self.origin = f"http://127.0.0.1:{self.server_address[1]}"
        self.status = status
        self.settings: dict[str, Any] | None = {
            "coordinator": coordinator,
            "status": "status.json" if status else None,
            "title": "Handwritten digits",
            "about": "Together we train a small model that reads handwritten digits. Nobody sees what you draw.",
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
    coordinator: str, status: Callable[[], Any] | None = None, *, folder: Path | None = None, port: int = 0
) -> Iterator[PageSite]:
    """``folder``: of a built page; left out: the page as it is now. ``port`` 0: any."""
    site = PageSite(coordinator, status, folder or built_page(), port)
    with served(site):
        yield site
