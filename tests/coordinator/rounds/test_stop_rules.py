"""Stop rules, one by one."""

from __future__ import annotations

from math import nan

import pytest
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.improvement import Improvement
from fleetlearn_coordinator.rounds.settings import ReleaseBudget, Settings
from fleetlearn_coordinator.rounds.stop_rules import finish

SETTINGS = Settings(goal=2, cohort=3, minimum=1, deadline=60.0, grace=5.0, gather=4.0)
ACCURACY, LOSS = (
    SETTINGS._replace(metric="accuracy", target=0.9),
    SETTINGS._replace(metric="loss", target=0.2, below=True),
)
SMALL_LOSS = "loss of model version 2 is 0.1 on the devices' training examples; the target is 0.2"
SMALL_CHANGE = "the model's change, 0.25, is below 0.5"
ACCURATE = "accuracy of model version 2 is 0.9 on the devices' training examples; the target is 0.9"

HELD_OUT = "accuracy of model version 2 is 0.9 on held-out data; the target is 0.9"


@pytest.mark.parametrize(
    ("rules", "change", "metrics", "finished"),
    [
        (SETTINGS, 0.0, {}, None),
        (SETTINGS._replace(rounds=3), 1.0, {}, Finish("3 rounds done", "rounds", 3, 3)),
        (SETTINGS._replace(rounds=4), 1.0, {}, None),
        (SETTINGS._replace(epsilon=0.5), 0.25, {}, Finish(SMALL_CHANGE, "epsilon", 0.25, 0.5)),
        (SETTINGS._replace(epsilon=0.5), 0.5, {}, None),
        (
            ACCURACY,
            1.0,
            {"accuracy": 0.9},
            Finish(ACCURATE, "metric", 0.9, 0.9, "accuracy", 2),
        ),
        (ACCURACY, 1.0, {"accuracy": 0.89}, None),
        (ACCURACY, 1.0, {"loss": 0.9}, None),
        (
            LOSS,
            1.0,
            {"loss": 0.1},
            Finish(SMALL_LOSS, "metric", 0.1, 0.2, "loss", 2),
        ),
        (
            ACCURACY._replace(measured_on="held-out data"),
            1.0,
            {"accuracy": 0.9},
            Finish(HELD_OUT, "metric", 0.9, 0.9, "accuracy", 2),
        ),
        (LOSS, 1.0, {"loss": 0.3}, None),
    ],
)
def test_stop_rules(
    rules: Settings, change: float, metrics: dict[str, float], finished: Finish | None
) -> None:
    assert finish(rules, 3, change, metrics, 2) == finished


def test_a_privacy_budget_is_spent_by_committed_rounds_alone() -> None:
    spent = Finish("the privacy budget is spent", "privacy budget", 7.96, 8.0)
    rules = SETTINGS._replace(budget=ReleaseBudget(5, spent))
    # Version 9 may be the ninth after four roll backs.
    assert finish(rules, 9, 1.0, {}, releases=4) is None
    assert finish(rules, 5, 1.0, {}, releases=5) == spent
    assert finish(rules, 5, 1.0, {}, releases=6) == spent  # a smaller budget than before
    assert finish(rules._replace(rounds=5), 5, 1.0, {}, releases=5) != spent


def measured(rules: Settings, *values: float) -> Improvement:
    found = Improvement(rules.below, rules.least)
    for version, value in enumerate(values):
        found.note(version, value)
    return found


def test_patience_ends_with_the_best_version() -> None:
    rules = SETTINGS._replace(metric="loss", below=True, patience=2)
    assert finish(rules, 2, 1.0, {"loss": 0.6}, 1, improvement=measured(rules, 0.5, 0.6)) is None
    found = finish(rules, 3, 1.0, {"loss": 0.5}, 2, improvement=measured(rules, 0.5, 0.6, 0.5))
    assert found == Finish(
        "loss on the devices' training examples is best, 0.5, at model version 0: 2 measured "
        "models have not improved it",
        *("patience", 0.5, 2, "loss", 0),
    )
    slow = rules._replace(least=0.25)
    found = finish(slow, 3, 1.0, {}, improvement=measured(slow, 0.5, 0.4, 0.3))
    assert found == Finish(
        "loss on the devices' training examples is best, 0.3, at model version 2: 2 measured "
        "models have not improved it by more than 0.25",
        *("patience", 0.3, 2, "loss", 2),
    )
    never = finish(rules, 3, 1.0, {}, improvement=measured(rules, nan, nan))
    assert never == Finish(
        "loss was never finite on the devices' training examples: 2 measured models have not "
        "improved it",
        *("patience", 2, 2, "loss"),
    )
    assert finish(rules._replace(target=0.6), 3, 1.0, {"loss": 0.6}, 2) is not None
    assert finish(rules, 3, 1.0, {"loss": 0.0}, 2) is None, "it has no target"
