"""An own stop rule: a function of another package that says when training is over.

The engine knows nothing of packages and names: it is given the function. A rule keeps no state, and
what it goes by survives a restart, so that a server that was killed decides as if it had not been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure

from fleetlearn_coordinator.rounds.commands import Finish


class OwnRuleError(FleetError):
    """An own rule failed, or returned what it must not. The run stops with it: the rule is to be
    mended first."""

    def __init__(self, text: str) -> None:
        super().__init__(Code.BAD_MESSAGE, text)


class PastRound(NamedTuple):
    """A round that made a model."""

    version: int
    """Of the model that it made."""
    reports: int
    """Reports that counted."""
    change: float
    """The L2 norm of the model's change."""
    metrics: Mapping[str, float]
    """What its devices measured of the model with which it began: of version - 1. Only what at
    least ``round.minimum`` of them measured."""


StopRule: TypeAlias = Callable[[Sequence[PastRound]], "str | None"]
"""Returns why training is over, for people, or None. It is asked after each committed round, and
again after a restart."""


@dataclass(slots=True)
class OwnStopRule:
    """A stop rule, and the rounds that it goes by: those since the run began, or since the last
    roll back."""

    rule: StopRule
    rounds: list[PastRound] = field(default_factory=list)

    def add(self, version: int, summary: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """A round was committed that made this version. ``metrics``: those that may stop the
        run."""
        # A rule that wrote to the metrics would decide otherwise after a restart.
        kept = MappingProxyType(dict(metrics))
        self.rounds.append(PastRound(version, summary["reports"], summary["change"], kept))

    def finish(self) -> Finish | None:
        """Return why training is over, or None. Raises OwnRuleError."""
        if not self.rounds:
            return None
        try:
            reason = self.rule((*self.rounds,))
        except ANY_FAILURE as error:
            raise OwnRuleError(failure("stop.rule", error)) from error
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason:
            raise OwnRuleError(
                f"stop.rule returned {reason!r}; expected None, or why training is over, in words"
            )
        version = self.rounds[-1].version
        return Finish(reason, "own", version, version)
