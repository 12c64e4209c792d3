"""A simulation's numbers as the tables of a coordinator's run."""

from __future__ import annotations

import json
from pathlib import Path

from fleetlearn_simulator import load_results
from runs_folder import row, write_rows


def folder_of(place: Path, **values: object) -> Path:
    first = row(
        1,
        connected=9,
        reports=5,
        partial=1,
        train={"loss": 0.5},
        test={"accuracy": 0.25},
        dropped={"lost": 2, "rejected: out-of-range": 3, "surplus": 4},
        causes={"battery": 2},
        bytes={"down": 10, "up": 20},
        device_seconds={"useful": 3.0, "wasted": 1.0},
        change=0.5,
    )
    second = row(2, how="abandoned", train={"loss": None})
    return write_rows(place, [first, second], scenario='name = "trial"\nseed = 3\n', **values)


def test_rounds_by_hand(tmp_path: Path) -> None:
    results = load_results(folder_of(tmp_path))
    assert (results.name, results.settings, results.finished) == (
        "trial",
        {"name": "trial", "seed": 3},
        False,
    )
    first, second = results.rounds().rows
    assert first == {
        "round": 1,
        "outcome": "committed",
        "time": 60.0,
        "seconds": 60.0,
        "connected": 9,
        "reports": 5,
        "partial": 1,
        "lost": 2,
        "refused": 3,
        "surplus": 4,
        "lost/lost": 2,
        "refused/out-of-range": 3,
        "change": 0.5,
        "bytes_down": 10,
        "bytes_up": 20,
        "train/loss": 0.5,
        "test/accuracy": 0.25,
        "device_seconds/useful": 3.0,
        "device_seconds/wasted": 1.0,
        "cause/battery": 2,
    }
    assert (second["outcome"], second["lost"], second["train/loss"]) == ("abandoned", 0, None)
    assert (second["cause/battery"], second["refused/out-of-range"]) == (0, 0)
    assert results.evaluations().rows == []


def test_evaluations_by_hand(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, summary={"reason": "rounds"})
    line = {
        "evaluation": 1,
        "version": 2,
        "outcome": "valid",
        "time": 90.0,
        "seconds": 5.0,
        "devices": 7,
        "examples": 70,
        "metrics": {"accuracy": 0.5},
    }
    (folder / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    results = load_results(folder)
    assert results.finished
    assert results.evaluations().rows == [
        {
            "evaluation": 1,
            "outcome": "valid",
            "version": 2,
            "time": 90.0,
            "devices": 7,
            "examples": 70,
            "evaluation/accuracy": 0.5,
        }
    ]
