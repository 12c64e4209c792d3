"""What a start takes up of the rounds that an earlier process left open."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fleetlearn_coordinator.rounds.commands import LOST, Command, Commit
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_coordinator.storage.ledger import TaskEnded, Unfinished

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.training_run.run import Clocks, Run


def resume_rounds(run: Run, now: Clocks) -> list[Command]:
    """Take over the open round's reports and tasks, and reports that came before their round. Returns what
    ``Run.record`` does. Raises StoreError (damaged)."""
    engine = run.engine
    oldest = engine.version - engine.settings.max_staleness if engine.settings.outlive else None
    with run.store.repair_advice():
        found = run.store.ledger.unfinished(oldest)
        open_now = [row for row in found.reports if row.round == found.round]
        later = sorted((row for row in found.reports if row.round != found.round), key=lambda row: row.round)
        given_up = found.round is not None and run.store.is_given_up(found.round)
        if not given_up:
            run.open_round.load_sums(open_now, run.model)
        for row in later:
            run.open_round.load_early(row)
    run.open_round.count_again(open_now)
    if given_up:
        _give_up(run, found, now)
        found = Unfinished(None, [], [], [], later)
    elif found.round is not None:
        run.log.info(
            "round %d goes on: %d reports are safe, %d tasks were out",
            found.round, len(open_now), len(found.leases),
        )  # fmt: skip
    if not any(found):
        return []
    accepted, early = ([(row.task, row.device) for row in rows] for rows in (open_now, later))
    restored = Restored(found.round, found.leases, [] if given_up else accepted, found.dropped, found.lost, early)
    heard: list[Command] = []
    for command in run.record(engine.restore(restored, now.engine), now):
        heard += run.commit(command, now) if isinstance(command, Commit) else [command]
    return heard


def _give_up(run: Run, found: Unfinished, now: Clocks) -> None:
    assert found.round is not None
    dropped = Counter([*(cause for _, _, cause in found.dropped), *(LOST for _ in found.leases)])
    closed = run.abandon(found.round, dict(dropped), "its reports cannot be added up any more", now)
    run.store.write([*(TaskEnded(row.task, LOST) for row in found.leases), closed])
