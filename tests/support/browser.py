"""Pages in a real browser: Chromium without a window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import unescape
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from playwright.sync_api import BrowserContext, sync_playwright

Site = TypeVar("Site", bound=ThreadingHTTPServer)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def chromium() -> str:
    """The browser's path. Skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            f"no Chromium here (looked for {', '.join(NAMES)}; on Debian: apt-get install chromium)"
        )
    return found


@contextmanager
def served(site: Site) -> Iterator[Site]:
    """Let a site answer in a thread."""
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    try:
        yield site
    finally:
        site.shutdown()
        site.server_close()
        thread.join()


@contextmanager
def browsing(
    profile: Path, *more_flags: str, webgpu: bool = False, **options: Any
) -> Iterator[BrowserContext]:
    """A browser with a profile of its own, driven by Playwright; it reaches this machine alone.

    Args:
        more_flags: Of Chromium, for example ``"--use-fake-device-for-media-stream"``.
        webgpu: With WebGPU, which the processor computes (SwiftShader).
        options: Of Playwright's ``launch_persistent_context``, for example ``color_scheme="dark"``.
    """
    flags = [
        *FLAGS[1:-1],
        *more_flags,
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
        # kill_tabs would kill the process of a tab to come
        "--disable-features=SpareRendererForSitePerProcess",
    ]
    if webgpu:
        flags.remove("--disable-gpu")
        flags += [
            "--enable-unsafe-webgpu",
            "--use-webgpu-adapter=swiftshader",
            "--enable-features=Vulkan",
        ]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium(), args=flags, **options
        )
        try:
            yield started
        finally:
            started.close()


def tab_processes() -> list[psutil.Process]:
    """The processes of the tabs of the browsers that this process started; a tab's workers are in
    its process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "--type=renderer" in process.cmdline():
                found.append(process)
    return found


def kill_tabs(tabs: list[psutil.Process] | None = None) -> None:
    """Kill these tabs; all, where none are given."""
    for process in tab_processes() if tabs is None else tabs:
        process.kill()


def charts_of(page: Path) -> dict[str, Any]:
    """The figures that a page was written with, by title."""
    text = page.read_text("utf-8")
    found = re.search(r"^const charts = (.*);$", text, re.MULTILINE)
    assert found
    titles = [unescape(title) for title in re.findall(r"<h3>(.*?)</h3>", text)]
    return dict(zip(titles, json.loads(found[1]).values(), strict=True))


def ask(page: Path, script: str, folder: Path) -> Any:
    """Return what the JavaScript ``script``, the body of an async function, returns in the page.
    Errors of the script and of the page fail the test. The script runs before the page's load
    event, and may not wait for anything."""
    probe = """<script>
      const problems = [];
      addEventListener("error", event => problems.push(event.message));
      </script>"""
    finish = f"""<script>
      const told = error => {{ problems.push(String(error)); }};
      (async () => {{ {script} }})().catch(told).then(answer => {{
        const place = document.createElement("pre");
        place.id = "answer";
        place.textContent = JSON.stringify({{ answer: answer ?? null, problems }});
        document.body.append(place);
      }});
      </script>"""
    copy = folder / "probed.html"
    text = page.read_text("utf-8").replace("<head>", f"<head>{probe}", 1)
    head, _, tail = text.rpartition("</body>")
    copy.write_text(f"{head}{finish}</body>{tail}", "utf-8")
    command = [
        chromium(),
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,2000",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer, done.stderr[-2000:]
    found = json.loads(unescape(answer[1]))
    assert found["problems"] == []
    return found["answer"]
