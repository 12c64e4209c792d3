"""An own stop rule: what it is told, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.own_stop_rule import (
    OwnRuleError,
    OwnStopRule,
    PastRound,
    StopRule,
)


def plateau(rounds: Sequence[PastRound]) -> str | None:
    """Three rounds whose loss does not fall."""
    losses = [each.metrics["loss"] for each in rounds[-3:]]
    if len(losses) == 3 and losses == sorted(losses):
        return f"the loss does not fall since version {rounds[-3].version}"
    return None


def told(rule: StopRule, losses: Sequence[float]) -> OwnStopRule:
    made = OwnStopRule(rule)
    for version, loss in enumerate(losses, 1):
        made.add(version, {"reports": 4, "change": 0.5, "more": 1}, {"loss": loss})
    return made


def test_it_goes_by_the_rounds_so_far() -> None:
    assert told(plateau, []).finish() is None
    assert told(plateau, [3.0, 2.0, 1.0]).finish() is None
    done = told(plateau, [3.0, 1.0, 2.0, 2.0])
    assert done.finish() == Finish("the loss does not fall since version 2", "own", 4, 4)
    assert done.rounds[0] == PastRound(1, 4, 0.5, {"loss": 3.0})
    again = told(plateau, [3.0, 1.0, 2.0, 2.0])
    assert again.finish() == done.finish(), "as after a restart"


def test_it_cannot_change_what_it_is_told() -> None:
    def greedy(rounds: Sequence[PastRound]) -> str | None:
        rounds.clear()  # type: ignore[attr-defined]
        return None

    with pytest.raises(OwnRuleError, match=r"stop\.rule failed: AttributeError"):
        told(greedy, [1.0]).finish()


@pytest.mark.parametrize(
    ("rule", "refusal"),
    [
        (lambda rounds: True, r"returned True; expected None, or why"),
        (lambda rounds: "", r"returned ''; expected"),
        (lambda rounds: sys.exit("done"), r"failed: SystemExit: done"),
        (lambda rounds: rounds[0].metrics.clear(), r"failed: AttributeError"),
        (lambda rounds: rounds[0].metrics["accuracy"], r"failed: KeyError: 'accuracy'"),
    ],
)
def test_a_wrong_answer_is_named(rule: StopRule, refusal: str) -> None:
    with pytest.raises(OwnRuleError, match=rf"stop\.rule {refusal}"):
        told(rule, [1.0]).finish()
