"""Reports on disk: those of this version, and those that were written before reports had parts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fleetlearn_protocol.messages import Evaluation, Part, Report
from fleetlearn_protocol.stored_report import read_report

REPORT = Report(
    "t1-1",
    1,
    (Part("update", "float32", 40, 7),),
    100,
    5,
    1.0,
    True,
    0.5,
    {"accuracy": 1.0},
    2.5,
    Evaluation(9, 1.0),
)
BEFORE: dict[str, Any] = {
    "type": "report",
    "task": "t1-1",
    "round": 1,
    "crc32": 7,
    "size": 40,
    "examples": 100,
    "steps": 5,
    "epochs": 1.0,
    "complete": True,
    "loss": 0.5,
    "metrics": {"accuracy": 1.0},
    "seconds": 2.5,
    "encoding": "float32",
    "evaluation": {"examples": 9, "loss_sum": 1.0, "metric_sums": {}},
}
"""As the version before wrote it, with every field."""


def test_a_report_of_today() -> None:
    assert read_report(msgspec.json.encode(REPORT)) == REPORT


def test_a_report_of_the_version_before() -> None:
    assert read_report(json.dumps(BEFORE).encode()) == REPORT


@pytest.mark.parametrize("field", ["crc32", "size", "encoding", "task"])
def test_a_damaged_report_of_the_version_before(field: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=field):
        read_report(
            json.dumps({name: value for name, value in BEFORE.items() if name != field}).encode()
        )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"{}",
        b'{"parts": []}',
        b'{"type":"report","parts":7}',
        b'{"task":"\xea"}',
        b'{"a":' * 10_000,
    ],
)
def test_what_is_no_report(content: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_report(content)
