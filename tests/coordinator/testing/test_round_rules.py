"""The test kit finds planted mistakes in selection strategies and stop rules, and passes right
ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fleetlearn_coordinator import Choice, PastRound
from fleetlearn_coordinator.rounds.own_stop_rule import OwnRuleError
from fleetlearn_coordinator.testing import check_selection, check_stop_rule


def by_chance(choice: Choice) -> Sequence[str]:
    keys = {device.name: next(choice.random) for device in choice.devices}
    return sorted(keys, key=keys.__getitem__)[: choice.wanted]


def by_loss(choice: Choice) -> Sequence[str]:
    def loss(place: int) -> float:
        record = choice.devices[place].record
        return 9.0 if record is None or record.loss is None else record.loss

    ranked = sorted(range(len(choice.devices)), key=loss, reverse=True)
    return [choice.devices[place].name for place in ranked]


def phones(choice: Choice) -> Sequence[str]:
    return [each.name for each in choice.devices if "tier:phone" in each.stated.labels]


@pytest.mark.parametrize("strategy", [by_chance, by_loss, phones])
def test_right_strategies_pass(strategy: object) -> None:
    check_selection(strategy)  # type: ignore[arg-type]


class Turns:
    """Goes round: those that were chosen last come last."""

    def __init__(self) -> None:
        self.last: list[str] = []

    def __call__(self, choice: Choice) -> Sequence[str]:
        ranked = sorted(choice.devices, key=lambda device: device.name in self.last)
        self.last = [device.name for device in ranked[: choice.wanted]]
        return self.last


def own_chance(choice: Choice) -> Sequence[str]:
    names = [device.name for device in choice.devices]
    random.shuffle(names)
    return names


def nobody(choice: Choice) -> Sequence[str]:
    return []


def sorts_in_place(choice: Choice) -> Sequence[str]:
    choice.devices.sort(reverse=True)  # type: ignore[attr-defined]
    return [device.name for device in choice.devices]


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (Turns(), "when it was asked again after other questions: it keeps a state"),
        (own_chance, "or draws its own random numbers"),
        (nobody, "it never chose a device"),
        (sorts_in_place, r"it changed choice\.devices"),
    ],
)
def test_planted_mistakes_of_strategies_are_found(strategy: object, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_selection(strategy)  # type: ignore[arg-type]


def test_what_a_run_would_refuse_is_refused() -> None:
    with pytest.raises(OwnRuleError, match="none of the 1 devices that wait"):
        check_selection(lambda choice: ["somebody"])


def after_ten(past: Sequence[PastRound]) -> str | None:
    return "ten rounds done" if len(past) >= 10 else None


def no_better(past: Sequence[PastRound]) -> str | None:
    values = [each.metrics["loss"] for each in past if "loss" in each.metrics]
    return "it does not fall" if len(values) > 5 and values[-1] >= values[-6] else None


@pytest.mark.parametrize("rule", [after_ten, no_better, lambda past: None])
def test_right_stop_rules_pass(rule: object) -> None:
    check_stop_rule(rule)  # type: ignore[arg-type]


class Counts:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, past: Sequence[PastRound]) -> str | None:
        self.asked += 1
        return "asked ten times" if self.asked > 10 else None


@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        (Counts(), AssertionError, "when it was asked again after other questions"),
        (lambda past: len(past) > 3, AssertionError, "it returned False; expected None"),
        (lambda past: str(past[0].metrics["loss"]), KeyError, "loss"),
    ],
)
def test_planted_mistakes_of_stop_rules_are_found(
    rule: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_stop_rule(rule)  # type: ignore[arg-type]
