"""Epsilon for people: what is spent is never shown as less."""

from __future__ import annotations

from random import Random

import pytest
from fleetlearn_protocol.epsilon_text import budget_text, share_text, spent_text


@pytest.mark.parametrize(
    ("epsilon", "digits", "text"),
    [
        (1.5449, 3, "1.55"),
        (1.5449, 4, "1.545"),
        (7.9999, 3, "8"),
        (7.9999, 4, "8"),
        (7.9999, 5, "7.9999"),
        (1.1, 3, "1.1"),
        (0.0, 3, "0"),
        (0.00012341, 3, "0.000124"),
        (999.1, 3, "1e+03"),
        (1e30, 3, "1e+30"),
        (float("inf"), 3, "inf"),
    ],
)
def test_what_is_spent_is_rounded_up(epsilon: float, digits: int, text: str) -> None:
    assert spent_text(epsilon, digits=digits) == text


def test_no_text_is_less_than_the_value_nor_a_whole_last_digit_more() -> None:
    random = Random(36)
    for _ in range(2000):
        value = 10 ** random.uniform(-6, 6)
        digits = random.randint(3, 6)
        shown = float(spent_text(value, digits=digits))
        assert value <= shown <= value * (1 + 10 ** (1 - digits))


def test_within_its_budget_nothing_looks_past_it() -> None:
    assert spent_text(7.9921, 7.993) == "7.993"
    assert spent_text(7.99291, 7.993) == "7.993"
    assert spent_text(7.99301, 7.993) == "8"  # past it
    assert spent_text(1.2345678901, 1.2345678902) == "1.23456789011"[:-1]
    assert spent_text(7.9999, 8.0) == "8"


def test_a_budget_is_shown_as_it_was_given() -> None:
    assert list(map(budget_text, (8.0, 8, 2.3, 1.2345678, 0.1))) == [
        "8", "8", "2.3", "1.2345678", "0.1",
    ]  # fmt: skip


def test_a_share_is_rounded_up_as_well() -> None:
    assert share_text(0.90449) == "90.5 %"
    assert share_text(0.9999) == "100 %"
    assert share_text(0.55) == "55 %"
