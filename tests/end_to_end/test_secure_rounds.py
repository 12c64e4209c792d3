"""Rounds of masked updates with a helper, a coordinator and devices as processes: they make the
model of the same devices without [secure], whoever is away or dies meanwhile."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file
from secure_fleet import SecureFleet

pytestmark = pytest.mark.slow
NAMES = ["d0", "d1", "d2"]
CRASH = Path(__file__).with_name("crash_secure.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    NAMED = runpy.run_path(str(CRASH))
POINTS: list[str] = [*NAMED["POINTS"]]
REFUSED: list[str] = sorted(NAMED["WITH_A_REFUSAL"])
AFTER_A_REFUSAL = {each for each in POINTS if "left out" in each or "taken off" in each}


def finished(fleet: SecureFleet) -> np.ndarray:
    """The model when all is over."""
    run = fleet.run
    for name in ("coordinator", *fleet.names):
        assert run.wait(name) == 0, run.log(name)
    version, model = read_model(fleet.data)
    assert version == 3
    return model


def plain_model(folder: Path, warm: Path, bundle: Path, shards: list[Path]) -> np.ndarray:
    """The model of the same devices without [secure]."""
    with processes(folder, warm) as run:
        port, plan = free_port(), folder / "plan.toml"
        settings: dict[str, object] = {
            "local__lr": 0.2,
            "round__goal": 3,
            "round__minimum": 3,
            "round__gather": 30.0,
            "round__grace": 30.0,
            "round__weighting": "uniform",
            "stop__rounds": 3,
        }
        plan.write_text(plan_text(bundle, folder / "run", "fedavg", **settings))  # type: ignore[arg-type]
        service_file(plan, port)
        run.coordinator(plan)
        for name, shard in zip(NAMES, shards, strict=False):
            run.device(name, f"ws://127.0.0.1:{port}", shard)
        assert run.wait("coordinator") == 0, run.log("coordinator")
        return read_model(folder / "run")[1]


@pytest.fixture(scope="session")
def plain(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> np.ndarray:
    return plain_model(tmp_path_factory.mktemp("plain"), warm, bundle_path, shards)


def test_a_fleet_with_a_helper_makes_the_model_of_a_fleet_without(
    run: Processes, bundle_path: Path, shards: list[Path], plain: np.ndarray
) -> None:
    fleet = SecureFleet(run, 3, NAMES)
    fleet.write_plan(bundle_path)
    fleet.start_helper()
    run.coordinator(fleet.plan)
    fleet.start_devices(shards)
    model = finished(fleet)
    assert np.abs(model - plain).max() < 1e-3
    rounds = read_status(fleet.data).rounds
    assert [row.outcome for row in rounds] == ["committed"] * 3


def test_words_of_three_bytes_make_nearly_the_same_model(
    run: Processes, bundle_path: Path, shards: list[Path], plain: np.ndarray
) -> None:
    """Each element is rounded to a multiple of 2 C / 4095, in each of three rounds."""
    fleet = SecureFleet(run, 3, NAMES)
    fleet.write_plan(bundle_path, secure__bits=12)
    fleet.start_helper()
    fleet.start_devices(shards)
    run.coordinator(fleet.plan)
    far = np.abs(finished(fleet) - plain).max()
    assert 0 < far < 3 * 2 * 5.0 / 4095
    assert [row.outcome for row in read_status(fleet.data).rounds] == ["committed"] * 3


def serve_and_die(fleet: SecureFleet, point: str, turn: int) -> None:
    """Serve until the coordinator dies at this point, and serve again."""
    process = fleet.run.coordinator(fleet.plan, CRASH, point, str(turn), fleet.plan)
    assert process.wait(60) == -9, f"it was to die as {point}: {fleet.run.log('coordinator')}"
    fleet.run.coordinator(fleet.plan, CRASH, "nowhere", "0", fleet.plan)


@pytest.mark.parametrize("point", [each for each in POINTS if each not in AFTER_A_REFUSAL])
def test_a_coordinator_that_dies_at_any_step_asks_for_the_same_set(
    run: Processes, bundle_path: Path, shards: list[Path], plain: np.ndarray, point: str
) -> None:
    """All three rounds have all three devices, and so the model is the one without masks."""
    fleet = SecureFleet(run, 3, NAMES)
    fleet.write_plan(bundle_path)
    fleet.start_helper()
    fleet.start_devices(shards)
    serve_and_die(fleet, point, 2)
    assert np.abs(finished(fleet) - plain).max() < 1e-3
    rounds = read_status(fleet.data).rounds
    assert [(row.outcome, row.summary["reports"]) for row in rounds] == [("committed", 3)] * 3


@pytest.mark.parametrize("point", REFUSED)
def test_a_coordinator_that_dies_while_a_device_is_left_out(
    run: Processes, bundle_path: Path, shards: list[Path], point: str
) -> None:
    """d3 trains, and the helper does not know it: each round is of the others alone. From then on
    d3 is in doubt, and has to wait for a round that needs it."""
    fleet = SecureFleet(run, 3, NAMES)
    fleet.names = [*NAMES, "d3"]
    fleet.write_plan(bundle_path, round__minimum=3, round__gather=3.0)
    fleet.start_helper()
    fleet.start_devices(shards)
    serve_and_die(fleet, point, 1)
    finished(fleet)
    rounds = sorted(read_status(fleet.data).rounds, key=lambda row: row.number)
    assert [(row.outcome, row.summary["reports"]) for row in rounds] == [("committed", 3)] * 3
    assert rounds[0].summary["dropped"] == {"rejected: helper-unknown-device": 1}


@pytest.mark.parametrize("dies", [False, True])
def test_a_buffered_fleet_weighs_stale_updates_before_they_are_masked(
    run: Processes, bundle_path: Path, shards: list[Path], dies: bool
) -> None:
    """FedBuff: two updates of three devices make a model, and the third is stale by then."""
    fleet = SecureFleet(run, 2, NAMES)
    fleet.write_plan(
        bundle_path,
        "fedbuff",
        round__goal=2,
        round__minimum=None,
        round__concurrency=3,
        round__over_selection=None,
        round__gather=None,
    )
    fleet.start_helper()
    fleet.start_devices(shards)
    if dies:
        serve_and_die(fleet, "the helper has answered and nobody heard", 2)
    else:
        run.coordinator(fleet.plan)
    # Two devices may finish the run while the third waits to connect again: it is not told.
    assert run.wait("coordinator") == 0, run.log("coordinator")
    version, model = read_model(fleet.data)
    assert version == 3
    assert np.isfinite(model).all()
    rounds = read_status(fleet.data).rounds
    assert [(row.outcome, row.summary["reports"]) for row in rounds] == [("committed", 2)] * 3


def test_a_model_that_travels_as_float16_is_the_one_that_devices_sign(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """The helper is told the SHA-256 of what the devices were sent."""
    fleet = SecureFleet(run, 3, NAMES)
    fleet.write_plan(bundle_path, encoding__down="float16")
    fleet.start_helper()
    run.coordinator(fleet.plan)
    fleet.start_devices(shards)
    finished(fleet)
    assert [row.outcome for row in read_status(fleet.data).rounds] == ["committed"] * 3
