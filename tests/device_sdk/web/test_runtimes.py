"""What computes in a browser: one thread, threads and WebGPU give the numbers of the Python
device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import browsing
from fleetlearn_device import open_runtime
from fleetlearn_protocol import open_bundle
from playwright.sync_api import Page
from web_sdk import RUNTIME_FILES, WEBGPU_FILES, built, link_runtime

BATCH, STEPS, LR = 8, 4, 0.05
TOLERANCE = 1e-4
MODELS = ("cnn", "own")
"""onnxruntime-web 1.30 cannot load a graph with dropout, such as own's, for WebGPU."""
ASK = """message => new Promise((resolve, reject) => {
  self.worker ??= new Worker("step_worker.js", { type: "module" });
  worker.onerror = event => reject(new Error(event.message));
  worker.onmessage = ({ data }) => {
    if (data.error) reject(new Error(data.error));
    else resolve(data.found instanceof Float32Array ? Array.from(data.found) : data.found);
  };
  worker.postMessage(message);
})"""
"""Gives the worker a message, and returns its answer."""


class Isolated(SimpleHTTPRequestHandler):
    """Serves pages that may have threads."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Isolated, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def site(cases: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page without content, the worker, the runtime's files, and the bundles with their
    batches."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text("<p>")
    (folder / "step_worker.js").symlink_to(built("browser/step_worker.js"))
    link_runtime(folder, RUNTIME_FILES + WEBGPU_FILES)
    for name in MODELS:
        case, bundle = cases(name), folder / name
        bundle.mkdir()
        for path in case.path.iterdir():
            (bundle / path.name).symlink_to(path)
        for row, values in zip(open_bundle(case.path).manifest.batch, batches(case), strict=True):
            (bundle / f"batch-{row.name}.bin").write_bytes(values.tobytes())
    return folder


def batches(case: Any) -> tuple[Any, Any]:
    return np.asarray(case.x)[: BATCH * STEPS], np.asarray(case.y)[: BATCH * STEPS]


def expected(case: Any) -> np.ndarray[Any, Any]:
    """The parameters after the steps, by the Python device."""
    runtime = open_runtime(case.path)
    manifest = open_bundle(case.path).manifest
    hyper = {row.name: row.default or 0.0 for row in manifest.hyper} | {"lr": LR}
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        runtime.step(tuple(values[rows] for values in batches(case)), seed=step, **hyper)
    return np.array(runtime.parameters)


def ask(page: Page, do: str, **message: Any) -> Any:
    return page.evaluate(ASK, {"do": do, "examples": BATCH, "lr": LR, **message})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "model"), [("wasm", "own"), ("wasm, 2 threads", "own"), ("webgpu", "cnn")]
)
def test_the_numbers_are_those_of_the_python_device(
    engine: str, model: str, site: Path, cases: Callable[[str], Any], tmp_path: Path
) -> None:
    with serving(site) as origin, browsing(tmp_path, webgpu=engine == "webgpu") as browser:
        page = browser.new_page()
        page.goto(f"{origin}/index.html")
        if engine == "webgpu" and not page.evaluate(
            "async () => !!await navigator.gpu?.requestAdapter()"
        ):
            pytest.skip("this Chromium has no WebGPU, not even SwiftShader's")
        assert ask(page, "open", engine=engine, folder=model) == engine
        assert np.isfinite(ask(page, "steps", count=STEPS)["loss"])
        found = np.array(ask(page, "parameters"), np.float32)
        ask(page, "close")
    assert np.abs(found - open_bundle(site / model).parameters()[: len(found)]).max() > 0.01
    np.testing.assert_allclose(found, expected(cases(model)), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_the_choice_is_measured(site: Path, tmp_path: Path) -> None:
    with serving(site) as origin, browsing(tmp_path) as browser:
        page = browser.new_page()
        page.goto(f"{origin}/index.html")
        found = ask(page, "choose", folder="own")
        assert page.evaluate("crossOriginIsolated")
        assert ask(page, "choose", folder="own")["why"] == found["why"], "it is remembered"
        ask(page, "open", engine=found["engine"], folder="own")
        assert np.isfinite(ask(page, "steps", count=1)["loss"])
    assert found["engine"] in found["engines"]
    for engine in found["engines"]:
        assert f"{engine} " in found["why"]
    assert "ms a step" in found["why"]
    assert "computes something else" not in found["why"]
