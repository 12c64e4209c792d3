"""The SDK for browsers where it is made for: a Web Worker in Chromium, with IndexedDB, against a real coordinator."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from browser import FLAGS, chromium
from fleetlearn_coordinator import read_model
from fleetlearn_device import open_runtime
from fleetlearn_device.training.train import train
from fleetlearn_protocol import open_bundle
from line_bundle import line_data, write_line_bundle
from peers import plan_text
from processes import free_port, processes, status_of, wait_for
from web_sdk import built, link_runtime

ROUNDS, EPOCHS, LR = 3, 2, 0.05
TOLERANCE = 1e-4


class Site(ThreadingHTTPServer):
    """Serves a folder to the browser, and keeps what the page logs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.lines: list[str] = []
        self.origin = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(SimpleHTTPRequestHandler):
    server: Site

    def do_POST(self) -> None:
        self.server.lines.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    served = Site(folder)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


@pytest.mark.slow
def test_a_tab_trains_and_goes_on_after_the_browser_was_killed(site: Site, tmp_path: Path) -> None:
    folder, port = tmp_path / "site", free_port()
    browser = [chromium(), *FLAGS[:-1], "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    bundle = write_line_bundle(tmp_path / "line.bundle", references=("anchor",))
    x, y = line_data(20)
    settings = {"url": f"ws://127.0.0.1:{port}", "x": x.tolist(), "y": y.tolist()}
    (folder / "settings.json").write_text(json.dumps(settings))
    for name in ("page.js", "worker.js"):
        (folder / name).write_bytes(built(f"browser/{name}").read_bytes())
    link_runtime(folder)
    (folder / "index.html").write_text('<script type="module" src="page.js"></script>')
    plan = tmp_path / "plan.toml"
    plan.write_text(
        plan_text(
            bundle.path, tmp_path / "run", local__lr=LR, local__epochs=EPOCHS, local__batch_size=0,
            round__goal=1, round__grace=60.0, round__deadline=600.0, stop__rounds=ROUNDS,
        )
    )  # fmt: skip
    (tmp_path / "service.toml").write_text(f'port = {port}\norigins = ["{site.origin}"]\n')
    command = [*browser, f"--user-data-dir={tmp_path / 'profile'}", f"{site.origin}/index.html"]
    with processes(tmp_path) as run:
        run.coordinator(plan)
        run.start("browser", *command)
        wait_for(lambda: version(tmp_path / "run") > 0, f"a round of the tab, which says {site.lines}")
        if run.running["coordinator"].poll() is None:
            run.kill("browser")
            run.start("browser", *command)
        assert run.wait("coordinator") == 0, run.log("coordinator")
    names = {line.split(" as ")[1] for line in site.lines if line.startswith("checked in")}
    assert len(names) == 1, site.lines  # the name is in the browser's database
    found, model = read_model(tmp_path / "run")
    assert found == ROUNDS
    runtime, expected = open_runtime(bundle.path), open_bundle(bundle.path).parameters()
    for _ in range(ROUNDS):
        runtime.load(expected)
        hyper = {"lr": LR, "mu": 0.0}
        expected = expected + train(runtime, (x, y), hyper=hyper, epochs=EPOCHS, batch_size=0, seed=0).update
    np.testing.assert_allclose(model, expected, rtol=0, atol=TOLERANCE)


def version(data_dir: Path) -> int:
    """The newest model's version; 0 before the first round ended."""
    found = status_of(data_dir)
    return 0 if found is None else found.version
