"""The SDK for browsers where it is made for: a Web Worker in Chromium, with IndexedDB, against a
real coordinator."""

from __future__ import annotations

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
from web_page import serving

ROUNDS, EPOCHS, LR = 3, 2, 0.05
TOLERANCE = 1e-4


@pytest.mark.slow
def test_a_tab_trains_and_goes_on_after_the_browser_was_killed(tmp_path: Path) -> None:
    port = free_port()
    browser = [chromium(), *FLAGS[:-1], "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    bundle = write_line_bundle(tmp_path / "line.bundle", references=("anchor",))
    x, y = line_data(20)
    settings = {"url": f"ws://127.0.0.1:{port}", "x": x.tolist(), "y": y.tolist()}
    plan = tmp_path / "plan.toml"
    plan.write_text(
        plan_text(
            bundle.path, tmp_path / "run", local__lr=LR, local__epochs=EPOCHS, local__batch_size=0,
            round__goal=1, round__grace=60.0, round__deadline=600.0, stop__rounds=ROUNDS,
        )
    )  # fmt: skip
    with serving(tmp_path / "site", **settings) as site, processes(tmp_path) as run:
        (tmp_path / "service.toml").write_text(f'port = {port}\norigins = ["{site.origin}"]\n')
        command = [*browser, f"--user-data-dir={tmp_path / 'profile'}", site.page]
        run.coordinator(plan)
        run.start("browser", *command)
        wait_for(
            lambda: version(tmp_path / "run") > 0, f"a round of the tab, which says {site.lines}"
        )
        if run.running["coordinator"].poll() is None:
            run.kill("browser")
            run.start("browser", *command)
        assert run.wait("coordinator") == 0, run.log("coordinator")
    assert len(site.names()) == 1, site.lines  # the name is in the browser's database
    found, model = read_model(tmp_path / "run")
    assert found == ROUNDS
    runtime, expected = open_runtime(bundle.path), open_bundle(bundle.path).parameters()
    for _ in range(ROUNDS):
        runtime.load(expected)
        hyper = {"lr": LR, "mu": 0.0}
        train(runtime, (x, y), hyper=hyper, epochs=EPOCHS, batch_size=0, seed=0)
        expected = runtime.parameters.copy()
    np.testing.assert_allclose(model, expected, rtol=0, atol=TOLERANCE)


def version(data_dir: Path) -> int:
    """The newest model's version; 0 before the first round ended."""
    found = status_of(data_dir)
    return 0 if found is None else found.version
