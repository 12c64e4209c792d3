"""When c or h begins again, because devices lost their part of it."""

from __future__ import annotations

from fleetlearn_coordinator.aggregation.tied_sum import EMPTY_SUM, TiedSum


def test_a_device_that_forgets_every_day_does_not_keep_the_others_at_zeros() -> None:
    """c begins again at most once in N reports; until then what was lost is remembered."""
    state, began = EMPTY_SUM, []
    for round in range(1, 31):
        state = state.after(100, 10, 1, round)
        began += [round] if state.since == round else []
    assert began == [10, 20, 30]
    assert state.after(100, 9, 0, 31) == TiedSum(9, 0, 30)
