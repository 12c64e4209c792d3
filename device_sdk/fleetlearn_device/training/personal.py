"""Ditto and FedRep: what is the device's own is trained in passes by itself, beside what travels.

Steps, epochs and loss of the result are those of the passes that make the update. A time budget is
shared in proportion to the passes; each of the two parts does at least one step. The personal
passes draw from another seed, so that Ditto's update is plain training's, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetlearn_protocol.messages import UPDATE

from fleetlearn_device.training.train import SEEDS, DivergedError, TrainingResult
from fleetlearn_device.training.work import TaskOutcome, TaskWork

PERSONAL_SEED = 2**52
"""What the personal passes add to the task's seed, modulo 2^53."""


def ditto(work: TaskWork) -> TaskOutcome:
    """Train the round's model as plain training does, then the device's personal model, which is
    pulled towards it.

    Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", arXiv
    2012.04221, algorithm 1: v_k <- v_k - lr (grad F_k(v_k) + lambda (v_k - w)), where w is the
    round's model. lambda is the task's mu, which is 0 in the training of the round's model. v_k
    begins as the model of the device's first round.
    """
    inputs, settings, runtime = work.inputs, work.settings, work.runtime
    work.load()
    shared = work.train(
        hyper=work.hyper | {"mu": 0.0}, time_budget=_share_of_time(work, settings.epochs)
    )
    first = inputs.personal is None
    own = inputs.model if inputs.personal is None else inputs.personal[: inputs.model.size]
    runtime.load(own, anchor=inputs.model)
    with named("personal model"):
        trained = _train_personal(
            work,
            evaluate=settings.evaluate and not first,
            time_budget=_time_left(work, shared),
            on_step=_after_step(work, done=shared.steps),
        )
    result = shared._replace(
        complete=shared.complete and trained.complete,
        seconds=shared.seconds + trained.seconds,
    )
    # The first personal model is the round's, and has been measured as such.
    measured = shared.evaluation if first else trained.evaluation
    return TaskOutcome(result, {UPDATE: result.update}, {}, runtime.parameters.copy(), measured)


def fedrep(work: TaskWork) -> TaskOutcome:
    """Train the personal parameters with the others frozen, then the others with the personal ones
    frozen.

    Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated Learning",
    arXiv 2102.07078, algorithm 1: the personal parameters are the head, what travels is the body.
    After each step the frozen rows, statistics included, are overwritten with what they were. For
    the other rows the step is the same as if these had been frozen, as long as the optimizer treats
    each element by itself. Both phases begin with a fresh state of the optimizer.
    """
    runtime, size = work.runtime, work.bundle.manifest.size
    work.load()
    body, head = slice(0, size), slice(size, None)
    with named("personal parameters"):
        own = _train_personal(
            work,
            time_budget=_share_of_time(work, _personal_epochs(work)),
            on_step=_after_step(work, put_back=_keeping(work, body)),
        )
    # What travels is as it was, except where an earlier process had begun the second part already.
    runtime.load(runtime.local, anchor=work.inputs.model)
    result = work.train(
        evaluate=False,
        time_budget=_time_left(work, own),
        on_step=_after_step(work, done=own.steps, put_back=_keeping(work, head)),
    )
    result = result._replace(
        complete=result.complete and own.complete,
        seconds=result.seconds + own.seconds,
        evaluation=own.evaluation,
    )
    return TaskOutcome(result, {UPDATE: result.update})


def _personal_epochs(work: TaskWork) -> int:
    return work.settings.personal_epochs or work.settings.epochs


def _train_personal(work: TaskWork, **changes: Any) -> TrainingResult:
    """Do the personal passes with the loaded model."""
    seed = (work.settings.seed + PERSONAL_SEED) % SEEDS
    return work.train(epochs=_personal_epochs(work), seed=seed, **changes)


def _share_of_time(work: TaskWork, epochs: int) -> float | None:
    """Return the part of the time budget for this many passes."""
    budget = work.settings.time_budget
    return (
        None
        if budget is None
        else budget * epochs / (work.settings.epochs + _personal_epochs(work))
    )


def _time_left(work: TaskWork, first: TrainingResult) -> float | None:
    """Return what the first part of the training left of the time budget: enough for one step."""
    budget = work.settings.time_budget
    return None if budget is None else max(budget - first.seconds, sys.float_info.min)


def _after_step(
    work: TaskWork, *, done: int = 0, put_back: Callable[[], None] = lambda: None
) -> Callable[[int, float], None]:
    """Return what is called after each step. done: steps of the part before."""

    def after(steps: int, loss: float) -> None:
        put_back()
        if work.settings.on_step is not None:
            work.settings.on_step(done + steps, loss)

    return after


def _keeping(work: TaskWork, rows: slice) -> Callable[[], None]:
    """Return a function that gives these elements of the local model the values that they have
    now."""
    runtime, values = work.runtime, work.runtime.local[rows].copy()

    def put_back() -> None:
        whole = runtime.local.copy()
        whole[rows] = values
        runtime.load(whole, anchor=work.inputs.model, state=runtime.state)

    return put_back


@contextmanager
def named(what: str) -> Iterator[None]:
    """Say in a DivergedError what it is that diverged."""
    try:
        yield
    except DivergedError as error:
        raise type(error)(f"in the training of the {what}: {error}") from None
