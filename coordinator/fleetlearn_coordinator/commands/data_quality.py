"""``fleetlearn-coordinator data-quality``: whose data are unlike the others', and how sure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log10
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError, many
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import AsJson, PlanFile
from fleetlearn_coordinator.quality.worth import ContributionFinding, worth_over_rounds

if TYPE_CHECKING:  # late: the plan imports numpy
    from fleetlearn_coordinator.plan.plan import Plan

app = typer.Typer()
WORTH_LINES = 20
"""Most devices whose updates' worth is printed."""


class FeatureFinding(msgspec.Struct, frozen=True):
    """A feature of a device that is unlike the same feature of the others."""

    device: str
    feature: int
    """Its place in the first array of a batch."""
    what: str
    """``mean``; ``spread``: the standard deviation; ``missing``: the share of values that are not
    finite."""
    value: float
    others: float
    """The mean of the others' values."""
    deviations: float
    """How far it is from them, in standard deviations of the others' values."""
    log10_p: float
    """log10 of how probable such a distance is by chance, corrected for all that was looked at."""


class LossFinding(msgspec.Struct, frozen=True):
    """A device on whose data the model is worse than on the others'."""

    device: str
    value: float
    """The mean loss per example."""
    others: float
    deviations: float
    log10_p: float
    wrong_labels: float | None = None
    """The share of labels that are wrong, if wrong labels alone are the reason."""
    wrong_labels_error: float | None = None
    """Its standard error."""


class QualityView(msgspec.Struct, frozen=True):
    """The last look at the devices' data."""

    number: int
    version: int
    """Of the model that was measured."""
    outcome: str
    """``valid``, or ``invalid``: fewer devices than quality.minimum answered."""
    closed: float
    """Unix time."""
    devices: int
    """How many answered."""
    alarm: float
    features: list[FeatureFinding]
    losses: list[LossFinding]
    not_finite: list[str]
    """Devices on whose data the model's loss is not finite."""
    contributions: list[ContributionFinding]
    """Of all devices that were measured, what hurts most first."""


@app.command("data-quality")
def data_quality(plan: PlanFile, as_json: AsJson = False) -> None:
    """Say whose data look unlike the others', in the last look of a plan with [quality]: damaged
    sensors, wrong labels, data of another kind. Nothing is changed."""
    from fleetlearn_coordinator.plan.plan import Plan

    with expected_errors():
        view = quality_view(Plan.load(plan))
    if as_json:
        print(msgspec.json.encode(view).decode())
    else:
        for line in quality_lines(view):
            say(line)


def quality_view(plan: Plan) -> QualityView:
    """Return the last look. Raises FleetError where there is none yet."""
    from fleetlearn_protocol.quality_messages import QUALITY

    from fleetlearn_coordinator.storage.find_storage import find_storage

    if plan.quality is None:
        text = (
            f"{plan.file} has no [quality], so that nobody looks at the devices' data. Add the "
            "line [quality], and start the coordinator again"
        )
        raise FleetError(Code.UNKNOWN_CONTENT, text)
    with find_storage(plan.data_dir).read_ledger() as ledger:
        looks = ledger.exchanges(QUALITY)
        rounds = [summary for *_, summary in ledger.closed_rounds(0)]
    if not looks:
        text = (
            f"no look at the devices' data is over yet: there is one after "
            f"{many(plan.quality.every, 'committed round')}, and one after the last"
        )
        raise FleetError(Code.UNKNOWN_CONTENT, text)
    last = looks[-1]
    about = {key: getattr(last, key) for key in ("number", "version", "outcome", "closed")}
    return view_of(plan.quality.alarm, {**last.summary, **about}, rounds)


def view_of(
    alarm: float, look: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]
) -> QualityView:
    """Return the view of a look. ``alarm``: the plan's now. ``look``: its summary, with ``number``,
    ``version``, ``outcome`` and ``closed``. ``rounds``: the summaries of committed rounds."""
    found: dict[str, Any] = {"features": [], "losses": [], "not_finite": [], "alarm": alarm, **look}
    return msgspec.convert({**found, "contributions": contributions_of(rounds)}, QualityView)


def hurting(view: QualityView) -> list[ContributionFinding]:
    """Return the devices whose updates make the held-out loss worse, as sure as the plan's alarm
    asks."""
    limit = log10(view.alarm)
    return [each for each in view.contributions if each.shapley < 0 and each.log10_p < limit]


def named(view: QualityView) -> set[str]:
    """Return all devices that a look names."""
    features, losses = (
        {each.device for each in view.features},
        {each.device for each in view.losses},
    )
    return {*features, *losses, *view.not_finite, *(each.device for each in hurting(view))}


def contributions_of(rounds: Iterable[Mapping[str, Any]]) -> list[ContributionFinding]:
    """Return what each device's updates were worth. ``rounds``: the summaries of committed
    rounds."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for summary in rounds:
        for device, found in summary.get("contributions", {}).items():
            rows.setdefault(device, []).append((found["shapley"], found["left_out"]))
    return worth_over_rounds(rows)


def quality_lines(view: QualityView) -> list[str]:
    """Return the look for people, a line each."""
    lines = [
        f"look {view.number}, with model version {view.version}: {many(view.devices, 'device')} "
        f"answered; a device is named if chance would put it so far away with a probability below "
        f"{view.alarm:g}"
    ]
    if view.outcome != "valid":
        lines.append("too few answered for the look to be valid: nothing follows from it")
    lines += [_feature_line(each) for each in view.features]
    lines += [_loss_line(each) for each in view.losses]
    if view.not_finite:
        named = ", ".join(view.not_finite)
        lines.append(f"{named}: the model's loss is not finite on these data")
    lines += [_contribution_line(each) for each in hurting(view)]
    if len(lines) == 1:
        lines.append("no device's data are unlike the others'")
    return lines + _worth_lines(view.contributions)


def _feature_line(found: FeatureFinding) -> str:
    what = {
        "mean": "has the mean",
        "spread": "has the standard deviation",
        "missing": "is missing in a share of",
    }
    return (
        f"{found.device}: feature {found.feature} {what[found.what]} {found.value:.4g}, the "
        f"others' is {found.others:.4g} ({_how_sure(found.deviations, found.log10_p)})"
    )


def _loss_line(found: LossFinding) -> str:
    text = (
        f"{found.device}: the model's loss is {found.value:.4g}, on the others' data "
        f"{found.others:.4g} ({_how_sure(found.deviations, found.log10_p)})"
    )
    if found.wrong_labels is None or found.wrong_labels_error is None:
        return f"{text}: wrong labels, or data of another kind"
    share, error = 100 * found.wrong_labels, 100 * found.wrong_labels_error
    return f"{text}: as if {share:.0f} % of its labels were wrong (+- {error:.1f} %)"


def _contribution_line(found: ContributionFinding) -> str:
    return (
        f"{found.device}: its updates make the held-out loss worse, by {-found.shapley:.3g} a "
        f"round (+- {found.error:.2g}, {many(found.rounds, 'round')}, p = "
        f"{_chance(found.log10_p)})"
    )


def _worth_lines(found: list[ContributionFinding]) -> list[str]:
    """Return a line for each device, what hurts most first, up to WORTH_LINES of them."""
    lines = [
        f"{each.device}: {each.shapley:+.3g} a round (+- {each.error:.2g}), left out "
        f"{each.left_out:+.3g}; {many(each.rounds, 'round')}"
        for each in found[:WORTH_LINES]
    ]
    if lines:
        lines.insert(0, "by how much updates lower the held-out loss (Shapley value):")
    if len(found) > WORTH_LINES:
        lines.append(f"and {len(found) - WORTH_LINES} more, worth more: --json has them")
    return lines


def _how_sure(deviations: float, log10_p: float) -> str:
    return f"{abs(deviations):.3g} deviations away, p = {_chance(log10_p)}"


def _chance(log10_p: float) -> str:
    # Below 1e-300 a double would be 0.
    return f"1e{log10_p:.0f}" if log10_p < -300 else f"{10**log10_p:.2g}"
