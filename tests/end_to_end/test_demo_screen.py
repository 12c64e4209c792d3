"""What the demo shows fits in a terminal of 80 columns; and a fall of the accuracy is explained."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from examples.demo import screen as screens
from examples.demo.screen import Round, Screen
from examples.demo.strikes import CoordinatorKill, Strikes

LONGEST = Round(
    number=9999,
    outcome="abandoned",
    reports=105,
    dropped={"lost": 10, "surplus": 12, "failed: stopping": 3},
    loss=12.345,
    accuracy=1.0,
    bytes_up=99_900_000,
    bytes_down=999_000,
    seconds=100.25,
    ended=1.0,
)


@pytest.mark.parametrize("size", [(80, 24), (80, 50), (120, 40)])
def test_the_table_and_the_last_events_fit(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(
        force_terminal=True, width=size[0], height=size[1], record=True, file=StringIO()
    )
    monkeypatch.setattr(screens, "Console", lambda **_: console)
    shown = Screen(100)
    for number in range(40):
        shown._rounds.append(replace(LONGEST, number=number, dropped={"lost": 1 + number}))
        shown.event(
            f"event {number}: "
            + "a device is back, and the update that it had finished is accepted " * (number % 3)
        )
    shown.now("round 7: 3 of 9 reports, 6 tasks out")
    console.print(shown._draw())
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= size[0]
    assert len(lines) <= size[1]
    text = "\n".join(lines)
    for words in ("105 of 145", "12.345", "100.0%", "99.90 MB", "999 kB", "100.25", "event 39"):
        assert words in text, words


def test_a_long_cell_takes_another_line() -> None:
    console = Console(force_terminal=True, width=80, record=True, file=StringIO())
    shown = Screen(1)
    shown._rounds.append(LONGEST)
    console.print(shown._draw(everything=True))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "100.25" in text
    assert "(abandoned)" in text


@pytest.fixture
def strikes() -> Any:
    """Those of a demo whose coordinator died in round 8."""
    found = Strikes.__new__(Strikes)
    found.coordinator, found.explained = CoordinatorKill(8, 1.0, 5, 4), False
    return found


def test_a_fall_of_the_accuracy_after_the_death_is_explained_once(strikes: Strikes) -> None:
    high, low = replace(LONGEST, number=7, accuracy=0.95), replace(LONGEST, number=8, accuracy=0.9)
    assert strikes.explain_fall(high, replace(low, number=7)) == "", "it was alive"
    assert strikes.explain_fall(low, replace(high, number=8)) == "", "no fall"
    assert strikes.explain_fall(high, replace(low, accuracy=None)) == "", "not measured"
    assert strikes.explain_fall(high, low) == (
        "accuracy 95.0% -> 90.0%: not the crash (all 5 reports from before it count), but whose "
        "data this round was trained on"
    )
    assert strikes.explain_fall(high, low) == ""
