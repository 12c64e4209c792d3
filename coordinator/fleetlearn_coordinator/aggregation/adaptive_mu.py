"""FedProx's mu, adapted to the loss: Li et al., "Federated Optimization in Heterogeneous Networks" (2020), arXiv
1812.06127, section 5.3.2: "increasing mu by 0.1 whenever the loss increases and decreasing it by 0.1 whenever the loss
decreases for 5 consecutive rounds".

The loss of a committed round is what devices measure of its model before training (or of their training where
they do not evaluate). What a round leaves for the next is in its summary, and so survives the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

STEP = 0.1
FALLS = 5
"""Rounds in a row with a falling loss after which mu falls."""


class MuState(NamedTuple):
    """What the committed rounds decide of the open one."""

    mu: float
    loss: float | None = None
    """Of the last committed round; None: there is none, or nobody measured it."""
    falls: int = 0
    """In how many rounds up to it the loss fell, one after the other, since mu fell last."""


def state_after(summary: Mapping[str, Any] | None, first: float) -> MuState:
    """Return the state after the last committed round. summary: that round's; None before the first. ``first`` is where
    mu begins."""
    found = summary or {}
    if "mu" in found:
        return MuState(found["mu"]["next"], found["mu"]["loss"], found["mu"]["falls"])
    return MuState(first, found.get("metrics", {}).get("loss"))


def next_state(state: MuState, loss: float | None) -> MuState:
    """Return the state after a round with this loss. None: nobody measured it, and nothing follows from the round."""
    if loss is None or state.loss is None:
        return state if loss is None else state._replace(loss=loss)
    if loss > state.loss:
        return MuState(round(state.mu + STEP, 9), loss)
    falls = state.falls + 1 if loss < state.loss else 0
    if falls == FALLS:
        return MuState(max(0.0, round(state.mu - STEP, 9)), loss)
    return MuState(state.mu, loss, falls)


def summary_of(state: MuState, loss: float | None) -> dict[str, Any]:
    """Return what a round with this state and this loss adds to its summary."""
    after = next_state(state, loss)
    return {"mu": {"used": state.mu, "next": after.mu, "loss": after.loss, "falls": after.falls}}
