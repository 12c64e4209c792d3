"""Moments as people read them."""

from __future__ import annotations

from fleetlearn_protocol.date_text import date_text


def test_a_moment_is_told_in_utc() -> None:
    assert date_text(1_795_800_534) == "2026-11-27 17:28:54Z"
    assert date_text(0.9) == "1970-01-01 00:00:00Z"
