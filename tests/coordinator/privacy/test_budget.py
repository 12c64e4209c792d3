"""What a run has spent: vectors, worked by hand; then any order of what happens to a run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.privacy.budget import (
    PrivacyAccount,
    Segment,
    begin_segment,
    make_account,
    releases_left,
    spent,
)
from hypothesis import given, settings
from hypothesis import strategies as st

DELTA = 1e-6


def segment(noise: float = 1.0, releases: int = 0, **more: Any) -> Segment:
    usual: dict[str, Any] = {"mechanism": "gaussian", "separation": 1, "planned": 100}
    usual["participations"] = 10_000
    return Segment(noise=noise, releases=releases, **(usual | more))


@pytest.mark.parametrize(
    ("segments", "epsilon"),
    [
        ([], 0.0),
        ([segment(1.0, 0)], 0.0),
        # Vectors of a Gaussian mechanism at delta 1e-6: sigma / sensitivity 1, 2 and 4.
        ([segment(1.0, 1)], 4.8866),
        ([segment(2.0, 1)], 2.2541),
        ([segment(4.0, 1)], 1.0607),
        # mu^2 = 16 / 16 of a device that is in each of sixteen releases
        ([segment(4.0, 16)], 4.8866),
        # at most four times, or in each fourth release
        ([segment(4.0, 16, participations=4)], 2.2541),
        ([segment(4.0, 16, separation=4)], 2.2541),
        ([segment(4.0, 13, separation=4)], 2.2541),
        ([segment(4.0, 16, separation=4, participations=1)], 1.0607),
        # mu^2 = 4 / 64 + 3 / 16 = 1 / 4, a device's cap being counted in each segment
        ([segment(8.0, 4, participations=4), segment(4.0, 9, participations=3)], 2.2541),
        # On the device: one update in each round, whether it counts or not.
        ([segment(4.0, 4, mechanism="local")], 2.2541),
        ([segment(4.0, 3, mechanism="local", abandoned=1)], 2.2541),
        ([segment(4.0, 0, mechanism="local", abandoned=4)], 2.2541),
        ([segment(4.0, 4, mechanism="local", participations=1, separation=4)], 2.2541),
        # Under the masks: as where the coordinator adds it, and each sum that came to no release.
        ([segment(4.0, 16, mechanism="distributed")], 4.8866),
        ([segment(4.0, 16, mechanism="distributed", separation=4)], 2.2541),
        ([segment(4.0, 12, mechanism="distributed", separation=4, abandoned=1)], 2.2541),
        ([segment(4.0, 0, mechanism="distributed", participations=1, abandoned=4)], 2.2541),
    ],
)
def test_vectors(segments: list[Segment], epsilon: float) -> None:
    assert spent(segments, DELTA) == pytest.approx(epsilon, abs=1e-4)


def test_a_larger_delta_allows_a_smaller_epsilon() -> None:
    assert spent([segment(1.0, 1)], 1e-5) < spent([segment(1.0, 1)], 1e-6)


def test_releases_left() -> None:
    # mu = 1 is spent by sixteen releases: epsilon 4.88655
    left = releases_left([segment(4.0)], 4.8866, DELTA, 1000)
    assert left == 16
    assert releases_left([segment(4.0, 10)], 4.8866, DELTA, 1000) == 6
    assert releases_left([segment(4.0, 16)], 4.8866, DELTA, 1000) == 0
    assert releases_left([segment(4.0, 40)], 4.8866, DELTA, 1000) == 0
    assert releases_left([segment(4.0, 10)], 4.8866, DELTA, 5) == 5
    # 8 releases of twice the mu^2 are gone, and 8 of its sixteenths are left
    assert releases_left([segment(4.0, 8), segment(4.0)], 4.8866, DELTA, 1000) == 8


def test_no_release_costs_more_once_no_device_may_take_part_again() -> None:
    done = segment(2.0, 3, participations=1)
    assert releases_left([done], 2.26, DELTA, 500) == 500


def test_a_segment_goes_on_under_the_same_rules() -> None:
    first, other = segment(4.0, 3), segment(2.0)
    assert begin_segment([], segment(4.0)) == [segment(4.0)]
    assert begin_segment([first], segment(4.0)) == [first]
    assert begin_segment([first], other) == [first, other]
    # A plan that was changed, and changed back before a release was made.
    assert begin_segment([first, other], segment(3.0)) == [first, segment(3.0)]
    assert begin_segment([first, other], segment(4.0)) == [first]
    assert begin_segment([first, other.after(1)], segment(4.0))[2:] == [segment(4.0)]


def test_a_segment_that_has_ended_does_not_go_on() -> None:
    ended = segment(4.0, 3, rules="")
    assert begin_segment([ended, segment(4.0, rules="a")], segment(4.0, rules="a")) == [
        ended,
        segment(4.0, rules="a"),
    ]


PARAMETERS = st.builds(
    segment,
    noise=st.floats(0.5, 20.0),
    separation=st.integers(1, 5),
    participations=st.integers(1, 20),
    mechanism=st.sampled_from(["gaussian", "local", "distributed"]),
)


EVENTS = st.one_of(st.sampled_from(["release", "abandon", "abandon seen", "restart"]), PARAMETERS)


@settings(max_examples=40)
@given(st.lists(EVENTS, max_size=20))
def test_what_is_spent_never_falls(happened: list[Any]) -> None:
    """Whatever the order of releases, abandoned rounds, restarts and changed plans. A roll back
    changes nothing."""
    account, releases = make_account([segment()], 50.0, DELTA), 0
    accounts = [account]
    for event in happened:
        match event:
            case "release":
                account = account.after_release()
                releases += 1
            case "abandon":
                account = account.after_abandoned()
            case "abandon seen":
                account = account.after_abandoned(seen=True)
            case "restart":
                account = msgspec.json.decode(msgspec.json.encode(account), type=PrivacyAccount)
            case _:
                segments = begin_segment(account.segments, event)
                account = make_account(segments, account.budget, account.delta)
        accounts.append(account)
        assert account.releases == releases
    assert account == make_account(account.segments, account.budget, account.delta)
    for earlier, later in pairwise(accounts):
        assert later.epsilon >= earlier.epsilon - 1e-9
        assert later.rounds >= earlier.rounds


@settings(max_examples=40)
@given(st.lists(PARAMETERS, min_size=1, max_size=3), st.floats(0.1, 10.0), st.integers(1, 30))
def test_releases_left_are_all_that_fit(
    parameters: list[Segment], epsilon: float, most: int
) -> None:
    segments = [each.after(2) for each in parameters]
    left = releases_left(segments, epsilon, DELTA, most)
    after = [spent([*segments[:-1], segments[-1].after(n)], DELTA) for n in range(most + 2)]
    assert left == most or after[left + 1] > epsilon
    assert left == 0 or after[left] <= epsilon


@pytest.mark.parametrize("seen", [False, True])
def test_a_sum_that_was_seen_costs_more_than_a_release_that_few_may_be_in(seen: bool) -> None:
    """mu^2 of 16 allows 64 releases of each fourth of which a device is in one; a sum that came to
    no release counts for every device, as four of them."""
    terms: dict[str, Any] = {"mechanism": "distributed", "separation": 4}
    account = make_account([segment(4.0, **terms)], 4.8866, DELTA)
    assert account.left == 64
    after = account.after_abandoned(seen=seen)
    assert (after.left, after.rounds) == ((60, 1) if seen else (64, 0))
    # Where no device may take part once more, releases cost nothing, and sums that are seen do.
    capped = make_account([segment(4.0, **terms | {"participations": 15})], 4.8866, DELTA)
    assert capped.left is None
    for _ in range(2 * seen):
        capped = capped.after_abandoned(seen=True)
    assert capped.left == (56 if seen else None)


def test_an_account_counts_its_releases() -> None:
    account = make_account([segment(4.0)], 4.8866, DELTA)
    assert (account.epsilon, account.left, account.releases) == (0.0, 16, 0)
    for _ in range(16):
        account = account.after_release()
    assert (account.left, account.releases) == (0, 16)
    assert account.epsilon == pytest.approx(4.8866, abs=1e-4)
    assert account.epsilon <= 4.8866
    again = make_account(account.segments, account.budget, account.delta)
    assert again == account
    assert make_account(account.segments, 2.0, DELTA).left == 0  # a smaller budget
    assert make_account(account.segments, 9.0, DELTA).left > 0  # type: ignore[operator]
    assert make_account(account.segments, None, DELTA).left is None
    # No device may take part once more: further releases cost nothing.
    assert make_account([segment(4.0, participations=16)], 4.8866, DELTA).left is None
