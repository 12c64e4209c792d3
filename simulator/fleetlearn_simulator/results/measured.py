"""A simulation's rounds and evaluations as the same tables that a coordinator's run has."""

from __future__ import annotations

from pathlib import Path

from fleetlearn_coordinator.results.result_table import ResultRow
from fleetlearn_coordinator.results.run_results import (
    RunResults,
    dropped_columns,
    evaluation_row,
    prefixed,
    with_zeros,
)

from fleetlearn_simulator.results.loaded_run import Round, read_run
from fleetlearn_simulator.results.run_folder import EVALUATIONS, read_rows

TOLD = "epsilon", "release", "clip", "clipped_share"
"""What a table says of a private run's releases."""


def load_results(folder: Path | str) -> RunResults:
    """Read what a simulation measured, whether it is finished or not. The columns are those of
    ``fleetlearn_coordinator.results.run_results``, and ``connected``, ``device_seconds/useful`` and
    ``/wasted``, and ``cause/CAUSE``: why devices lost tasks, as only a simulation knows. Of a
    private run also ``privacy/clip`` and, where that follows the updates, ``/clipped_share``.
    Raises SimulatorError if a file is missing or damaged."""
    folder = Path(folder)
    run = read_run(folder)
    evaluations = read_rows(folder, EVALUATIONS) if (folder / EVALUATIONS).exists() else []
    return RunResults(
        run.name,
        run.scenario,
        with_zeros([_round_row(row) for row in run.rows]),
        [
            evaluation_row(row["evaluation"], row["outcome"], row["version"], row["time"], row)
            for row in evaluations
        ],
        bool(run.summary),
    )


def _round_row(row: Round) -> ResultRow:
    return {
        "round": row.round,
        "outcome": row.how,
        "time": row.time,
        "seconds": row.seconds,
        "connected": row.connected,
        "reports": row.reports,
        "partial": row.partial,
        **({} if row.goal is None else {"goal": row.goal}),
        **dropped_columns(row.dropped),
        "change": row.change or 0.0,
        "bytes_down": row.bytes.get("down", 0),
        "bytes_up": row.bytes.get("up", 0),
        **prefixed("train", row.train),
        **prefixed("evaluation", row.evaluation),
        **prefixed("test", row.test),
        **prefixed("device_seconds", row.device_seconds),
        **prefixed("cause", row.causes),
        **prefixed("privacy", {name: row.privacy[name] for name in TOLD if name in row.privacy}),
    }
