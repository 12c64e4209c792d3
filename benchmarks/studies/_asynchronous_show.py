"""The tables of asynchronous.py, as docs/studies/asynchronous.md has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import _measure as measure
from _dropout_tables import digits, minutes, of, percent, tuned
from fleetlearn_simulator.results.run_statistics import Target

Results = Mapping[Any, Sequence[Mapping[str, Any]]]
"""The runs of each cell: (method, concurrency, dropout)."""
Job = TypeVar("Job")


def progress(
    carry_out: Callable[[Job], dict[str, Any]], jobs: Sequence[Job]
) -> list[dict[str, Any]]:
    """The figures of each run, one after the other."""
    results = []
    for job in jobs:
        results.append(carry_out(job))
        print(".", end="", flush=True, file=sys.stderr)
    print(f" {len(jobs)} runs", file=sys.stderr)
    return results


def text(results: Results, best: Mapping[str, Mapping[str, float]], target: Target) -> str:
    """Return all tables."""
    parts = {
        "Chosen": tuned(best),
        f"Until {target}": until(results),
        "At the end of a run": ends(results),
    }
    return "\n\n".join(
        f"## {title}\n\n{measure.table(list(rows))}" for title, rows in parts.items()
    )


def until(results: Results) -> Iterator[Sequence[str]]:
    """Trips, time, bytes and models to the target."""
    yield "tasks at a time", "dropout", "method", "trips", "minutes", "MB", "models", "device-hours"
    for cell, runs in results.items():
        show = {
            "trips": lambda value: f"{value:,.0f}",
            "time": minutes,
            "bytes": lambda value: digits(float(f"{value / 1e6:.3g}")),
            "rounds": digits,
            "device_seconds": lambda value: digits(float(f"{value / 3600:.3g}")),
        }
        cells = [of(runs, "to_target", key, show=words) for key, words in show.items()]
        yield f"{cell.concurrency:,}", f"{percent(cell.dropout)} %", cell.method, *cells


def ends(results: Results) -> Iterator[Sequence[str]]:
    """The final models, and the course of the runs."""
    tenths = "slowest tenth", "2nd", "5th", "9th", "fastest tenth"
    yield (
        "tasks at a time",
        "dropout",
        "method",
        "staleness",
        "time wasted, %",
        "accuracy, %",
        *tenths,
    )
    for cell, runs in results.items():
        own = [[run["by_tenth"][index] for run in runs] for index in (0, 1, 4, 8, 9)]
        yield (
            *(f"{cell.concurrency:,}", f"{percent(cell.dropout)} %", cell.method),
            of(runs, "staleness", show=digits),
            of(runs, "wasted_share", show=percent),
            of(runs, "accuracy", show=percent),
            *(of([{"own": value} for value in values], "own", show=percent) for values in own),
        )
