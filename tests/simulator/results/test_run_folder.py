"""A run's folder: logs that are cut back to the checkpoint, and errors that say what is wrong."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.round_state import EXCHANGE_POLICIES
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results import run_folder
from fleetlearn_simulator.results.run_folder import (
    CHECKPOINT,
    EVENTS,
    MODEL,
    ROUNDS,
    SUMMARY,
    RunLogs,
    read_checkpoint,
    read_rows,
    save_model,
    write_json,
)
from roll_call import ROLL_CALL, RollCall, roll_call
from safetensors.numpy import load_file, save_file


def test_logs_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    logs.write_events([{"time": 0.1 + 0.2, "event": "opened"}])
    logs.write_round({"round": 1})
    logs.write_checkpoint(
        {"model": np.arange(3, dtype=np.float32)}, {"now": 0.1 + 0.2, "none": None}
    )
    logs.write_events([{"time": 7.0, "event": "lost to the cut"}])
    logs.write_round({"round": 2})
    logs.close()
    found = read_checkpoint(tmp_path)
    assert found is not None
    tensors, state = found
    assert tensors["model"].tolist() == [0.0, 1.0, 2.0]
    assert (state["now"], state["none"]) == (0.1 + 0.2, None), "numbers come back to the last bit"

    again = RunLogs(tmp_path, at=state["logs"])
    again.write_events([{"time": 8.0, "event": "closed"}])
    again.close()
    assert read_rows(tmp_path, EVENTS) == [
        {"time": 0.1 + 0.2, "event": "opened"},
        {"time": 8.0, "event": "closed"},
    ]
    assert read_rows(tmp_path, ROUNDS) == [{"round": 1}]


def test_a_new_run_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    """Otherwise a resumed run could go on from the checkpoint of another."""
    logs = RunLogs(tmp_path)
    logs.write_events([{"event": "old"}])
    logs.write_checkpoint({"model": np.zeros(1, np.float32)}, {})
    logs.close()
    save_model(tmp_path, [("w", np.zeros((2, 1), np.float32))])
    write_json(tmp_path / SUMMARY, {"b": 1, "a": [2]})
    assert (tmp_path / SUMMARY).read_text().index('"a"') < (tmp_path / SUMMARY).read_text().index(
        '"b"'
    )
    assert load_file(tmp_path / MODEL)["w"].shape == (2, 1)
    RunLogs(tmp_path).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [EVENTS, ROUNDS]
    assert read_rows(tmp_path, EVENTS) == []
    assert read_checkpoint(tmp_path) is None


@pytest.mark.parametrize("resumed", [False, True])
def test_each_kind_of_exchange_has_a_file_while_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """A run that begins again, or goes on from before the first of them, has none."""
    monkeypatch.setitem(EXCHANGE_POLICIES, ROLL_CALL, roll_call(RollCall()))
    logs = RunLogs(tmp_path)
    logs.write_checkpoint({"model": np.zeros(1, np.float32)}, {})
    for kind in (EVALUATION, ROLL_CALL):
        logs.write_exchange(kind, {kind: 1})
    logs.close()
    assert read_rows(tmp_path, "evaluations.jsonl") == [{"evaluation": 1}]
    assert read_rows(tmp_path, "roll-calls.jsonl") == [{"roll-call": 1}]
    found = read_checkpoint(tmp_path)
    assert found is not None
    RunLogs(tmp_path, at=found[1]["logs"] if resumed else None).close()
    assert {file.name for file in tmp_path.glob("*.jsonl")} == {EVENTS, ROUNDS}


def test_without_events_the_log_is_empty(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path, events=False)
    logs.write_events([{"event": "opened"}, {"event": "assigned"}])
    logs.write_round({"round": 1})
    logs.close()
    assert read_rows(tmp_path, EVENTS) == []
    assert read_rows(tmp_path, ROUNDS) == [{"round": 1}]


def test_events_are_in_the_log_in_their_order_however_many_come_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LINES_AT_ONCE", 3)
    rows = [{"time": float(number), "event": "accepted", "device": number} for number in range(8)]
    found = set()
    for counts in ([1] * 8, [8], [2, 0, 5, 1], [3, 3, 2]):
        logs, given = RunLogs(tmp_path), iter(rows)
        for count in counts:
            noted = [*islice(given, count)]
            logs.write_events(noted)
            noted.clear()  # what is done with the list afterwards does not matter
        logs.close()
        assert read_rows(tmp_path, EVENTS) == rows
        found.add((tmp_path / EVENTS).read_bytes())
    assert len(found) == 1


def test_a_log_that_lost_its_end_is_refused(tmp_path: Path) -> None:
    """Cutting it to a greater length would fill it with zeros."""
    logs = RunLogs(tmp_path)
    logs.write_events([{"event": "opened"}])
    logs.write_checkpoint({"model": np.zeros(1, np.float32)}, {})
    logs.close()
    found = read_checkpoint(tmp_path)
    assert found is not None
    (tmp_path / EVENTS).write_bytes(b"")
    with pytest.raises(SimulatorError, match=r"events\.jsonl is shorter than when"):
        RunLogs(tmp_path, at=found[1]["logs"])
    (tmp_path / EVENTS).unlink()
    with pytest.raises(SimulatorError, match=r"events\.jsonl is shorter than when"):
        RunLogs(tmp_path, at=found[1]["logs"])


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x10\0\0\0\0\0\0\0{}"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(
        SimulatorError, match=r"checkpoint\.safetensors is damaged .* run the scenario again"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("metadata", [None, {"other": "x"}, {"state": "{"}])
def test_a_checkpoint_without_its_state_is_refused(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    save_file({"model": np.zeros(1, np.float32)}, tmp_path / CHECKPOINT, metadata=metadata)
    with pytest.raises(SimulatorError, match="is damaged"):
        read_checkpoint(tmp_path)


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / ROUNDS).write_text('{"round": 1}\n{"round"')
    with pytest.raises(SimulatorError, match="cannot be read as a run's log"):
        read_rows(tmp_path, ROUNDS)
    with pytest.raises(SimulatorError, match="cannot be read as a run's log"):
        read_rows(tmp_path, EVENTS)
