"""What of a device's answer does not fit together."""

from __future__ import annotations

from typing import Any

import pytest
from fleetlearn_protocol.quality_messages import QualityAnswer

GOOD: dict[str, Any] = {"missing": (0, 2), "means": (1.0, -1.0), "variances": (0.0, 2.0)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, None),
        ({"means": (1.0,)}, "different lengths"),
        ({"missing": (0, 9)}, "more values are missing"),
        ({"variances": (0.0, -1.0)}, "below 0"),
        ({"fourths": (-1.0, 1.0)}, "below 0"),
    ],
)
def test_answers(wrong: dict[str, Any], said: str | None) -> None:
    found = QualityAnswer(**{"rows": 5, **GOOD, "fourths": (0.0, 4.0), **wrong}).contradiction
    assert found is None if said is None else said in (found or "")


def test_no_features_are_no_contradiction() -> None:
    assert QualityAnswer(1, (), (), (), ()).contradiction is None
