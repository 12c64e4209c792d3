"""The same small fleet as real processes and in the simulator, with the same outcomes: the same
model, bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_simulator import Options, Outcome, simulate
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.results.run_folder import EVENTS, ROUNDS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from peers import plan_text
from processes import Processes, free_port, service_file, status_of, wait_for
from simulated_shards import SHARDS

CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
DYING, DIVERGING, ABSENT = 3, 4, 5
"""Devices 0 to 2 work; the others do not, in their ways."""
FOREVER = 1e9
SCENARIO = """
name = "truth"
plan = "plan.toml"
population = {{ size = 6, connected = 6 }}
data = {{ kind = "function", function = "shards:make" }}
compute = {{ step_seconds = 1.0 }}
availability = {{ kind = "trace", file = "trace.csv" }}
{more}
"""


@pytest.fixture
def fleet_data(tmp_path: Path, shards: list[Path]) -> list[Path]:
    """Each device's data; those of one are beyond what float32 holds once they are trained on."""
    paths = []
    for device, shard in enumerate(shards[: ABSENT + 1]):
        with np.load(shard) as file:
            x, y = file["x"], file["y"]
        paths.append(tmp_path / f"{device}.npz")
        np.savez(paths[-1], x=1e30 * x if device == DIVERGING else x, y=y)
    (tmp_path / "shards.py").write_text(SHARDS)
    return paths


def simulated(
    folder: Path, name: str, leaves: float, more: str = "", options: Options | None = None
) -> Outcome:
    """Device DYING goes offline at this time, for good."""
    ends = {DYING: leaves}
    rows = [f"{device},0,{ends.get(device, FOREVER)}" for device in range(ABSENT)]
    (folder / "trace.csv").write_text(
        "\n".join(["device,on,off", *rows, f"{ABSENT},{FOREVER},{FOREVER + 1}", ""])
    )
    (folder / "scenario.toml").write_text(SCENARIO.format(more=more))
    scenario = Scenario.load(folder / "scenario.toml")
    outcome = simulate(scenario, folder / name, options or Options(backend="bundle", workers=1))
    assert outcome is not None
    return outcome


def times(folder: Path, round: int) -> tuple[float, float]:
    """When this round began, and when the report of DYING was accepted in it."""
    rows = read_rows(folder, EVENTS)
    begins = next(row["time"] for row in rows if row["event"] == "opened" and row["round"] == round)
    task = f"s-{round}-"
    ends = next(
        row["time"]
        for row in rows
        if row["event"] == "accepted" and row["device"] == DYING and row["task"].startswith(task)
    )
    return begins, ends


@pytest.mark.parametrize(
    ("up", "down"), [("float32", "float32"), ("int8", "float16"), ("topk-0.1-int8", "delta")]
)
def test_processes_and_simulator_make_the_same_model(
    run: Processes, bundle_path: Path, fleet_data: list[Path], up: str, down: str
) -> None:
    """Three rounds. Device 3 is killed in the second, its training done; device 4 diverges; device
    5 is not there."""
    port = free_port()
    data_dir = run.folder / "run"
    plan = run.folder / "plan.toml"
    plan.write_text(
        plan_text(
            bundle_path,
            data_dir,
            "fedprox",
            local__lr=0.1,
            local__mu=0.01,
            local__epochs=2,
            local__batch_size=16,
            round__goal=4,
            round__minimum=3,
            round__grace=1.0,
            round__gather=30.0,
            round__deadline=600.0,
            server__optimizer="adam",
            server__lr=0.05,
            stop__rounds=3,
            encoding__up=up,
            encoding__down=down,
        )
    )
    service_file(plan, port)

    def start(device: int) -> None:
        name = name_of(device)
        dies: list[str | Path] = [CRASH_DEVICE, "the work is done but not on disk", "2"]
        wrapper = dies if device == DYING else []
        # This interpreter for all, whatever ONNX Runtime it has: another may add in another order.
        url, options = f"ws://127.0.0.1:{port}", ("--runtime", "onnx")
        run.device(name, url, fleet_data[device], *wrapper, options=options)

    coordinator = run.coordinator(plan)
    for device in range(DIVERGING):
        start(device)
    # The first round opens with the four that work; were the fifth among them, it could end before
    # the last is there.
    wait_for(lambda: bool((found := status_of(data_dir)) and found.rounds), "the first round")
    start(DIVERGING)
    assert coordinator.wait(120) == 0, run.log("coordinator")
    assert run.running[name_of(DYING)].wait(10) == -9
    status = read_status(data_dir)
    real = [row.summary for row in status.rounds]
    assert [row["reports"] for row in real] == [4, 3, 3]
    version, model = read_model(data_dir)
    assert version == 3

    assert ("the difference of the model" in run.log(name_of(0))) == (down == "delta")
    begins, ends = times(simulated(run.folder, "calm", FOREVER).folder, 2)
    outcome = simulated(run.folder, "simulated", (begins + ends) / 2)
    assert outcome.model.tobytes() == model.tobytes()
    assert outcome.summary["rounds"] == 3

    rows = read_rows(outcome.folder, ROUNDS)
    assert [row["reports"] for row in rows] == [4, 3, 3]
    for row, summary in zip(rows, real, strict=True):
        assert row["train"] == summary["train"], "the devices' own losses, to the last bit"
        assert row["change"] == summary["change"]
        assert row["evaluation"] == pytest.approx(summary["evaluation"], rel=1e-6)
    assert rows[1]["causes"]["offline"] == 1
    for found in (rows, real):
        # When device 4 has its turns is a matter of milliseconds; what comes of them is not.
        dropped = Counter[str]()
        for row in found:
            dropped.update(row["dropped"])
        assert found[1]["dropped"]["lost"] >= 1
        assert dropped["failed: diverged"] >= 1
        assert set(dropped) <= {"lost", "failed: diverged", "surplus"}


def test_another_seed_is_another_model(
    tmp_path: Path, bundle_path: Path, fleet_data: list[Path]
) -> None:
    """If the order of the examples did not matter, the tests above would show less."""
    (tmp_path / "plan.toml").write_text(
        plan_text(
            bundle_path,
            tmp_path / "run",
            local__lr=0.1,
            local__batch_size=16,
            round__goal=4,
            round__minimum=3,
            stop__rounds=1,
        )
    )
    first = simulated(tmp_path, "first", FOREVER)
    assert simulated(tmp_path, "again", FOREVER).model.tobytes() == first.model.tobytes()
    assert (
        simulated(tmp_path, "other", FOREVER, more="seed = 1").model.tobytes()
        != first.model.tobytes()
    )
