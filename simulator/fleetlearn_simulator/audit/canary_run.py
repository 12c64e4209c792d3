"""The one-run audit of a private plan: canaries report to the coordinator's own rounds, and the
attack guesses from the models that these make who of them was there.

No model is trained: the rounds are over a made-up vector in which all that moves are the canaries
and the noise. The rules of the plan are all of its own, but for the server's optimizer: every
optimizer works on what is released, and what it makes of it costs no more privacy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from fleetlearn_coordinator.aggregation import optimizers
from fleetlearn_coordinator.aggregation.model_state import ModelState, make_state
from fleetlearn_coordinator.aggregation.modular_sum import SumWords
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.privacy import release
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import UPDATE

from fleetlearn_simulator.audit.canary_devices import (
    CanaryDevices,
    Guesses,
    Matrix,
    guess,
    log_ratios,
    make_canaries,
    schedule,
)
from fleetlearn_simulator.fleet.fixed_point_updates import weighted_rows
from fleetlearn_simulator.fleet.masked_reports import withheld_columns
from fleetlearn_simulator.keyed_random import secret_bytes

RoundOpener: TypeAlias = Callable[[RoundRules, ModelState], OpenRound]
"""Opens a round: ``OpenRound``, or what a test has in its place to see whether the audit fails."""
SIZE_PER_CANARY = 4
"""Elements of the model for each canary: three quarters of the space tell what the noise is."""


class CanaryAttack(NamedTuple):
    """How the canaries take part. The defaults find what is wrong soonest."""

    canaries: int = 1000
    """Most of them. There are fewer where the rounds have no place for so many."""
    releases: int = 20
    """Most rounds; the plan's, where it has fewer."""
    norm: float = 10.0
    """The length of a canary's update, in units of the clip norm: the coordinator must clip it."""
    reports: float = 1.0
    """The share of ``round.goal`` that reports in each round; the others have vanished."""
    seed: int = 0


class ObservedReleases(NamedTuple):
    """What the adversary sees."""

    released: Matrix
    """The noisy sums, (T, P)."""
    lengths: Matrix
    """How long a canary's step is in each of them if it is there, (m, T)."""


def place_canaries(plan: Plan, settings: CanaryAttack) -> CanaryDevices:
    """Return the canaries of an audit of this plan. Raises ValueError where a round has no place
    for any."""
    privacy = plan.privacy
    assert privacy is not None, "a plan without [privacy] is not audited"
    releases = min(settings.releases, plan.stop.rounds)
    places = int(plan.round.goal * settings.reports)
    if not places:
        raise ValueError(
            f"{settings.reports:g} of round.goal = {plan.round.goal} reports are none: at least "
            "one must come"
        )
    count = min(settings.canaries, places * min(privacy.separation, releases))
    takes_part = schedule(count, releases, privacy.separation, privacy.participations)
    return make_canaries(settings.seed, takes_part, SIZE_PER_CANARY * max(count, 32) + releases)


def run_canaries(
    plan: Plan,
    manifest: Manifest,
    settings: CanaryAttack,
    open_round: RoundOpener = OpenRound,
) -> Guesses:
    """Audit a plan: let canaries take part in its rounds, and guess their coins.

    ``manifest``: of the plan's bundle. ``open_round``: see ``RoundOpener``. Raises PlanError and
    PrivacyError where the plan has no rules for its rounds."""
    canaries = place_canaries(plan, settings)
    rules = audit_rules(plan, manifest, canaries)
    # Devices add noise for the fewest of them; no sum of fewer comes about.
    fewest = plan.secure.minimum if plan.secure is not None else 1
    seen = observe(rules, canaries, settings, open_round, fewest)
    assert plan.privacy is not None
    ratios = log_ratios(canaries, seen.lengths, seen.released)
    return guess(ratios, canaries.included, plan.privacy.delta)


def audit_rules(plan: Plan, manifest: Manifest, canaries: CanaryDevices) -> RoundRules:
    """Return the rules of the plan's rounds, over a model of the canaries' size."""
    size = canaries.directions.shape[1]
    first = next(row for row in manifest.travelling if not row.buffer)
    table = (msgspec.structs.replace(first, shape=(size,), offset=0),)
    rules = plan.round_rules(msgspec.structs.replace(manifest, parameters=table))
    return replace(rules, optimizer=optimizers.make("sgd", table, lr=1.0))


def observe(
    rules: RoundRules,
    canaries: CanaryDevices,
    settings: CanaryAttack,
    open_round: RoundOpener,
    fewest: int = 1,
) -> ObservedReleases:
    """Let the rounds run, and return what is released in each. ``fewest``: reports of a round."""
    privacy = rules.privacy
    assert privacy is not None, "the rules of a private plan"
    count, releases = canaries.takes_part.shape
    nothing = np.zeros(canaries.directions.shape[1], np.float32)
    secret = secret_bytes(settings.seed, "audit secret")
    state = make_state(
        rules,
        None,
        version=0,
        model=nothing,
        optimizer_state=rules.optimizer.init(nothing),
        vectors={},
        privacy=release.begin(privacy, secret, nothing.size),
    )
    released, lengths = np.zeros((releases, nothing.size)), np.zeros((count, releases))
    for number in range(releases):
        assert state.privacy is not None
        clip = state.privacy.clip
        rows = np.flatnonzero(canaries.takes_part[:, number])
        norm = settings.norm * clip
        reports = _reports(rules, canaries, rows, norm, settings.seed, number, fewest)
        round_ = open_round(rules, state)
        received = round_.receive(reports)
        if received.refusal is not None:
            raise received.refusal.error
        round_.accept(received.accepted)
        round_.add(received.accepted)
        masks = None if rules.secure is None else np.zeros(nothing.size + 1, np.uint32)
        made = round_.commit(number + 1, round_.summary({}), masks=masks)
        released[number] = made.state.model
        released[number] *= privacy.goal * privacy.largest_weight
        factors = [rules.staleness_factor(each) for each in reports.staleness[: len(rows)]] or [1.0]
        if len(rows):
            lengths[rows, number] = clip * privacy.largest_weight * np.array(factors)
        # Each round begins from zeros again: in float32 a small step beside a large model is lost.
        state = replace(made.state, model=nothing)
    return ObservedReleases(released, lengths)


def _reports(
    rules: RoundRules,
    canaries: CanaryDevices,
    rows: np.ndarray,
    norm: float,
    seed: int,
    number: int,
    fewest: int,
) -> ReportColumns:
    """Return the reports of these canaries, of the largest weight. Where late updates count, every
    third is one round late, and every third two. A round of fewer than ``fewest`` has as many
    reports of zeros beside. With [secure] they clip, as nobody else can, and write their steps in
    fixed point."""
    assert rules.privacy is not None
    numbers = rules.secure
    assert not isinstance(numbers, SumWords), "what is audited trains"
    length = norm if numbers is None else min(norm, numbers.bound)
    steps = np.float32(length) * canaries.directions[rows]
    steps[~canaries.included[rows]] = 0.0
    if (lacking := fewest - len(rows)) > 0:
        steps = np.concatenate([steps, np.zeros((lacking, steps.shape[1]), np.float32)])
    count = len(steps)
    ones = np.ones(count, np.int64)
    reports = ReportColumns(
        weights=ones * rules.privacy.largest_weight,
        examples=ones,
        steps=ones,
        complete=ones > 0,
        loss=np.zeros(count),
        metrics={name: np.zeros(count) for name in rules.metrics if name != "loss"},
        largest={UPDATE: np.abs(steps).max(axis=1).astype(np.float64)},
        parts={UPDATE: steps},
        staleness=[row % 3 for row in range(count)] if rules.outlive else (),
    )
    if numbers is None:
        return reports
    factors = np.array([rules.staleness_factor(each) for each in reports.staleness] or [1.0])
    factors = np.broadcast_to(factors, count)
    devices, turn = np.arange(count), np.full(count, number)
    words = weighted_rows(steps, np.ones(count), factors, numbers, seed, devices, turn)
    return withheld_columns(reports, words)
