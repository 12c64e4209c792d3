"""What a start takes up of the rounds that an earlier process left open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from fleetlearn_coordinator.rounds.commands import LOST
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.round_reports import RoundReports
from fleetlearn_coordinator.service.training_run.run_regions import RestoredRegions, RunRegions
from fleetlearn_coordinator.storage.ledger import Row, TaskEnded, Unfinished
from fleetlearn_coordinator.storage.store import Store


class GivenUp(NamedTuple):
    """A round whose reports cannot be added up any more."""

    number: int
    dropped: dict[str, int]
    """Cause -> tasks that ended so."""
    rows: list[Row]
    """The ends of the tasks that were out."""


class Unended(NamedTuple):
    """What an earlier process left."""

    restored: Restored | None
    """What the engine takes over. None: nothing."""
    given_up: GivenUp | None
    """The round that is to be abandoned first."""


def take_up_rounds(
    store: Store,
    reports: RoundReports,
    oldest: int | None,
    log: RunLog,
    is_closed: Callable[[int | None], bool],
    regions: RunRegions,
) -> Unended:
    """Take over the open round's reports, and reports that came before their round. ``oldest``: the
    oldest version whose tasks may still count, where tasks outlive their rounds. ``is_closed``:
    whether the helper was asked for the sum of this round's masks, so that it takes no other
    report. Raises StoreError (damaged, or the plan has other regions now)."""
    with store.repair_advice():
        found = store.ledger.unfinished(oldest)
        given_up = found.round is not None and store.is_given_up(found.round)
        restored_regions = RestoredRegions({}, {})
        if not given_up:
            restored_regions = regions.take_back(found, store.ledger)
        for task in (*found.leases, *found.lost):
            reports.members.take_back(task.task, task.member)
        for report in found.reports:
            reports.members.take_back(report.task, report.member)
        open_now = [row for row in found.reports if row.round == found.round]
        later = [row for row in found.reports if row.round != found.round]
        later.sort(key=lambda row: row.round)
        if not given_up:
            reports.load_sums(open_now)
        for row in later:
            reports.load_early(row)
    if not given_up or regions.weights is None:
        reports.count_again(open_now)
    abandoned = None
    if given_up:
        abandoned = _give_up(found)
        found = Unfinished(None, [], [], [], later)
    elif found.round is not None:
        text = "round %d goes on: %d reports are safe, %d tasks were out"
        if is_closed(found.round):
            text = "round %d is closed: %d reports are safe, %d tasks were out"
        log.info(text, found.round, len(open_now), len(found.leases))
    if not any(found):
        return Unended(None, abandoned)
    accepted = [] if given_up else [(row.task, row.device) for row in open_now]
    early = [(row.task, row.device) for row in later]
    closed = found.round is not None and is_closed(found.round)
    leases = [(row.task, row.device, row.version) for row in found.leases]
    lost = [(row.task, row.device, row.version) for row in found.lost]
    restored = Restored(
        found.round, leases, accepted, found.dropped, lost, early, closed, *restored_regions,
        goal=found.goal,
    )  # fmt: skip
    return Unended(restored, abandoned)


def _give_up(found: Unfinished) -> GivenUp:
    assert found.round is not None
    dropped = Counter(cause for _, _, cause in found.dropped)
    dropped[LOST] += len(found.leases)
    return GivenUp(found.round, dict(+dropped), [TaskEnded(row.task, LOST) for row in found.leases])
