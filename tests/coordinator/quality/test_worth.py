"""What updates were worth over rounds."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.quality.student import log10_two_sided
from fleetlearn_coordinator.quality.worth import worth_over_rounds


def test_worth_over_rounds() -> None:
    """A t test by hand: mean -2, deviation 1 over four rounds, t = -4 with 3 degrees of freedom."""
    rows = {
        "good": [(1.0, 0.5)] * 2,
        "bad": [(-1.0, -0.5), (-2.0, -1.0), (-2.0, -1.0), (-3.0, -1.5)],
        "same": [(0.5, 0.1)] * 3,
    }
    bad, same, good = worth_over_rounds(rows)
    assert (bad.device, bad.rounds, bad.shapley, bad.left_out) == ("bad", 4, -2.0, -1.0)
    assert bad.error == pytest.approx((2 / 3) ** 0.5 / 2)
    t = 2 / bad.error
    assert bad.log10_p == pytest.approx(log10_two_sided(t, 3) + np.log10(2))
    assert (good.device, good.log10_p) == ("good", 0.0)
    assert (same.error, same.log10_p) == (0.0, -1e300)
