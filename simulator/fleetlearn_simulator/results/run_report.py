"""report.html: one run in charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.epsilon_text import budget_text, spent_text

from fleetlearn_simulator.results import html_page as page
from fleetlearn_simulator.results.family_runs import backend_words, member_words, own_lines
from fleetlearn_simulator.results.html_page import ABSENT, PagePart, listed, share, size, span
from fleetlearn_simulator.results.loaded_run import LoadedRun, read_run, series
from fleetlearn_simulator.results.private_runs import (
    NOT_RELEASED,
    plan_words,
    privacy_charts,
    privacy_words,
)
from fleetlearn_simulator.results.run_charts import (
    KIND_STYLES,
    connected_chart,
    device_time_chart,
    lengths_chart,
    lost_chart,
    lost_in_all_chart,
    metric_charts,
    participation_chart,
    reports_chart,
)
from fleetlearn_simulator.results.run_folder import ROUNDS, SCENARIO
from fleetlearn_simulator.results.run_statistics import wasted_share
from fleetlearn_simulator.results.secure_runs import secure_parts, secure_words

REPORT = "report.html"
LAST_ROUNDS = 20
"""Rounds in the table."""


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write a page about a run that is finished or not. Default for ``file``: ``report.html`` in
    its folder.

    Raises SimulatorError if there is no run, or if the page cannot be written.
    """
    run = read_run(folder)
    return page.write_page(file or folder / REPORT, f"{run.name} · fleetlearn", _parts(run))


def _parts(run: LoadedRun) -> Iterator[PagePart]:
    yield PagePart("title", run.name)
    yield from (PagePart("note", line) for line in _subtitle(run))
    if not run.rows:
        yield PagePart("text", f"No round has ended yet: {ROUNDS} is empty.")
    else:
        yield PagePart("tiles", list(_tiles(run)))
        yield PagePart("section", "Metrics")
        yield PagePart("switch")
        yield PagePart("charts", metric_charts(run))
        if members := [*member_words(run.summary)]:
            yield PagePart("section", "Members of the family")
            yield page.table(["model", "devices, reports and what was measured last"], members)
        if run.private:
            yield PagePart("section", "Privacy")
            yield PagePart("note", f"{privacy_words(run.private[-1].privacy)}.")
            yield PagePart("charts", privacy_charts(run))
        yield from secure_parts(run)
        yield PagePart("section", "Where devices were lost")
        yield PagePart(
            "note", f"As the coordinator saw it: {listed(run.total(lambda row: row.dropped))}."
        )
        if run.total(lambda row: row.causes):
            yield PagePart("charts", [lost_chart(run), lost_in_all_chart(run)])
        else:
            yield PagePart("text", "In the simulation itself, no task was lost.")
        yield PagePart("section", "Device time and participation")
        yield PagePart("charts", [device_time_chart(run), participation_chart(run)])
        yield PagePart("section", "Rounds")
        yield PagePart("charts", [connected_chart(run), reports_chart(run), lengths_chart(run)])
        yield PagePart("section", "The last rounds")
        yield _last(run)
    if run.scenario:
        yield PagePart(
            "folded", ("The scenario, as it was run", (run.folder / SCENARIO).read_text("utf-8"))
        )


def _subtitle(run: LoadedRun) -> Iterator[str]:
    tables = run.scenario
    plan = tables.get("plan", {})
    population = tables.get("population", {}).get("size")
    family = plan.get("family", {})
    words = [
        f"seed {tables['seed']}" if "seed" in tables else "",
        f"{population:,} devices" if isinstance(population, int) else "",
        f"tiers {', '.join(tables['tiers'])}" if len(tables.get("tiers", {})) > 1 else "",
        f"data {tables['data']['kind']}" if "data" in tables else "",
        f"availability {tables['availability']['kind']}" if "availability" in tables else "",
        f"recipe {plan['recipe']}" if "recipe" in plan else "",
        _goal_words(plan.get("round", {})),
        f"bundle {Path(plan['bundle']).name}" if "bundle" in plan and not family else "",
        f"members {', '.join(family)}" if family else "",
    ]
    privacy = plan_words(plan) if "privacy" in plan else ""
    secure = secure_words(plan, tables.get("coordinator", {})) if "secure" in plan else ""
    state = (
        run.state
        if run.summary
        else f"not finished: as far as round {run.rows[-1].round if run.rows else 0}"
    )
    backend = f"back end {backend_words(run.summary)}" if "why" in run.summary else ""
    own = [(f"{title}: {words}",) for title, words in own_lines(run.summary)]
    yield from filter(
        None,
        (
            " · ".join(filter(None, line))
            for line in (words, *own, (privacy,), (secure,), (state, backend))
        ),
    )


def _goal_words(rule: Mapping[str, Any]) -> str:
    """Return what a plan's rounds want. ``rule``: its [round]."""
    if "goal_share" in rule:
        return f"goal of {rule['goal_share']:g} of the devices, {rule['goal']:,} reports at most"
    return f"goal of {rule['goal']:,} reports" if "goal" in rule else ""


def _tiles(run: LoadedRun) -> Iterator[tuple[str, str, str]]:
    committed = run.committed
    yield "rounds", f"{len(committed):,}", f"{len(run.rows) - len(committed):,} abandoned"
    yield (
        "virtual time",
        span(run.rows[-1].time),
        f"median round {span(float(np.median(run.column(lambda round_: round_.seconds))))}",
    )
    reports = sum(round_.reports for round_ in committed)
    yield "reports", f"{reports:,}", f"{sum(round_.partial for round_ in committed):,} partial"
    tasks, lost = (
        run.total(lambda round_: round_.assigned).total(),
        run.total(lambda round_: round_.causes).total(),
    )
    yield "tasks lost", share(lost, tasks), f"{lost:,} of {tasks:,}"
    seconds = run.total(lambda round_: round_.device_seconds).total()
    yield (
        "device time wasted",
        f"{100 * wasted_share(run):.3g} %" if seconds else ABSENT,
        f"of {span(seconds)}",
    )
    sent = run.total(lambda round_: round_.bytes)
    yield "bytes sent", size(sent.total()), f"{size(sent['down'])} down, {size(sent['up'])} up"
    if "devices" in run.summary:
        population = run.scenario.get("population", {}).get("size", 0)
        yield (
            "devices with a task",
            f"{run.summary['devices']:,}",
            f"{share(run.summary['devices'], population)} of all",
        )
    if without := run.summary.get("without_examples"):
        yield (
            "devices without examples",
            f"{without:,}",
            "of those that were drawn; they never connect",
        )
    if run.private:
        spent = run.private[-1].privacy
        budget, epsilon = spent.get("of"), spent["epsilon"]
        of = "no budget" if budget is None else f"of {budget_text(budget)}"
        told = ABSENT if epsilon is None else spent_text(epsilon, budget, 4)
        yield "epsilon", told, f"{of}, at delta {spent['delta']:g}"
    for name, kinds in series(run).items():
        kind = next(iter(kinds))
        mark = NOT_RELEASED if run.private and kind == "test" else ""
        yield name, f"{kinds[kind][1][-1]:.4g}", KIND_STYLES[kind][0] + mark


def _last(run: LoadedRun) -> PagePart:
    """Return a table of the last rounds."""
    columns = [(name, kind) for name, kinds in series(run).items() for kind in kinds]
    columns = [
        (name, kind)
        for name, kind in columns
        if kind != "train" or (name, "evaluation") not in columns
    ]
    headers = [
        "round",
        "outcome",
        "virtual time",
        "length",
        "connected",
        "tasks",
        "reports",
        "partial",
    ]
    headers += [f"{name} ({kind})" for name, kind in columns]
    headers += [*(["epsilon"] if run.private else []), "change", "wasted", "lost"]
    rows = []
    for round_ in run.rows[-LAST_ROUNDS:]:
        cells = [
            str(round_.round),
            round_.how,
            span(round_.time),
            span(round_.seconds),
            f"{round_.connected:,}",
        ]
        cells += [
            f"{sum(round_.assigned.values()):,}",
            f"{round_.reports:,}" + ("" if round_.goal is None else f" of {round_.goal:,}"),
            f"{round_.partial:,}",
        ]
        means = [getattr(round_, kind).get(name) for name, kind in columns]
        cells += [ABSENT if value is None else f"{value:.4g}" for value in means]
        if run.private:
            spent = round_.privacy.get("epsilon")
            cells.append(
                ABSENT if spent is None else spent_text(spent, round_.privacy.get("of"), 4)
            )
        cells += [
            ABSENT if round_.change is None or round_.how != "committed" else f"{round_.change:.3g}"
        ]
        cells += [share(round_.wasted, round_.wasted + round_.useful), listed(round_.causes)]
        rows.append(cells)
    return page.table(headers, rows)
