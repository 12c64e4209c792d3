"""pFedMe and APFL: two models that are trained in the same steps, the one that makes the update and
the device's own.

The step of each batch is several steps of the runtime. What they need of the other model is in the
task's ``Progress.kept``, so that checkpoints have it. ``personal.py`` has the algorithms whose two
parts are trained one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import UPDATE, Evaluation
from fleetlearn_protocol.vector import Vector, gather, scatter

from fleetlearn_device.runtimes.checks import Batch
from fleetlearn_device.training.data import Data
from fleetlearn_device.training.personal import PERSONAL_SEED, named
from fleetlearn_device.training.train import SEEDS, Step, TrainingResult, evaluate_data
from fleetlearn_device.training.work import TaskOutcome, TaskWork

OWN = "own model"
ALPHA = "alpha"
MIXED = (2, 1)
"""What APFL keeps: the mixed model as the last task left it, v, and alpha."""
INNER_SEEDS = 2**32
"""pFedMe: by how much the seed of a step differs from that of the step before it on the same
batch."""
MOST_INNER_STEPS = 10**4


def pfedme(work: TaskWork) -> TaskOutcome:
    """Train a personal model theta with a pull towards the local model w, which follows it slowly.
    The update is w's.

    T. Dinh, Tran and Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes", arXiv
    2006.08848, algorithm 1. For each batch, theta is brought near argmin f(theta) + lambda/2
    ||theta - w||^2 by K steps of the bundle's optimizer, from where the batch before left it; then
    w <- w - eta lambda (w - theta). In the task's hyper-parameters lambda is mu, K is inner_steps,
    eta is outer_lr, and lr is the optimizer's. Both models begin as the round's. Loss and metrics
    are those of theta at the first of its K steps.
    """
    inputs, runtime, kept = work.inputs, work.runtime, work.progress.kept
    manifest = work.bundle.manifest
    turns = int(work.numbers["inner_steps"])
    if not 1 <= turns <= MOST_INNER_STEPS or turns != work.numbers["inner_steps"]:
        raise ValueError(
            f"hyper-parameter inner_steps is {work.numbers['inner_steps']}; expected a whole "
            f"number from 1 to {MOST_INNER_STEPS}"
        )
    pull = np.float32(work.numbers["outer_lr"] * work.hyper["mu"])

    def step(batch: Batch, seed: int, hyper: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        local = runtime.parameters.copy()
        runtime.load(kept.get(OWN, local), anchor=local, state=runtime.state)
        loss, metrics = runtime.step(batch, seed=seed, **hyper), runtime.metrics
        for turn in range(1, turns):
            runtime.step(batch, seed=(seed + turn * INNER_SEEDS) % SEEDS, **hyper)
        theta = kept[OWN] = runtime.parameters.copy()
        moved = local - pull * (local - theta)
        # Buffers are measured, not descended: both models have the newest.
        scatter(moved, manifest.buffers, gather(theta, manifest.buffers))
        runtime.load(moved, anchor=inputs.model, state=runtime.state)
        return loss, metrics

    own = None if inputs.personal is None else inputs.personal[: manifest.size]
    work.load()
    result = _train(work, step, turns, own)
    measured = _measured(work, own, result.evaluation)
    return TaskOutcome(result, {UPDATE: result.update}, {}, kept[OWN], measured)


def apfl(work: TaskWork) -> TaskOutcome:
    """Train the round's model w as plain training does, and beside it the device's own v by the
    gradient of their mixture alpha v + (1 - alpha) w, which is the personal model.

    Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning", arXiv 2003.13461,
    algorithm 1, with g the gradient at the mixture: v <- v - lr alpha g, and by equation 10 alpha
    <- alpha - a lr <v - w, g>, kept between 0 and 1, where a is adapt_alpha: 1 is the paper's, 0
    leaves alpha as it is. v begins as the model of the device's first round, or as the personal
    model of another algorithm, and alpha as the task's hyper-parameter says.
    """
    inputs, runtime, kept = work.inputs, work.runtime, work.progress.kept
    manifest = work.bundle.manifest
    size, buffers, adapt = manifest.size, manifest.buffers, work.numbers["adapt_alpha"]
    if not (0 <= work.numbers[ALPHA] <= 1 and adapt >= 0):
        raise ValueError(
            f"hyper-parameters alpha and adapt_alpha are {work.numbers[ALPHA]} and {adapt}; "
            "expected alpha from 0 to 1 and adapt_alpha not negative"
        )
    own, alpha = _own_of(inputs.personal, inputs.model, work.numbers[ALPHA])
    kept.setdefault(OWN, own)
    kept.setdefault(ALPHA, np.full(1, alpha, np.float32))

    def step(batch: Batch, seed: int, hyper: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        local, own, alpha = runtime.parameters.copy(), kept[OWN], kept[ALPHA][0]
        mixture = _mixed(own, local, alpha, manifest)
        runtime.load(mixture, anchor=inputs.model)
        runtime.step(batch, seed=(seed + PERSONAL_SEED) % SEEDS, **hyper)
        moved = runtime.parameters - mixture  # -lr g: the optimizer is plain gradient descent
        scatter(moved, buffers, 0.0)
        after = own + alpha * moved
        scatter(after, buffers, gather(runtime.parameters, buffers))
        rise = adapt * float(np.dot(own.astype(np.float64) - local, moved.astype(np.float64)))
        kept[OWN] = after
        kept[ALPHA] = np.full(1, np.clip(float(alpha) + rise, 0, 1), np.float32)
        runtime.load(local, anchor=inputs.model)
        return runtime.step(batch, seed=seed, **hyper), runtime.metrics

    before = None
    if inputs.personal is not None:
        before = _mixed(own, inputs.model, np.float32(alpha), manifest)
    work.load()
    result = _train(work, step, 2, before)
    mixture = _mixed(kept[OWN], runtime.parameters, kept[ALPHA][0], manifest)
    personal = np.concatenate([mixture, kept[OWN], kept[ALPHA]])[: 2 * size + 1]
    measured = _measured(work, before, result.evaluation)
    return TaskOutcome(result, {UPDATE: result.update}, {}, personal, measured)


def mixed_model(personal: Vector, model: Vector, manifest: Manifest) -> Vector:
    """Return APFL's personal model, mixed from v and this round's model: float32, shape (P,)."""
    own, alpha = _own_of(personal, model, 1.0)
    return _mixed(own, model, np.float32(alpha), manifest)


def _own_of(personal: Vector | None, model: Vector, alpha: float) -> tuple[Vector, float]:
    """Return v and alpha from the vector that a device keeps. alpha: the value to begin with."""
    size = model.size
    if personal is None:
        return model.copy(), alpha
    if personal.size != 2 * size + 1:  # another algorithm's personal model
        return personal[:size].copy(), alpha
    return personal[size : 2 * size].copy(), float(personal[2 * size])


def _mixed(own: Vector, local: Vector, alpha: np.float32, manifest: Manifest) -> Vector:
    """Return alpha v + (1 - alpha) w, with the buffers of v: those are measured on the mixture."""
    mixture: Vector = alpha * own + (np.float32(1) - alpha) * local
    scatter(mixture, manifest.buffers, gather(own, manifest.buffers))
    return mixture


def _train(work: TaskWork, step: Step, turns: int, personal: Vector | None) -> TrainingResult:
    """Train with ``turns`` steps of the runtime for each batch, and measure the personal model
    first, if the device has one: float32, shape (P,)."""
    tell = work.settings.on_step

    def on_step(steps: int, loss: float) -> None:
        if tell is not None:
            tell(turns * steps, loss)

    return work.train(step=step, on_step=on_step, before_steps=_measuring(work, personal))


def _measuring(work: TaskWork, personal: Vector | None) -> Callable[[Data], None]:
    """Return what measures the personal model before the first step, where the task evaluates and
    the device has one."""
    settings = work.settings

    def measure(data: Data) -> None:
        if personal is None or not settings.evaluate:
            return
        work.runtime.load(personal)
        held_out = data if settings.held_out is None else settings.held_out
        with named("personal model"):
            work.progress.measured[OWN] = evaluate_data(
                work.runtime,
                held_out,
                batch_size=settings.batch_size,
                should_stop=settings.should_stop,
                on_batch=settings.on_evaluated,
            )
        work.load()

    return measure


def _measured(
    work: TaskWork, personal: Vector | None, first: Evaluation | None
) -> Evaluation | None:
    """Return the measurement of the personal model. first: of the round's model, which the first
    personal model is."""
    return first if personal is None else work.progress.measured.get(OWN)
