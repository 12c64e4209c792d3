"""Whole runs: the same bytes whatever the number of processes, and however often a run was stopped,
or killed."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import virtual
from fleetlearn_device.runtimes.providers import CPU, PROVIDERS, Provider
from fleetlearn_simulator import Options, Outcome, simulate
from fleetlearn_simulator import run as run_module
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import (
    CHECKPOINT,
    EVENTS,
    MADE_OF,
    MODEL,
    OPTIONS,
    ROUNDS,
    SCENARIO,
    SUMMARY,
    read_checkpoint,
    read_json,
    read_rows,
    write_json,
)
from fleetlearn_simulator.run import prepare
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training import choice
from fleetlearn_simulator.training.choice import BackendChoice, choose_backend
from fleetlearn_simulator.training.kept_rows import KEPT_STATES, NO_ROW
from fleetlearn_simulator.training.process_pool import ProcessPool
from fleetlearn_simulator.training.run_bundles import run_bundles
from line_bundle import write_line_bundle
from threadpoolctl import threadpool_info
from virtual import make_scenario, write_scenario

FILES = (SCENARIO, EVENTS, ROUNDS, MODEL, SUMMARY)
MESSY: dict[str, Any] = {
    "seed": 14,
    "availability": {"kind": "markov", "on": 400.0, "off": 200.0},
    "failures": {
        "train": 0.002,
        "crash": 0.1,
        "stragglers": 0.3,
        "corrupt": [{"share": 0.2, "kind": "stale"}, {"share": 0.2, "kind": "garbage"}],
        "regions": 3,
        "outages": [{"region": 1, "begin": 100.0, "end": 400.0}],
    },
    "coordinator": {"crashes": [33.0, 222.0, 400.0], "restart": 10.0},
    "population__connected": 10,
    "plan__local": {"epochs": 2, "batch_size": 10, "lr": 0.002},
    "plan__round": {
        "goal": 6,
        "over_selection": 1.2,
        "minimum": 5,
        "deadline": 300.0,
        "max_weight": 50,
    },
    "plan__server": {"optimizer": "adam", "lr": 0.01},
    "plan__stop__rounds": 8,
}
"""A bit of everything on twelve devices."""
ONE = Options(backend="bundle", workers=1, checkpoint=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def done(outcome: Outcome | None) -> Outcome:
    assert outcome is not None
    return outcome


@pytest.fixture(scope="module")
def scenario(line: Path, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return make_scenario(tmp_path_factory.mktemp("messy"), line, 12, **MESSY)


@pytest.fixture(scope="module")
def whole(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped."""
    return done(simulate(scenario, tmp_path_factory.mktemp("whole") / "run", ONE)).folder


def test_the_messy_scenario_is_one(whole: Path) -> None:
    """If nothing happened in it, the tests below would show nothing."""
    rounds, events = read_rows(whole, ROUNDS), {row["event"] for row in read_rows(whole, EVENTS)}
    assert {"crash", "restart", "lost", "accepted", "committed"} <= events
    assert {row["how"] for row in rounds} == {"committed", "abandoned"}
    assert len({cause for row in rounds for cause in row["causes"]}) >= 4
    assert sum(row["partial"] for row in rounds) > 0
    assert len({row["connected"] for row in rounds}) > 1


def test_the_same_seed_is_the_same_run_on_two_processes(
    scenario: Scenario, whole: Path, tmp_path: Path
) -> None:
    two = done(simulate(scenario, tmp_path / "two", ONE._replace(workers=2)))
    assert contents(two.folder) == contents(whole)


PRODUCTS = """
import numpy as np

def examples(device, seed):
    return 400

def make(device, seed):
    random = np.random.default_rng([seed, device])
    factor = random.standard_normal((784, 30), np.float32)
    x = random.standard_normal((400, 784), np.float32) @ factor / 28
    return {"x": x[:, :3].copy(), "y": x.sum(1)}
"""


def test_data_that_come_of_products_are_the_same_on_two_processes(
    line: Path, tmp_path: Path
) -> None:
    """Of this size they differ in their last bits with the number of threads that make them, where
    there are cores."""
    scenario = make_scenario(tmp_path, line, 4)
    (tmp_path / "lines.py").write_text(PRODUCTS)
    before = threadpool_info()
    runs = [
        done(simulate(scenario, tmp_path / f"run{n}", ONE._replace(workers=n))).folder
        for n in (1, 2)
    ]
    assert contents(runs[0]) == contents(runs[1])
    assert threadpool_info() == before, "the program's own products are as fast as before"


def test_its_own_folder_repeats_a_run(whole: Path, tmp_path: Path) -> None:
    again = done(simulate(Scenario.load(whole / SCENARIO), tmp_path / "again", ONE))
    assert contents(again.folder) == contents(whole)


def test_another_seed_is_another_run(line: Path, whole: Path, tmp_path: Path) -> None:
    other = done(
        simulate(
            make_scenario(tmp_path, line, 12, **(MESSY | {"seed": 12})), tmp_path / "other", ONE
        )
    )
    assert all(contents(other.folder)[name] != contents(whole)[name] for name in FILES)


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_run_stopped_after_any_round_ends_as_if_it_was_not(
    scenario: Scenario, whole: Path, tmp_path: Path, stop: int
) -> None:
    seen = 0

    def count(fleet: Any) -> None:
        nonlocal seen
        seen += fleet.history[-1]["how"] == "committed"

    folder = tmp_path / "run"
    options = ONE._replace(checkpoint=100)
    assert (
        simulate(scenario, folder, options, progress=count, should_stop=lambda: seen >= stop)
        is None
    )
    assert not (folder / SUMMARY).exists()
    found = read_checkpoint(folder)
    assert found is not None
    assert found[1]["version"] == stop
    again = done(simulate(scenario, folder, options, resume=True))
    assert contents(again.folder) == contents(whole)


def test_a_run_stopped_after_each_round(scenario: Scenario, whole: Path, tmp_path: Path) -> None:
    folder, outcome, times = tmp_path / "run", None, 0
    while outcome is None:
        seen: list[int] = []
        outcome = simulate(
            scenario,
            folder,
            ONE,
            resume=times > 0,
            progress=lambda fleet, seen=seen: (
                seen.append(1) if fleet.history[-1]["how"] == "committed" else None
            ),  # type: ignore[misc]
            should_stop=lambda seen=seen: bool(seen),  # type: ignore[misc]
        )
        times += 1
        assert times < 20
    assert times >= 7
    assert contents(folder) == contents(whole)


def test_rounds_that_want_a_share_of_the_devices_and_a_run_stopped_after_each(
    line: Path, tmp_path: Path
) -> None:
    """With crashes of the coordinator in their middle. Each round keeps the goal that it had."""
    rule = MESSY["plan__round"] | {"goal_share": 0.5, "minimum": 2, "gather": 20.0}
    scenario = make_scenario(tmp_path, line, 12, **(MESSY | {"plan__round": rule}))
    whole = done(simulate(scenario, tmp_path / "whole", ONE)).folder
    rounds, events = read_rows(whole, ROUNDS), read_rows(whole, EVENTS)
    assert len({row["goal"] for row in rounds}) > 1
    opened = {row["round"]: row["goal"] for row in events if row["event"] == "opened"}
    assert {row["round"]: row["goal"] for row in rounds} == opened
    open_rounds = [
        row["event"]
        for row in events
        if row["event"] in ("opened", "committed", "abandoned", "crash")
    ]
    assert ("opened", "crash") in [*pairwise(open_rounds)]

    folder, outcome, times = tmp_path / "run", None, 0
    while outcome is None:
        before = 0 if times == 0 else len(read_rows(folder, ROUNDS))
        outcome = simulate(
            scenario, folder, ONE, resume=times > 0,
            should_stop=lambda before=before: len(read_rows(folder, ROUNDS)) > before,  # type: ignore[misc]
        )  # fmt: skip
        times += 1
        assert times < 30
    assert times > 4
    assert contents(folder) == contents(whole)


def test_a_metric_that_too_few_devices_measured_does_not_stop_a_resumed_run(
    line: Path, tmp_path: Path
) -> None:
    """Two devices' losses are within the bounds, and their mean meets the target; three are the
    minimum."""
    scenario = make_scenario(
        tmp_path, line, 4,
        plan__local__evaluate=True,
        plan__round__minimum=3,
        plan__stop={"rounds": 2, "metric": "loss", "target": 4.5, "bounds": [0.0, 5.0]},
    )  # fmt: skip
    seen: list[Fleet] = []
    assert (
        simulate(
            scenario, tmp_path / "run", ONE, progress=seen.append, should_stop=lambda: bool(seen)
        )
        is None
    )
    (row,) = read_rows(tmp_path / "run", ROUNDS)
    assert (row["behind"]["loss"], row["metrics"]["loss"] < 4.5) == (2, True)
    assert (
        done(simulate(scenario, tmp_path / "run", resume=True)).summary["reason"] == "2 rounds done"
    )


def test_a_resumed_run_is_carried_out_as_it_was_begun(scenario: Scenario, tmp_path: Path) -> None:
    options = ONE._replace(events=False)
    expected = contents(done(simulate(scenario, tmp_path / "whole", options)).folder)
    assert expected[EVENTS] == b""
    seen: list[Any] = []
    assert (
        simulate(
            scenario,
            tmp_path / "run",
            options,
            progress=seen.append,
            should_stop=lambda: len(seen) > 3,
        )
        is None
    )
    assert contents(done(simulate(scenario, tmp_path / "run", resume=True)).folder) == expected
    assert simulate(scenario, tmp_path / "none", options, should_stop=lambda: True) is None
    assert contents(done(simulate(scenario, tmp_path / "none", resume=True)).folder) == expected
    (tmp_path / "run" / OPTIONS).write_text("{")
    with pytest.raises(SimulatorError, match=r"options\.json cannot be read"):
        simulate(scenario, tmp_path / "run", resume=True)


def test_a_finished_run_resumed_is_the_same(
    scenario: Scenario, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    assert done(simulate(scenario, tmp_path / "copy", ONE, resume=True)).summary["rounds"] == 8
    assert contents(tmp_path / "copy") == contents(whole)


CHILD = """
import sys
from pathlib import Path
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.results.run_folder import CHECKPOINT
from fleetlearn_simulator.scenario.scenario import Scenario

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    options = Options(backend="bundle", workers=1, checkpoint=1)
    simulate(Scenario.load(sys.argv[1]), folder, options, resume=(folder / CHECKPOINT).exists())
"""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_as_if_it_was_not(line: Path, tmp_path: Path) -> None:
    """SIGKILL, at random moments while it writes, until it gets through."""
    settings = MESSY | {"plan__stop__rounds": 150, "population__connected": 40}
    path = write_scenario(tmp_path, line, 40, **settings)
    expected = contents(done(simulate(Scenario.load(path), tmp_path / "whole", ONE)).folder)
    (tmp_path / "child.py").write_text(CHILD)
    folder, luck, kills = tmp_path / "run", random.Random(1), 0
    # The data's function imports what the tests share.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    while True:
        child = subprocess.Popen(
            [sys.executable, str(tmp_path / "child.py"), str(path), str(folder)], env=environment
        )
        try:
            begin = (folder / ROUNDS).stat().st_size if (folder / ROUNDS).exists() else 0
            # As soon as it has written this much more: the size is looked at, not the clock.
            goal = begin + luck.randrange(1, 12_000)
            limit = time.monotonic() + 60
            while child.poll() is None and kills < 8:
                if (folder / ROUNDS).exists() and (folder / ROUNDS).stat().st_size >= goal:
                    child.send_signal(signal.SIGKILL)
                    break
                assert time.monotonic() < limit
                time.sleep(luck.random() / 1000)
            if child.wait(60) == 0:
                break
            assert child.returncode == -signal.SIGKILL
            kills += 1
        finally:
            child.kill()
            child.wait()
    assert kills >= 3
    assert contents(folder) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, [0, 3, 6]), (1.0, [0, 3])])
def test_checkpoints_are_written_every_so_many_rounds(
    scenario: Scenario,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    expected: list[int],
) -> None:
    """More rarely where writing one takes as long as a round: a clock that goes on whenever it is
    read."""
    clock = count(0.0, seconds)
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    versions = []

    def look(fleet: Any) -> None:
        found = read_checkpoint(tmp_path / "run")
        versions.append(found[1]["version"] if found else 0)

    simulate(scenario, tmp_path / "run", ONE._replace(checkpoint=3), progress=look)
    found = read_checkpoint(tmp_path / "run")
    assert found is not None
    assert sorted({*versions, found[1]["version"]}) == expected


def test_stopped_before_its_first_checkpoint_it_begins_anew(
    scenario: Scenario, whole: Path, tmp_path: Path
) -> None:
    assert simulate(scenario, tmp_path / "run", ONE, should_stop=lambda: True) is None
    assert not (tmp_path / "run" / CHECKPOINT).exists()
    simulate(scenario, tmp_path / "run", ONE, resume=True)
    assert contents(tmp_path / "run") == contents(whole)


def test_resuming_needs_a_checkpoint_of_the_same_run(
    scenario: Scenario, whole: Path, line: Path, tmp_path: Path
) -> None:
    with pytest.raises(SimulatorError, match="holds no run to resume"):
        simulate(scenario, tmp_path / "empty", ONE, resume=True)
    assert not (tmp_path / "empty").exists()
    shutil.copytree(whole, tmp_path / "copy")
    other = make_scenario(tmp_path, line, 12, **(MESSY | {"seed": 12}))
    with pytest.raises(
        SimulatorError, match=r"changed: data\.seed was 14 and is 12; seed was 14 and is 12\. Its"
    ):
        simulate(other, tmp_path / "copy", ONE, resume=True)
    (tmp_path / "copy" / MADE_OF).unlink()  # as in an earlier version
    with pytest.raises(SimulatorError, match="is of another bundle, seed or population"):
        simulate(other, tmp_path / "copy", ONE, resume=True)
    assert contents(tmp_path / "copy") == contents(whole)
    simulate(scenario, tmp_path / "copy", ONE, resume=True)
    assert contents(tmp_path / "copy") == contents(whole)


def test_a_new_run_in_an_old_folder_begins_anew(
    scenario: Scenario, whole: Path, line: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    simulate(make_scenario(tmp_path, line, 12, **(MESSY | {"seed": 12})), folder, ONE)
    simulate(scenario, folder, ONE)
    assert contents(folder) == contents(whole)


def test_the_summary_adds_up(whole: Path) -> None:
    rows = read_rows(whole, ROUNDS)
    committed = [row for row in rows if row["how"] == "committed"]
    summary = json.loads((whole / SUMMARY).read_text())
    assert summary["rounds"] == len(committed) == 8
    assert summary["abandoned"] == len(rows) - 8
    assert summary["reports"] == sum(row["reports"] for row in committed)
    assert summary["time"] == rows[-1]["time"]
    for kind in ("down", "up"):
        assert summary["bytes"][kind] == sum(row["bytes"][kind] for row in rows)
    for use in ("useful", "wasted"):
        assert summary["device_seconds"][use] == pytest.approx(
            sum(row["device_seconds"][use] for row in rows)
        )
    assert summary["reason"] == "8 rounds done"
    assert summary["metrics"] == committed[-1]["metrics"]


def test_metrics_are_of_the_rounds_model_before_training(line: Path, tmp_path: Path) -> None:
    """With an evaluation, the first round's is of the initial model; without, the metrics are
    training's."""
    settings = {
        "plan__local__evaluate": True,
        "plan__stop__rounds": 2,
        "plan__local__batch_size": 0,
    }
    evaluated = done(simulate(make_scenario(tmp_path, line, 3, **settings), tmp_path / "a", ONE))
    first, _ = read_rows(evaluated.folder, ROUNDS)
    # All examples in one step: its loss is measured on the same model and data.
    assert first["evaluation"]["loss"] == pytest.approx(first["train"]["loss"], rel=1e-6)
    assert first["metrics"]["loss"] == first["evaluation"]["loss"]
    settings["plan__local__evaluate"] = False
    plain = done(simulate(make_scenario(tmp_path, line, 3, **settings), tmp_path / "b", ONE))
    first, _ = read_rows(plain.folder, ROUNDS)
    assert first["evaluation"] == {}
    assert first["metrics"] == first["train"]


TESTED = """
def test(seed):
    return line_data(500, seed=123)
"""


def test_the_test_set_is_measured_as_often_as_asked(line: Path, tmp_path: Path) -> None:
    scenario = make_scenario(tmp_path, line, 3, plan__stop__rounds=4)
    with (tmp_path / "lines.py").open("a") as module:
        module.write(TESTED)
    outcome = done(simulate(scenario, tmp_path / "run", ONE._replace(test=2)))
    tests = [row.get("test") for row in read_rows(outcome.folder, ROUNDS)]
    assert [found is not None for found in tests] == [False, True, False, True]
    assert tests[1] is not None
    assert tests[3] is not None
    assert tests[1]["loss"] > tests[3]["loss"] > 0
    assert outcome.summary["test"] == tests[3]
    without = done(simulate(scenario, tmp_path / "without", ONE._replace(test=0)))
    assert without.summary["test"] == {}
    assert without.model.tobytes() == outcome.model.tobytes()


def test_a_model_that_is_no_use_any_more_ends_nothing(line: Path, tmp_path: Path) -> None:
    """Large updates are accepted; the test loss of what they make is beyond any number."""
    scenario = make_scenario(
        tmp_path,
        line,
        1,
        plan__stop__rounds=2,
        failures__corrupt=[{"share": 1.0, "kind": "scaled", "factor": 1e6}],
    )
    (tmp_path / "lines.py").write_text(
        "import numpy as np\n\ndef make(device, seed):\n    x = np.full((1, 3), 0.1, np.float32)\n"
        "    return x, x[:, 0]\n\ndef test(seed):\n    x = np.full((4, 3), 1e18, np.float32)\n    "
        "return x, x[:, 0]\n"
    )
    outcome = done(simulate(scenario, tmp_path / "run", ONE))
    assert outcome.summary["rounds"] == 2
    assert outcome.summary["test"] == {}


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Devices keep a personal parameter, a row of state, the previous model, and what top-k leaves
    out."""
    folder = tmp_path_factory.mktemp("keeping")
    bundle = write_line_bundle(
        folder / "keeping.bundle", personal=True, state=True, references=["anchor", "previous"]
    )  # fmt: skip
    settings = MESSY | {"plan__local__evaluate": True, "plan__encoding__up": "topk-0.5-int8"}
    return make_scenario(folder, bundle.path, 12, **settings)


def kept_of(fleets: list[Fleet]) -> list[list[float] | None]:
    """What the devices of the last fleet keep."""
    kept = fleets[-1].coordinator.kept
    assert kept is not None
    assert kept.states is not None
    assert kept.residuals is not None
    both = [
        (each.file, row)
        for each in (kept.states, kept.residuals)
        for row in each.of(list(range(12)))
    ]
    return [None if row == NO_ROW else file.read(row).tolist() for file, row in both]


def test_what_devices_keep_is_the_same_on_two_processes_and_after_a_stop(
    keeping: Scenario, tmp_path: Path
) -> None:
    fleets: list[Fleet] = []
    whole = done(simulate(keeping, tmp_path / "whole", ONE, progress=fleets.append)).folder
    kept = kept_of(fleets)
    assert sum(values is not None for values in kept) >= 10
    two = done(
        simulate(keeping, tmp_path / "two", ONE._replace(workers=2), progress=fleets.append)
    ).folder
    assert contents(two) == contents(whole)
    assert kept_of(fleets) == kept
    stopped, outcome, times = tmp_path / "stopped", None, 0
    while outcome is None:
        begin = len(fleets)
        outcome = simulate(
            keeping,
            stopped,
            ONE,
            resume=times > 0,
            progress=fleets.append,
            should_stop=lambda begin=begin: any(
                fleet.history[-1]["how"] == "committed" for fleet in fleets[begin:]
            ),  # type: ignore[misc]
        )
        times += 1
        assert times < 20
    assert times >= 7
    assert contents(stopped) == contents(whole)
    assert kept_of(fleets) == kept


def test_a_new_run_begins_with_devices_that_keep_nothing(keeping: Scenario, tmp_path: Path) -> None:
    first = contents(done(simulate(keeping, tmp_path / "run", ONE)).folder)
    assert contents(done(simulate(keeping, tmp_path / "run", ONE)).folder) == first
    assert (tmp_path / "run" / KEPT_STATES).stat().st_size <= 4 * 6 * 3 * 12, "rows are used again"


def test_auto_without_a_graph_for_many(scenario: Scenario) -> None:
    (run,) = run_bundles(scenario)
    assert choose_backend(run, "auto") == (
        "bundle",
        "bundle line has no graphs/train_many.onnx",
    )
    with pytest.raises(SimulatorError, match=r"has no graphs/train_many\.onnx"):
        simulate(scenario, "nowhere", Options(backend="vectorized", workers=1))
    assert not Path("nowhere").exists()


SOFTMAX = virtual.SOFTMAX | {
    "plan__stop__rounds": 3,
    "plan__round": {"goal": 12, "minimum": 4, "over_selection": 1.3, "deadline": 1000.0},
}


def events_but_change(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key != "change"}
        for row in read_rows(folder, EVENTS)
    ]


def test_many_devices_in_a_call_on_two_processes(softmax: Path, tmp_path: Path) -> None:
    """Blocks are cut otherwise; what each device makes is the same."""
    scenario = make_scenario(tmp_path, softmax, 30, **SOFTMAX)
    options = Options(backend="vectorized", workers=1)
    one = done(simulate(scenario, tmp_path / "one", options))
    two = done(simulate(scenario, tmp_path / "two", options._replace(workers=2)))
    assert contents(one.folder) == contents(two.folder)
    per_device = done(simulate(scenario, tmp_path / "bundle", options._replace(backend="bundle")))
    assert events_but_change(one.folder) == events_but_change(per_device.folder), "whatever trains"
    assert abs(one.model - per_device.model).max() < 1e-6
    assert one.summary["test"]["accuracy"] == pytest.approx(
        per_device.summary["test"]["accuracy"], abs=0.02
    )


@pytest.mark.parametrize("backend", ["bundle", "vectorized", "auto"])
def test_a_run_with_parameters_in_another_memory(
    softmax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: BackendChoice
) -> None:
    """As on a GPU, with the CPU and memory of its own in the GPU's place. One process trains, as
    one GPU."""
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu"))
    monkeypatch.setattr(choice, "ProcessPool", None)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    scenario = make_scenario(tmp_path, softmax, 30, **SOFTMAX)
    options = Options(backend, provider="cuda", checkpoint=1)
    found = done(simulate(scenario, tmp_path / "cuda", options))
    kind = found.summary["backend"]
    expected = done(simulate(scenario, tmp_path / "cpu", Options(kind, workers=1, checkpoint=1)))
    assert found.model.tobytes() == expected.model.tobytes()
    assert found.summary["test"] == expected.summary["test"]
    # A run that is resumed goes on where it was; this one finds that the GPU is gone.
    monkeypatch.setitem(PROVIDERS, "cuda", Provider("NoSuchExecutionProvider", {}, "cuda"))
    before = contents(found.folder)
    with pytest.raises(
        SimulatorError,
        match="the provider 'cuda' is ONNX Runtime's NoSuchExecutionProvider, which is",
    ):
        simulate(scenario, found.folder, resume=True)
    assert contents(found.folder) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(provider="cuda", engine="ray"), "workers on Ray train on the CPU"),
        (Options(provider="tpu"), "provider 'tpu'; expected one of cpu, cuda"),  # type: ignore[arg-type]
    ],
)
def test_a_provider_that_cannot_be_used_is_refused_before_anything_is_written(
    line: Path, tmp_path: Path, options: Options, text: str
) -> None:
    with pytest.raises(SimulatorError, match=text):
        simulate(make_scenario(tmp_path, line, 6), tmp_path / "run", options)
    assert not (tmp_path / "run").exists()


def test_a_run_that_began_before_there_were_providers_is_resumed_on_the_cpu(
    line: Path, tmp_path: Path
) -> None:
    scenario = make_scenario(tmp_path, line, 6)
    whole = done(simulate(scenario, tmp_path / "whole", ONE))
    prepare(scenario, tmp_path / "run", ONE, read_json(whole.folder / MADE_OF))
    kept = read_json(tmp_path / "run" / OPTIONS)
    assert kept.pop("provider") == "cpu"
    write_json(tmp_path / "run" / OPTIONS, kept)
    assert (
        done(simulate(scenario, tmp_path / "run", ONE, resume=True)).model.tobytes()
        == whole.model.tobytes()
    )


def test_auto_says_what_it_took_and_why(softmax: Path, tmp_path: Path) -> None:
    scenario = make_scenario(tmp_path, softmax, 30, **SOFTMAX)
    outcome = done(simulate(scenario, tmp_path / "run", Options(workers=1, checkpoint=1)))
    assert outcome.summary["backend"] in ("bundle", "vectorized")
    assert "bundle" in outcome.summary["why"]
    assert "ms a device" in outcome.summary["why"]
    found = read_checkpoint(outcome.folder)
    assert found is not None
    assert found[1]["why"] == outcome.summary["why"], (
        "a resumed run takes the same, whatever is faster then"
    )
    assert (outcome.folder / CHECKPOINT).exists()


def test_python_looks_for_cycles_as_before_when_a_run_is_over(line: Path, tmp_path: Path) -> None:
    kept = gc.get_threshold()  # a coordinator in this process may have raised it
    before = (700, 10, 10)
    gc.set_threshold(*before)
    seen = []

    def progress(fleet: Fleet) -> None:
        seen.append(gc.get_threshold()[0])
        raise RuntimeError("enough")

    try:
        with pytest.raises(RuntimeError, match="enough"):
            simulate(make_scenario(tmp_path, line, 6), tmp_path / "run", ONE, progress=progress)
        assert seen == [run_module.GC_THRESHOLD]
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*kept)


def test_a_run_that_is_over_lets_go_of_its_fleet(line: Path, tmp_path: Path) -> None:
    left: list[Any] = []
    gc.disable()
    try:
        simulate(
            make_scenario(tmp_path, line, 6),
            tmp_path / "run",
            ONE,
            progress=lambda fleet: left.append(ref(fleet)),
        )
        assert [fleet() for fleet in left] == [None]
    finally:
        gc.enable()


ALIKE = {"kind": "synthetic", "alpha": 0.5, "beta": 0.5, "examples": 30}


@pytest.mark.parametrize(
    ("changes", "processes"),
    [({"data": ALIKE}, 0), ({"data": ALIKE, "plan__round__goal": 9}, 2), ({}, 2)],
    ids=["one block", "more devices than a block has", "of other sizes"],
)
def test_a_round_of_one_block_is_trained_here(
    softmax: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    processes: int,
) -> None:
    """Unless the options ask for more processes."""
    made: list[int] = []

    class Counted(ProcessPool):
        def __init__(self, make: Any, workers: int, divide: Any) -> None:
            made.append(workers)
            super().__init__(make, workers, divide)

    monkeypatch.setattr(choice, "ProcessPool", Counted)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    scenario = make_scenario(
        tmp_path, softmax, 30, **(virtual.SOFTMAX | {"plan__round__goal": 8} | changes)
    )
    first = done(simulate(scenario, tmp_path / "run", Options("vectorized")))
    assert sum(made) == processes
    if processes:
        return
    second = done(simulate(scenario, tmp_path / "two", Options("vectorized", workers=2)))
    assert sum(made) == 2
    assert first.summary == second.summary
