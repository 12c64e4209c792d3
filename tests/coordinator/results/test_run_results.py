"""A run's numbers as tables: by hand from a ledger, and formats read back by other libraries."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator import RunResults
from fleetlearn_coordinator.results.errors import ResultsError
from fleetlearn_coordinator.results.result_table import FORMATS, ResultTable, tool
from fleetlearn_coordinator.storage.errors import StoreError
from hand_written_run import write_hand_written_run

COLUMNS = [
    "round", "outcome", "version", "time", "seconds", "reports", "partial", "lost", "refused",
    "surplus", "lost/lost", "refused/out-of-range", "change", "bytes_down", "bytes_up",
    "train/loss", "evaluation/accuracy", "held-out/accuracy",
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_hand_written_run(tmp_path / "trial")


def test_rounds_by_hand(data: Path) -> None:
    results = RunResults.load(data)
    assert (results.name, results.finished) == ("trial", False)
    assert results.settings == {"round": {"goal": 9}}
    table = results.rounds()
    assert table.columns == COLUMNS
    assert table.rows[0] == {
        "round": 1,
        "outcome": "committed",
        "version": 1,
        "time": 120.0,
        "seconds": 59.5,
        "reports": 5,
        "partial": 1,
        "lost": 2,
        "refused": 3,
        "surplus": 4,
        "lost/lost": 2,
        "refused/out-of-range": 3,
        "change": 0.5,
        "bytes_down": 1000,
        "bytes_up": 2000,
        "train/loss": 1.0,
        "evaluation/accuracy": 0.1,
        "held-out/accuracy": 0.75,
    }
    # An abandoned round makes no model, and what the model before measured is not its own.
    assert table.rows[1]["version"] == 1
    assert "held-out/accuracy" not in table.rows[1]
    assert [row["version"] for row in table.rows] == [1, 1, 2]


def test_evaluations_by_hand(data: Path) -> None:
    assert RunResults.load(data).evaluations().rows == [
        {
            "evaluation": 1,
            "outcome": "valid",
            "version": 1,
            "time": 150.0,
            "devices": 7,
            "examples": 70,
            "evaluation/accuracy": 0.6,
        }
    ]


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    assert RunResults.load(write_hand_written_run(tmp_path / "run", finished=True)).finished


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a coordinator.s data directory"):
        RunResults.load(tmp_path)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames(data: Path, library: str) -> None:
    pytest.importorskip(library)
    frame = getattr(RunResults.load(data).rounds(), library)()
    assert [*frame.columns] == COLUMNS
    assert frame["train/loss"].mean() == pytest.approx((1.0 + 1 / 3) / 2), "null is no number"
    assert frame["round"].to_list() == [1, 2, 3]


def test_a_whole_number_first_makes_no_column_of_whole_numbers() -> None:
    pytest.importorskip("polars")
    rows: list[dict[str, Any]] = [{"a": 1} for _ in range(200)]
    frame = ResultTable([*rows, {"a": 0.5}]).polars()
    assert frame["a"].to_list() == [1.0] * 200 + [0.5]


def test_each_format_read_back(data: Path, tmp_path: Path) -> None:
    table = RunResults.load(data).rounds()
    for suffix in FORMATS:
        if suffix == ".parquet":
            pytest.importorskip("polars")
        table.write(tmp_path / f"rounds{suffix}")
    assert (
        msgspec.json.Decoder().decode_lines((tmp_path / "rounds.jsonl").read_bytes()) == table.rows
    )
    with (tmp_path / "rounds.csv").open(newline="") as stream:
        lines = [*csv.DictReader(stream)]
    assert [*lines[0]] == COLUMNS
    assert [line["train/loss"] for line in lines] == ["1.0", "", str(1 / 3)]
    frame = tool("polars").read_parquet(tmp_path / "rounds.parquet")
    assert frame.to_dicts() == [{name: row.get(name) for name in COLUMNS} for row in table.rows]
    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        "rounds.csv",
        "rounds.jsonl",
        "rounds.parquet",
    ], "nothing else is left"


def test_another_ending_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"rounds\.xls ends with none of \.parquet, \.csv"):
        RunResults.load(data).rounds().write(tmp_path / "rounds.xls")


def test_a_file_that_cannot_be_written_leaves_the_one_before(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    file.write_text("before")
    with pytest.raises(TypeError):
        ResultTable([{"a": object()}]).write(tmp_path / "rounds.jsonl")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(IsADirectoryError):
        RunResults.load(data).rounds().write(tmp_path / "folder.csv")
    assert file.read_text() == "before"
    assert not [*tmp_path.glob(".*")]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("fleetlearn_coordinator.results.result_table.import_module", missing)
    with pytest.raises(ResultsError, match=r"needs polars.*pip install 'fleetlearn\[results\]'"):
        ResultTable([]).polars()
