"""Ctrl-C, as a terminal sends it: to the command and to the processes that it has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.results.run_folder import (
    CHECKPOINT,
    EVENTS,
    ROUNDS,
    SCENARIO,
    SUMMARY,
    read_rows,
)
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import write_scenario

LIMIT = 60.0
"""Seconds after which something hangs."""


def hear_ctrl_c() -> None:
    """As a terminal's processes do. Tests that a shell runs in the background ignore SIGINT, and so
    would what they begin."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """``fleetlearn-simulate``, in a group of processes of its own."""
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-m", "fleetlearn_simulator", *words],
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def wait_until(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT
    while not condition():
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_sweep_is_stopped_and_goes_on(line: Path, tmp_path: Path) -> None:
    path = write_scenario(tmp_path, line, 3, plan__stop__rounds=200, sweep={"seed": [1, 2, 3, 4]})
    folder = tmp_path / "out"
    words = (
        "run",
        str(path),
        "--output",
        str(folder),
        "--workers",
        "2",
        "--backend",
        "bundle",
        "--no-events",
    )
    with command(*words) as child:
        wait_until(lambda: any(folder.glob(f"*/{CHECKPOINT}")), child)
        os.killpg(child.pid, signal.SIGINT)
        said, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 130
    assert f"stopped; fleetlearn-simulate resume {folder} goes on" in said
    runs = sorted(folder.iterdir())
    stopped = [run for run in runs if (run / CHECKPOINT).exists()]
    waiting = [run for run in runs if not (run / ROUNDS).exists()]
    assert (len(runs), len(stopped) > 0, len(waiting) > 0) == (4, True, True)
    assert 0 < len(read_rows(stopped[0], ROUNDS)) < 200
    with command(*words) as child:
        said, _ = child.communicate(timeout=LIMIT)
        assert "holds a run already" in said
    with command("resume", str(folder), "--workers", "2") as child:
        said, _ = child.communicate(timeout=LIMIT)
        assert child.returncode == 0, said
    for run in (stopped[0], waiting[-1]):
        whole = simulate(
            Scenario.load(run / SCENARIO), tmp_path / "whole", Options("bundle", 1, events=False)
        )
        assert whole is not None
        for name in (SCENARIO, EVENTS, ROUNDS, SUMMARY):
            assert (run / name).read_bytes() == (whole.folder / name).read_bytes()
    assert all((run / SUMMARY).exists() for run in runs)


def left_of(group: int) -> list[int]:
    """Return the processes of the group that still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_command_alone_leaves_no_process_behind(
    line: Path, tmp_path: Path, number: int
) -> None:
    """A service manager's SIGTERM, a closed terminal, or memory that ran out. A simulated round
    takes milliseconds."""
    path = write_scenario(tmp_path, line, 3, plan__stop__rounds=100_000, sweep={"seed": [1, 2, 3]})
    folder = tmp_path / "out"
    words = (
        "run",
        str(path),
        "--output",
        str(folder),
        "--workers",
        "2",
        "--backend",
        "bundle",
        "--no-events",
    )
    with command(*words) as child:
        wait_until(lambda: any(folder.glob(f"*/{CHECKPOINT}")), child)
        assert len(left_of(child.pid)) >= 3
        os.kill(child.pid, number)
        child.wait(LIMIT)
        limit = time.monotonic() + LIMIT
        while left := left_of(child.pid):
            assert time.monotonic() < limit, left
            time.sleep(0.05)
        said, _ = child.communicate(timeout=LIMIT)
    if number != signal.SIGKILL:
        assert child.returncode == 130
        assert f"stopped; fleetlearn-simulate resume {folder} goes on" in said


def test_processes_that_train_end_with_a_killed_command(line: Path, tmp_path: Path) -> None:
    """They are in the middle of a block that does not end."""
    path = write_scenario(tmp_path, line, 1)
    (tmp_path / "lines.py").write_text(ENDLESS)
    with command("run", str(path), "--workers", "2", "--backend", "bundle") as child:
        wait_until((tmp_path / "begun").exists, child)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(LIMIT)
        limit = time.monotonic() + LIMIT
        while left := left_of(child.pid):
            assert time.monotonic() < limit, left
            time.sleep(0.05)


ENDLESS = """
from pathlib import Path
from threading import Event

def examples(device, seed):
    return 10

def make(device, seed):
    (Path(__file__).parent / "begun").touch()
    Event().wait()
"""


def test_the_second_does_not_wait_for_the_end_of_a_round(line: Path, tmp_path: Path) -> None:
    path = write_scenario(tmp_path, line, 1)
    (tmp_path / "lines.py").write_text(ENDLESS)
    with command("run", str(path), "--workers", "1", "--backend", "bundle") as child:
        wait_until((tmp_path / "begun").exists, child)
        sent = 0
        while child.poll() is None and sent < LIMIT:
            os.killpg(child.pid, signal.SIGINT)
            sent += 1
            try:
                child.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
    assert child.returncode not in (0, -signal.SIGKILL)
    assert sent >= 2
