"""The archive that `npm pack` makes of the SDK for browsers, and a bundler's use of it as README.md
says."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import browsing, served
from filelock import FileLock
from page_person import PATIENCE
from web_sdk import FOLDER, node, npm

ROOT = Path(__file__).parents[3]
PAGE = """<!doctype html>
<script type="module">
  import { train } from "./app.js";
  globalThis.states = [];
  const data = { x: { values: new Float32Array(8), shape: [2, 4] } };
  const device = train("ws://127.0.0.1:9", data, (state) => states.push(state));
  device.serve().catch((error) => states.push({ failed: String(error) }));
</script>
"""
BUNDLERS = {
    "vite": (["node_modules/vite/bin/vite.js", "build", "--logLevel", "error"], "dist"),
    "esbuild": (
        [
            "node_modules/esbuild/bin/esbuild",
            "app.js",
            "worker.js",
            "--bundle",
            "--format=esm",
            "--target=es2022",
            "--outdir=public",
            "--log-level=error",
        ],
        "public",
    ),
}
"""What each is run with, and where it writes."""


@cache
def archive() -> Path:
    """The archive, made once for the tests of this process."""
    node()
    with FileLock(FOLDER / "build.lock"):
        done = npm("run", "--silent", "build")
        assert done.returncode == 0, done.stdout + done.stderr
        (FOLDER / "build").mkdir(exist_ok=True)
        done = npm("pack", "--json", "--pack-destination", "build")
    assert done.returncode == 0, done.stderr
    return FOLDER / "build" / json.loads(done.stdout)[0]["filename"]


def test_the_archive_has_all_that_a_page_needs() -> None:
    with tarfile.open(archive()) as packed:
        names = set(packed.getnames())
        licence = packed.extractfile("package/LICENSE")
        assert licence is not None
        assert licence.read() == (ROOT / "LICENSE").read_bytes()
        manifest = packed.extractfile("package/package.json")
        assert manifest is not None
        exports = json.load(manifest)["exports"]
    for one in exports.values():
        for path in one.values():
            assert f"package/{path.removeprefix('./')}" in names
    assert "package/scripts/runtime_files.mjs" in names
    assert "package/README.md" in names
    assert not any("/test/" in name or "/page/" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("bundler", list(BUNDLERS))
def test_the_recipe_for_a_bundler_gives_a_device_that_can_train(
    bundler: str, tmp_path: Path
) -> None:
    modules = tmp_path / "node_modules"
    modules.mkdir()
    with tarfile.open(archive()) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (tmp_path / "unpacked" / "package").rename(modules / "fleetlearn-web")
    for found in (FOLDER / "node_modules").iterdir():
        (modules / found.name).symlink_to(found)
    readme = (FOLDER / "README.md").read_text("utf-8")
    files = re.findall(r"```js\n// ([a-z_.]+\.m?js)\b.*?\n(.*?)```", readme, re.DOTALL)
    assert {name for name, _ in files} == {"app.js", "worker.js", "copy_runtime.mjs"}
    for name, content in files:
        (tmp_path / name).write_text(content)
    (tmp_path / "package.json").write_text('{ "type": "module" }')
    (tmp_path / "index.html").write_text(PAGE)
    command, output = BUNDLERS[bundler]
    program = node()[0]
    for arguments in (["copy_runtime.mjs"], command):
        first = [] if arguments[0].endswith("esbuild") else [program]
        done = subprocess.run(
            [*first, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    if bundler == "esbuild":
        (tmp_path / output / "index.html").write_text(PAGE)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    site = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / output)))
    site.daemon_threads = True
    with served(site), browsing(tmp_path / "profile") as browser:
        page = browser.pages[0]
        page.set_default_timeout(PATIENCE)
        page.goto(f"http://127.0.0.1:{site.server_address[1]}/")
        page.wait_for_function(
            "globalThis.states?.some(state => state.failed || state.why?.startsWith('no "
            "connection'))"
        )
        states = page.evaluate("states")
    assert [state["failed"] for state in states if "failed" in state] == []
    # what computes is there, and no coordinator is
    assert "loading" in {state["phase"] for state in states}
