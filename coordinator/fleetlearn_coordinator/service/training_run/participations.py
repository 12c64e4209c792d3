"""How devices took part in the releases of a private run: what the ledger keeps of it.

A device is known by its name. Its row is written in the batch that makes the release, so that
neither is there without the other, and it stays for as long as the run's data directory does:
nothing prunes it, and a roll back takes no release back.
"""

from __future__ import annotations

from fleetlearn_protocol.messages import Task
from fleetlearn_protocol.secure.task_terms import training_digest

from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.plan.privacy_budget import digest_of
from fleetlearn_coordinator.privacy.budget import PrivacyAccount
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.service.training_run.algorithm_change import give_up_rows
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata, ParticipationCounted, Row

RULES = "participation_rules"
"""Key of the metadata: the digest of the rules under which the run was served last."""


def take_up_participations(
    rules: RoundRules,
    task: Task,
    account: PrivacyAccount | None,
    engine: Engine,
    ledger: Ledger,
) -> list[Row]:
    """Tell the engine how devices took part so far. Returns what is to be written at this start.
    ``task``: what all tasks say alike. ``account``: the run's, None without [privacy].

    Under other rules than at the last start the open round is given up: its reports were clipped,
    and its devices counted, for another noise; or they were masked, and are read otherwise now, or
    their devices signed something else than devices do from now on, so that the helper would add
    them to no others. The segment of the account that begins then counts participations from 0.
    """
    rows = list[Row]()
    digest = None if rules.privacy is None else digest_of(rules.privacy)
    if rules.secure is not None:
        signed = f"{training_digest(task)} of {task.bundle}, {task.secure}"
        digest = f"{digest or 'not private'}, masked: {tuple(rules.secure)}, {signed}"
    if engine.settings.pairwise is not None:
        digest = f"{digest}, neighbours: {engine.settings.pairwise.graph}"
    if ledger.get(RULES) != digest:
        rows.append(Metadata(RULES, digest))
        if ledger.last_round():
            rows += give_up_rows(ledger)
    if account is not None and engine.limits is not None:
        since = account.releases - account.segments[-1].releases + 1
        known = ledger.participations()
        counted = ((row.device, row.last, row.times * (row.since == since)) for row in known)
        engine.limits.restore(account.releases, counted, since)
    return rows


def participation_rows(engine: Engine) -> list[Row]:
    """Return what is to be written with the model that the engine is committing."""
    limits = engine.limits
    if limits is None:
        return []
    release, since = limits.release, limits.since
    return [ParticipationCounted(device, release, since) for device in limits.taking_part()]
