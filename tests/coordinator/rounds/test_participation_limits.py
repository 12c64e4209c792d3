"""Limits of participation, worked by hand."""

import pytest
from fleetlearn_coordinator.rounds.participation_limits import (
    NEVER,
    ParticipationLimits,
    PrivacyLimitError,
    limits_of,
)
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_protocol import ProtocolError
from fleetlearn_protocol.errors import Code

SETTINGS = Settings(goal=2, cohort=3, minimum=2, deadline=20.0, grace=3.0, gather=2.0)


def commit(limits: ParticipationLimits, *devices: str) -> None:
    for device in devices:
        limits.count(device, limits.release)
    limits.commit(0.0)


def test_settings_without_a_separation_have_no_limits():
    assert limits_of(SETTINGS) is None
    assert not SETTINGS.limits_participation
    limits = limits_of(SETTINGS._replace(separation=3, participations=2))
    assert limits == ParticipationLimits(3, 2)


def test_a_device_waits_for_its_separation():
    limits = ParticipationLimits(separation=3)
    commit(limits, "a")  # release 1
    assert limits.release == 2
    assert [limits.may_take_part("a", release) for release in (2, 3, 4, 5)] == [
        False,
        False,
        True,
        True,
    ]
    assert limits.may_take_part("b", 2)
    commit(limits)
    commit(limits)
    limits.count("a", 4)
    assert limits.first_release("a") == 7


def test_a_device_takes_part_once_in_a_release_at_most():
    limits = ParticipationLimits(separation=1)
    limits.count("a", 1)
    assert not limits.may_take_part("a", 1)
    with pytest.raises(PrivacyLimitError, match="took part in release 1, and may again from"):
        limits.refuse("a", 1)
    assert limits.may_take_part("a", 2)
    limits.count("a", 2)  # early, for the release after
    assert limits.first_release("a") == 3


def test_a_device_takes_part_as_often_as_it_may_and_never_again():
    limits = ParticipationLimits(separation=1, participations=2)
    commit(limits, "a")
    limits.count("a", 2)
    assert limits.is_done("a")  # what is pending counts, too
    assert limits.first_release("a") == NEVER
    limits.commit(0.0)
    assert limits.why_not("a") == (
        "the device took part 2 times, as often as the plan's [privacy] allows "
        "(privacy.participations)"
    )
    with pytest.raises(ProtocolError, match="2 times") as refused:
        limits.refuse("a", 1000)
    assert refused.value.code is Code.NOT_WANTED  # devices of any age know it
    assert not limits.is_done("b")


def test_an_abandoned_round_counts_nothing():
    limits = ParticipationLimits(separation=5, participations=1)
    limits.count("a", 1)
    limits.count("b", 1)
    assert limits.abandon() == ["a", "b"]
    assert limits.release == 1
    assert limits.may_take_part("a", 1)
    assert limits.known == {}


def test_abandoning_keeps_what_counts_for_later_releases():
    limits = ParticipationLimits(separation=1)
    limits.count("a", 1)
    limits.count("b", 2)
    assert limits.abandon() == ["a"]
    assert limits.pending == {"b": [2]}
    assert limits.give_up() == ["b"]
    assert limits.pending == {}


def test_what_is_restored_counts_and_a_stricter_separation_holds_at_once():
    limits = ParticipationLimits(separation=4, participations=3)
    limits.restore(10, [("a", 9, 0), ("b", 2, 3)])
    assert limits.release == 11
    assert limits.first_release("a") == 13  # a new segment: its count begins from 0
    assert limits.first_release("b") == NEVER
    assert limits.why_not("a") == (
        "the device took part in release 9, and may again from release 13 on "
        "(privacy.separation = 4); the next is release 11"
    )


def test_a_snapshot_goes_on_where_it_was_taken():
    limits = ParticipationLimits(separation=2, participations=2)
    commit(limits, "a", "b")
    limits.count("c", 2)
    again = ParticipationLimits(separation=2, participations=2)
    again.take_up(limits.snapshot())
    assert again == limits
    again.commit(0.0)
    assert again.known["c"] == (2, 1)
    assert "c" in limits.pending  # the first one is as it was
