"""Local training on the device: E epochs of steps within a time budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.learning_rates import factor_at
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.messages import Evaluation, StepSchedule
from fleetlearn_protocol.vector import Vector, check_finite, gather, scatter

from fleetlearn_device.runtimes.checks import (
    Batch,
    DataError,
    check_hyper,
    find_nonfinite,
)
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.data import ArrayData, Data, as_data, one_pass, steps_of_pass
from fleetlearn_device.training.features import FeatureData
from fleetlearn_device.training.kept_state import collect_kept_state
from fleetlearn_device.training.progress import DoneSteps, PartInProgress, Progress

SEEDS = 2**53
"""Seeds of a random step: 0 to 2^53 - 1."""
LARGEST = 1e30
"""The largest magnitude of a number in the protocol."""
NO_BATCH = "a pass over the data gave no batch: there is nothing to train on now"
EVALUATION_BATCH = 256
"""Most examples evaluated at a time: bounds memory, and changes no sum beyond rounding."""


Step: TypeAlias = Callable[[Batch, int, Mapping[str, float]], tuple[float, dict[str, float]]]
"""(batch, seed, all hyper-parameters of the bundle) -> the batch's mean loss and metrics, before
the step."""


class TrainingError(Exception):
    """Training came to no result."""


class DivergedError(TrainingError):
    """The loss or the model is no longer finite."""


class BadValuesError(DivergedError, DataError):
    """The loss or the model is no longer finite, and the data hold a value that is not finite
    either."""


class NoExamplesError(TrainingError):
    """A pass over the data gave no batch: there is nothing to train on this time."""


class OutOfTimeError(TrainingError):
    """The time budget was used up before the first step."""


class FunctionFailedError(TrainingError):
    """A function of the device's owner failed, or returned what the bundle does not declare."""


class StoppedError(TrainingError):
    """``should_stop`` returned True. The work is dropped."""


class TrainingResult(NamedTuple):
    """The result of training. Where the time was over before the last epoch's end, or training was
    to finish early, ``complete`` is False, and the counts are of the work that was done."""

    update: Vector
    """The travelling parameters after training minus the anchor, the round's model: float32, shape
    (P,). 0 in the manifest's buffers."""
    buffers: Vector
    """The values of the manifest's buffers after training, one row after the other: float32, shape
    (B,). They were measured, not descended, so what travels is where they are, not how far they
    moved."""
    largest: float
    """The greatest magnitude in the update."""
    kept_state: Vector
    """What the device keeps for its next task (kept_state.py): float32, shape
    (kept_state_size,)."""
    examples: int
    """n_k, the examples that the device has: the mean of the complete passes, rounded. Where no
    pass was completed: the evaluation's examples, or as many as an earlier pass gave, or as the
    data are said to have."""
    steps: int
    epochs: float
    """Passes that were done; a fraction where the last one was cut short."""
    seen: int
    """Examples in all steps; an example counts once for each epoch."""
    complete: bool
    """All epochs were done."""
    loss: float
    """Mean over the examples of all steps; each loss is measured before its step."""
    metrics: dict[str, float]
    """Means over the same examples. A metric that is not finite on some batch is left out."""
    seconds: float
    """Wall-clock time, evaluation included."""
    evaluation: Evaluation | None
    """Sums of the model before training, on what is held out, or on all data. None where it was not
    asked for."""
    factors: float = 0.0
    """Sum of the schedule's factors of the steps; without a schedule the number of steps. Times lr
    it is the sum of the steps' learning rates."""


def train(
    runtime: Runtime,
    data: Data | Batch | Iterable[Batch],
    *,
    hyper: Mapping[str, float],
    epochs: int,
    batch_size: int,
    seed: int,
    time_budget: float | None = None,
    evaluate: bool = False,
    held_out: Data | None = None,
    counted: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    should_finish: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    on_step: Callable[[int, float], None] | None = None,
    on_evaluated: Callable[[], None] = lambda: None,
    before_steps: Callable[[Data], None] = lambda data: None,
    step: Step | None = None,
    progress: Progress | None = None,
    schedule: StepSchedule | None = None,
) -> TrainingResult:
    """Train from the runtime's loaded model for ``epochs`` passes over ``data``, or until the time
    is over.

    Args: data: Arrays, or Data (see ``as_data``). FeatureData for a runtime that trains from
        features: as many of them
            as can be kept are computed first, in at most half of the time.
        hyper: Values by name, such as lr and mu. Others have the manifest's defaults.
        batch_size: Examples in a step; 0: all examples in one step. The user's own batches keep
            their sizes.
        seed: With the epoch's number, decides the order of the examples; step k (from 0) draws from
            seed + k mod 2^53.
        time_budget: Seconds from the call on. A step begins only if a step of the mean duration so
            far would still fit; the first step always begins. None: no limit.
        evaluate: Measure the loaded model first, on ``held_out``, or on all data.
        held_out: Examples that are not among ``data``. FeatureData, if ``data`` are.
        counted: Examples that a pass gave earlier. None: no pass was completed yet.
        should_stop: Asked before each step.
        should_finish: Asked before each step but the first. True: end as at the end of the time.
        clock: Seconds, rising.
        on_step: Called after each step with the number of steps done and the step's loss.
        on_evaluated: Called after each batch of the evaluation, or of features that are computed
            first.
        before_steps: Called with the data before the first step, within the time budget. It may use
            the runtime, and leaves it loaded with the model to train.
        step: What is done with a batch. It leaves the runtime loaded with the model that makes the
            update, and the round's model as the anchor. None: a step of the runtime.
        progress: The task's, which this is a part of. Where an earlier process began the part, it
            goes on: with the examples that were not seen yet, in the same order, and without
            ``before_steps`` and a second evaluation.
        schedule: What the steps' learning rates are multiplied by. None: 1.

    Data are searched for NaN and infinity only where training diverges, since a model may use them
    for missing values.

    Raises TrainingError (diverged, out of time, stopped, no examples), DataError (also where
    training diverged because the data hold a value that is not finite), ValueError on a
    hyper-parameter or argument, StepError, MemoryError.
    """
    progress = progress or Progress()
    found = progress.begin_part(runtime)
    if isinstance(found, dict):  # an earlier process did this part
        result = TrainingResult(**found)
        progress.end_part(found)
        return result
    spent = 0.0 if found is None else found.seconds
    begun = clock()
    start = begun - spent
    manifest = runtime.manifest
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; expected at least 1")
    limit = math.inf if time_budget is None else time_budget
    if not limit > 0:
        raise OutOfTimeError(f"the time budget is {time_budget} s: nothing can be done in it")
    values = check_hyper(hyper, manifest.hyper)
    do_step = step or partial(_step, runtime)
    data = as_data(data).fit(manifest.batch)
    planned = 0
    if schedule is not None:
        if "lr" not in values:
            raise ValueError(
                f"a schedule of the learning rate was given, and the step of bundle "
                f"{manifest.name} has no lr; it takes {', '.join(values) or 'nothing'}"
            )
        if schedule.steps is None:
            whole = data.source if isinstance(data, FeatureData) else data
            planned = epochs * steps_of_pass(whole, batch_size)
    diverged = partial(_diverged, data, manifest.batch, should_stop)

    if isinstance(data, FeatureData):
        half = begun + (limit - spent) / 2
        data.compute(batch_size, lambda: should_stop() or clock() > half, on_evaluated)
    evaluation = None if found is None else found.evaluation
    if evaluate and found is None:
        measured = data if held_out is None else held_out.fit(manifest.batch)
        try:
            evaluation = evaluate_data(
                runtime,
                measured,
                batch_size=batch_size,
                should_stop=should_stop,
                on_batch=on_evaluated,
            )
        except DivergedError as error:
            raise _diverged(measured, manifest.batch, should_stop, str(error)) from None
    if found is None:
        before_steps(data)

    done = DoneSteps() if found is None else found.done
    complete = True
    now = clock()
    began = now - (0.0 if found is None else found.step_seconds)

    def so_far() -> PartInProgress:
        return PartInProgress(done, now - start, now - began, evaluation)

    for epoch, batch, count in _passes(data, epochs, batch_size, seed, runtime, done):
        if should_stop():
            if done.steps:
                progress.stopped(so_far(), runtime)
            raise StoppedError(f"training was stopped after step {done.steps}")
        # The first step always begins: a device that is slow for its budget still gives an update.
        time_is_over = done.steps and now - start + (now - began) / done.steps > limit
        if time_is_over or (done.steps and should_finish()):
            complete = False
            break
        factor, now_values = 1.0, values
        if schedule is not None:
            factor = factor_at(schedule, done.steps, planned)
            now_values = {**values, "lr": values["lr"] * factor}
        loss, metrics = do_step(batch, (seed + done.steps) % SEEDS, now_values)
        done.add(epoch, count, loss, metrics, factor)
        # Written so that NaN, which is neither above nor below, fails too.
        if not abs(loss) <= LARGEST:
            raise diverged(f"step {done.steps}'s loss is {loss}: a smaller lr may help")
        if on_step is not None:
            on_step(done.steps, loss)
        before, now = now, clock()
        if progress.after_step(now - before, so_far, runtime):
            now = clock()

    update: Vector = runtime.parameters - runtime.anchor
    buffers: Vector = gather(runtime.parameters, manifest.buffers)
    # Buffers travel as values, in a part beside the update: no difference may count them again.
    scatter(update, manifest.buffers, 0.0)
    kept_state = collect_kept_state(runtime)

    try:
        what = "update"
        largest = check_finite(update)
        what = "model's buffers"
        check_finite(buffers)
        what = "device's own part"
        check_finite(kept_state)
    except ProtocolError as error:
        text = f"the {what} after step {done.steps} is not finite: {error.text}"
        raise diverged(text) from None

    passes = epochs if complete else done.passes
    if passes:
        examples = done.examples_of_a_pass(passes, complete)
    else:
        known = data.examples if counted is None else counted
        if evaluation is not None and held_out is None:
            known = evaluation.examples  # an evaluation is a complete pass, too
        examples = max(known, done.seen_in_pass)
    part = 0.0 if complete else min(1.0, done.seen_in_pass / examples)
    result = TrainingResult(
        update=update,
        buffers=buffers,
        largest=largest,
        kept_state=kept_state,
        examples=examples,
        steps=done.steps,
        epochs=passes + part,
        seen=done.seen,
        complete=complete,
        loss=done.loss_sum / done.seen,
        metrics=_measured({name: total / done.seen for name, total in done.metric_sums.items()}),
        seconds=clock() - start,
        evaluation=evaluation,
        factors=done.factors,
    )
    progress.end_part(result._asdict())
    return result


def _step(
    runtime: Runtime, batch: Batch, seed: int, hyper: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    return runtime.step(batch, seed=seed, **hyper), runtime.metrics


def _diverged(
    data: Data, inputs: Sequence[Input], should_stop: Callable[[], bool], text: str
) -> DivergedError:
    """Return the error that says so, and blames the data where these hold NaN or infinity."""
    if isinstance(data, FeatureData):  # what is wrong is in the examples they were made from
        nonfinite = _first_nonfinite(data.source, data.source_inputs, should_stop)
    else:
        nonfinite = _first_nonfinite(data, inputs, should_stop)
    if nonfinite is None:
        return DivergedError(text)
    return BadValuesError(f"{nonfinite}. With it, {text}")


def evaluate_data(
    runtime: Runtime,
    data: Data | Batch | Iterable[Batch],
    *,
    batch_size: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    on_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Return the sums of the runtime's model over all data, in batches of ``batch_size`` examples,
    at most 256.

    ``batch_size`` 0: 256. A metric that is not finite is left out. Raises StoppedError,
    DivergedError (the loss is not finite), NoExamplesError, DataError, StepError.
    """
    data = as_data(data).fit(runtime.manifest.batch)
    examples, loss_sum = 0, 0.0
    metric_sums = dict.fromkeys(runtime.manifest.metrics, 0.0)
    # Without a seed: in the data's own order, since sums do not depend on it.
    size = min(batch_size or EVALUATION_BATCH, EVALUATION_BATCH)
    for batch in one_pass(data, data.batches(size, None), runtime.manifest.batch):
        if should_stop():
            raise StoppedError("evaluation was stopped")
        part = runtime.evaluate(batch)
        examples, loss_sum = examples + part.examples, loss_sum + part.loss_sum
        for name, value in part.metric_sums.items():
            metric_sums[name] += value
        on_batch()
    if not examples:
        raise NoExamplesError(NO_BATCH)
    if not abs(loss_sum) <= LARGEST:
        raise DivergedError(f"before training, the model's summed loss on these data is {loss_sum}")
    return Evaluation(examples, loss_sum, _measured(metric_sums))


def _first_nonfinite(
    data: Data, inputs: Sequence[Input], should_stop: Callable[[], bool]
) -> str | None:
    """Return what to say of the first value that is not finite; None if all are finite, or the pass
    was stopped."""
    seen = 0
    for arrays in one_pass(data, data.batches(EVALUATION_BATCH, None), inputs):
        if should_stop():
            return None
        nonfinite = find_nonfinite(arrays, inputs, seen)
        if nonfinite is not None:
            return nonfinite
        seen += len(arrays[0])
    return None


def _measured(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without those that these data do not define (0/0), which must not fail the
    training."""
    return {name: value for name, value in metrics.items() if abs(value) <= LARGEST}


def _passes(
    data: Data,
    epochs: int,
    batch_size: int,
    seed: int,
    runtime: Runtime,
    done: DoneSteps,
) -> Iterator[tuple[int, Batch, int]]:
    """Yield (epoch from 0, batch, its examples) for each step after those that are ``done``. Raises
    NoExamplesError on a pass without batches."""
    seen, skip = done.seen_in_pass, done.batches_in_pass
    for epoch in range(done.passes, epochs):
        batches = _batches_from(data, skip, batch_size, seed, epoch)
        for arrays in one_pass(data, batches, runtime.manifest.batch, seen=seen, epoch=epoch):
            seen += len(arrays[0])
            yield epoch, arrays, len(arrays[0])
        if not seen:
            raise NoExamplesError(NO_BATCH)
        seen = skip = 0


def _batches_from(data: Data, skip: int, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
    """Return the batches of a pass after its first ``skip``."""
    if skip and isinstance(data, ArrayData | FeatureData):  # which need not make what is skipped
        return data.batches(batch_size, seed, epoch, skip)
    return islice(data.batches(batch_size, seed, epoch), skip, None)
