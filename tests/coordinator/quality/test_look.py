"""Looks at devices' data, from answers that were written by hand."""

from __future__ import annotations

import msgspec
import pytest
from fleetlearn_coordinator.quality.look import look_at
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.quality_messages import QualityAnswer


def answer(mean: float = 0.0, loss: float | None = 0.5, right: int = 90) -> QualityAnswer:
    evaluation = None if loss is None else Evaluation(100, 100 * loss, {"accuracy": right})
    return QualityAnswer(100, (0,), (mean,), (1.0,), (3.0,), evaluation)


ALIKE = {"a": answer(0.1, 0.5), "b": answer(-0.1, 0.6), "c": answer(0.0, 0.4)}


def test_devices_that_are_alike() -> None:
    found = look_at({**ALIKE, "d": answer(0.05, 0.52)}, 0.01, None)
    assert (found["features"], found["losses"], found["not_finite"]) == ([], [], [])
    assert found["measured"] == 4


def test_a_feature_and_a_loss() -> None:
    found = look_at({**ALIKE, "d": answer(4.0, 5.0, right=50)}, 0.05, 2)
    (feature,) = found["features"]
    assert (feature["device"], feature["feature"], feature["what"]) == ("d", 0, "mean")
    assert feature["others"] == pytest.approx(0.0)
    (loss,) = found["losses"]
    assert loss["device"] == "d"
    assert loss["others"] == pytest.approx(0.5)
    assert loss["wrong_labels"] == pytest.approx(0.5)
    msgspec.json.encode(found)


def test_a_loss_that_is_lower_accuses_nobody() -> None:
    assert look_at({**ALIKE, "d": answer(loss=-5.0)}, 0.05, None)["losses"] == []


def test_a_loss_that_is_not_finite_is_named() -> None:
    assert look_at({**ALIKE, "d": answer(loss=None)}, 0.01, None)["not_finite"] == ["d"]


def test_others_that_are_all_the_same_leave_finite_numbers() -> None:
    same = {name: answer() for name in "abc"}
    found = look_at({**same, "d": answer(loss=0.6)}, 0.01, None)
    assert msgspec.json.decode(msgspec.json.encode(found["losses"]))[0]["log10_p"] == -1e300


@pytest.mark.parametrize(
    ("rows", "mean", "variance"), [(100, 1e-200, 1.0), (2, 0.0, 1e-200), (2, 0.0, 5e-324)]
)
def test_no_answer_divides_by_zero(rows: int, mean: float, variance: float) -> None:
    """One hostile device ended the coordinator with each of these, and again after a restart."""
    same = QualityAnswer(rows, (0,), (0.0,), (0.0,), (0.0,))
    hostile = QualityAnswer(100, (0,), (mean,), (variance,), (1e-300,))
    look_at({"a": same, "b": same, "c": same, "d": same, "hostile": hostile}, 0.05, 10)
