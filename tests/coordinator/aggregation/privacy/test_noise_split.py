"""How a private round's noise is shared by what it releases."""

from __future__ import annotations

from math import sqrt

import pytest
from fleetlearn_coordinator.aggregation.privacy.noise_split import count_noise, split_noise


@pytest.mark.parametrize(("goal", "update"), [(100, 1.00504), (50, 1.02062)])
def test_the_paper_s_split(goal: int, update: float) -> None:
    """Andrew et al. 2021, section 2.3, with sigma_b = m / 20: z = 1."""
    split = split_noise(1.0, goal, adaptive=True, metrics_noise=None)
    assert split.update == pytest.approx(update, abs=5e-6)
    assert split.clip_count == count_noise(goal) == goal / 20


def test_a_mean_alone_has_all_of_the_noise() -> None:
    assert split_noise(0.7, 10, adaptive=False, metrics_noise=None) == (
        pytest.approx(0.7, rel=1e-15), None, None,
    )  # fmt: skip


@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_together_they_are_the_round_s_noise(noise: float, adaptive: bool) -> None:
    metrics = noise * sqrt(10)
    split = split_noise(noise, 200, adaptive=adaptive, metrics_noise=metrics)
    together = split.update**-2 + metrics**-2
    if split.clip_count is not None:
        together += (2 * split.clip_count) ** -2
    assert together == pytest.approx(noise**-2)
    assert split.update > noise


def test_a_plan_that_leaves_the_mean_nothing_is_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"a larger round\.goal") as refused:
        split_noise(2.0, 20, adaptive=True, metrics_noise=None)
    numbers = "takes 1 / noise^2 = 0.25 together, and the count of clipped updates"
    assert numbers in str(refused.value)
    with pytest.raises(ValueError, match=r"a larger privacy\.metrics_noise"):
        split_noise(2.0, 20, adaptive=False, metrics_noise=2.0)
