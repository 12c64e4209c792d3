"""An evaluation's summary: worked by hand, and its quantiles against numpy's and against their
definition."""

from __future__ import annotations

import random
from math import floor, inf

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.evaluation_summary import (
    FEWEST_DEVICES,
    QUANTILES,
    summarise_evaluation,
)
from fleetlearn_protocol.messages import Evaluation

NAMES = ("accuracy", "loss")
BOUNDS = {"accuracy": (-inf, 1.0)}


def by_definition(values: list[float], share: float) -> float:
    """Definition 7 of Hyndman and Fan: linear between the two values around (n - 1) * share."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def test_means_are_per_example_and_quantiles_are_over_devices() -> None:
    rng = np.random.default_rng(3)
    examples = rng.integers(1, 100, 40)
    right = np.floor(rng.random(40) * examples)
    losses = rng.random(40) * examples
    columns = zip(examples.tolist(), losses.tolist(), right.tolist(), strict=True)
    results = [Evaluation(n, loss, {"accuracy": a}) for n, loss, a in columns]
    tiers = ["fast"] * 25 + ["slow"] * 15
    found = summarise_evaluation(results, tiers, NAMES, 10**6, BOUNDS)
    assert (found["devices"], found["examples"]) == (40, examples.sum())
    assert found["metrics"]["accuracy"] == pytest.approx(right.sum() / examples.sum())
    assert found["metrics"]["loss"] == pytest.approx(losses.sum() / examples.sum())
    assert found["behind"] == {"accuracy": 40, "loss": 40}
    means = (right / examples).tolist()
    for name, share in QUANTILES.items():
        assert found["quantiles"]["accuracy"][name] == pytest.approx(by_definition(means, share))
        assert found["quantiles"]["loss"][name] == pytest.approx(
            np.quantile(losses / examples, share)
        )
        assert found["tiers"]["fast"]["quantiles"]["accuracy"][name] == pytest.approx(
            np.quantile(means[:25], share)
        )
    assert found["tiers"]["fast"]["metrics"]["accuracy"] == pytest.approx(
        right[:25].sum() / examples[:25].sum()
    )
    assert found["tiers"]["slow"] == {"devices": 15}, (
        f"fewer than {FEWEST_DEVICES} devices: no figures of their own"
    )

    rows = list(zip(results, tiers, strict=True))
    random.Random(1).shuffle(rows)
    again = summarise_evaluation(
        [row[0] for row in rows], [row[1] for row in rows], NAMES, 10**6, BOUNDS
    )
    assert again == found, "to the last bit, whoever came first"


def test_a_device_that_says_what_cannot_be_is_left_out_of_that_metric() -> None:
    honest = [Evaluation(10, 5.0, {"accuracy": 8.0})] * FEWEST_DEVICES
    found = summarise_evaluation(
        [*honest, Evaluation(10, 5.0, {"accuracy": 70.0})], [""] * 21, NAMES, 100, BOUNDS
    )
    assert found["metrics"]["accuracy"] == pytest.approx(0.8)
    assert found["behind"] == {"accuracy": 20, "loss": 21}
    assert found["left_out"] == {"accuracy": 1}
    assert found["quantiles"]["accuracy"]["p90"] == pytest.approx(0.8)


def test_nobody_counts_for_more_examples_than_the_plan_says() -> None:
    results = [
        Evaluation(10, 0.0, {"accuracy": 0.0}),
        Evaluation(10**6, 0.0, {"accuracy": 10.0**6}),
    ]
    found = summarise_evaluation(results, ["", ""], NAMES, 10, {})
    assert found["metrics"]["accuracy"] == pytest.approx(0.5)
    assert found["examples"] == 20


def test_few_devices_have_no_quantiles_and_none_have_no_metrics() -> None:
    few = [Evaluation(10, 5.0)] * (FEWEST_DEVICES - 1)
    found = summarise_evaluation(few, [""] * len(few), NAMES, 100, BOUNDS)
    assert found["quantiles"] == {}
    assert found["metrics"] == {"loss": 0.5}
    assert summarise_evaluation([], [], NAMES, 100, BOUNDS)["metrics"] == {}
