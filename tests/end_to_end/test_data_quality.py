"""A fleet of real processes, one device of which has a damaged sensor: one command names it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_status
from fleetlearn_coordinator.commands.data_quality import quality_lines, quality_view
from fleetlearn_coordinator.quality.contributions import leave_one_out, shapley
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector
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


@pytest.mark.parametrize("kills", [False, True])
def test_what_updates_are_worth(tmp_path: Path, kills: bool) -> None:
    """One step of gradient descent on quadratics: each device's update is known, and so is the loss
    on held-out data of each mean of them."""
    minima = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-9.0, -9.0]], np.float32)
    bundle = quadratics_bundle(tmp_path / "quadratics.bundle").path
    plan, port, data_dir = tmp_path / "plan.toml", free_port(), tmp_path / "run"
    service_file(plan, port)
    ones = np.ones((1, 2), np.float32)
    np.savez(tmp_path / "held_out.npz", x=np.ones((1, 2), np.float32), y=ones)
    text = plan_text(
        bundle=bundle,
        data_dir=data_dir,
        round__goal=len(minima),
        round__minimum=len(minima),
        round__grace=60.0,
        round__gather=60.0,
        round__deadline=600.0,
        local__lr=0.25,
        local__epochs=1,
        stop__rounds=4,
        evaluation__data=str(tmp_path / "held_out.npz"),
        quality__every=2,
        quality__contributions=1,
    )
    plan.write_text(text)
    with processes(tmp_path) as run:
        run.coordinator(plan)
        for number, minimum in enumerate(minima):
            arrays = tmp_path / f"{number}.npz"
            np.savez(arrays, x=minimum[np.newaxis], y=ones)
            run.device(f"device-{number}", f"ws://127.0.0.1:{port}", arrays)
        if kills:
            wait_for(lambda: bool((found := status_of(data_dir)) and found.rounds), "a round")
            run.kill("coordinator")
            run.coordinator(plan)
        assert run.wait("coordinator") == 0
        names = [
            json.loads((tmp_path / f"device-{number}.state/identity.json").read_text())["device"]
            for number in range(len(minima))
        ]
    model = open_bundle(bundle).parameters()
    found = {row.number: row.summary["contributions"] for row in read_status(data_dir).rounds}
    for number in sorted(found):
        ends = model - 0.25 * (model - minima)

        def utility(members: frozenset[int], start: Vector = model, ends: Vector = ends) -> float:
            at = ends[sorted(members)].mean(axis=0) if members else start
            return -float(((at - 1.0) ** 2).sum() / 2)

        exact, without = shapley(4, utility), leave_one_out(4, utility)
        told = [found[number][name] for name in names]
        assert [each["shapley"] for each in told] == pytest.approx(exact.values, abs=1e-5)
        assert [each["left_out"] for each in told] == pytest.approx(without.values, abs=1e-5)
        model = ends.mean(axis=0)
    view = quality_view(Plan.load(plan))
    assert view.contributions[0].device == names[3]
    assert view.contributions[0].rounds == 4
    assert view.contributions[0].shapley < 0
