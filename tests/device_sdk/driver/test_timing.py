"""How long a device waits before it connects again."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fleetlearn_device.driver.timing import (
    LONGEST_RETRY_AFTER,
    Timing,
    retry_after,
    seconds_to_wait,
)

TIMING = Timing(base=0.5, cap=60.0)


@pytest.mark.parametrize(
    ("failures", "limit"), [(0, 0.5), (1, 1.0), (3, 4.0), (6, 32.0), (7, 60.0), (1000, 60.0)]
)
def test_the_wait_grows_to_its_cap_with_full_jitter(failures: int, limit: float) -> None:
    dice = random.Random(3)
    waits = [seconds_to_wait(TIMING, failures, None, dice) for _ in range(2000)]
    assert 0 <= min(waits) < 0.05 * limit
    assert 0.95 * limit < max(waits) <= limit
    assert np.mean(waits) == pytest.approx(limit / 2, rel=0.1)


def test_the_coordinator_s_own_time_is_followed() -> None:
    dice = random.Random(3)
    waits = [seconds_to_wait(TIMING, 5, 10.0, dice) for _ in range(2000)]
    assert 5.0 <= min(waits) < 5.5
    assert 14.5 < max(waits) <= 15.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("", 0.0),
        ("7", 7.0),
        ("0", 0.0),
        ("9" * 5000, LONGEST_RETRY_AFTER),
        ("-1", 0.0),
        ("1e9", 0.0),
        ("\N{SUPERSCRIPT TWO}", 0.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
    ],
)
def test_a_refused_handshake_says_how_long_to_wait(value: str, seconds: float) -> None:
    assert retry_after(value) == seconds
