"""What a round keeps of its reports until it ends, without their elements: columns, one entry for
each block of reports that came together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.messages import Evaluation
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.commit import weights_of
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.round_summary import (
    NOTHING,
    Measurements,
    evaluation_of,
    summarise,
)
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported


class AcceptedReports(NamedTuple):
    """What a round keeps of reports for its end: columns of ``ReportColumns``."""

    examples: NDArray[np.int64]
    complete: NDArray[np.bool_]
    loss: NDArray[np.float64]
    metrics: Mapping[str, NDArray[np.float64]]
    staleness: Sequence[int]
    evaluations: Sequence[Evaluation | None]
    personal: Sequence[Evaluation | None]
    lost_tied: Sequence[bool]
    weighed: Sequence[Reported]


def kept_of(reports: ReportColumns) -> AcceptedReports:
    """Return what is kept of these reports."""
    return AcceptedReports(
        reports.examples,
        reports.complete,
        reports.loss,
        reports.metrics,
        reports.staleness,
        reports.evaluations,
        reports.personal,
        reports.lost_tied,
        reports.weighed,
    )


def staleness_of(accepted: Iterable[AcceptedReports]) -> list[int]:
    """Return the staleness of the updates, in order; empty where none can be stale."""
    return [*chain.from_iterable(each.staleness for each in accepted)]


def weighed_of(accepted: Iterable[AcceptedReports]) -> list[Reported]:
    """Return what the weighing of the updates depends on, in order; empty where nothing is."""
    return [*chain.from_iterable(each.weighed for each in accepted)]


def evaluations_of(accepted: Iterable[AcceptedReports]) -> list[Evaluation | None]:
    """Return what the devices measured before they trained, in the order of their reports."""
    return [*chain.from_iterable(each.evaluations for each in accepted)]


def measured(accepted: Sequence[AcceptedReports], rules: RoundRules) -> dict[str, Any]:
    """Return what the devices measured, for the summary. In a private round only
    ``OpenRound.commit`` knows what of it is released; with masked updates nobody looks at what
    single devices say, and where nothing is trained there is nothing to measure."""
    if rules.privacy is not None or rules.secure is not None or rules.computation is not None:
        return summarise(NOTHING, NOTHING, {})
    return summarise(_training(accepted, rules), _evaluation(accepted, rules), rules.bounds)


def _training(accepted: Sequence[AcceptedReports], rules: RoundRules) -> Measurements:
    """Return what the devices measured in their training, in the order of their reports."""
    if not accepted:
        return NOTHING
    examples = np.concatenate([each.examples for each in accepted])
    weights = weights_of(examples, rules.max_weight)
    sums = dict[str, NDArray[np.float64]]()
    for name in rules.metrics:
        columns = [each.loss if name == "loss" else each.metrics[name] for each in accepted]
        means: NDArray[np.float64] = np.concatenate(columns)
        sums[name] = weights * means
    return Measurements(weights, sums)


def _evaluation(accepted: Sequence[AcceptedReports], rules: RoundRules) -> Measurements:
    """Return what the devices measured before they trained, for the summary."""
    evaluations = evaluations_of(accepted)
    if not any(evaluations):
        return NOTHING
    personal = [*chain.from_iterable(each.personal for each in accepted)]
    return evaluation_of(evaluations, rules.metrics, rules.max_weight, personal)
