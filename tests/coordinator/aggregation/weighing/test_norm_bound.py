"""The bound: what a long update is multiplied by, and how the bound follows the updates."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.weighing.norm_bound import (
    NormBound,
    clip_factor,
    next_bound,
)


def test_a_clipped_update_is_as_long_as_the_bound() -> None:
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1.0, 2.0, 4.0, 1e6)] == [
        1.0,
        1.0,
        1.0,
        0.5,
        2e-6,
    ]


def test_the_bound_follows_by_the_paper_s_equation() -> None:
    """C * exp(-eta * (b - gamma)) with eta = 0.2: 8 of 10 within is more than the half that is
    wanted."""
    rule = NormBound(1.0, "clip", 0.5, 0.2)
    assert next_bound(rule, 3.0, 8, 10) == 3.0 * exp(-0.2 * (0.8 - 0.5))
    assert next_bound(rule, 3.0, 0, 10) == 3.0 * exp(0.1)
    assert next_bound(rule, 3.0, 5, 10) == 3.0
    assert next_bound(rule, 3.0, 0, 0) == 3.0, "no update came"
    assert next_bound(NormBound(1.0, "clip"), 3.0, 8, 10) == 3.0, "no quantile"


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("first", [1e-3, 1e3])
def test_it_comes_to_the_quantile_from_below_and_above(quantile: float, first: float) -> None:
    norms = np.exp(np.random.default_rng(1).standard_normal((400, 200)))
    rule, bound = NormBound(first, "clip", quantile, 0.2), first
    for row in norms:
        bound = next_bound(rule, bound, int((row <= bound).sum()), len(row))
    assert bound == pytest.approx(np.quantile(norms, quantile), rel=0.1)
