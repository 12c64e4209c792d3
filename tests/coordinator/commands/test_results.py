"""The command ``results``, typed, of a run and of a simulation: their columns are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.commands.results import app
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_coordinator.storage.runs import Runs
from hand_written_run import add_round, write_hand_written_run
from peers import plan_text
from runs_folder import row, write_rows
from typer.testing import CliRunner


def typed(room: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", room, "results", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def lines_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_and_a_simulation_alike(tmp_path: Path) -> None:
    data = write_hand_written_run(tmp_path / "trial")
    folder = write_rows(tmp_path / "simulated", [row(1)], scenario='name = "trial"\n')
    found = []
    for room, place in (("fleetlearn_coordinator", data), ("fleetlearn_simulator", folder)):
        ended = typed(
            room, place, "--rounds", tmp_path / "rounds.jsonl", "--evaluations",
            tmp_path / "evaluations.csv", "--history", tmp_path / f"{room}.jsonl",
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        found.append(lines_of(tmp_path / "rounds.jsonl"))
        assert lines_of(tmp_path / f"{room}.jsonl")[0]["_step"] == 1
    run, simulated = found
    assert len(run) == 3
    assert len(simulated) == 1
    both = {*run[0]} & {*simulated[0]}
    assert {"round", "outcome", "time", "seconds", "reports", "lost", "change"} <= both


def test_a_plan_names_its_data(tmp_path: Path) -> None:
    ended = typed("fleetlearn_coordinator", tmp_path / "none.toml", "--history", tmp_path / "h")
    assert ended.returncode == 1
    assert "none.toml" in ended.stderr


def test_one_of_several_runs_by_its_name(tmp_path: Path, bundle_path: Path) -> None:
    service = tmp_path / "service.toml"
    service.write_text('runs = "runs"\n', "utf-8")
    runs = Runs(tmp_path / "runs")
    for name in ("first", "second"):
        plan = tmp_path / f"{name}.toml"
        plan.write_text(plan_text(bundle_path, write_hand_written_run(tmp_path / name)), "utf-8")
        runs.add(name, plan)
    runs.close()
    file = tmp_path / "rounds.jsonl"
    ended = CliRunner().invoke(app, [str(service), "second", "--rounds", str(file)])
    assert ended.exit_code == 0, ended.output
    assert len(lines_of(file)) == 3
    ended = CliRunner().invoke(app, [str(service), "third", "--rounds", str(file)])
    assert ended.exit_code == 1
    assert "there is no run called third; there are: first, second" in ended.stderr


def test_a_url_is_refused() -> None:
    ended = CliRunner().invoke(app, ["http://127.0.0.1:1", "--history", "history.jsonl"])
    assert ended.exit_code == 1
    assert "this command reads files, and takes PLAN.toml" in ended.stderr


def test_nowhere_to_go_is_refused(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, [str(write_hand_written_run(tmp_path))])
    assert ended.exit_code == 1
    assert "nothing says where the results go: give --rounds FILE" in ended.stderr


def test_follows_until_the_run_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_hand_written_run(tmp_path / "trial")
    looked: list[float] = []

    def sleep(seconds: float) -> None:
        """What happens between two looks: a round, and then the end."""
        looked.append(seconds)
        storage = find_storage(data)
        with storage.lock():
            ledger = storage.open_ledger(power=False, any_thread=False)
            if len(looked) == 1:
                add_round(ledger, 4)
            else:
                ledger.write([Metadata("finished", "4 rounds were wanted")])
            ledger.close()

    monkeypatch.setattr("fleetlearn_coordinator.results.send_results.time.sleep", sleep)
    file = tmp_path / "history.jsonl"
    ended = CliRunner().invoke(app, [str(data), "--history", str(file), "--follow", "7"])
    assert ended.exit_code == 0, ended.output
    assert looked == [7.0, 7.0]
    steps = [line["_step"] for line in lines_of(file)]
    assert steps == [1, 1, 2, 3, 4], "each line once"
