"""PyTorch's ctc_loss (Graves et al. 2006, connectionist temporal classification), whose result
PyTorch cannot trace.

A text's *states* are its labels with a blank before, between and behind them, 2 * labels + 1. Time
goes from a state to itself, to the next, or past a blank to the next label, unless that label is
the same. ``log_forward_step`` sums, in logarithms, over all ways to each state. Run from both ends,
with each way's own steps counted once, it gives the loss and the probability of each state at each
time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fleetlearn_export.errors import ExportError
from fleetlearn_export.tracing.formulas.scan import SCAN, STEPS

aten = torch.ops.aten
NEVER = -math.inf
"""The logarithm of the probability of what cannot be."""
MEAN, SUM = 1, 2
"""PyTorch's numbers for reductions; 0 is none."""
ARGUMENTS = "Tensor logp, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank"
torch.library.define("fleetlearn::ctc_loss", f"({ARGUMENTS}) -> Tensor")
torch.library.define("fleetlearn::ctc_loss_backward", f"(Tensor grad, {ARGUMENTS}) -> Tensor")
FORWARD: Any = torch.ops.fleetlearn.ctc_loss.default
"""Returns each text's loss (n,). logp: (time, n, classes); targets: int64 (n, labels); the lengths:
int64 (n,)."""
BACKWARD: Any = torch.ops.fleetlearn.ctc_loss_backward.default
"""Returns the gradient by logp, which is PyTorch's: right behind log_softmax alone."""


def ctc_loss(
    logp: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    if logp.dim() != 3 or targets.dim() != 2:
        raise ExportError(
            f"ctc_loss has scores of shape {tuple(logp.shape)} and targets of shape "
            f"{tuple(targets.shape)}; a bundle has (time, n, classes) and (n, labels): give each "
            "text its own row, and fill up the shorter ones"
        )
    lengths = [row.to(torch.int64) for row in (input_lengths, target_lengths)]
    losses: Tensor = FORWARD(logp, targets.to(torch.int64), *lengths, blank)
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == MEAN:
        return (losses / lengths[1].clamp(min=1)).mean()
    return losses.sum() if reduction == SUM else losses


class _States(NamedTuple):
    """The states of each text, in the order of time or against it."""

    classes: Tensor
    """int64 (n, states)."""
    jumps: Tensor
    """float (n, states): 0 where time may come from the state two before, NEVER elsewhere."""
    number: Tensor
    """int64 (states,)."""


def _states(logp: Tensor, targets: Tensor, target_lengths: Tensor, blank: int) -> _States:
    labels = torch.arange(targets.shape[1]) < target_lengths.unsqueeze(1)
    named = torch.where(labels, targets, blank)
    blanks = torch.full_like(named, blank)
    classes = torch.cat([torch.stack([blanks, named], 2).flatten(1), blanks[:, :1]], 1)
    other = (classes[:, 2:] != blank) & (classes[:, 2:] != classes[:, :-2])
    jumps = torch.where(functional.pad(other.to(logp.dtype), [2, 0]) > 0, 0.0, NEVER).to(logp.dtype)
    return _States(classes, jumps, torch.arange(classes.shape[1]))


def _of_states(logp: Tensor, states: _States) -> Tensor:
    """Return the logarithms (time, n, states)."""
    return logp.gather(2, states.classes.unsqueeze(0).expand(logp.shape[0], -1, -1))


def _last(states: _States, target_lengths: Tensor) -> Tensor:
    """Return which states a text may end in: the last blank or the last label, bool (n, states)."""
    ends = 2 * target_lengths.unsqueeze(1)
    return (states.number == ends) | (states.number == ends - 1)


def _from_the_front(scores: Tensor, states: _States, target_lengths: Tensor) -> Tensor:
    """Return, for each time and state, the logarithm of the sum over all ways from the beginning to
    there."""
    first = states.number <= (target_lengths > 0).to(torch.int64).unsqueeze(1)
    now = torch.where(first, 0.0, NEVER).to(scores.dtype).unsqueeze(0)
    later = torch.full_like(scores[1:], NEVER)
    return _log_forward(scores, torch.cat([now, later]), states.jumps)


def _from_the_end(
    scores: Tensor, states: _States, input_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Return the same over all ways from there to the end."""
    time = torch.arange(scores.shape[0]).reshape(-1, 1, 1)
    lengths = input_lengths.reshape(1, -1, 1)
    starts = torch.where(
        (time == lengths - 1) & _last(states, target_lengths).unsqueeze(0), 0.0, NEVER
    )
    scores = torch.where(time < lengths, scores, NEVER)
    jumps = functional.pad(states.jumps[:, 2:], [0, 2], value=NEVER)
    reversed_scores = _log_forward(
        scores.flip(0, 2), starts.to(scores.dtype).flip(0, 2), jumps.flip(1)
    )
    return reversed_scores.flip(0, 2)


def losses(
    logp: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int
) -> Tensor:
    states = _states(logp, targets, target_lengths, blank)
    ways = _from_the_front(_of_states(logp, states), states, target_lengths)
    last = (input_lengths - 1).reshape(1, -1, 1).expand(1, -1, ways.shape[2])
    final = torch.where(_last(states, target_lengths), ways.gather(0, last).squeeze(0), NEVER)
    return -final.logsumexp(1)


def gradient(
    grad: Tensor,
    logp: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> Tensor:
    states = _states(logp, targets, target_lengths, blank)
    scores = _of_states(logp, states)
    through = _from_the_front(scores, states, target_lengths) + _from_the_end(
        scores, states, input_lengths, target_lengths
    )
    possible = through > NEVER
    # Both have the state's own score. The sum over the states at any time of a text is its
    # probability.
    through = torch.where(possible, through - torch.where(possible, scores, 0.0), NEVER)
    whole = through[0].logsumexp(1)
    share = torch.where(possible, through - whole.reshape(1, -1, 1), NEVER).exp()
    places = states.classes.unsqueeze(0).expand(logp.shape[0], -1, -1)
    by_logp = logp.exp() - torch.zeros_like(logp).scatter_add(2, places, share)
    counted = torch.arange(logp.shape[0]).reshape(-1, 1) < input_lengths.unsqueeze(0)
    # Without a way to the end the loss is infinite; what came back then is a 0 for zero_infinity.
    counted = counted & (whole > NEVER).unsqueeze(0)
    return torch.where(counted.unsqueeze(2), by_logp * grad.reshape(1, -1, 1), 0.0)


def log_forward_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return score + log of the sum of the exponentials of start[s], x[s], x[s - 1] and x[s - 2] +
    jumps[s], where x is the state, and all of these are NEVER before the beginning. rows: score and
    start; all are (n, states)."""
    (before,), (score, start), (jumps,) = states, rows, fixed
    shifted = functional.pad(before, [2, 0], value=NEVER)
    ways = start, before, shifted[:, 1:-1], shifted[:, :-2] + jumps
    # Where all are NEVER their differences are not numbers.
    largest = torch.maximum(torch.maximum(ways[0], ways[1]), torch.maximum(ways[2], ways[3]))
    largest = largest.clamp(min=torch.finfo(score.dtype).min)
    first, *others = ((way - largest).exp() for way in ways)
    next_score = score + sum(others, first).log() + largest
    return [next_score], [next_score]


STEPS["ctc"] = log_forward_step


def _log_forward(scores: Tensor, starts: Tensor, jumps: Tensor) -> Tensor:
    """Return x (time, n, states), each time's from the one before."""
    result: Tensor = SCAN("ctc", [torch.full_like(jumps, NEVER)], [scores, starts], [jumps], False)[
        1
    ]
    return result


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.blank = inputs[-1]
    ctx.save_for_backward(*inputs[:-1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return BACKWARD(grad, *ctx.saved_tensors, ctx.blank), None, None, None, None


for name, function in (("ctc_loss", losses), ("ctc_loss_backward", gradient)):
    torch.library.impl(f"fleetlearn::{name}", "CPU")(function)
torch.library.register_fake("fleetlearn::ctc_loss")(lambda logp, *_: logp.new_empty(logp.shape[1]))
torch.library.register_fake("fleetlearn::ctc_loss_backward")(
    lambda grad, logp, *_: torch.empty_like(logp)
)
torch.library.register_autograd("fleetlearn::ctc_loss", _backward, setup_context=_setup)

FORMULAS = {aten.ctc_loss.Tensor: ctc_loss}
DECOMPOSITIONS = {FORWARD: losses, BACKWARD: gradient}
