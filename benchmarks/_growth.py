"""What grows during a soak: straight lines through samples of what a process holds.

It imports no other benchmark, so that tests use it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Row = Mapping[str, float]
BOUNDS = {
    "RSS, MiB": 1.5,
    "files": 4.0,
    "sockets without a device": 4.0,
    "database, KiB a round": 2.0,
    "identities, KiB a change": 1.0,
    "WALs, MiB": 4.0,
    "other data, MiB": 4.0,
}
"""What may be added to each over the second half. The summary of each round stays in the database,
and each enrolment and revocation in the audit log, so these two are divided by the rounds and the
changes of the second half."""
PAGES = 64.0
"""KiB that a database may grow beside that: SQLite adds pages, not rows."""


def growth(rows: Sequence[Row], name: str) -> float:
    """Return what a straight line through the second half of the samples rises by."""
    values = [row[name] for row in rows[len(rows) // 2 :]]
    if len(values) < 2:
        return 0.0
    slope, _ = np.polyfit(range(len(values)), values, 1)
    return float(slope) * (len(values) - 1)


def growths(rows: Sequence[Row]) -> dict[str, float]:
    """Return the growth over the second half of each figure of BOUNDS."""
    found = {name: growth(rows, name) for name in BOUNDS if name in rows[0]}
    for name, of in (("database, KiB a round", "rounds"), ("identities, KiB a change", "changes")):
        added = growth(rows, name.partition(" a ")[0]) - PAGES
        found[name] = max(0.0, added) / max(1.0, growth(rows, of))
    return found
