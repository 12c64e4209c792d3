"""Which reports of masked updates are refused, and what the device is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.conversation.masked_reports import check_masked
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import Evaluation, Part, Report, SecureTask

SECURE = SecureTask("helper", 3, 20, helper="a" * 64)
GOOD = Report(
    "r-4-1", 4, (Part("update", "masked", 8, 1),), 1, 1, 2.0, True, 0.0, sealed="5e" * 80,
    signature="a0" * 64,
)  # fmt: skip


def test_a_report_that_says_nothing_is_accepted() -> None:
    check_masked(GOOD, SECURE, 4, 2)


def test_without_a_helper_no_seed_is_sealed() -> None:
    report = msgspec.structs.replace(GOOD, sealed=None, signature=None)
    check_masked(report, SecureTask("pairwise", 3, 20), 4, 2)


MEASURED = Evaluation(9, 2.0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sealed": None}, "it has no `sealed`"),
        ({"signature": None}, "it has no `signature`"),
        ({"round": 5}, "it names round 5; the task is of round 4"),
        ({"examples": 10}, "its `examples` is 10; with a masked update it must be 1"),
        ({"steps": 7}, "its `steps` is 7"),
        ({"epochs": 1.0}, "its `epochs` is 1.0; with a masked update it must be 2.0"),
        ({"complete": False}, "its `complete` is False"),
        ({"loss": 0.5}, "its `loss` is 0.5"),
        ({"metrics": {"accuracy": 0.5}}, "its `metrics` is"),
        ({"seconds": 3.0}, "its `seconds` is 3.0"),
        ({"evaluation": MEASURED}, "its `evaluation` is"),
        ({"personal": MEASURED}, "its `personal` is"),
        ({"lost_tied": True}, "its `lost_tied` is True"),
        ({"clipped": True}, "its `clipped` is True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_any_other_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        check_masked(msgspec.structs.replace(GOOD, **fields), SECURE, 4, 2)
    assert refused.value.code is Code.BAD_MESSAGE
    assert f"the report of task r-4-1 is refused: {told}" in refused.value.text
