"""Epsilon and noise, against figures that were computed apart from this code."""

from __future__ import annotations

import math
import re
import sys

import dp_accounting
import pytest
from fleetlearn_coordinator.privacy.accounting import (
    PrivacyError,
    gaussian_epsilon,
    noise_for,
    poisson_epsilon,
    poisson_noise_for,
    sensitivity,
)


@pytest.mark.parametrize(("noise", "epsilon"), [(1, 4.8866), (2, 2.2541), (4, 1.0607)])
def test_epsilon_of_one_gaussian(noise: float, epsilon: float) -> None:
    assert gaussian_epsilon(1 / noise, 1e-6) == pytest.approx(epsilon, abs=5e-5)


def test_no_loss_is_epsilon_0() -> None:
    assert gaussian_epsilon(0.0, 1e-6) == 0


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("moved", [1.0, math.sqrt(30)])
def test_the_noise_for_an_epsilon_is_the_least(epsilon: float, moved: float) -> None:
    noise = noise_for(epsilon, 1e-6, moved)
    assert gaussian_epsilon(moved / noise, 1e-6) <= epsilon
    assert gaussian_epsilon(moved / (noise * (1 - 2e-8)), 1e-6) > epsilon
    assert float(f"{noise:.8e}") == pytest.approx(noise, rel=1e-15), "nine digits"


def test_a_search_that_ends_a_little_elsewhere_finds_the_same_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as that of another version of SciPy."""
    expected, search = noise_for(3.7, 1e-6, 5.0), dp_accounting.get_sigma_gaussian
    for away in (-1e-12, 1e-12):
        noise_for.cache_clear()
        monkeypatch.setattr(
            dp_accounting, "get_sigma_gaussian", lambda *given, away=away: search(*given) + away
        )
        assert noise_for(3.7, 1e-6, 5.0) == expected
    noise_for.cache_clear()


@pytest.mark.parametrize(
    ("releases", "separation", "participations", "times"),
    [(1, 1, 9, 1), (10, 1, 10, 10), (10, 1, 4, 4), (10, 3, 9, 4), (9, 3, 9, 3), (2, 5, 9, 1)],
)
def test_independent_noise_counts_the_releases_that_one_device_can_be_in(
    releases: int, separation: int, participations: int, times: int
) -> None:
    found = sensitivity("gaussian", releases, separation, participations)
    assert found == pytest.approx(math.sqrt(times))
    local = sensitivity("local", releases, separation, participations)
    assert local == pytest.approx(math.sqrt(releases)), "what was sent is told, counted or not"


POISSON = [
    (1, 0.01, 1000, 1e-6, 2.1245),
    pytest.param(0.8, 0.01, 1000, 1e-6, 3.7062, marks=pytest.mark.slow),
    pytest.param(0.6, 0.01, 500, 1e-6, 6.9348, marks=pytest.mark.slow),
    (2, 0.1, 100, 1e-5, 2.3374),
    pytest.param(1, 0.01, 1000, 1e-5, 1.8282, marks=pytest.mark.slow),
    pytest.param(1, 0.001, 2000, 1e-6, 0.2523, marks=pytest.mark.slow),
    pytest.param(3, 0.2, 50, 1 / 48000, 1.961, marks=pytest.mark.slow),
]
"""Noise, rate, releases, delta -> epsilon by privacy loss distributions."""


@pytest.mark.parametrize(("noise", "rate", "releases", "delta", "epsilon"), POISSON)
def test_epsilon_with_poisson_sampling(
    noise: float, rate: float, releases: int, delta: float, epsilon: float
) -> None:
    found = poisson_epsilon(noise, rate, releases, delta)
    assert found == pytest.approx(epsilon, abs=5e-5 if delta < 2e-5 else 5e-4)
    assert found <= poisson_epsilon(noise, rate, releases, delta, 1e-3), "coarser is no less"


@pytest.mark.parametrize(
    ("noise", "rate", "releases", "delta", "epsilon"),
    [
        (1, 0.01, 1000, 1e-6, 2.4367),
        (0.8, 0.01, 1000, 1e-6, 4.2935),
        (0.6, 0.01, 500, 1e-6, 8.1035),
        (2, 0.1, 100, 1e-5, 2.5806),
    ],
)
def test_another_bound_is_above(
    noise: float, rate: float, releases: int, delta: float, epsilon: float
) -> None:
    """The same by Renyi divergences, which nobody here uses: a check of the vectors."""
    accountant = dp_accounting.rdp.RdpAccountant()
    one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(dp_accounting.SelfComposedDpEvent(one, releases))
    found = accountant.get_epsilon(delta)
    assert found == pytest.approx(epsilon, abs=5e-5)
    assert poisson_epsilon(noise, rate, releases, delta, 1e-3) < found


def test_a_device_in_each_release_has_no_amplification() -> None:
    assert poisson_epsilon(4.0, 1.0, 10, 1e-6) == pytest.approx(
        gaussian_epsilon(math.sqrt(10) / 4, 1e-6), abs=1e-3
    )


@pytest.mark.parametrize(
    ("rate", "releases", "noise"),
    [
        pytest.param(0.001, 1500, 0.6162, marks=pytest.mark.slow),
        pytest.param(0.005, 2000, 0.8639, marks=pytest.mark.slow),
        pytest.param(0.01, 1000, 1.0291, marks=pytest.mark.slow),
    ],
)
def test_the_noise_of_poisson_sampling(rate: float, releases: int, noise: float) -> None:
    found = poisson_noise_for(2.0, 1e-6, rate, releases)
    assert found == pytest.approx(noise, abs=1e-4)


@pytest.mark.slow
def test_the_noise_of_poisson_sampling_is_about_the_least() -> None:
    found = poisson_noise_for(1.0, 1e-5, 0.1, 20)
    assert poisson_epsilon(found, 0.1, 20, 1e-5) <= 1.0
    assert poisson_epsilon(found * 0.999, 0.1, 20, 1e-5) > 1.0


def test_little_noise_is_counted_in_a_moment_and_not_below() -> None:
    """Below 0.4 the steps are coarse: the bound is no lower than a finer one."""
    coarse = poisson_epsilon(0.35, 0.01, 20, 1e-6)
    assert poisson_epsilon(0.35, 0.01, 20, 1e-6, 1e-3) <= coarse
    assert coarse < gaussian_epsilon(math.sqrt(20) / 0.35, 1e-6)


def test_a_noise_that_nobody_can_mean_is_refused() -> None:
    with pytest.raises(PrivacyError, match="a noise multiplier above 1e\\+06"):
        noise_for(1e-6, 1e-9, 1e3)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(PrivacyError, match=re.escape("fleetlearn[coordinator,privacy]")):
        gaussian_epsilon(0.987, 1e-6)


def test_correlated_noise_counts_less_than_all_releases() -> None:
    """One participation of many releases: the norm of a column of C, between 1 and the root."""
    once = sensitivity("dp-ftrl", 100, 100, 1)
    assert 1 < once < math.sqrt(100)
    first = [sensitivity("dp-ftrl", releases, 10, 10, 100) for releases in (1, 10, 50, 100)]
    assert first == sorted(first), "more releases cost no less"
    assert first[0] == 1, "the first release has the noise of its own alone"
