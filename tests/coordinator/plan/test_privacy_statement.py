"""What a plan promises, against closed forms and by hand."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy.correlated import strategy_of
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_statement import PrivacyStatement, privacy_statement
from fleetlearn_coordinator.plan.privacy_terms import privacy_rules
from plans import PRIVATE, SECURE, SMALL

Z2 = PRIVATE.replace("noise = 1.0", "noise = 2.0")


def statement(text: str, elements: int | None = None) -> PrivacyStatement:
    return privacy_statement(Plan.parse(text, Path("/base"), file="my.toml"), elements)


def test_four_releases_of_noise_2_are_one_gaussian() -> None:
    """mu = sqrt(4) / 2 = 1: epsilon 4.8866 at 1e-6, and Phi(1/2) right guesses."""
    found = statement(f"{SMALL}[stop]\nrounds = 4\n{Z2}", 400)
    assert [(row.releases, row.allowed) for row in found.spending] == [(1, True), (4, True)]
    first, last = found.spending
    assert first.epsilon == pytest.approx(2.2541, abs=5e-5)
    assert last.epsilon == pytest.approx(4.8866, abs=5e-5)
    assert last.guess == pytest.approx(0.691462, abs=1e-6)
    assert (found.budget, found.allowed, found.planned) == (None, 4, 4)
    noise = found.noise  # C = 0.5, goal = 4
    assert (noise.multiplier, noise.on_sum, noise.on_mean) == (2.0, 1.0, 0.25)
    assert noise.added_up == pytest.approx(0.5)
    assert noise.mean_length == pytest.approx(5.0)


def test_ten_times_the_goal() -> None:
    """Noise 20 with the same noise on the mean: mu = 2 / 20. With noise 2 a tenth of it."""
    now, spread, exact = statement(f"{SMALL}[stop]\nrounds = 4\n{Z2}").what_if
    assert (now.epsilon, now.on_mean) == (pytest.approx(4.8866, abs=5e-5), 0.25)
    assert spread.on_mean == 0.25
    cdf, mu, epsilon = NormalDist().cdf, 0.1, spread.epsilon
    # Balle and Wang, theorem 8.
    delta = cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-6, rel=1e-6)
    assert "goal = 40" in spread.change
    assert "noise = 20" in spread.change
    assert (exact.epsilon, exact.on_mean) == (now.epsilon, 0.025)


def test_largest_weights_cancel_in_the_mean() -> None:
    text = SMALL + 'weighting = "examples"\nmax_weight = 50\n'
    noise = statement(f"{text}{Z2}").noise
    assert (noise.on_sum, noise.on_mean) == (50.0, 0.25)


def test_local_noise_is_averaged() -> None:
    """Four devices' noise of 2 * 0.5 each: 1 / sqrt(4) on the mean."""
    found = statement(f'{SMALL}{Z2}mechanism = "local"')
    assert (found.noise.on_sum, found.noise.on_mean) == (1.0, 0.5)
    assert any("The coordinator is not trusted" in line for line in found.assumed)


def test_a_budget_ends_the_run_before_its_plan() -> None:
    """1.0: mu^2 is the number of releases, and 15 of them cost about 27."""
    found = statement(f"{SMALL}{PRIVATE}epsilon = 20.0")
    assert 0 < found.allowed < 100
    rows = {row.releases: row for row in found.spending}
    assert rows[found.allowed].epsilon <= 20 < rows[100].epsilon
    assert [row.allowed for row in found.spending] == [row.epsilon <= 20 for row in found.spending]
    assert any(f"after {found.allowed} of the 100" in line for line in found.remarks)
    none = statement(f"{SMALL}{PRIVATE}epsilon = 1.0")
    assert none.allowed == 0
    assert any("refuses to start" in line for line in none.remarks)


def test_correlated_noise_cancels_over_releases() -> None:
    """Against the inverse of the matrix itself."""
    text = f'recipe = "dp-ftrl"\n{SMALL}[stop]\nrounds = 12\n{PRIVATE}separation = 4'
    plan = Plan.parse(text, Path("/base"))
    rules = privacy_rules(plan, 1)
    assert rules is not None
    first = strategy_of(rules).coefficients(12)
    matrix = np.array([[first[i - j] if i >= j else 0.0 for j in range(12)] for i in range(12)])
    inverse = np.linalg.inv(matrix)
    found = privacy_statement(plan, None).noise
    fresh = 1.0 * 0.5 / 4
    assert found.on_mean == pytest.approx(fresh * np.linalg.norm(inverse[-1]))
    assert found.added_up == pytest.approx(fresh * np.linalg.norm(inverse.sum(axis=0)))
    assert found.added_up < fresh * np.sqrt(12), "independent noise of the same size"


def test_whether_there_are_enough_devices() -> None:
    """10 devices, goal 4, 3 releases apart: 12 are needed; 9 rounds of 4 from 10 times 3."""
    text = f"{SMALL}minimum = 2\n[stop]\nrounds = 9\n{PRIVATE.replace('1000', '10')}separation = 3"
    rows = [(each.needed, each.there, each.holds) for each in statement(text).devices]
    assert rows == [(4, 10, True), (12, 10, False), (36, 30, False)]


@pytest.mark.slow
def test_poisson_sampling_is_stated_and_counted() -> None:
    plain = statement(f"{SMALL}[stop]\nrounds = 20\n{PRIVATE}")
    text = f'{SMALL}[stop]\nrounds = 20\n{PRIVATE}sampling = "poisson"'
    sampled = statement(text)
    assert sampled.spending[-1].epsilon < plain.spending[-1].epsilon
    assert 0.5 < sampled.spending[-1].guess < 1
    assert any("probability 0.004" in line for line in sampled.assumed)


def test_remarks_of_weak_promises() -> None:
    assert any("promises little" in line for line in statement(f"{SMALL}{PRIVATE}").remarks)
    strong = statement(f"{SMALL}{PRIVATE.replace('noise = 1.0', 'epsilon = 1.0')}")
    assert not any("promises little" in line for line in strong.remarks)


def test_a_delta_that_is_too_large_is_said() -> None:
    found = statement(f"{SMALL}{PRIVATE.replace('1e-6', '1e-2')}")
    assert any("NOT below 1 / population" in line for line in found.assumed)


def test_with_masked_updates_the_statement_says_who_is_trusted_with_what() -> None:
    """The coordinator cannot check what it does not see: then it must not be said that it does."""
    plain, masked = (
        statement(f"{SMALL}{PRIVATE}{secure}").assumed
        for secure in ("", SECURE.replace("clip = 0.5\n", ""))
    )
    assert any("the coordinator checks each" in line for line in plain)
    assert any("The coordinator is trusted: it sees the updates" in line for line in plain)
    assert not any("checks each" in line or "sees the updates" in line for line in masked)
    assert any("cannot check it, as it sees the sum alone" in line for line in masked)
    assert any("The coordinator and the helper are trusted not to" in line for line in masked)
    assert len(masked) == len(plain)


@pytest.mark.parametrize("mechanism", ["gaussian", "distributed"])
def test_a_run_without_a_helper_is_not_said_to_trust_one(mechanism: str) -> None:
    small = SMALL.replace("4", "40")
    private = f'{PRIVATE}mechanism = "{mechanism}"\n'
    found = statement(f'{small}minimum = 26\n{private}[secure]\nmode = "pairwise"\n').assumed
    assert any("No more than 0.05 of a round's devices" in line for line in found)
    assert not any("helper" in line for line in found)


def test_a_multiplier_of_the_mean_is_told_where_it_is_another_one() -> None:
    """A computed noise has nine digits, and 1 / sqrt(noise^-2) is not always the same float."""
    for budget in (0.7, 1.3, 2.9, 4.0, 5.3, 8.1):
        text = PRIVATE.replace("noise = 1.0", f"epsilon = {budget}")
        noise = statement(f"{SMALL}{text}").noise
        assert noise.update_multiplier == noise.multiplier
    adaptive = statement(f"{SMALL}{PRIVATE.replace('1.0', '0.3')}clip_quantile = 0.5").noise
    assert adaptive.update_multiplier > adaptive.multiplier
