"""FedProx's mu, adapted to the loss: Li et al., "Federated Optimization in Heterogeneous Networks"
(2020), arXiv 1812.06127, section 5.3.2: "increasing mu by 0.1 whenever the loss increases and
decreasing it by 0.1 whenever the loss decreases for 5 consecutive rounds".

Beside the paper, mu rises to 1 / lr at most. A step moves a device's model by lr * mu of its way
back to the model that it was sent: more than all of the way with a larger mu, and further away than
it was from mu = 2 / lr on. Near the optimum the loss rises every other round by chance, so without
a limit mu gets there, and the run diverges.

The loss of a committed round is what devices measure of its model before training (or of their
training where they do not evaluate). What a round leaves for the next is in its summary, and so
survives the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
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
    """Return the state after the last committed round. summary: that round's; None before the
    first. ``first`` is where mu begins."""
    found = summary or {}
    if "mu" in found:
        return MuState(found["mu"]["next"], found["mu"]["loss"], found["mu"]["falls"])
    return MuState(first, found.get("metrics", {}).get("loss"))


def largest(hyper: Mapping[str, float]) -> float:
    """Return how far mu may rise. hyper: the plan's values for the step. A user's own step may have
    no ``lr``: then nothing limits mu."""
    return 1 / hyper["lr"] if hyper.get("lr") else inf


def next_state(state: MuState, loss: float | None, most: float = inf) -> MuState:
    """Return the state after a round with this loss. None: nobody measured it, and nothing follows
    from the round. most: where mu stops rising; a run that began with a larger mu keeps it."""
    if loss is None or state.loss is None:
        return state if loss is None else state._replace(loss=loss)
    if loss > state.loss:
        risen = round(state.mu + STEP, 9)
        return MuState(risen if risen <= most else state.mu, loss)
    falls = state.falls + 1 if loss < state.loss else 0
    if falls == FALLS:
        return MuState(max(0.0, round(state.mu - STEP, 9)), loss)
    return MuState(state.mu, loss, falls)


def summary_of(state: MuState, loss: float | None, most: float = inf) -> dict[str, Any]:
    """Return what a round adds to its summary. Arguments as for ``next_state``."""
    after = next_state(state, loss, most)
    return {"mu": {"used": state.mu, "next": after.mu, "loss": after.loss, "falls": after.falls}}
