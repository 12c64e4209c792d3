"""How devices took part in the releases of a private run: what the ledger keeps of it.

A device is known by its name. Its row is written in the batch that makes the release, so that
neither is there without the other, and it stays for as long as the run's data directory does:
nothing prunes it, and a roll back takes no release back.
"""

from __future__ import annotations

import msgspec

from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.service.training_run.algorithm_change import give_up_rows
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata, ParticipationCounted, Row

RULES = "privacy_rules"
"""Key of the metadata: the rules under which the run was served last."""
SEGMENT, SINCE = "participation_segment", "participations_since"
"""Keys of the metadata: what the present segment has in common, and its first release. Within it
participations are counted."""


def take_up_participations(rules: PrivacyRules | None, engine: Engine, ledger: Ledger) -> list[Row]:
    """Tell the engine how devices took part so far. Returns what is to be written at this start.

    Under other rules than at the last start the open round is given up: its reports were clipped,
    and its devices counted, for another noise. Where the noise, the clip norm or the limits are
    others, a new segment begins (``privacy.budget.Segment``).
    """
    known = ledger.participations()
    releases = max(engine.releases, max((row.last for row in known), default=0))
    rows = list[Row]()
    now = None if rules is None else msgspec.json.encode(rules).decode()
    if ledger.get(RULES) != now:
        rows.append(Metadata(RULES, now))
        if ledger.last_round():
            rows += give_up_rows(ledger)
    if rules is None or engine.limits is None:
        return rows
    segment, since = _segment(rules), ledger.get(SINCE)
    if since is None or ledger.get(SEGMENT) != segment:
        since = releases + 1
        rows += [Metadata(SEGMENT, segment), Metadata(SINCE, since)]
    counted = ((row.device, row.last, row.times * (row.since == since)) for row in known)
    engine.limits.restore(releases, counted, int(since))
    return rows


def _segment(rules: PrivacyRules) -> str:
    """Return what the releases of a segment have in common."""
    parts = [
        rules.mechanism,
        rules.noise,
        rules.clip,
        rules.separation,
        rules.participations,
        rules.largest_weight,
    ]
    return msgspec.json.encode(parts).decode()


def participation_rows(engine: Engine) -> list[Row]:
    """Return what is to be written with the model that the engine is committing."""
    limits = engine.limits
    if limits is None:
        return []
    release, since = limits.release, limits.since
    return [ParticipationCounted(device, release, since) for device in limits.taking_part()]
