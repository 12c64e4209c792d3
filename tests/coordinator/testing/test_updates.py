"""The test kit passes our aggregators, optimizers, staleness functions and weighing rules, and
finds planted mistakes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Aggregator, Optimizer, RoundUpdates, WeighingRule
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.staleness import FUNCTIONS, StalenessConstants
from fleetlearn_coordinator.aggregation.updates import Result
from fleetlearn_coordinator.aggregation.weighing.fair import fair
from fleetlearn_coordinator.aggregation.weighing.normalised import normalised
from fleetlearn_coordinator.testing import (
    check_aggregator,
    check_optimizer,
    check_staleness,
    check_weighing,
)


@pytest.mark.parametrize("name", aggregators.AGGREGATORS)
def test_our_aggregators_pass(name: str) -> None:
    check_aggregator(aggregators.make(name))


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_our_optimizers_pass(name: str) -> None:
    check_optimizer(optimizers.make(name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_our_staleness_functions_pass(name: str) -> None:
    constants = StalenessConstants(0.5, 4.0)
    check_staleness(lambda tau: FUNCTIONS[name].of(tau, constants))


@pytest.mark.parametrize("rule", [fair(1.0, 0.1), fair(5.0, 0.01), normalised("sgd", 0.0, 0.0)])
def test_our_weighing_rules_pass(rule: WeighingRule) -> None:
    check_weighing(rule)


def trimmed(updates: RoundUpdates) -> Any:
    return updates.by_columns(lambda values: np.sort(values, axis=0).mean(axis=0))


def equal_lengths(updates: RoundUpdates) -> Any:
    return updates.combination(1.0 / np.maximum(updates.norms(), 1e-30) / len(updates))


@pytest.mark.parametrize("combine", [trimmed, equal_lengths])
def test_right_functions_pass(combine: Callable[[RoundUpdates], Any]) -> None:
    check_aggregator(combine)


def float32_sums(**changes: Any) -> Aggregator[Any]:
    """A mean that adds in float32: what everybody writes first."""

    def add(state: Any, update: Any, weight: int, largest: float, factor: float, _: Any) -> None:
        state["sum"] += np.concatenate([*update]) * np.float32(weight)
        state["weight"] += weight

    functions: dict[str, Any] = {
        "init": lambda size: {"sum": np.zeros(size, np.float32), "weight": np.zeros(1, np.int64)},
        "add": add,
        "result": lambda state, present: Result(
            (state["sum"] / state["weight"]).astype(np.float64), np.zeros(0)
        ),
        "to_tensors": lambda state: state,
        "from_tensors": lambda tensors: {name: each.copy() for name, each in tensors.items()},
    }
    return aggregators.MEAN._replace(**{**functions, **changes})


def changes_updates(state: Any, update: Any, *numbers: Any) -> None:
    for part in update:
        part *= 1.0  # what is below is seen with zeros alone
        part += 1.0
    aggregators.MEAN.add(state, update, *numbers)


def forgets(tensors: Any) -> Any:
    return aggregators.MEAN.init(40)


def loses_half(first: Any, second: Any) -> None:
    """Forgets the second sum."""


COUNTER = itertools.count()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (float32_sums(), "the order"),
        (aggregators.MEAN._replace(add=changes_updates), "changed an update|the same updates"),
        (aggregators.MEAN._replace(from_tensors=forgets), "saved and loaded"),
        (aggregators.MEAN._replace(merge=loses_half), "the merge of two partial sums"),
        (lambda updates: np.zeros(3), r"returned an array of shape \(3,\); expected \(40,\)"),
        (lambda updates: updates.combination(1 / (updates.norms() * 0)), "not finite|made element"),
        (lambda updates: trimmed(updates) * random.random(), "keeps a state, or draws random"),
        (lambda updates: trimmed(updates) + next(COUNTER), "keeps a state"),
        (
            lambda updates: updates.combination(np.ones(9)),
            "one update: aggregation.aggregator fail",
        ),
    ],
)
def test_mistakes_of_aggregators_are_found(made: Any, says: str) -> None:
    with np.errstate(divide="ignore", invalid="ignore"), pytest.raises(AssertionError, match=says):
        check_aggregator(made)


def remembers_outside() -> Optimizer:
    kept: dict[int, Any] = {}

    def step(delta: Any, state: Any, share: float) -> Any:
        kept[len(delta)] = kept.get(len(delta), 0.0) * 0.9 + delta
        return kept[len(delta)]

    return Optimizer("outside", {}, step)


def adds_in_place(delta: Any, state: Any, share: float) -> Any:
    delta *= 2
    return delta


def loses_slot(delta: Any, state: Any, share: float) -> Any:
    state.pop("v")
    return delta


def shortens_blocks(delta: Any, state: Any, share: float) -> Any:
    return delta / max(1.0, float(np.linalg.norm(delta)))


def drifts(delta: Any, state: Any, share: float) -> Any:
    return delta + 0.5


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (remembers_outside(), "must be in the slots of its state"),
        (Optimizer("o", {}, adds_in_place), "read-only"),
        (Optimizer("o", {"v": 0.0}, loses_slot), "a state of {}; expected"),
        (Optimizer("o", {}, shortens_blocks), "must work element by element"),
        (Optimizer("o", {}, drifts), "a mean update of zeros moved a new model"),
        (Optimizer("o", {}, lambda delta, state, share: delta[:3]), r"a move of shape \(3,\)"),
        (Optimizer("o", {}, lambda delta, state, share: delta * 1e300), "would make element"),
    ],
)
def test_mistakes_of_optimizers_are_found(optimizer: Optimizer, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_optimizer(optimizer)


def test_a_step_is_no_optimizer() -> None:
    with pytest.raises(AssertionError, match="a function was given; expected Optimizer"):
        check_optimizer(lambda delta, state, share: delta)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda tau: 0.9, "returned 0.9 for a staleness of 0; expected 1"),
        (lambda tau: max(0.0, 1 - tau / 10), "returned 0.0 for a staleness of 10"),
        (lambda tau: 1 + tau, "expected a factor above 0, at most 1"),
        (lambda tau: 1.0 if tau != 3 else 0.5, "a staleness of 4 counts 1.0, more than one of 3"),
        (lambda tau: 1 / (1 - tau) if tau else 1.0, "ZeroDivisionError"),
    ],
)
def test_mistakes_of_staleness_functions_are_found(
    function: Callable[[int], float], says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        check_staleness(function)


def rule(**changes: Any) -> WeighingRule:
    plain = {
        "factor": lambda reported, level: 1.0,
        "scale": lambda reports, level: 1.0,
        "next_level": lambda reports, level: None,
    }
    return WeighingRule("mine", **{**plain, **changes}, needs_norms=False, needs_losses=True)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (rule(factor=lambda reported, level: reported.loss), "for a factor; expected one above 0"),
        (rule(scale=lambda reports, level: math.nan), "returned nan for a scale"),
        (rule(next_level=lambda reports, level: math.inf), "the level inf"),
        (rule(next_level=lambda reports, level: 1 / 0), r"aggregation\.weighing failed: ZeroDiv"),
        (
            rule(scale=lambda reports, level: 1 + sum(each.loss / 3 for each in reports)),
            "in another order: add with math.fsum",
        ),
        (rule(next_level=lambda reports, level: reports[0].loss), "the next level"),
        (rule(factor=lambda reported, level: random.random()), "another one when it was asked"),
    ],
)
def test_mistakes_of_weighing_rules_are_found(made: WeighingRule, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_weighing(made)


def test_a_right_rule_passes() -> None:
    check_weighing(rule(factor=lambda reported, level: min(1.0, reported.steps / 100)))
