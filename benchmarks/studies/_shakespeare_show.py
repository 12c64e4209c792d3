"""The tables of shakespeare.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import _measure as measure
import numpy as np

Results = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
TITLES = {
    "paper": "The paper's LSTM",
    "batches": "Batches and epochs, by role and mixed",
    "sizes": "By role, mixed, and mixed in equal numbers",
    "servers": "The optimizer on the server",
    "losses": "Devices that vanish, and FedBuff",
}


def text(described: Mapping[str, float], results: Results, targets: Mapping[str, float]) -> str:
    """Return all tables."""
    sizes = [("of the data", ""), *((name, f"{value:,.0f}") for name, value in described.items())]
    parts = [f"## Data\n\n{measure.table(sizes)}"]
    for part, runs in results.items():
        rows = table(runs, targets[part], part == "losses")
        parts.append(f"## {TITLES[part]}\n\n{measure.table(rows)}")
    return "\n\n".join(parts)


def table(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], target: float, fates: bool
) -> list[Sequence[str]]:
    """Return a row for each way of training. fates: with what became of tasks."""
    until = f"until {100 * target:g} %"
    rows: list[Sequence[str]] = [
        ("", f"models {until}", f"updates {until}", f"minutes {until}", "updates", "accuracy, %")
        + (("tasks lost, %",) if fates else ())
    ]
    for name, seeds in runs.items():
        rows.append(
            (
                name,
                *(_until(seeds, key) for key in ("round", "reports", "minutes")),
                f"{np.median([run['reports'][-1] for run in seeds]):,.0f}",
                _spread([100 * run["last"] for run in seeds]),
            )
            + ((_spread([100 * run["lost_share"] for run in seeds]),) if fates else ())
        )
    return rows


def _until(seeds: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return what the median run had spent where it reached the target."""
    if any(run["to_target"] is None for run in seeds):
        return "not reached"
    spent = [run[key][run["round"].index(run["to_target"])] for run in seeds]
    return f"{np.median(spent):,.0f}"


def _spread(values: Sequence[float]) -> str:
    middle = f"{np.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.1f}-{max(values):.1f}]"
