"""What a run with several models says of each, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fleetlearn_coordinator.aggregation.round_summary import MEMBERS
from fleetlearn_protocol.errors import many

_HASH = re.compile("[0-9a-f]{16}$")
OWN = "own"
"""Where a summary has the other packages' functions that the run used."""


def own_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each line about an own algorithm that the run used."""
    for where, origin in summary.get(OWN, {}).items():
        # The name, and, where there are any, the package's version and the source's hash.
        words = [f"source {each}" if _HASH.match(each) else each for each in str(origin).split()]
        yield f"own {where}", ", ".join(words)


def member_words(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each line about the members of a plan's family: nothing where
    the plan has none. ``summary``: the run's."""
    for name, own in summary.get(MEMBERS, {}).items():
        words = [many(own["devices"], "device"), many(own["reports"], "report")]
        for what in ("metrics", "test"):
            values = ", ".join(f"{key} {value:.5g}" for key, value in own[what].items())
            words += [f"{what} {values}"] if values else []
        yield f"member {name}", "; ".join(words)
    if without := summary.get("without_member"):
        yield "no member", f"fits {many(without, 'device')}, which never take part"


def backend_words(summary: Mapping[str, Any]) -> str:
    """Return which back end trained, and why."""
    kinds = summary["backend"]
    if not isinstance(kinds, str):
        kinds = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    return f"{kinds} ({summary['why']})"
