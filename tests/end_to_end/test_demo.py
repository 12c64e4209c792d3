"""``make demo`` as a user runs it: real processes, real deaths. However it ends, none of its
processes is left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.demo.__main__ import main
from examples.demo.fleet import training_build
from examples.demo.processes import Child, DemoError, end_all

ROOT = Path(__file__).resolve().parents[2]
UPDATE_BYTES = 22_602 * 4
SMALL = ["--devices", "6", "--rounds", "8", "--kill", "2", "--accuracy", "0.3"]


def command(output: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "examples.demo", "--output", str(output), *arguments]


def run_demo(
    output: Path, *arguments: str, timeout: float = 400.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(output, *arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def processes_of(output: Path) -> list[psutil.Process]:
    """Everything whose command line names the demo's output directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(output) in part for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def assert_nothing_runs(output: Path, within: float = 0.0) -> None:
    deadline = time.monotonic() + within
    while left := processes_of(output):
        assert time.monotonic() < deadline, [process.cmdline() for process in left]
        time.sleep(0.02)


def start_and_await_rounds(output: Path) -> subprocess.Popen[str]:
    """A demo that trains: its second round is over."""
    demo = subprocess.Popen(
        command(output, *SMALL, "--rounds", "1000"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.split()[:1] == ["2"]:
            assert len(processes_of(output)) == 1 + 1 + 6  # itself, the coordinator, the devices
            return demo
    raise AssertionError(demo.communicate()[1])


def check_summary(output: Path, *, devices: int, rounds: int, killed: int) -> dict[str, Any]:
    """What must be true of every good run; returns the summary."""
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text("utf-8"))
    goal = 3 * devices // 4
    history = [row for row in summary["history"] if row["outcome"] == "committed"]
    assert (summary["devices"], summary["rounds"], len(history)) == (devices, rounds, rounds)
    assert summary["accuracy"] == history[-1]["accuracy"]
    assert summary["reports"] == sum(row["reports"] for row in summary["history"])
    # At least half of the goal; the goal unless a round's deadline passed.
    assert all(goal // 2 <= row["reports"] <= row["cohort"] for row in history)
    assert summary["reports"] >= (rounds - 2) * goal
    for row in summary["history"]:
        assert row["cohort"] == row["reports"] + sum(row["dropped"].values())
    assert sum(summary["dropped"].values()) == sum(
        sum(row["dropped"].values()) for row in summary["history"]
    )

    kills = summary["kills"]
    assert summary["killed"] == len(kills) == len({kill["device"] for kill in kills}) == killed
    assert {kill["phase"] for kill in kills} <= {"training", "uploading"}
    back = [kill["returned_in_round"] is not None for kill in kills]
    assert back == [True] * (killed // 2) + [False] * (killed - killed // 2)
    assert summary["resumed"] == killed // 2
    # Who died and stayed dead has lost its task, whatever the round's end was.
    assert summary["dropped"].get("lost", 0) >= sum(kill["phase"] == "training" for kill in kills)

    death = summary["coordinator_kill"]
    assert summary["coordinator_killed"] == 1
    assert death["reports"] >= 1
    assert death["tasks_out"] >= 1
    (resumed,) = [row for row in summary["history"] if row["number"] == death["round"]]
    assert resumed["reports"] >= death["reports"]

    # Not counted: what came in before the coordinator was killed, in that round.
    assert summary["bytes_up"] >= (summary["reports"] - death["reports"]) * UPDATE_BYTES
    assert summary["bytes"] == summary["bytes_up"] + summary["bytes_down"]
    assert summary["export"]["largest_difference"] < 1e-5
    assert summary["seconds"] > summary["training_seconds"] > 0
    assert (output / "progress.png").read_bytes().startswith(b"\x89PNG")
    return summary


def check_model(output: Path, accuracy: float, printed: str) -> None:
    """The command that the demo printed, run as it stands, finds the same accuracy."""
    (line,) = [line for line in printed.splitlines() if line.startswith("use it")]
    used = subprocess.run(
        line.removeprefix("use it").strip(),
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(output / "infer.onnx") in line
    right, _, total = used.stdout.splitlines()[-1].split()[:3]
    assert int(right) == round(accuracy * int(total))


def test_a_small_run(tmp_path: Path) -> None:
    demo = run_demo(tmp_path / "out", *SMALL)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert_nothing_runs(tmp_path)
    summary = check_summary(tmp_path / "out", devices=6, rounds=8, killed=2)
    check_model(tmp_path / "out", summary["accuracy"], demo.stdout)
    if training_build():
        assert summary["runtimes"] == {"ort-training": 2, "onnx": 4}
        assert summary["export"]["without_ort_training"] is None
        assert "2 of them on ONNX Runtime's training build" in demo.stdout
    else:
        assert summary["runtimes"] == {"onnx": 6}
        assert "no device uses ONNX Runtime's training build here" in demo.stdout
    for text in ("SIGKILL to device-", "starts again", "SIGKILL to the coordinator", "is up again"):
        assert text in demo.stdout


@pytest.mark.slow
def test_sigterm_ends_everything(tmp_path: Path) -> None:
    demo = start_and_await_rounds(tmp_path / "out")
    demo.send_signal(signal.SIGTERM)
    demo.communicate(timeout=20)
    assert demo.returncode == 128 + signal.SIGTERM
    assert_nothing_runs(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--devices 5", "argument --devices: '5' was given; expected a whole number from 6 to 140"),
        (
            "--rounds many",
            "argument --rounds: 'many' was given; expected a whole number from 6 to 10000",
        ),
        ("--alpha nan", "argument --alpha: 'nan' was given; expected a number from 0.01 to 1000"),
        ("--devices 12 --kill 9", "--kill 9 leaves too few of 12 devices: a round wants 9 reports"),
        ("--round 30", "unrecognized arguments: --round 30"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--output", str(tmp_path / "out"), *arguments.split()])
    assert left.value.code == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_a_device_command(tmp_path: Path) -> None:
    demo = run_demo(tmp_path / "out", "--device-command", str(tmp_path / "nothing"))
    assert demo.returncode == 1
    assert f"demo: --device-command {tmp_path / 'nothing'} is no program" in demo.stderr
    assert_nothing_runs(tmp_path)


def test_a_child_says_how_it_ended(tmp_path: Path) -> None:
    child = Child("the child", ["sh", "-c", "echo one; echo two >&2; exit 3"], tmp_path / "log")
    child.start()
    assert child.process is not None
    child.process.wait()
    assert child.new_lines() == ["one", "two"]
    assert child.new_lines() == []
    text = child.last_words(lines=1)
    assert text == f"the child ended with exit status 3; its log {tmp_path / 'log'} ends:\n    two"
    child.start()  # the log goes on
    child.process.wait()
    assert child.new_lines() == ["one", "two"]


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    deaf = Child(
        "the deaf one",
        ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"],
        tmp_path / "log",
    )
    deaf.start()
    while "ready" not in deaf.new_lines():
        time.sleep(0.01)
    end_all([deaf], patience=0.2)
    assert deaf.status == -signal.SIGKILL
    assert "was ended by SIGKILL" in deaf.last_words()


def test_a_child_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    with pytest.raises(DemoError, match=r"the child cannot be started: .*text: Permission denied"):
        Child("the child", [tmp_path / "text"], tmp_path / "log").start()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_whole_demo(tmp_path: Path, seed: int) -> None:
    began = time.monotonic()
    demo = run_demo(tmp_path / "out", "--seed", str(seed))
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert time.monotonic() - began < 170
    assert_nothing_runs(tmp_path)
    summary = check_summary(tmp_path / "out", devices=12, rounds=30, killed=4)
    assert summary["accuracy"] >= 0.95
    check_model(tmp_path / "out", summary["accuracy"], demo.stdout)


@pytest.mark.slow
def test_forty_devices_and_sixty_rounds(tmp_path: Path) -> None:
    demo = run_demo(tmp_path / "out", "--devices", "40", "--rounds", "60", timeout=400.0)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert check_summary(tmp_path / "out", devices=40, rounds=60, killed=4)["accuracy"] >= 0.95
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
def test_sigkill_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = start_and_await_rounds(tmp_path / "out")
    demo.kill()
    demo.communicate()
    assert_nothing_runs(tmp_path, within=5.0)


@pytest.mark.slow
def test_the_coordinator_dies_of_something_else(tmp_path: Path) -> None:
    demo = start_and_await_rounds(tmp_path / "out")
    (coordinator,) = [
        p
        for p in processes_of(tmp_path)
        if any("fleetlearn-coordinator" in part for part in p.cmdline())
    ]
    coordinator.send_signal(signal.SIGABRT)
    _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "demo: the coordinator was ended by SIGABRT; its log" in errors
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
def test_a_device_dies_of_something_else(tmp_path: Path) -> None:
    demo = start_and_await_rounds(tmp_path / "out")
    (device,) = [process for process in processes_of(tmp_path) if "device-04" in process.cmdline()]
    device.send_signal(signal.SIGABRT)
    _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "demo: device-04 was ended by SIGABRT; its log" in errors
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo = run_demo(tmp_path / "out", "--port", str(port))
    assert demo.returncode == 1
    assert "demo: the coordinator ended with exit status 1" in demo.stderr
    assert f"port {port}: another program listens there, perhaps another coordinator" in demo.stderr
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
def test_devices_that_hang(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nwhile :; do sleep 0.2; done\n")
    hangs.chmod(0o755)
    demo = run_demo(tmp_path / "out", "--stall", "2", "--device-command", str(hangs))
    assert demo.returncode == 1
    assert "demo: no round ended for 2 s. 0 of 12 devices up" in demo.stderr
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
def test_an_accuracy_that_is_not_reached(tmp_path: Path) -> None:
    demo = run_demo(tmp_path / "out", *SMALL[:-2], "--accuracy", "1")
    assert demo.returncode == 1
    assert "100.0% was to be reached" in demo.stderr
    assert (tmp_path / "out" / "summary.json").exists()
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
def test_two_demos_in_one_directory(tmp_path: Path) -> None:
    first = start_and_await_rounds(tmp_path / "out")
    try:
        second = run_demo(tmp_path / "out")
        assert second.returncode == 1
        assert "another demo is running in" in second.stderr
        assert first.poll() is None
    finally:
        os.kill(first.pid, signal.SIGINT)
        _, errors = first.communicate(timeout=20)
    assert first.returncode == 130
    assert "demo: stopped; nothing is left running" in errors
    assert_nothing_runs(tmp_path)
