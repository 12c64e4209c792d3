"""A report that tells nothing of the device's data has all its fields from its task, or fixed."""

from __future__ import annotations

from fleetlearn_protocol.messages import Evaluation, Part, Report
from fleetlearn_protocol.withheld import without_data

PART = Part("update", "masked", 8, 1)
MEASURED = Evaluation(9, 2.0, {"accuracy": 3.0})
REPORT = Report(
    "t1-1", 1, (PART,), 9, 7, 1.5, False, 0.25, {"accuracy": 0.5}, 3.0, MEASURED, MEASURED, True,
    True, "5e" * 80, "a0" * 64,
)  # fmt: skip


def test_what_is_left_is_what_the_task_says() -> None:
    assert without_data(REPORT, 3) == Report(
        "t1-1", 1, (PART,), 1, 1, 3.0, True, 0.0, sealed="5e" * 80, signature="a0" * 64
    )


def test_every_field_that_a_device_measures_is_withheld() -> None:
    kept = {"task", "round", "parts", "sealed", "signature"}
    found = without_data(REPORT, 3)
    for name in {*Report.__struct_fields__} - kept:
        assert getattr(found, name) != getattr(REPORT, name), name
    for name in kept:
        assert getattr(found, name) == getattr(REPORT, name), name
