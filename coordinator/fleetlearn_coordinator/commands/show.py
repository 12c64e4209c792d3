"""Records as text for people: lines and tables, the same on a terminal, in a pipe and in a live
view."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.typer_app import plain_table

from fleetlearn_coordinator.dashboard.live_records import PrivacySpent
from fleetlearn_coordinator.service.views.records import (
    CheckView,
    DeviceView,
    EvaluationView,
    HostView,
    RoundView,
    RunGlance,
    RunView,
)

if TYPE_CHECKING:
    from rich.table import Table

WHILE = "while they trained"
BARS = "▁▂▃▄▅▆▇█"
NARROW = 110
"""Columns of a terminal in which tables leave out what can be done without."""
PIPE = 200
"""Columns where the output goes to a file or a pipe."""


def columns_here() -> int:
    """Return how wide the standard output is."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE


def tell(line: str) -> None:
    """Print a line; on a terminal it goes on below, a little to the right, where it is too long."""
    if sys.stdout.isatty():
        wraps = textwrap.TextWrapper(columns_here(), subsequent_indent="  ")
        line = "\n".join(wraps.wrap(line))
    print(line)


def date(at: float | None) -> str:
    """Return a Unix time as a date and a time of the clock, in UTC; empty where it is None."""
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}Z"


def clock(at: float | None, now: float) -> str:
    """Return a Unix time, without its date if it is today's."""
    if at is None:
        return ""
    found = datetime.fromtimestamp(at, UTC)
    if found.date() == datetime.fromtimestamp(now, UTC).date():
        return f"{found:%H:%M:%S}Z"
    return date(at)


def span(seconds: float) -> str:
    """Return a length of time, in the unit that fits."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def ago(at: float, now: float) -> str:
    """Return how long ago a moment is, or how far ahead."""
    return f"in {span(at - now)}" if at > now else f"{span(now - at)} ago"


def size(count: int) -> str:
    """Return a number of bytes, in the unit that fits."""
    for unit, amount in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= amount:
            return f"{count / amount:.1f} {unit}"
    return f"{count} B"


def listed(metrics: Mapping[str, float]) -> str:
    """Return metrics with their values."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def causes(counts: Mapping[str, int]) -> str:
    """Return how often each cause was one, by name."""
    return ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items()))


def bars(values: Sequence[float]) -> str:
    """Return values as bars of one character each, the least and the greatest at the ends."""
    low, high = min(values), max(values)
    reach = (high - low) or 1.0
    return "".join(BARS[round((value - low) / reach * (len(BARS) - 1))] for value in values)


def run_lines(run: RunView, now: float) -> list[str]:
    """Return where a run stands, in lines."""
    state = f"running at {run.address}" if run.running else "not running"
    computed = _computed(run)
    newest = f"model version {run.version}" if computed is None else many(run.version, "round")
    lines = [f"{run.finished or 'not finished'}; {state}; {newest}"]
    if computed is not None and run.finished is None:
        lines.append(computed)
    if not run.running and run.finished is None and run.seen is not None:
        why = f"the coordinator was stopped at {date(run.seen)}"
        if run.live.get("pid") is not None:
            killed = "the coordinator died: it was killed, or its machine went down"
            why = f"{killed}, after {date(run.seen)}"
        lines.append(f"{why}; `fleetlearn-coordinator serve` goes on with the run")
    if run.failed:
        lines.append(f"failed: {run.failed}")
    if run.wanted not in (None, "running"):
        lines.append(f"people want it {run.wanted}")
    lines += _open_round(run, now)
    if run.running:
        lines.append(_devices(run))
    if run.waits_for:
        lines.append(run.waits_for)
    lines += _apart(run)
    if run.last_model is not None and run.version:
        lines.append(_pace(run, now))
    if run.privacy is not None:
        rounds = run.stop.get("rounds")
        to_go = None if rounds is None else max(0, rounds - run.version)
        lines.append(f"privacy: {privacy_words(run.privacy, to_go)}")
    return lines


def _computed(run: RunView) -> str | None:
    """Return where a run without a model stands, in words; None: it trains one, or no round is
    over."""
    found = (row.summary.get("computation") for row in reversed(run.rounds))
    return next((text for text in found if text is not None), None)


def privacy_words(spent: PrivacySpent, to_go: int | None) -> str:
    """Return what a private run has spent, such as ``epsilon 3.1 of 8 (delta 1e-06), 120 releases,
    310 left``. ``to_go``: rounds until stop.rounds; None: not known."""
    of = "" if spent.budget is None else f" of {budget_text(spent.budget)}"
    epsilon = spent_text(spent.epsilon, spent.budget)
    known = [count for count in (spent.left, to_go) if count is not None]
    left = f", {min(known)} left" if known else ""
    releases = many(spent.releases, "release")
    return f"epsilon {epsilon}{of} (delta {spent.delta:g}), {releases}{left}"


def _open_round(run: RunView, now: float) -> list[str]:
    if run.opened is None:
        return [f"phase {run.phase}, round {run.round}"] if run.running else []
    goal = "" if run.goal is None else f" of {run.goal}"
    parts = [f"{run.accepted}{goal} reports", f"{many(run.leases, 'task')} running"]
    if of_members := run.live.get("members"):
        listed_tasks = ", ".join(f"{count} of {name}" for name, count in of_members.items())
        parts[-1] += f" ({listed_tasks})"
    if run.dropped:
        parts.append(f"ended without a report: {causes(run.dropped)}")
    if run.deadline is not None:
        parts.append(f"deadline {clock(run.deadline, now)}, {ago(run.deadline, now)}")
    whole = f"round {run.round}, open since {clock(run.opened, now)}: {'; '.join(parts)}"
    return [whole, *_regions(run)]


def _regions(run: RunView) -> list[str]:
    """Return a line for each region of the open round."""
    lines = []
    for each in run.live.get("regions", []):
        words = (
            f"{each['reports']} of {each['goal']} reports, {many(each['tasks'], 'task')} running"
        )
        if each["done"] is not None:
            words += ", done" if each["done"] else ", failed"
        elif each["seconds"] is not None:
            words += f", {each['minimum']} are the minimum; {each['seconds']:.0f} s left"
        lines.append(f"region {each['name']}: {words}")
    return lines


def _devices(run: RunView) -> str:
    names = {"uploading": "uploading", "queued": "waiting to upload", "idle": "idle"}
    also = [f"{run.live[key]} {text}" for key, text in names.items() if run.live.get(key)]
    return ", ".join([f"{many(run.connected, 'device')} connected", *also])


def _apart(run: RunView) -> list[str]:
    """Return where devices are connected, if not to this process, and which take no part, and
    why."""
    live, lines = run.live if run.running else {}, []
    if gateways := live.get("gateways"):
        of_each = ", ".join(
            f"gateway {each.get('name') or each['number']} has {many(each['devices'], 'device')}"
            for each in gateways
        )
        lines.append(f"{many(len(gateways), 'gateway')}: {of_each}")
    if unable := live.get("unable"):
        lines.append(f"{many(unable, 'device')} cannot do this run's tasks, as their own logs say")
    if live.get("ineligible") or live.get("barred"):
        counts = sorted(live["ineligible_by"].items())
        by = ", ".join(f"{count} by {rule}" for rule, count in counts)
        lines.append(
            f"{live['ineligible']} devices are not eligible{f' ({by})' if by else ''}; "
            f"{live['barred']} took part lately"
        )
    if "away" in live:
        hours = live["all_back_in"] / 3600
        lines.append(f"{live['away']} devices are away, told to come back within {hours:.2g} hours")
    return lines


def _pace(run: RunView, now: float) -> str:
    assert run.last_model is not None
    computed = _computed(run) is not None
    made = "round" if computed else "model"
    parts = [f"last {made} {clock(run.last_model, now)}, {ago(run.last_model, now)}"]
    if run.rounds_per_hour is not None:
        rate = run.rounds_per_hour
        parts.append(f"{rate:,.0f} rounds an hour" if rate >= 100 else f"{rate:.2g} rounds an hour")
    if run.eta is not None and not computed:  # a computation ends by itself
        soon = run.eta < now + 1
        when = "at any moment" if soon else f"at {clock(run.eta, now)}, {ago(run.eta, now)}"
        parts.append(f"stop.rounds = {run.stop['rounds']} {when}")
    return "; ".join(parts)


def trend_lines(run: RunView, *, pictures: bool) -> list[str]:
    """Return how the metrics moved, a line each. ``pictures``: with bars, for a terminal."""
    lines = []
    for name, trend in run.trend.items():
        if len(trend.values) > 1:
            moved = f"{trend.change:+.3g} in {len(trend.values)} rounds"
            text = f"{name} {trend.values[-1]:.4g}, {moved}"
            lines.append(f"{text}  {bars(trend.values)}" if pictures else text)
    return lines


def measured_line(rounds: Sequence[RoundView]) -> str | None:
    """Return a sentence on what the rounds' metrics measure: which model, on whose examples.
    None: the rounds have no metrics."""
    names = _names(row.metrics for row in rounds)
    if not names:
        return None
    last = next(row for row in reversed(rounds) if row.metrics)
    before = bool(last.summary.get("evaluation"))
    model = "of the model that a round began with, " if before else ""
    when = "before they trained" if before else WHILE
    whose = "on the training examples of the round's own devices"
    return f"{', '.join(names)}: {model}{whose}, {when}"


def member_lines(row: RoundView) -> list[str]:
    """Return what a round says of the members of a family, a line each. Empty: the run has one
    model."""
    return [
        f"{name} in round {row.number}: "
        + ", ".join(
            filter(
                None,
                [
                    many(own["reports"], "report"),
                    listed(own["metrics"]),
                    f"change {own['change']:.3g}",
                ],
            )
        )
        for name, own in row.summary.get("members", {}).items()
    ]


def rounds_table(rounds: Sequence[RoundView], now: float, width: int) -> Table:
    """Return rounds that are over, a row each. ``width``: of the terminal; in a narrow one what can
    be done without is left out, the causes take more lines, and every number stays whole."""
    metrics = _names(row.metrics for row in rounds)
    narrow = width < NARROW
    told = not narrow or any(row.outcome != "committed" for row in rounds)
    outcome, seconds = ["outcome"] * told, ["seconds"] * (not narrow)
    private = ["epsilon"] * any("privacy" in row.summary for row in rounds)
    # The state of a computation does not move by a distance that says anything.
    change = ["change"] * (not all("computation" in row.summary for row in rounds))
    last = [*metrics, *change, *private, *seconds]
    columns = ("round", "ended", *outcome, "reports", "dropped", *last)
    table = plain_table(*columns, wraps="dropped")
    for row in rounds:
        values = (f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in metrics)
        table.add_row(
            str(row.number), clock(row.closed, now), *([row.outcome] * told), reports_of(row),
            causes(row.summary.get("dropped", {})), *values, *([f"{row.norm:.3g}"] * len(change)),
            *(_epsilon(row) for _ in private), *([f"{row.seconds:.2f}"] * (not narrow)),
        )  # fmt: skip
    return table


def reports_of(row: RoundView) -> str:
    """Return how many reports of a round count; with the goal where the round has its own."""
    return str(row.reports) if row.goal is None else f"{row.reports}/{row.goal}"


def _epsilon(row: RoundView) -> str:
    """Return what the run had spent after a round; empty where the round released nothing."""
    found = row.summary.get("privacy", {})
    epsilon = found.get("epsilon")
    return "" if epsilon is None else spent_text(epsilon, found.get("of"), 4)


def evaluations_table(rows: Sequence[EvaluationView]) -> Table:
    """Return evaluations that are over, a row each."""
    metrics = _names(row.summary["metrics"] for row in rows)
    columns = ("evaluation", "version", "outcome", "devices", "examples", *metrics)
    table = plain_table(*columns, title="evaluations on devices, of their own training examples")
    for row in rows:
        own = row.summary["metrics"]
        values = (f"{own[name]:.4g}" if name in own else "" for name in metrics)
        counts = str(row.summary["devices"]), str(row.summary["examples"])
        table.add_row(str(row.number), str(row.version), row.outcome, *counts, *values)
    return table


def runs_table(runs: Sequence[RunGlance], now: float) -> Table:
    """Return runs, a row each."""
    columns = ("run", "state", "version", "round", "reports", "devices", "last model", "for")
    table = plain_table(*columns, wraps="for")
    for run in runs:
        goal = "" if run.goal is None else f"/{run.goal}"
        table.add_row(
            run.name,
            run.state,
            str(run.version),
            str(run.round) if run.round else "",
            f"{run.accepted}{goal}" if run.opened is not None else "",
            str(run.connected) if run.running else "",
            clock(run.last_model, now),
            run.population,
        )
    return table


def host_lines(host: HostView) -> list[str]:
    """Return what is to be said of a host and its runs beside their table."""
    lines = [] if host.running else ["no coordinator serves these runs now"]
    for run in host.runs:
        if run.failed:
            lines.append(f"{run.name} failed: {run.failed}")
        if run.error:
            lines.append(f"{run.name}: {run.error}")
        if run.waits_for:
            lines.append(f"{run.name}: {run.waits_for}")
    return lines


def devices_table(devices: Sequence[DeviceView], now: float, width: int) -> Table:
    """Return devices, a row each. ``width``: as for ``rounds_table``."""
    narrow = width < NARROW
    more = [] if narrow else ["tags", "enrolled"]
    columns = ("device", "connected", "last seen", "done", "failed", "lost", *more)
    table = plain_table(*columns, "last error", wraps="last error")
    for row in devices:
        enrolled = f"revoked {date(row.revoked)}" if row.revoked is not None else date(row.enrolled)
        error = "" if row.error is None else f"{row.error} ({clock(row.error_at, now)})"
        table.add_row(
            row.device,
            "yes" if row.connected else "",
            clock(row.seen, now),
            str(row.done),
            str(row.failed),
            str(row.lost),
            *([] if narrow else [" ".join(row.tags), enrolled]),
            error,
        )
    return table


def checks_table(checks: Sequence[CheckView]) -> Table:
    """Return what was checked, a row each."""
    table = plain_table("check", "state", "found", wraps="found")
    for check in checks:
        table.add_row(check.what, check.state, check.found)
    return table


def _names(rows: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for metrics in rows for name in metrics))
