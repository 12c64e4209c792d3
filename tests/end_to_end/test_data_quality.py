"""A fleet of real processes, one device of which has a damaged sensor: one command names it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.commands.data_quality import quality_lines, quality_view
from peers import plan_text
from processes import free_port, processes, service_file, status_of, wait_for
from quadratics import quadratics_bundle

pytestmark = pytest.mark.slow
DEVICES, DAMAGED = 5, 2


@pytest.mark.parametrize("kills", [False, True])
def test_the_damaged_sensor_is_found(tmp_path: Path, kills: bool) -> None:
    bundle = quadratics_bundle(tmp_path / "quadratics.bundle").path
    generator = np.random.default_rng(5)
    plan, port, data_dir = tmp_path / "plan.toml", free_port(), tmp_path / "run"
    service_file(plan, port)
    text = plan_text(
        bundle=bundle,
        data_dir=data_dir,
        round__goal=DEVICES,
        round__minimum=DEVICES,
        round__grace=60.0,
        round__deadline=600.0,
        local__lr=0.05,
        stop__rounds=4,
        quality__every=2,
        quality__devices=DEVICES,
    )
    plan.write_text(text)
    with processes(tmp_path) as run:
        run.coordinator(plan)
        for number in range(DEVICES):
            x = generator.normal(size=(50, 2)).astype(np.float32)
            x[:, 1] += 6 * (number == DAMAGED)
            arrays = tmp_path / f"{number}.npz"
            np.savez(arrays, x=x, y=np.ones((50, 2), np.float32))
            run.device(f"device-{number}", f"ws://127.0.0.1:{port}", arrays)
        if kills:
            wait_for(lambda: bool((found := status_of(data_dir)) and found.rounds), "a round")
            run.kill("coordinator")
            run.coordinator(plan)
        assert run.wait("coordinator") == 0
        names = {
            number: json.loads((tmp_path / f"device-{number}.state/identity.json").read_text())
            for number in range(DEVICES)
        }
    view = quality_view(Plan.load(plan))
    assert (view.outcome, view.devices, view.version) == ("valid", DEVICES, 4)
    (found,) = view.features
    assert (found.feature, found.what) == (1, "mean")
    assert found.device == names[DAMAGED]["device"]
    assert found.value == pytest.approx(6, abs=0.6)
    assert any(found.device in line and "p = " in line for line in quality_lines(view))
    assert {each.device for each in view.losses} <= {found.device}
