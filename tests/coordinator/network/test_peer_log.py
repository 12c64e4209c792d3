"""What is said about peers, and how seldom."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.network import peer_log
from fleetlearn_coordinator.network.peer_log import INTERVAL, MOST_CAUSES, say_seldom


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is: one number, to be changed. The bound of lines about all connections is not
    at stake here."""
    now = [1000.0]
    monkeypatch.setattr(peer_log.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(peer_log.few_lines, "filter", lambda record: True)
    return now


def test_a_cause_is_said_once_in_a_while_and_counted_meanwhile(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        say_seldom("a connection of 192.0.2.7", "it speaks TLS")
    say_seldom("a connection of 192.0.2.8", "it speaks TLS")
    assert caplog.messages == [
        "a connection of 192.0.2.7: it speaks TLS",
        "a connection of 192.0.2.8: it speaks TLS",
    ]
    clock[0] += INTERVAL
    say_seldom("a connection of 192.0.2.7", "it speaks TLS")
    assert caplog.messages[2:] == [
        "a connection of 192.0.2.7: it speaks TLS (999 times more since this was logged last)"
    ]


def test_a_flood_of_causes_takes_no_memory(clock: list[float]) -> None:
    for number in range(3 * MOST_CAUSES):
        say_seldom(f"a connection of {number}", "it speaks TLS")
    assert len(peer_log._said) == MOST_CAUSES
