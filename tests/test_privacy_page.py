"""The numbers of docs/privacy.md that people decide by."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import NormalDist

import pytest
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon

PAGE = " ".join((Path(__file__).parents[1] / "docs" / "privacy.md").read_text("utf-8").split())


def test_how_often_a_guess_is_right() -> None:
    """Two normal distributions whose means are mu standard deviations apart are told apart in
    Phi(mu / 2) of cases, and mu gives epsilon."""
    said = re.findall(r"epsilon (\d+) (?:it is at most )?(\d\d) %", PAGE)
    assert [int(epsilon) for epsilon, _ in said] == [1, 4, 8]
    for epsilon, right in said:
        # the mu with which a guess is right so often, half a percent more and less
        least, most = (2 * NormalDist().inv_cdf((int(right) + off) / 100) for off in (-0.5, 0.5))
        assert gaussian_epsilon(least, 1e-6) < int(epsilon) < gaussian_epsilon(most, 1e-6)


def test_what_the_noise_on_the_mean_becomes() -> None:
    found = re.search(
        r"for z = 1 and a goal of 100 z_update = ([\d.]+), for a goal of 50 ([\d.]+)", PAGE
    )
    assert found is not None
    for goal, said in zip((100, 50), found.groups(), strict=True):
        assert (1 - (goal / 10) ** -2) ** -0.5 == pytest.approx(float(said.rstrip(".")), abs=5e-6)
