"""The one-run audit, through the coordinator's own rounds: what it proves is below the epsilon that
a plan is accounted for, and above it for each planted mistake."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.plan import distributed_noise
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_terms import epsilon_after
from fleetlearn_coordinator.privacy.accounting import sensitivity
from fleetlearn_simulator.audit.canary_devices import Guesses
from fleetlearn_simulator.audit.canary_run import (
    CanaryAttack,
    RoundOpener,
    audit_rules,
    observe,
    place_canaries,
    run_canaries,
)
from fleetlearn_simulator.fleet import fixed_point_updates
from plans import manifest
from private_mistakes import ClippedAfterAveraging, DividedByWhoCame, one_noise_for_all_sums

ROUNDS, DELTA = 4, 1e-6
FEW = CanaryAttack(canaries=240, releases=ROUNDS, reports=0.1, seed=11)
"""One report in ten comes."""


def private_plan(
    round_: dict[str, Any] | None = None, *, secure: bool = False, **privacy: Any
) -> Plan:
    """A plan of rounds of 2,400 devices, with noise / sensitivity = 2 unless another is given."""
    usual = {"noise": 2 * ROUNDS**0.5, "delta": DELTA, "population": 100_000, "clip": 0.5}
    tables = {
        "name": "a",
        "bundle": "a.bundle",
        "recipe": "dp-fedavg",
        "local": {"lr": 0.1},
        "round": {"goal": 2400, "minimum": 1} | (round_ or {}),
        "stop": {"rounds": ROUNDS},
        "privacy": usual | privacy,
    }
    if secure:
        helper = {"helper": "https://helper.example:8770", "key": "a" * 64}
        tables["secure"] = {"mode": "helper", "certificate": "b" * 64, **helper}
    return Plan.read(tables, Path())


def accounted(plan: Plan) -> float:
    rules = plan.round_rules(manifest()).privacy
    assert rules is not None
    return epsilon_after(plan, ROUNDS, rules.noise)


def attacked(
    plan: Plan, settings: CanaryAttack = FEW, open_round: RoundOpener = OpenRound
) -> Guesses:
    return run_canaries(plan, manifest(), settings, open_round)


CORRELATED = sensitivity("dp-ftrl", ROUNDS, 2, 2, ROUNDS)
PLANS = {
    "gaussian": private_plan(),
    "weights": private_plan({"weighting": "examples", "max_weight": 7}),
    "separation": private_plan(noise=2 * 2**0.5, separation=2),
    "adaptive": private_plan(clip_quantile=0.5),
    "dp-ftrl": private_plan(mechanism="dp-ftrl", separation=2, noise=2 * CORRELATED),
    "asynchronous": private_plan({"participation": "asynchronous", "concurrency": 2400}),
    "masked": private_plan({"minimum": 2}, secure=True),
    "masked, late": private_plan(
        {"minimum": 2, "participation": "asynchronous", "concurrency": 2400}, secure=True
    ),
    "masked, distributed": private_plan({"minimum": 240}, secure=True, mechanism="distributed"),
}
NOT_MASKED = [kind for kind in PLANS if not kind.startswith("masked")]
"""Of masked updates the mistakes would be others."""


@pytest.mark.parametrize("kind", PLANS)
def test_what_is_proved_is_below_what_is_accounted(kind: str) -> None:
    plan = PLANS[kind]
    found, most = attacked(plan), accounted(plan)
    assert most == pytest.approx(2.2541, abs=1e-3)  # noise / sensitivity = 2: anchors
    assert found.epsilon < most
    assert found.correct > found.guesses / 2  # the canaries are seen: the attack does attack


@pytest.mark.parametrize("kind", NOT_MASKED)
@pytest.mark.parametrize("mistake", ["divided", "clipped late", "one noise"])
def test_what_is_proved_is_above_what_is_accounted_for_each_mistake(
    kind: str, mistake: str
) -> None:
    opener: RoundOpener = {"divided": DividedByWhoCame, "clipped late": ClippedAfterAveraging}.get(
        mistake, OpenRound
    )
    plan = PLANS[kind]
    with one_noise_for_all_sums() if mistake == "one noise" else nullcontext():
        assert attacked(plan, open_round=opener).epsilon > accounted(plan)


@pytest.mark.parametrize("mistake", ["for the goal", "one noise"])
def test_what_is_proved_shows_noise_that_devices_make_wrong(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """One report in a hundred comes, as many as secure.minimum says. Noise for the goal: each
    device adds as much as if all came. One noise: it follows from what all devices know."""
    plan = private_plan({"goal": 24_000, "minimum": 240}, secure=True, mechanism="distributed")
    few = FEW._replace(reports=0.01)
    assert attacked(plan, few).epsilon < accounted(plan)
    if mistake == "for the goal":
        right = distributed_noise.noise_of_device

        def wrong(multiplier: float, bits: int, minimum: int, colluding: float = 0.0) -> float:
            return right(multiplier, bits, plan.round.goal, colluding)

        monkeypatch.setattr(distributed_noise, "noise_of_device", wrong)
    else:
        monkeypatch.setattr(
            fixed_point_updates.keyed_random, "secret_bytes", lambda seed, *about: bytes(32)
        )
    assert attacked(plan, few).epsilon > accounted(plan)


def test_the_attack_comes_close_where_there_is_next_to_no_noise() -> None:
    """All of 240 coins are guessed: what is left is the confidence, log of about 240 / 4."""
    found = attacked(private_plan(noise=0.01))
    assert (found.guesses, found.correct) == (240, 240)
    assert found.epsilon == pytest.approx(3.98, abs=0.05)


@pytest.mark.parametrize("secure", [False, True])
def test_what_is_released_of_a_canary_is_its_clipped_step(secure: bool) -> None:
    """Next to no noise: the sums are those of steps of length C, in units of the sum."""
    plan = private_plan({"minimum": 2}, noise=0.01, secure=secure)
    canaries = place_canaries(plan, FEW)
    seen = observe(audit_rules(plan, manifest(), canaries), canaries, FEW, OpenRound)
    assert set(np.unique(seen.lengths)) == {0.0, 0.5}
    taken = (canaries.takes_part & canaries.included[:, None]).astype(float)
    expected = 0.5 * taken.T @ canaries.directions
    assert np.abs(seen.released - expected).max() < 0.01 * 0.5 * 6


def test_a_round_that_nobody_reports_to_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one must come"):
        place_canaries(private_plan(), FEW._replace(reports=1e-5))
