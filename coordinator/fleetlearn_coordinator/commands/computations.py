"""The commands of ``fleetlearn-coordinator`` for runs without a model: the bundle that devices
compute by, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import plain_table, say, show_table

from fleetlearn_coordinator.commands.boosting_tables import show_components, show_trees
from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import AsJson, PlanFile

app = typer.Typer()
MOST_SHOWN = 200
"""Characters of an array."""


@app.command("make-bundle")
def make_bundle(
    questions: Annotated[
        Path, typer.Argument(metavar="QUESTIONS.toml", help="The computation and its settings.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle's file.")],
) -> None:
    """Write the bundle of a run without a model, such as one of statistics. It needs no PyTorch."""
    from fleetlearn_protocol.computations.bundle import read_questions, write_computation_bundle
    from fleetlearn_protocol.computations.kinds import KINDS
    from fleetlearn_protocol.computations.settings import kind_of
    from fleetlearn_protocol.encodings import INT64, MASKED64

    with expected_errors():
        try:
            name, settings, preprocessing = read_questions(questions)
        except ValueError as error:
            raise FleetError(Code.BAD_MESSAGE, f"{questions}: {error}") from None
        write_computation_bundle(output, name, settings, preprocessing)
    kind = KINDS[kind_of(settings)]
    sums = kind.sums(settings).size
    down, up, masked = 4 * kind.state(settings).size, INT64.size(sums), MASKED64.size(sums)
    say(
        f"wrote the computation {kind_of(settings)} to {output}: in each round a device fetches "
        f"{down} bytes and sends {up} (with [secure]: {masked})"
    )


@app.command()
def result(
    plan: PlanFile,
    version: Annotated[
        int | None, typer.Option(help="After how many rounds. Default: all so far.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run without a model found, such as the statistics of all devices' rows."""
    from fleetlearn_coordinator.plan.plan import Plan
    from fleetlearn_coordinator.service.views.computation import read_result

    with expected_errors():
        found = read_result(Plan.load(plan), version)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(f"{found.run}: {found.progress}")
    SHOW[found.computation](found.result)


def _show_statistics(found: dict[str, Any]) -> None:
    for name, column in found["columns"].items():
        is_category = "values" in column
        print(f"\n{name}: {column['missing']} of {found['rows']} rows have no value")
        if "noise" in found:
            print("noise is a standard deviation; that of the number of rows is ", end="")
            print(f"{found['noise']['rows']:.4g}")
        table = plain_table(*(("value", "rows", "share") if is_category else ("", "value", "")))
        rows = _category(column, found["rows"]) if is_category else _numbers(column)
        for row in rows:
            table.add_row(*row)
        show_table(table)


def _category(column: dict[str, Any], rows: int) -> Iterator[tuple[str, str, str]]:
    counts = [(each["value"], each["rows"]) for each in column["values"]]
    if "noise" in column:
        yield "(noise)", f"{column['noise']['rows']:.4g}", ""
    for value, count in [*counts, ("(others)", column["others"])]:
        yield value, str(count), f"{count / max(1, rows - column['missing']):.1%}"


def _numbers(column: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    noise = column.get("noise")
    if noise is not None and "mean" in column:
        for kind in ("mean", "deviation"):
            said = f"noise {noise[kind]:.3g}" if kind in noise else ""
            yield kind, f"{column[kind]:.6g}", said
    elif "mean" in column:
        yield "mean", f"{column['mean']:.10g}", f"within {column['mean_error']:.2g}"
        yield "deviation", f"{column['deviation']:.10g}", ""
    for name in ("minimum", "maximum"):
        if name in column:
            yield name, *_between(column[name])
    for quantile in column.get("quantiles", ()):
        yield f"quantile {quantile['share']:g}", *_between(quantile)
    if column.get("below") or column.get("above"):
        yield "outside of the range", f"{column['below']} below", f"{column['above']} above"
    if histogram := column.get("histogram"):
        if "noise" in histogram:
            yield "noise of each count", f"{histogram['noise']:.4g}", ""
        edges, counts = histogram["edges"], histogram["rows"]
        most = max(1, *counts)
        for low, high, count in zip(edges, edges[1:], counts, strict=False):
            yield f"{low:.6g} to {high:.6g}", str(count), "#" * round(40 * count / most)


def _between(quantile: dict[str, Any]) -> tuple[str, str]:
    if quantile["value"] is None:
        return "not known", ""
    least, most = quantile["least"], quantile["most"]
    if least is not None and least == most:
        return f"{quantile['value']:.10g}", "exactly"
    # With noise an end may be outside of the column's range.
    low = "below the range" if least is None else f"{least:.10g}"
    high = "above the range" if most is None else f"{most:.10g}"
    return f"{quantile['value']:.6g}", f"{low} to {high}"


def _show_function(found: dict[str, Any]) -> None:
    table = plain_table("", "value")
    for name, value in found["metrics"].items():
        table.add_row(name, f"{value:.10g}")
    for name, value in found["state"].items():
        table.add_row(name, _shortened(str(value)))
    table.add_row("last round", f"{found['rows']} rows of {found['devices']} devices")
    show_table(table)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ... (--json shows all)"


SHOW = {
    "statistics": _show_statistics,
    "boosted-trees": show_trees,
    "boosted-components": show_components,
    "function": _show_function,
}
"""Kind of computation -> what prints its result for people."""
