"""What the pages and tables of a simulation say of a run with secure aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol.computations.settings import KIND_NAMES

from fleetlearn_simulator.results.html_page import PagePart, size

if TYPE_CHECKING:  # it reads runs of coordinators too: their storage
    from fleetlearn_simulator.results.loaded_run import LoadedRun, Round

REPORT_BYTES = 228
"""Bytes of one device in a request to a helper: names of usual length, digests, the sealed seed and
the signature."""

HIDDEN = (
    "Hidden: every single update, and what devices measure. The coordinator sees who takes part "
    "and when, the sum of each round's updates, and so each model."
)


def secure_words(plan: Mapping[str, Any], coordinator: Mapping[str, Any]) -> str:
    """Return how a plan's updates are hidden. ``plan``, ``coordinator``: tables of a scenario."""
    secure = plan["secure"]
    # A page reads all numbers of a run's file as floats.
    words = (
        f"secure aggregation, mode {secure['mode']}: sums of at least {secure['minimum']:,.0f} "
        "devices, "
    )
    if plan["local"]["algorithm"] in KIND_NAMES:
        words += "whole"
    else:
        words += f"{secure['bits']:.0f} bits, clip norm {secure['clip']:.4g}"
    return words + ("" if coordinator.get("masks") else "; simulated without masks")


def asked_words(rounds: Sequence[Round]) -> str:
    """Return what the helper is asked for in a run's rounds."""
    sets = [row.reports for row in rounds if row.how == "committed"]
    if not sets:
        return "No round was committed: the helper is asked for nothing."
    fewest, most = min(sets), max(sets)
    many = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    times = "once" if len(sets) == 1 else f"{len(sets):,} times"
    return (
        f"The helper is asked {times}, for the sum of the masks of {many} devices: up to "
        f"{size(REPORT_BYTES * most)} to ask, and as much as one update to answer. It learns who "
        "took part in which round, and no update."
    )


def secure_parts(run: LoadedRun) -> Iterator[PagePart]:
    """Yield what a page says of a run with secure aggregation; nothing of another run."""
    plan = run.scenario.get("plan", {})
    if "secure" not in plan:
        return
    yield PagePart("section", "Secure aggregation")
    yield PagePart("note", f"{secure_words(plan, run.scenario.get('coordinator', {}))}.")
    yield PagePart("note", HIDDEN)
    if plan["secure"]["mode"] == "helper":
        yield PagePart("note", asked_words(run.rows))


def has_secure(runs: Iterable[LoadedRun]) -> bool:
    """Return whether a plan of these runs has [secure]."""
    return any("secure" in run.scenario.get("plan", {}) for run in runs)
