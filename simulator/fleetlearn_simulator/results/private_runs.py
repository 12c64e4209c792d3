"""What the pages and tables of a simulation say of a private run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fleetlearn_protocol.epsilon_text import budget_text, spent_text

from fleetlearn_simulator.results.html_page import COLOURS, Chart, chart, numbers
from fleetlearn_simulator.results.loaded_run import Floats, LoadedRun, series, thinned

NOT_RELEASED = "; the simulator's own, not released"
"""Follows what the simulator measures of a private run's models on data that it keeps back."""


def nothing_measured(private: bool, secure: bool) -> str:
    """Return what stands in the place of charts of metrics, where there are none."""
    kind = "private run" if private else "run with secure aggregation" if secure else ""
    why = f" A {kind} shows nothing of what its devices measure." if kind else ""
    return f"Nothing was measured.{why}"


def privacy_words(spent: Mapping[str, Any]) -> str:
    """Return what a run has spent. ``spent``: the ``privacy`` of a round's summary."""
    of = "" if spent.get("of") is None else f" of {budget_text(spent['of'])}"
    epsilon = spent_text(spent["epsilon"], spent.get("of"), 4)
    # A page reads all numbers of a run's file as floats.
    releases = "1 release" if spent["release"] == 1 else f"{spent['release']:,.0f} releases"
    return (
        f"epsilon {epsilon}{of} at delta {spent['delta']:g} after {releases}; "
        f"clip norm {spent['clip']:.4g}"
    )


def plan_words(plan: Mapping[str, Any]) -> str:
    """Return how a plan's releases are made. ``plan``: its tables."""
    privacy = plan["privacy"]
    drawn = ", each device drawn by a coin (Poisson)" if privacy["sampling"] == "poisson" else ""
    measured = (
        "what devices measure is not released"
        if privacy["metrics"] == "none"
        else "what devices measure is released with noise"
    )
    return f"mechanism {privacy['mechanism']}{drawn}; {measured}"


def spent_last(run: LoadedRun) -> float:
    """Return the epsilon that a run has spent, NaN where it is not private."""
    rows = run.private
    return float(rows[-1].privacy["epsilon"] or 0.0) if rows else float("nan")


def privacy_charts(run: LoadedRun) -> list[Chart]:
    """Show epsilon by round, what is measured against epsilon, and the clip norm."""
    rows = run.private
    rounds = np.array([row.round for row in rows], np.float64)
    epsilon = _column(run, "epsilon")
    budget = rows[-1].privacy.get("of")
    spent = [_line("spent", rounds, epsilon, COLOURS[0])]
    if budget is not None:
        ends = np.array([rounds[0], rounds[-1]])
        spent.append(_line("budget", ends, np.full(2, budget), COLOURS[3], "dash"))
    zero = {"rangemode": "tozero"}
    charts = [chart("Epsilon spent", spent, "round", "epsilon", yaxis=zero)]
    charts += _against_epsilon(run)
    clips = [_line("clip norm", rounds, _column(run, "clip"), COLOURS[8])]
    charts.append(chart("Clip norm", clips, "round", "L2 norm", yaxis=zero))
    if any("clipped_share" in row.privacy for row in rows):
        shares = _line("clipped", rounds, 100 * _column(run, "clipped_share"), COLOURS[1])
        note = "With noise: it may be below 0 or above 100."
        charts.append(chart("Clipped updates", [shares], "round", "per cent", note))
    return charts


def _against_epsilon(run: LoadedRun) -> list[Chart]:
    """Show each metric of the kept back data against what was spent when it was measured."""
    spent = {row.round: row.privacy["epsilon"] for row in run.private}
    charts = []
    for name, kinds in series(run).items():
        if "test" not in kinds:
            continue
        places, values = kinds["test"]
        at = np.array([spent.get(run.rows[place].round) or np.nan for place in places])
        line = _line(name, at, values, COLOURS[3])
        note = "On the data kept back" + NOT_RELEASED + "."
        charts.append(chart(f"{name} against epsilon", [line], "epsilon", name, note))
    return charts


def _column(run: LoadedRun, name: str) -> Floats:
    values: Sequence[float | None] = [row.privacy.get(name) for row in run.private]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _line(name: str, x: Floats, y: Floats, colour: str, dash: str = "solid") -> dict[str, Any]:
    chosen = thinned(y)
    return {
        "type": "scatter",
        "mode": "lines" if len(chosen) > 1 else "markers",
        "name": name,
        "x": numbers(x[chosen]),
        "y": numbers(y[chosen]),
        "line": {"color": colour, "dash": dash, "width": 2},
    }
