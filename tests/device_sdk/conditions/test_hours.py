"""Hours of the day, worked by hand. 2026-11-27 is a Friday."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from fleetlearn_device.conditions.hours import needs_hours, read_window
from hypothesis import given
from hypothesis import strategies as st

FRIDAY = datetime(2026, 11, 27)  # noqa: DTZ001


def at(day: int, hour: int, minute: int = 0) -> datetime:
    """``day``: days after that Friday."""
    return FRIDAY + timedelta(days=day, hours=hour, minutes=minute)


@pytest.mark.parametrize(
    ("text", "now", "open_"),
    [
        ("22:00-06:00", at(0, 21, 59), False),
        ("22:00-06:00", at(0, 22), True),
        ("22:00-06:00", at(0, 5, 59), True),
        ("22:00-06:00", at(0, 6), False),
        ("9:00-17:30", at(0, 17, 29), True),
        ("9:00-17:30", at(0, 17, 30), False),
        ("fri 22:00-06:00", at(1, 3), True),  # Saturday morning: it began on Friday
        ("fri 22:00-06:00", at(0, 3), False),
        ("sat,sun@00:00-24:00", at(2, 23, 59), True),
        ("sat,sun 00:00-24:00", at(3, 0), False),
        ("Fri-Mon 10:00-11:00", at(3, 10, 30), True),  # over the week's end
        ("fri-mon 10:00-11:00", at(4, 10, 30), False),
    ],
)
def test_windows(text: str, now: datetime, open_: bool) -> None:
    assert read_window(text).contains(now) is open_


@pytest.mark.parametrize(
    "text", ["", "22-6", "25:00-06:00", "22:00-24:30", "09:00-09:00", "fre 22:00-06:00",
             "mon tue 22:00-06:00", "mon- 22:00-06:00", "24:00-06:00"],
)  # fmt: skip
def test_what_is_no_window_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_window(text)


def test_the_reason_says_until_when_and_the_wait_is_exact() -> None:
    why_not, opens_in = needs_hours(["mon-fri 22:00-06:00", "sun 12:00-13:00"], lambda: at(1, 9))
    assert why_not(True) == (
        "outside its hours (mon-fri 22:00-06:00; sun 12:00-13:00), until sun 12:00"
    )
    assert opens_in() == 27 * 3600.0


MINUTES = st.integers(0, 7 * 24 * 60 - 1)


@given(
    st.frozensets(st.integers(0, 6), min_size=1),
    st.integers(0, 1439),
    st.integers(0, 1440),
    MINUTES,
)
def test_a_window_opens_exactly_when_it_says(
    days: frozenset[int], begin: int, end: int, minute: int
) -> None:
    """Minute by minute: nothing is open between now and the next opening, and the opening is."""
    if begin == end:
        return
    names = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    text = ",".join(names[day] for day in sorted(days))
    window = read_window(f"{text} {begin // 60}:{begin % 60:02}-{end // 60}:{end % 60:02}")
    now = FRIDAY + timedelta(minutes=minute)
    opening = window.next_opening(now)
    assert window.contains(opening)
    assert now < opening <= now + timedelta(days=7)
    if not window.contains(now):
        last_minute = opening - timedelta(minutes=1)
        assert not window.contains(last_minute)
