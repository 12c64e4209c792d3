"""Computations with secure aggregation, over real sockets between real processes: the last state is
that of the same rows without masks, bit for bit, whoever is killed meanwhile."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boosting_run import COMPONENTS, TREES, boosting_bundle, pooled_state, write_tables
from computing import computed, texts
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics
from peers import plan_text
from processes import Processes, free_port, service_file, status_of, wait_for
from secure_fleet import SecureFleet
from statistics_bundle import QUESTIONS, raw_table, statistics_bundle

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
CRASH, CRASH_PAIRWISE = HERE / "crash_secure.py", HERE / "crash_pairwise.py"
NAMES = ["a", "b", "c"]
RAW = {"a": raw_table(900, 1), "b": raw_table(300, 2), "c": raw_table(40, 3), "d": raw_table(70, 9)}
"""The tables of NAMES, and of a device that some tests have beside them."""
CHANGED: dict[str, Any] = {
    "secure__clip": None,
    "local__lr": None,
    "local__evaluate": None,
    "round__deadline": 300.0,
    "stop__rounds": 1000,
}
"""Of a plan of ``SecureFleet``."""
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(HERE))
    COORDINATOR = runpy.run_path(str(CRASH))["POINTS"].keys() - {
        "nowhere",
        "a device is left out and that is not written",
        "an update is taken off the sum",
    }
    PAIRWISE = list(runpy.run_path(str(CRASH_PAIRWISE))["COORDINATOR"])


def statistics_tables(folder: Path) -> dict[str, str]:
    for name, table in RAW.items():
        np.savez(folder / f"{name}.npz", **table)
    return {name: str(folder / f"{name}.npz") for name in RAW}


@cache
def statistics_states(*more: str) -> list[np.ndarray]:
    """The states of the same rows without processes and masks. ``more``: devices beside NAMES."""
    columns = [
        {
            "age": table["age"],
            "income": table["income"],
            "city": texts(table["city"].tolist()),
            "smoker": texts(table["smoker"].tolist()),
        }
        for table in map(RAW.get, (*NAMES, *more))
        if table is not None
    ]
    return computed(QUESTIONS, columns)[1]


Case = tuple[str, Callable[[Path], Any], Callable[[Path], dict[str, str]], Callable[[], np.ndarray]]
STATISTICS: Case = (
    "statistics", statistics_bundle, statistics_tables, lambda: statistics_states()[-1]
)  # fmt: skip
CASES: dict[str, Case] = {
    "statistics": STATISTICS,
    "trees": (
        "boosted-trees",
        lambda folder: boosting_bundle(folder, TREES),
        write_tables,
        lambda: pooled_state(TREES),
    ),
    "components": (
        "boosted-components",
        lambda folder: boosting_bundle(folder, COMPONENTS),
        write_tables,
        lambda: pooled_state(COMPONENTS),
    ),
}


def check(run: Processes, expected: np.ndarray) -> None:
    """Wait for the end: the state is the expected one, and all devices are in each round."""
    for name in ("coordinator", *NAMES):
        assert run.wait(name) == 0, run.log(name)
    assert read_model(run.folder / "run")[1].tobytes() == expected.tobytes()
    status = read_status(run.folder / "run")
    assert status.finished is not None
    assert status.finished.startswith("the computation is done")
    assert [row.summary["reports"] for row in status.rounds] == [3] * status.version
    for name in NAMES:
        assert "untrusted" not in run.log(name)


def helper_fleet(run: Processes, case: Case, **changed: Any) -> tuple[SecureFleet, dict[str, str]]:
    recipe, bundle, tables, _ = case
    fleet = SecureFleet(run, 2, NAMES)
    fleet.write_plan(bundle(run.folder).path, recipe, **(CHANGED | changed))
    return fleet, tables(run.folder)


def pairwise_plan(run: Processes, case: Case, **changed: Any) -> tuple[Path, str, dict[str, str]]:
    """Write a plan whose devices agree on masks. Returns the plan, the coordinator's address and
    each device's data."""
    recipe, bundle, tables, _ = case
    settings: dict[str, Any] = {
        "round__goal": 3,
        "round__minimum": 3,
        "round__gather": 30.0,
        "round__grace": 30.0,
        "secure__mode": "pairwise",
        "secure__dropouts": 0.0,
    }
    plan, port = run.folder / "plan.toml", free_port()
    settings |= changed
    text = plan_text(bundle(run.folder).path, run.folder / "run", recipe, **settings)
    plan.write_text(text)
    service_file(plan, port)
    return plan, f"ws://127.0.0.1:{port}", tables(run.folder)


@pytest.mark.parametrize("name", CASES)
def test_with_a_helper_the_state_is_that_of_all_rows(run: Processes, name: str) -> None:
    fleet, data = helper_fleet(run, CASES[name])
    fleet.start_helper()
    run.coordinator(fleet.plan)
    fleet.start_devices([Path(data[each]) for each in NAMES])
    check(run, CASES[name][3]())
    report = read_status(run.folder / "run").rounds[0].summary
    assert report["metrics"] == {}, "nothing that one device measures is told"


@pytest.mark.parametrize("name", CASES)
def test_with_pairwise_masks_the_state_is_that_of_all_rows(run: Processes, name: str) -> None:
    plan, url, data = pairwise_plan(run, CASES[name])
    run.coordinator(plan)
    for each in NAMES:
        run.device(each, url, Path(data[each]))
    check(run, CASES[name][3]())


def test_private_sums_under_pairwise_masks(run: Processes) -> None:
    """Of devices whose owners demand both: with next to no noise the result is that of all rows."""
    case = "statistics", private_statistics, statistics_tables, lambda: np.zeros(0)
    plan, url, data = pairwise_plan(run, case)
    text = plan.read_text().replace("rounds = 1000", "rounds = 1")
    privacy = "noise = 1e-3\ndelta = 1e-6\npopulation = 3\nclip = 1000.0\n"
    plan.write_text(f"{text}\n[privacy]\n{privacy}")
    run.coordinator(plan)
    for each in NAMES:
        demands = ("--require-privacy", "--require-secure")
        run.device(each, url, Path(data[each]), options=demands)
    for name in ("coordinator", *NAMES):
        assert run.wait(name) == 0, run.log(name)
    ages = np.concatenate([RAW[name]["age"] for name in NAMES])
    found = Plan.load(plan).computation(open_bundle(run.folder / "a.bundle").manifest)
    known = found.result(read_model(run.folder / "run")[1])
    assert known["noise"]["rows"] == pytest.approx(2.0)  # 1e-3 of 1,000 rows, and of four groups
    assert abs(known["rows"] - len(ages)) < 12
    assert known["columns"]["age"]["mean"] == pytest.approx(np.nanmean(ages), abs=1.0)
    (row,) = read_status(run.folder / "run").rounds
    assert row.summary["privacy"]["release"] == 1


def private_statistics(folder: Path) -> Any:
    asked = Statistics(numbers=(NumberColumn("age", range=(0.0, 100.0)),), rounds=1)
    return statistics_bundle(folder, asked)


@pytest.mark.parametrize("point", sorted(COORDINATOR))
def test_a_coordinator_that_is_killed_makes_the_same_state(run: Processes, point: str) -> None:
    fleet, data = helper_fleet(run, STATISTICS)
    fleet.start_helper()
    dying = run.coordinator(fleet.plan, CRASH, point, "2", fleet.plan)
    fleet.start_devices([Path(data[each]) for each in NAMES])
    assert dying.wait(90) == -9, f"it was to die where {point}: {run.log('coordinator')}"
    run.coordinator(fleet.plan)
    check(run, statistics_states()[-1])


@pytest.mark.parametrize("point", PAIRWISE)
def test_killed_in_the_last_exchange_of_pairwise_masks_it_makes_the_same_state(
    run: Processes, point: str
) -> None:
    plan, url, data = pairwise_plan(run, STATISTICS)
    dying = run.coordinator(plan, CRASH_PAIRWISE, point, "3", "serve", plan)
    for each in NAMES:
        run.device(each, url, Path(data[each]))
    assert dying.wait(90) == -9, f"it was to die where {point}: {run.log('coordinator')}"
    run.coordinator(plan)
    check(run, statistics_states()[-1])


@pytest.mark.parametrize(
    ("point", "phase", "counts"),
    [
        ("the device has told its answer", 2, False),
        ("the update is masked and not saved", 1, False),
        ("the device has to answer", 3, True),
    ],
)
def test_a_device_that_dies_in_a_round_of_pairwise_masks_counts_whole_or_not_at_all(
    run: Processes, point: str, phase: int, counts: bool
) -> None:
    """The other three take its masks off, whether it had sent its sums or not."""
    changed = {"round__goal": 4, "round__grace": 0.5, "stop__rounds": 1}
    plan, url, data = pairwise_plan(run, STATISTICS, **changed)
    run.coordinator(plan)
    for each in NAMES:
        run.device(each, url, Path(data[each]))
    dying = run.device("d", url, Path(data["d"]), CRASH_PAIRWISE, point, str(phase))
    assert dying.wait(90) == -9, f"it was to die where {point}: {run.log('d')}"
    assert run.wait("coordinator") == 0, run.log("coordinator")
    expected = statistics_states("d" if counts else "")[0]
    assert read_model(run.folder / "run", 1)[1].tobytes() == expected.tobytes()


def test_a_device_that_is_not_enrolled_is_taken_off_the_sum(run: Processes) -> None:
    """What it sent is in the masked sum already. The state of the first round is that of the
    others' rows, bit for bit."""
    fleet, data = helper_fleet(
        run, STATISTICS, round__goal=4, round__minimum=3, round__gather=1.0, stop__rounds=1
    )
    fleet.start_helper()
    run.coordinator(fleet.plan)
    fleet.start_devices([Path(data[each]) for each in NAMES])
    run.device("stranger", f"ws://127.0.0.1:{fleet.port}", run.folder / "d.npz")
    wait_for(lambda: "unknown-device" in run.log("coordinator"), "the refusal")
    assert run.wait("coordinator") == 0, run.log("coordinator")
    assert read_model(run.folder / "run", 1)[1].tobytes() == statistics_states()[0].tobytes()
    (row,) = read_status(run.folder / "run").rounds
    assert row.summary["reports"] == 3


def test_a_device_that_dies_before_it_masks_is_not_in_the_total(run: Processes) -> None:
    """Three of four have reported when the round closes without the fourth."""
    fleet, data = helper_fleet(
        run, STATISTICS, round__goal=4, round__minimum=3, round__grace=0.5, stop__rounds=1
    )
    fleet.enrol("stranger")
    fleet.start_helper()
    run.coordinator(fleet.plan)
    dying = run.device(
        "stranger",
        f"ws://127.0.0.1:{fleet.port}",
        run.folder / "d.npz",
        HERE / "crash_secure_device.py",
        "it is masked and not saved",
        "1",
        "none",
    )
    fleet.start_devices([Path(data[each]) for each in NAMES])
    assert dying.wait(90) == -9, run.log("stranger")
    assert run.wait("coordinator") == 0, run.log("coordinator")
    assert read_model(run.folder / "run", 1)[1].tobytes() == statistics_states()[0].tobytes()


@pytest.mark.parametrize("seed", range(2))
def test_everybody_killed_at_random_makes_the_same_state(run: Processes, seed: int) -> None:
    """Coordinator, helper and devices: one of them after each round."""
    drawn = random.Random(seed)
    fleet, data = helper_fleet(run, STATISTICS)

    def start(name: str) -> None:
        if name == "helper":
            fleet.start_helper()
        elif name == "coordinator":
            run.coordinator(fleet.plan)
        else:
            run.device(name, f"ws://127.0.0.1:{fleet.port}", Path(data[name]))

    everybody = ["helper", "coordinator", *NAMES]
    for name in everybody:
        start(name)
    for version in range(4):
        wait_for(lambda least=version: version_of(run) >= least, f"version {version}")
        name = drawn.choice(everybody)
        run.kill(name)
        start(name)
    check(run, statistics_states()[-1])


def version_of(run: Processes) -> int:
    """Return the newest version; -1: there is none yet."""
    status = status_of(run.folder / "run")
    return -1 if status is None else status.version


@pytest.mark.parametrize("demand", ["--require-secure", "--require-privacy"])
def test_with_noise_too_whoever_demands_either_takes_part(run: Processes, demand: str) -> None:
    """Devices clip their sums, mask them, and the coordinator adds noise to the total."""
    fleet, data = helper_fleet(
        run,
        ("statistics", private_bundle, statistics_tables, lambda: np.zeros(0)),
        privacy__population=1000,
        privacy__delta=1e-6,
        privacy__clip=1000.0,
        privacy__noise=0.001,
        stop__rounds=1,
    )
    fleet.start_helper()
    run.coordinator(fleet.plan)
    for name in NAMES:
        url = f"ws://127.0.0.1:{fleet.port}"
        run.device(name, url, Path(data[name]), options=[demand])
    for name in ("coordinator", *NAMES):
        assert run.wait(name) == 0, run.log(name)
    status = read_status(run.folder / "run")
    assert [row.summary["reports"] for row in status.rounds] == [3]
    found = json.loads(run.command("result", fleet.plan, "--json").stdout)["result"]
    assert found["rows"] == pytest.approx(1240, abs=20 * found["noise"]["rows"])
    assert 0 < found["noise"]["rows"] < 10


def private_bundle(folder: Path) -> Any:
    asked = Statistics(numbers=(NumberColumn("age", range=(0.0, 100.0), bins=4),), rounds=1)
    return statistics_bundle(folder, asked)
