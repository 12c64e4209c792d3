"""Whether shares are enough, against the coordinator's own unmasking; and the order of circles."""

from __future__ import annotations

from random import Random

import pytest
from fleetlearn_protocol.secure.graph import Degrees, neighbours_of
from fleetlearn_simulator.fleet.pairwise_circle import circle_order, lacking_shares


def by_hand(
    degrees: Degrees, order: list[int], sharers: set[int], survivors: set[int], told: set[int]
) -> bool:
    """Whether a secret of one device lacks shares, device by device."""
    names = [str(device) for device in order]
    for place, device in enumerate(order):
        near = {int(name) for name in neighbours_of(place, names, degrees.neighbours)}
        needed = device in survivors or (device in sharers and near & survivors)
        if needed and len(near & told) < degrees.threshold:
            return True
    return False


@pytest.mark.parametrize("count", [5, 6, 12])
def test_it_is_said_that_shares_lack_where_a_secret_has_too_few(count: int) -> None:
    draw, seen = Random(count), set()
    for _ in range(300):
        degrees = Degrees(min(draw.choice([4, 6]), count - 1), draw.randint(2, 3))
        order = draw.sample(range(100), count)
        sharers = {device for device in order if draw.random() < 0.9}
        survivors = {device for device in sharers if draw.random() < 0.8}
        told = {device for device in survivors if draw.random() < 0.8}
        expected = by_hand(degrees, order, sharers, survivors, told)
        found = lacking_shares(degrees, order, sharers, survivors, told)
        assert (found is not None) == expected
        seen.add(expected)
    assert seen == {True, False}


def test_the_words_name_the_device_and_the_numbers() -> None:
    order = [3, 1, 4, 7, 5]
    found = lacking_shares(Degrees(2, 2), order, order, [3, 1, 4, 7], [3, 4, 7])
    assert found == (
        "the shares of the own seed of d00000003 are too few: 0 came, and 2 are needed"
    )
    everybody = lacking_shares(Degrees(2, 2), order, order, order, order)
    assert everybody is None


def test_each_round_has_another_order_of_the_same_devices() -> None:
    devices = [*range(50)]
    orders = [circle_order(7, round, devices) for round in (1, 2)]
    assert orders[0] != orders[1]
    assert all(sorted(order) == devices for order in orders)
    assert circle_order(7, 1, devices) == orders[0]
