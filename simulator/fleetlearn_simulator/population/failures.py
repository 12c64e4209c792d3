"""What will happen to a task on its device. It is drawn when the task is assigned, by device and
round."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
from fleetlearn_device.session.session import UPLOAD_MARGIN
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.population.devices import Devices
from fleetlearn_simulator.population.failure_laws import (
    PHASES,
    VanishingTasks,
    by_tier,
    hazards_of,
    own_law,
    vanishing,
)
from fleetlearn_simulator.population.members import step_seconds_of
from fleetlearn_simulator.population.traits import Floats, Ids, Ints, traits
from fleetlearn_simulator.scenario.corruptions import corruptions_of
from fleetlearn_simulator.scenario.local_passes import passes_of
from fleetlearn_simulator.scenario.scenario import Scenario

Codes: TypeAlias = NDArray[np.int8]
CAUSES = ("", *PHASES, "crash", "outage", "straggler", "out-of-time")
"""Why a task fails on its device; "" if its report is sent. ``download``, ``train``, ``upload``:
the device vanished in this phase (a hazard). ``crash``: it died in training. ``outage``: its region
had no network for longer than ``plan.round.grace``. ``straggler``: it was slow, and slow devices
report nothing. ``out-of-time``: it had no time to train. After the last two the device is still
connected."""
EVALUATION_COST = 1 / 3
"""The cost of evaluating a batch, relative to a training step: a backward pass costs two forward
passes."""


class TaskFates(NamedTuple):
    """What will happen to n tasks: arrays of shape (n,)."""

    seconds: Floats
    """Seconds from the assignment until the report arrives, or until the task fails."""
    cause: Codes
    """Index in ``CAUSES``."""
    steps: Ints
    """Local steps that the device does, or would do if the task did not fail."""
    corrupt: Codes
    """Index in ``CORRUPTIONS``."""
    factor: Floats
    """The corruption's factor."""
    tier: Ints
    """Index in ``scenario.tiers``."""
    download: Floats
    """Seconds that the download takes, or would take, with the seconds for which it waits for its
    turn."""
    train: Floats
    """Seconds that training takes, or would take."""
    upload: Floats
    """Seconds that the upload takes, or would take."""


def sample_task_fates(
    scenario: Scenario,
    ids: Ids,
    round: int | Ints,
    *,
    now: float,
    deadline: float,
    steps: Ints,
    down: Floats | Ints,
    up: Floats | Ints,
    queue: Callable[[Floats], Floats] = np.zeros_like,
) -> TaskFates:
    """Draw what will happen to the tasks of these devices, assigned at the time ``now``, in a round
    that ends at ``deadline``.

    Args:
        scenario: Its ``compute.step_seconds`` must be measured.
        ids: int64, shape (n,).
        round: One for all, or shape (n,). The random numbers depend on it, on ``ids`` and on
            nothing else here. With ``failures.exact_stragglers`` all of ``ids`` together decide
            which devices straggle.
        now: Seconds.
        deadline: Seconds, on the same clock.
        steps: Local steps of all epochs, at least 1, shape (n,).
        down: Bytes that the device fetches, shape (n,).
        up: Bytes of its update, shape (n,).
        queue: Called with the seconds that each download takes, or until its device vanishes;
            returns the seconds for which it waits before. Default: no download waits.

    Raises SimulatorError if the cost of a step is not measured yet.
    """
    failures, local, count = scenario.failures, scenario.plan.local, len(ids)
    known = traits(scenario, ids)
    law, hazards, crash = own_law(scenario), hazards_of(scenario), by_tier(scenario, "crash")
    chance = failures.stragglers or any(crash) or hazards.any or law is not None
    luck = (
        # Always seven, so that one more kind of failure changes none of the others' numbers.
        keyed_random.uniform(scenario.seed, "fate", ids, round, keyed_random.COLUMN[:7])
        if chance
        else np.zeros((7, count))
    )
    download = known.latency + down / known.download
    upload = known.latency + up / known.upload
    slow = _straggling(scenario, luck[0])
    chosen = (
        np.where(slow, _partial_steps(steps, local.epochs, luck[1]), steps)
        if failures.stragglers
        else steps
    )
    step = _step_seconds(scenario, ids) / known.speed
    if law is None:
        vanishes = hazards.by_phase(known.tier, luck[2:5])
    else:
        _, train, _ = _training(scenario, chosen, steps, known.speed, step, download, inf)
        turns, seconds = np.broadcast_to(round, count), np.array([download, train, upload])
        tasks = VanishingTasks(Devices(scenario, ids), turns, "train", now, seconds, luck[2:5])
        vanishes = vanishing(law, failures.law, tasks)
    wait = queue(download if vanishes[0] is None else np.minimum(download, vanishes[0]))
    fetched = wait + download
    left = deadline - now
    done, train, late = _training(scenario, chosen, steps, known.speed, step, fetched, left)

    # Index in CAUSES -> seconds until the task ends that way; infinite if it does not. The earliest
    # end counts.
    begin = (wait, fetched, fetched + train)
    report = begin[2] + upload
    ends = {0: report}
    for row, (length, after) in enumerate(zip((download, train, upload), vanishes, strict=True)):
        if after is not None:
            ends[1 + row] = np.where(after < length, begin[row] + after, inf)
    if any(crash):
        ends[4] = np.where(luck[5] < np.array(crash)[known.tier], fetched + luck[6] * train, inf)
    if failures.outages:
        ends[5] = _outage(scenario, ids, now, report)
    if failures.discard:
        dropped = slow & (chosen < steps)
        ends[6] = np.where(dropped, begin[2], inf)
        ends[0] = np.where(dropped, inf, ends[0])
    # Devices mask no update of a training that was cut short.
    cut = done < steps if scenario.plan.secure is not None else np.zeros(count, np.bool_)
    if late.any() or cut.any():
        ends[7] = np.where(late, fetched, np.where(cut, begin[2], inf))
        ends[0] = np.where(late | cut, inf, ends[0])
    seconds, cause = report, np.zeros(count, np.int8)
    if len(ends) > 1:
        table = np.array([*ends.values()])
        seconds, cause = table.min(axis=0), np.array([*ends], np.int8)[table.argmin(axis=0)]
    corrupt, factor = corruptions_of(scenario, ids)
    return TaskFates(seconds, cause, done, corrupt, factor, known.tier, download, train, upload)


def sample_answer_fates(
    scenario: Scenario,
    kind: str,
    ids: Ids,
    turns: Ints,
    *,
    now: float,
    work: Floats | None,
    down: Ints,
    up: Ints,
) -> tuple[Floats, Codes]:
    """Draw what will happen to devices that are asked in an exchange: the seconds until each has
    answered or vanishes, and the index in ``CAUSES``.

    Args:
        scenario: Its ``compute.step_seconds`` must be measured. Its law of failures applies to a
            device that fetches, works and sends as in ``download``, ``train`` and ``upload``.
        kind: The kind of the exchange. The random numbers depend on it, on ``ids`` and on
            ``turns``.
        ids: int64, shape (n,).
        turns: A number for the turn in which the device is asked, shape (n,).
        now: When it is asked, in seconds.
        work: Training steps that take as long as to work the answer out, shape (n,). None: it takes
            no time, not even that of starting the runtime.
        down: Bytes that the device fetches, shape (n,).
        up: Bytes of its answer, shape (n,). If all are 0, nobody vanishes while it sends.
    """
    compute, known, count = scenario.compute, traits(scenario, ids), len(ids)
    answer = np.zeros(count)
    if work is not None:
        answer = compute.start_seconds / known.speed + work * (
            step_seconds_of(scenario, ids) / known.speed
        )
    fetch, send = known.latency + down / known.download, known.latency + up / known.upload
    lengths = np.array([fetch, answer, send if up.any() else np.zeros(count)])
    luck = keyed_random.uniform(scenario.seed, kind, ids, turns, keyed_random.COLUMN[: len(PHASES)])
    law = own_law(scenario)
    if law is None:
        vanishes = hazards_of(scenario).by_phase(known.tier, luck)
    else:
        tasks = VanishingTasks(Devices(scenario, ids), turns, kind, now, lengths, luck)
        vanishes = vanishing(law, scenario.failures.law, tasks)
    seconds, cause = fetch + answer + send, np.zeros(count, np.int8)
    begin = np.zeros(count)
    for row, (length, after) in enumerate(zip(lengths, vanishes, strict=True)):
        if after is not None:
            gone = (after < length) & (cause == 0)
            seconds = np.where(gone, begin + after, seconds)
            cause = np.where(gone, 1 + row, cause).astype(np.int8)
        begin = begin + length
    return seconds, cause


def _straggling(scenario: Scenario, luck: Floats) -> NDArray[np.bool_]:
    """Return which tasks stop early. If their number is fixed, these are the tasks with the
    smallest numbers drawn."""
    share = scenario.failures.stragglers
    if not scenario.failures.exact_stragglers:
        return luck < share
    return luck.argsort(kind="stable").argsort() < round(share * len(luck))


def _partial_steps(steps: Ints, epochs: int, luck: Floats) -> Ints:
    """Return a straggler's steps: 1 to E - 1 epochs; with one epoch, 1 to S - 1 steps; with one
    step, 1."""
    if epochs > 1:
        return steps * (1 + (luck * (epochs - 1)).astype(np.int64)) // epochs
    return np.minimum(1 + (luck * (steps - 1)).astype(np.int64), steps)


def _step_seconds(scenario: Scenario, ids: Ids) -> float | Floats:
    """Return what ``step_seconds_of`` returns. Raises SimulatorError where that is not measured
    yet."""
    seconds = scenario.compute.step_seconds
    if isinstance(seconds, str):
        raise SimulatorError(
            f'compute.step_seconds = "{seconds}": a step must be measured before tasks are assigned'
        )
    return step_seconds_of(scenario, ids)


def _training(
    scenario: Scenario,
    chosen: Ints,
    steps: Ints,
    speed: Floats,
    step: Floats,
    download: Floats,
    deadline: float,
) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """Return the steps that a device does in the time it has, as ``fleetlearn_device``'s session
    and training decide; the seconds that they take; and whether no time is left at all. ``step``:
    the seconds that each takes."""
    compute, local = scenario.compute, scenario.plan.local
    before = compute.start_seconds / speed
    passes = passes_of(local.algorithm, local.epochs, local.personal_epochs, local.hyper)
    batches = np.ceil(steps / passes)
    if local.evaluate:
        before = before + EVALUATION_COST * batches * step
    if local.algorithm == "scaffold-gradient":  # the gradient of all data takes a pass by itself
        before = before + batches * step
    # The device's session leaves this time for the upload (its UPLOAD_MARGIN).
    part, most = UPLOAD_MARGIN
    left = deadline - download - min(part * deadline, most)
    if local.time_budget is not None:
        left = np.minimum(left, local.time_budget)
    fit = np.floor((left - before) / np.maximum(step, 1e-12))
    done = np.minimum(chosen, np.clip(fit, 1, 2**53).astype(np.int64))
    return done, before + done * step, left <= 0


def _outage(scenario: Scenario, ids: Ids, now: float, length: Floats) -> Floats:
    """Return the seconds until a device loses its network for longer than its task waits for it."""
    begin = np.full(len(ids), inf)
    for outage in scenario.failures.outages:
        if outage.end > now and outage.end - max(outage.begin, now) > scenario.plan.round.grace:
            after = max(outage.begin - now, 0.0)
            hit = (ids % scenario.failures.regions == outage.region) & (after < length)
            begin[hit] = np.minimum(begin[hit], after)
    return begin
