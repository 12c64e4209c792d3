"""What the live page shows of one run, kept in memory: counts for each second, the last rounds, and
what devices said. Bounded in every way. No clock, no I/O, and nothing of the run itself.

The run's observer fills it with what happens (service/live_run.py); ``view`` and the simulator
fill it with what a folder says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fleetlearn_coordinator.dashboard.growing_list import GrowingList

SECONDS, MINUTES = 900, 1440
"""Samples that are kept: those of a quarter of an hour, and one for each minute of a day."""
ROUNDS = 1000
"""Rounds that are kept."""
EVALUATIONS = 200
NOTES = 200
"""Lines of text that are kept: what devices said, and which messages were refused."""
MOST_STALENESS = 50
"""Updates that are this stale, or staler, are counted together."""
MOST_NAMES = 64
"""Causes, and tiers, that are counted apart; what comes beyond is counted as OTHERS. A device
chooses its tier's name, so there may be any number."""
OTHERS = "others"
MOST_TEXT = 500
"""Characters of a device's text that are kept."""


class FleetNow(NamedTuple):
    """How many devices do what, at one moment."""

    connected: int
    training: int
    """Connected, with a task, and not uploading."""
    uploading: int
    silent: int
    """With a task, and not connected: the task waits for them."""


class RunHistory:
    """The history of one run. Times are Unix times, in seconds."""

    def __init__(self, minutes: GrowingList | None = None) -> None:
        """``minutes``: what somebody else fills; None: nobody has such rows."""
        self.samples = GrowingList(SECONDS)
        """Rows [time, connected, training, uploading, silent, reports that counted, bytes up,
        bytes down, {cause: tasks}]. Counts are of the second before the time."""
        self.minutes = GrowingList(MINUTES) if minutes is None else minutes
        """The same for minutes: the devices of a minute are those of its last second. Last comes
        the most devices that were present in it (service/fleet_minutes.py)."""
        self.rounds = GrowingList(ROUNDS)
        """Rows as ``round_row`` returns."""
        self.evaluations = GrowingList(EVALUATIONS)
        """Rows as ``evaluation_row`` returns."""
        self.held_out = GrowingList(ROUNDS)
        """Rows [version, {metric: value}]: what models measure on the coordinator's own data, in
        the order in which they were measured."""
        self.notes = GrowingList(NOTES)
        """Rows [time, device, cause, text]: failed tasks and refused messages."""
        self.causes: Counter[str] = Counter()
        """Cause -> tasks that ended by it without a report that counts."""
        self.refusals: Counter[str] = Counter()
        """Code -> messages that were refused."""
        self.staleness: Counter[int] = Counter()
        """Staleness -> updates that counted."""
        self.tiers: Counter[str] = Counter()
        """Tier that devices name -> updates that counted; empty: devices that name none."""
        self.bytes_up = self.bytes_down = 0
        """Payload of updates received and of content sent."""
        self._counted = 0
        self._ended: Counter[str] = Counter()
        self._sampled_up = self._sampled_down = 0

    @property
    def lists(self) -> dict[str, GrowingList]:
        """The lists, by name."""
        return {
            "samples": self.samples,
            "minutes": self.minutes,
            "rounds": self.rounds,
            "evaluations": self.evaluations,
            "held_out": self.held_out,
            "notes": self.notes,
        }

    def totals(self) -> dict[str, Any]:
        """Return the counts since this history began."""
        return {
            "causes": dict(self.causes),
            "refusals": dict(self.refusals),
            "staleness": {str(key): self.staleness[key] for key in sorted(self.staleness)},
            "tiers": dict(self.tiers),
            "bytes": [self.bytes_up, self.bytes_down],
        }

    # What happens

    def counted(self, staleness: int, tier: str) -> None:
        """A device's update counts."""
        self._counted += 1
        self.staleness[min(staleness, MOST_STALENESS)] += 1
        count_name(self.tiers, tier)

    def ended(self, cause: str) -> None:
        """A task ended without a report that counts."""
        count_name(self._ended, cause)
        count_name(self.causes, cause)

    def revived(self) -> None:
        """A device that was lost came back in time: its task goes on."""
        self.causes["lost"] = max(0, self.causes["lost"] - 1)

    def refused(self, time: float, device: str, code: str, text: str) -> None:
        """A device's message was refused."""
        count_name(self.refusals, code)
        self.notes.add([round(time, 1), device, f"refused: {code}", text[:MOST_TEXT]])

    def failed(self, time: float, device: str, cause: str, text: str) -> None:
        """A device gave its task back, and said why."""
        self.notes.add([round(time, 1), device, cause, text[:MOST_TEXT]])

    def moved(self, up: int, down: int) -> None:
        """``up`` bytes were received and ``down`` bytes sent since the last call."""
        self.bytes_up += up
        self.bytes_down += down

    def sample(self, time: float, fleet: FleetNow) -> None:
        """Close a second: what happened in it, and what devices do at its end."""
        up, down = self.bytes_up - self._sampled_up, self.bytes_down - self._sampled_down
        row = [round(time, 1), *fleet, self._counted, up, down, dict(self._ended)]
        self._sampled_up, self._sampled_down = self.bytes_up, self.bytes_down
        self._counted = 0
        self._ended.clear()
        self.samples.add(row)


def count_name(counts: Counter[str], name: str) -> None:
    """Count a name that a device may have chosen: MOST_NAMES of them, then OTHERS."""
    counts[name if name in counts or len(counts) < MOST_NAMES else OTHERS] += 1


def round_row(
    number: int,
    outcome: str,
    opened: float,
    closed: float,
    summary: Mapping[str, Any],
    why: str = "",
    version: int | None = None,
) -> dict[str, Any]:
    """Return what the page shows of a round that is over. ``summary``: as ``rounds`` of the status
    has it; rounds of earlier versions lack some of it. ``why``: why the round was abandoned.
    ``version``: of the model that the round made, where that is known."""
    members = {
        name: {key: own[key] for key in ("reports", "metrics", "change")}
        for name, own in summary.get("members", {}).items()
    }
    return {
        "number": number,
        "outcome": outcome,
        "version": version,
        "opened": round(opened, 3),
        "closed": round(closed, 3),
        "seconds": summary.get("seconds", 0.0),
        "reports": summary.get("reports", 0),
        "partial": summary.get("partial", 0),
        "dropped": summary.get("dropped", {}),
        "metrics": summary.get("metrics", {}),
        "evaluated": bool(summary.get("evaluation")),
        "change": summary.get("change", 0.0),
        "up": summary.get("bytes_up", 0),
        "down": summary.get("bytes_down", 0),
        "staleness": summary.get("staleness"),
        "why": why,
        **({"members": members} if members else {}),
        **{key: summary[key] for key in ("computation", "regions", "goal") if key in summary},
    }


def evaluation_row(
    number: int, version: int, valid: bool, closed: float, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the page shows of an evaluation that is over. ``summary``: as ``evaluations`` of
    the status has it."""
    return {
        "number": number,
        "version": version,
        "valid": valid,
        "closed": round(closed, 3),
        "devices": summary.get("devices", 0),
        "examples": summary.get("examples", 0),
        "metrics": summary.get("metrics", {}),
        "dropped": summary.get("dropped", {}),
    }
