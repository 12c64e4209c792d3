"""``fleetlearn-coordinator privacy``: what a plan promises, before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import typer
from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.errors import Code, FleetError, many
from fleetlearn_protocol.typer_app import plain_table, show_table

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import AsJson, PlanFile
from fleetlearn_coordinator.commands.show import tell

if TYPE_CHECKING:  # late: numpy and more
    from rich.table import Table

    from fleetlearn_coordinator.plan.noise_row import NoiseRow
    from fleetlearn_coordinator.plan.plan import Plan
    from fleetlearn_coordinator.plan.privacy_statement import PrivacyStatement

app = typer.Typer()


@app.command()
def privacy(plan: PlanFile, as_json: AsJson = False) -> None:
    """Say what a plan's differential privacy comes to: epsilon by release, the noise, what is
    assumed, what is not protected. Nothing runs and nothing is changed."""
    from fleetlearn_coordinator.plan.plan import Plan

    with expected_errors():
        found = statement_of(Plan.load(plan))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        show_statement(found)


def statement_of(plan: Plan) -> PrivacyStatement:
    """Return what the plan promises. Raises FleetError."""
    from fleetlearn_protocol import open_bundle

    from fleetlearn_coordinator.plan.plan import PlanError
    from fleetlearn_coordinator.plan.privacy_statement import privacy_statement
    from fleetlearn_coordinator.privacy.accounting import PrivacyError

    if plan.privacy is None:
        raise FleetError(
            Code.UNKNOWN_CONTENT,
            f"{plan.file} has no [privacy]: nothing limits what the run's models tell about a "
            "device. docs/algorithms/privacy-plan.md says what to write there",
        )
    elements = None
    try:
        manifest = open_bundle(plan.bundle).manifest
    except FleetError:
        pass  # the plan may be written before the model is exported
    else:
        elements = None if plan.algorithm.computes else manifest.size
        plan.check_bundle(manifest)
    try:
        return privacy_statement(plan, elements)
    except PrivacyError as error:
        raise PlanError(error.code, f"{plan.file}: {error.text}") from None


def show_statement(found: PrivacyStatement) -> None:
    """Print it for people."""
    print(f"Differential privacy of the run {found.run} ({found.plan})")
    budget = (
        "no budget" if found.budget is None else f"budget: epsilon = {budget_text(found.budget)}"
    )
    print(f"{found.mechanism} noise, {many(found.planned, 'release')} planned, {budget}")
    table = plain_table("releases", f"epsilon at delta {found.delta:g}", "right guesses", "")
    for row in found.spending:
        note = "" if row.allowed else "past the budget"
        table.add_row(
            str(row.releases), spent_text(row.epsilon, found.budget, 4), _percent(row.guess), note
        )
    show_table(table)
    tell(
        "right guesses: whoever sees all that the run shows, and must say whether a device sent "
        "its own updates or only zeros, is right so often at most. A coin is right in 50.0%."
    )
    _section("To note", found.remarks)
    _heading("Noise of one release")
    show_table(_noise_table(found.noise, found.mechanism))
    _heading("What else could be had, after all planned releases", after_table=True)
    table = plain_table("plan", "epsilon", "on the mean", "", wraps="plan")
    for other in found.what_if:
        past = found.budget is not None and other.epsilon > found.budget
        note = "past the budget" if past else ""
        epsilon = spent_text(other.epsilon, found.budget, 4)
        table.add_row(other.change, epsilon, f"{other.on_mean:.4g}", note)
    show_table(table)
    _heading("Devices that full rounds need", after_table=True)
    table = plain_table("for", "needed", "there", "", wraps="for")
    for each in found.devices:
        enough = "" if each.holds else "too few"
        table.add_row(each.what, str(each.needed), str(each.there), enough)
    show_table(table)
    _section("Assumed", found.assumed, after_table=True)
    _section("Not protected", found.not_protected)
    print("\nMore: docs/privacy.md, docs/algorithms/privacy-plan.md")


def _noise_table(noise: NoiseRow, mechanism: str) -> Table:
    table = plain_table("standard deviation of each element's noise", "", wraps="standard")
    where = "on one update" if mechanism == "local" else "on the sum of a round's updates"
    if noise.of_device is not None:
        table.add_row("that each device adds to its update", f"{noise.of_device:.4g}")
        where = "on the sum of the fewest updates (secure.minimum)"
    if mechanism == "dp-ftrl":
        where += ", fresh"
    table.add_row(where, f"{noise.on_sum:.4g}")
    table.add_row("on the mean that is released", f"{noise.on_mean:.4g}")
    if noise.added_up is not None:
        table.add_row("on the sum of all releases", f"{noise.added_up:.4g}")
    table.add_section()
    table.add_row("noise multiplier (privacy.noise)", f"{noise.multiplier:.4g}")
    if noise.update_multiplier != noise.multiplier:
        table.add_row("noise multiplier of the mean alone", f"{noise.update_multiplier:.4g}")
    table.add_row("clip norm: the longest update, and mean without noise", f"{noise.clip:.4g}")
    if noise.mean_length is not None:
        what = f"length of the noise on the mean ({noise.elements} elements)"
        table.add_row(what, f"{noise.mean_length:.4g}")
    return table


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability < 0.9995 else "over 99.9%"


def _section(title: str, lines: Iterable[str], *, after_table: bool = False) -> None:
    lines = list(lines)
    if lines:
        _heading(title, after_table=after_table)
    for line in lines:
        tell(f"- {line}")


def _heading(title: str, *, after_table: bool = False) -> None:
    """Print a heading after one empty line. On a terminal a table ends with one."""
    if not (after_table and sys.stdout.isatty()):
        print()
    print(title)
