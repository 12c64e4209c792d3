"""Statistics of three devices' tables, over real sockets between real processes: the last state is
that of a computation without any network, bit for bit, whoever is killed meanwhile."""

from __future__ import annotations

import csv
import json
import random
import runpy
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from computing import computed, texts
from fleetlearn_coordinator import read_model, read_status
from processes import ROOT, Processes, free_port, service_file, status_of, wait_for
from statistics_bundle import QUESTIONS, pooled, raw_table, statistics_bundle

pytestmark = pytest.mark.slow

CRASH = Path(__file__).with_name("crash_coordinator.py")
CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
TABLES = {"a": raw_table(900, 1), "b": raw_table(300, 2), "c": raw_table(40, 3)}
COORDINATOR_DIES = {
    "tasks are recorded but not sent": 2,
    "a chunk is spooled": 20,
    "an update is complete but not recorded": 5,
    "an update is recorded but not acknowledged": 7,
    "an update is acknowledged but not summed": 4,
    "a small update is summed and counted": 6,
    "a sum is written but not recorded": 2,
    "a sum is recorded": 2,
    "a round is closed and its commit not begun": 3,
    "the new model is in its place but not recorded": 3,
    "a round is committed but its batch is open": 2,
    "a round is recorded and the engine not told": 3,
    "a round is recorded and nobody told": 2,
}
"""Point -> which time it kills; the run has four rounds of three devices."""
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    DEVICE_DIES = list(runpy.run_path(str(CRASH_DEVICE))["POINTS"])


def data_of(folder: Path) -> dict[str, str]:
    """Write the tables as three kinds of data. Returns how each device is told of its own."""
    np.savez(folder / "a.npz", **TABLES["a"])
    with (folder / "b.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TABLES["b"])
        for row in zip(*TABLES["b"].values(), strict=True):
            writer.writerow(["NA" if value != value else value for value in row])
    with closing(sqlite3.connect(folder / "c.db")) as database:
        database.execute("CREATE TABLE people(age, income, city, smoker)")
        columns = [column.tolist() for column in TABLES["c"].values()]
        rows = [
            [None if value != value else value for value in row]
            for row in zip(*columns, strict=True)
        ]
        database.executemany("INSERT INTO people VALUES(?, ?, ?, ?)", rows)
        database.commit()
    query = f"{folder / 'c.db'}?nulls=missing&query=SELECT * FROM people"
    return {"a": str(folder / "a.npz"), "b": str(folder / "b.csv"), "c": query}


def begin(run: Processes) -> tuple[Path, str]:
    """Write a plan and its bundle. Returns the plan and the coordinator's address."""
    bundle = statistics_bundle(run.folder)
    plan = run.folder / "plan.toml"
    plan.write_text(
        f'recipe = "statistics"\nname = "people"\nbundle = "{bundle.path}"\ndata_dir = "run"\n'
        "[round]\ngoal = 3\nminimum = 3\nover_selection = 1.0\ngrace = 60.0\ndeadline = 300.0\n"
    )
    port = free_port()
    service_file(plan, port)
    return plan, f"ws://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def expected() -> tuple[bytes, dict[str, object]]:
    """The last state and the result of the same rows without processes and sockets."""
    columns = [
        {
            "age": table["age"],
            "income": table["income"],
            "city": texts(table["city"].tolist()),
            "smoker": texts(table["smoker"].tolist()),
        }
        for table in TABLES.values()
    ]
    found, states = computed(QUESTIONS, columns)
    return states[-1].tobytes(), found


def version_of(run: Processes) -> int:
    """Return the newest version; -1: there is none yet."""
    status = status_of(run.folder / "run")
    return -1 if status is None else status.version


def check(run: Processes, plan: Path, expected: tuple[bytes, dict[str, object]]) -> None:
    """The run is over, and its state is the expected one."""
    assert read_model(run.folder / "run")[1].tobytes() == expected[0]
    status = read_status(run.folder / "run")
    assert status.finished is not None
    assert status.finished.startswith("the computation is done")
    assert [row.summary["reports"] for row in status.rounds] == [3] * status.version
    found = json.loads(run.command("result", plan, "--json").stdout)
    assert found["result"] == json.loads(json.dumps(expected[1]))
    assert (found["done"], found["version"]) == (True, status.version)


def test_what_comes_out_is_what_numpy_finds_in_all_rows(
    run: Processes, expected: tuple[bytes, dict[str, object]]
) -> None:
    plan, url = begin(run)
    run.coordinator(plan)
    for name, data in data_of(run.folder).items():
        run.device(name, url, data)  # type: ignore[arg-type]
    for name in ("coordinator", *TABLES):
        assert run.wait(name) == 0, run.log(name)
    check(run, plan, expected)
    whole = pooled([*TABLES.values()])
    found = json.loads(run.command("result", plan, "--json").stdout)["result"]["columns"]
    age = whole["age"][~np.isnan(whole["age"])]
    assert found["age"]["missing"] == len(whole["age"]) - len(age)
    assert found["age"]["mean"] == pytest.approx(age.mean(), abs=found["age"]["mean_error"])
    (median,) = found["age"]["quantiles"]
    assert median["least"] <= np.quantile(age, 0.5, method="lower") <= median["most"]
    edges = np.linspace(0, 100, 5)
    assert found["age"]["histogram"]["rows"] == np.histogram(age, edges)[0].tolist()
    best = sorted(Counter(whole["city"].tolist()).items(), key=lambda pair: (-pair[1], pair[0]))
    assert [(each["value"], each["rows"]) for each in found["city"]["values"]] == best[:4]
    assert [each["rows"] for each in found["smoker"]["values"]] == [
        (whole["smoker"] == value).sum() for value in ("yes", "no")
    ]
    shown = run.command("result", plan).stdout
    assert "age: " in shown
    assert "city 1" in shown
    status = run.command("status", plan).stdout
    assert "the computation is done: measured on 1240 rows of 3 devices" in status
    assert not [word for word in ("accuracy", "loss", "model", "change") if word in status]
    refused = run.command("export-model", plan, "--output", "x.onnx", expected=1).stderr
    assert "`fleetlearn-coordinator result" in refused


@pytest.mark.parametrize("point", COORDINATOR_DIES)
def test_the_coordinator_killed_changes_nothing(
    run: Processes, expected: tuple[bytes, dict[str, object]], point: str
) -> None:
    plan, url = begin(run)
    process = run.coordinator(plan, CRASH, point, str(COORDINATOR_DIES[point]), plan)
    for name, data in data_of(run.folder).items():
        run.device(name, url, data)  # type: ignore[arg-type]
    assert process.wait(60) == -9, f"it was to die where {point}: {run.log('coordinator')}"
    assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    for name in TABLES:
        assert run.wait(name) == 0, run.log(name)
    check(run, plan, expected)


@pytest.mark.parametrize("point", DEVICE_DIES)
def test_a_device_killed_changes_nothing(
    run: Processes, expected: tuple[bytes, dict[str, object]], point: str
) -> None:
    plan, url = begin(run)
    run.coordinator(plan)
    data = data_of(run.folder)
    for name in "ab":
        run.device(name, url, data[name])  # type: ignore[arg-type]
    crashing = run.device("c", url, data["c"], CRASH_DEVICE, point, "2")  # type: ignore[arg-type]
    assert crashing.wait(60) == -9, run.log("c")
    run.device("c", url, data["c"])  # type: ignore[arg-type]
    for name in ("coordinator", *TABLES):
        assert run.wait(name) == 0, run.log(name)
    check(run, plan, expected)


@pytest.mark.parametrize("seed", range(3))
def test_everybody_killed_at_random_changes_nothing(
    run: Processes, expected: tuple[bytes, dict[str, object]], seed: int
) -> None:
    drawn = random.Random(seed)
    plan, url = begin(run)
    data = data_of(run.folder)

    def start(name: str) -> None:
        if name == "coordinator":
            run.coordinator(plan)
        else:
            run.device(name, url, data[name])  # type: ignore[arg-type]

    for name in ("coordinator", *TABLES):
        start(name)
    for version in range(4):
        wait_for(lambda least=version: version_of(run) >= least, f"version {version}")
        name = drawn.choice(["coordinator", *TABLES])
        run.kill(name)
        start(name)
    for name in ("coordinator", *TABLES):
        assert run.wait(name) == 0, run.log(name)
    check(run, plan, expected)


@pytest.mark.parametrize("options", [(), ("--secure",)])
def test_the_example_shows_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = ROOT / "examples" / "federated_statistics.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path, *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines() if " of age " in f"{line} "]
    assert len(lines) == 3
    assert all(float(line[-1]) < 1e-6 for line in lines), done.stdout
    assert ("[secure]" in (tmp_path / "statistics.toml").read_text()) == bool(options)


@pytest.mark.parametrize("name", ["statistics", "trees"])
def test_the_private_examples_are_better_with_more_epsilon(name: str) -> None:
    """The error of the mean falls, and the AUC rises, from the least epsilon to the greatest."""
    script = ROOT / "examples" / f"private_{name}.py"
    command = [sys.executable, script, "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    found = [float(row[1]) for row in rows[1:]]
    assert len(found) == 6
    worst, best = found[0], found[-1]
    assert (worst > 3 * best) if name == "statistics" else (worst + 0.02 < best > 0.94)
