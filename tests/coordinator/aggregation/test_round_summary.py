"""What the devices measured, put together: means by examples, and what no examples can have is left
out."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.round_summary import (
    NOTHING,
    Measurements,
    deciding,
    describe,
    evaluation_of,
    pooled,
    possible,
    summarise,
    training_of,
)
from fleetlearn_protocol.messages import Evaluation, Part, Report


def report(examples: int, loss: float, metrics: Mapping[str, float]) -> Report:
    return Report(
        "t", 1, (Part("update", "float32", 4, 0),), examples, 1, 1.0, True, loss, dict(metrics)
    )


def measured(weights: list[int], **sums: list[float]) -> Measurements:
    return Measurements(
        np.array(weights, np.int64), {name: np.array(column) for name, column in sums.items()}
    )


def test_metrics_are_pooled_by_examples() -> None:
    """(3 * 0.5 + 1 * 1.0) / 4; a metric that one device lacks is the others' mean."""
    assert pooled(measured([3, 1], loss=[1.5, 1.0], accuracy=[3.0, nan])) == {
        "loss": 0.625,
        "accuracy": 1.0,
    }
    assert pooled(measured([1, 3], loss=[1.0, 1.5], accuracy=[nan, 3.0])) == {
        "loss": 0.625,
        "accuracy": 1.0,
    }
    assert pooled(measured([3, 1], loss=[nan, nan])) == {}
    assert pooled(NOTHING) == {}


def test_the_means_are_the_same_bits_in_every_order() -> None:
    random = np.random.default_rng(0)
    weights, sums = (
        random.integers(1, 1000, 50),
        random.standard_normal(50) * 10.0 ** random.integers(-9, 9, 50),
    )
    first = pooled(Measurements(weights, {"loss": sums}))
    for _ in range(20):
        order = random.permutation(50)
        assert pooled(Measurements(weights[order], {"loss": sums[order]})) == first


def test_a_report_weighs_its_examples_up_to_the_limit_and_tells_of_known_metrics() -> None:
    reports = [report(10, 1.0, {"accuracy": 0.5, "made-up": 1.0}), report(90, 3.0, {})]
    training = training_of(reports, ["accuracy", "loss"], 30)
    assert training.weights.tolist() == [10, 30]
    assert pooled(training) == {"accuracy": 0.5, "loss": (10 * 1.0 + 30 * 3.0) / 40}
    assert pooled(training_of([report(1, 2.0, {"loss": 9.0})], ["loss"], 30)) == {"loss": 2.0}, (
        "its loss is its loss"
    )


def test_an_evaluation_has_no_more_say_than_its_device_in_the_model() -> None:
    evaluations = [
        Evaluation(10, 20.0, {"accuracy": 5.0}),
        None,
        Evaluation(1000, 0.0, {"accuracy": 1000.0}),
    ]
    evaluation = evaluation_of(evaluations, ["accuracy", "loss"], 10)
    assert evaluation.weights.tolist() == [10, 0, 10]
    assert pooled(evaluation) == {"accuracy": 0.75, "loss": 1.0}


def test_personal_models_are_measured_beside_the_round_s() -> None:
    """A device weighs the same in both, whatever it says of its personal model's examples; the
    third measured its personal model alone, and the fourth the round's alone."""
    shared = [Evaluation(10, 20.0, {"accuracy": 5.0}), Evaluation(90, 45.0, {"accuracy": 90.0})]
    own = [Evaluation(20, 10.0, {"accuracy": 20.0}), Evaluation(90, 9.0), Evaluation(5, 5.0), None]
    found = evaluation_of([*shared, None, Evaluation(5, 5.0)], ["accuracy", "loss"], 30, own)
    assert found.weights.tolist() == [10, 30, 0, 5]
    assert pooled(found)["personal.loss"] == (10 * 0.5 + 30 * 0.1) / 40
    assert pooled(found)["personal.accuracy"] == 1.0, (
        "of the first device: the second did not measure it"
    )
    assert summarise(NOTHING, found, {})["behind"] == {
        "accuracy": 2,
        "loss": 3,
        "personal.accuracy": 1,
        "personal.loss": 2,
    }
    bounded = summarise(NOTHING, found, {"personal.loss": (0.0, 0.2)})
    assert (bounded["metrics"]["personal.loss"], bounded["left_out"]) == (0.1, {"personal.loss": 1})


def test_no_personal_model_gives_no_metric_of_one() -> None:
    for personal in ([], [None], [Evaluation(1, 2.0)]):
        assert set(evaluation_of([None], ["loss"], 10, personal).sums) == {"loss"}


def test_the_model_s_evaluation_stands_before_the_training() -> None:
    training = measured([2, 2], accuracy=[1.0, nan], loss=[4.0, 8.0])
    evaluation = measured([2, 0], accuracy=[nan, nan], loss=[1.0, nan])
    assert summarise(training, evaluation, {}) == {
        "train": {"accuracy": 0.5, "loss": 3.0},
        "evaluation": {"loss": 0.5},
        "metrics": {"accuracy": 0.5, "loss": 0.5},
        "behind": {"accuracy": 1, "loss": 1},
        "left_out": {},
    }


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_device_beyond_the_bounds_is_left_out_of_that_metric(evaluated: bool) -> None:
    """Wherever it says so, in its training or in its evaluation: out of both."""
    good, bad = [0.5, 0.5], [0.5, 1.5]
    training = measured([1, 1], accuracy=good if evaluated else bad, loss=[1.0, 2.0])
    evaluation = measured([1, 1], accuracy=bad if evaluated else good, loss=[1.0, 2.0])
    found = summarise(training, evaluation, {"accuracy": (0.0, 1.0)})
    assert found["train"] == found["evaluation"] == {"accuracy": 0.5, "loss": 1.5}
    assert (found["behind"], found["left_out"]) == ({"accuracy": 1, "loss": 2}, {"accuracy": 1})
    assert deciding(found, 1) == {"accuracy": 0.5, "loss": 1.5}
    assert deciding(found, 2) == {"loss": 1.5}
    alone = summarise(NOTHING, evaluation, {"accuracy": (0.0, 1.0)})
    assert alone["left_out"] == ({"accuracy": 1} if evaluated else {})


def test_all_devices_beyond_the_bounds_leave_no_mean() -> None:
    found = summarise(
        measured([1, 2], accuracy=[1.5, -4.0]),
        NOTHING,
        {"accuracy": (0.0, 1.0), "other": (0.0, 1.0)},
    )
    assert (found["metrics"], found["behind"], found["left_out"]) == ({}, {}, {"accuracy": 2})


def test_bounds_allow_for_rounding() -> None:
    bounds = {"accuracy": (0.0, 1.0)}
    assert possible(
        bounds, "accuracy", np.array([-2e-6, -1e-6, 0.5, 1.0000005, 1.01])
    ).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert possible(bounds, "loss", 1e30)


def test_a_round_of_an_earlier_version_has_no_counts() -> None:
    assert deciding({"metrics": {"loss": 1.0}}, 5) == {"loss": 1.0}


def test_a_round_in_one_line() -> None:
    summary = {
        "reports": 8,
        "partial": 1,
        "dropped": {"lost": 2, "late": 1},
        "metrics": {"loss": 0.25, "accuracy": 0.9},
        "change": 0.125,
        "seconds": 1.5,
    }
    begin, end = "8 reports (1 partial), dropped: 1 late, 2 lost; ", "; change 0.125; 1.50 s"
    measured = "loss 0.25, accuracy 0.9 on the devices' training examples, "
    assert describe(summary) == f"{begin}{measured}while they trained{end}"
    assert (
        describe(summary | {"evaluation": {"loss": 0.25}})
        == f"{begin}{measured}before they trained{end}"
    )
    assert describe(summary | {"metrics": {}}) == f"{begin}no metrics{end}"
    large = {"reports": 1, "metrics": {"loss": 0.5}, "change": 0.25}
    small = {"reports": 0, "metrics": {}, "change": 0.0}
    members = {"large": large, "small": small}
    assert describe(summary | {"metrics": {}, "members": members}) == (
        f"{begin}no metrics{end}; large: 1 report, loss 0.5, change 0.25; small: 0 reports, no "
        "metrics, change 0"
    )
