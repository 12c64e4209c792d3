"""Degrees and thresholds against those that Google's federated-compute has in its tests."""

from __future__ import annotations

from math import comb, floor

import pytest
from fleetlearn_protocol.secure.graph import degrees, graph_of, neighbours_of

KNOWN = [
    (100, 0.45, 0.45, True, 92, 46),
    (1000, 0.45, 0.45, True, 822, 417),
    (10, 0.33, 0.33, True, 8, 4),
    (100, 0.33, 0.33, True, 68, 34),
    (1000, 0.33, 0.33, True, 286, 150),
    (10000, 0.33, 0.33, True, 422, 221),
    (100000, 0.33, 0.33, True, 480, 251),
    (100, 0.3, 0.3, False, 92, 62),
    (1000, 0.3, 0.3, False, 872, 584),
    (100, 0.05, 0.33, True, 28, 6),
    (1000, 0.05, 0.33, True, 72, 24),
    (10000, 0.05, 0.33, True, 86, 29),
    (1000000, 0.05, 0.33, True, 102, 34),
    (100, 0.05, 0.33, False, 72, 39),
    (1000, 0.05, 0.33, False, 398, 223),
    (10, 0.33, 0.05, True, 4, 4),
    (1000, 0.33, 0.05, True, 78, 60),
    (1000, 0.33, 0.05, False, 132, 109),
]


@pytest.mark.parametrize(("devices", "hostile", "lost", "consistent", "k", "t"), KNOWN)
def test_known_degrees(
    devices: int, hostile: float, lost: float, consistent: bool, k: int, t: int
) -> None:
    assert degrees(devices, hostile, lost, consistent=consistent) == (k, t)


@pytest.mark.parametrize("devices", [6, 10, 20, 50])
@pytest.mark.parametrize(("hostile", "lost"), [(0.05, 0.1), (0.05, 0.33), (0.0, 0.1)])
def test_few_devices_have_enough_neighbours_that_stay(
    devices: int, hostile: float, lost: float
) -> None:
    """Of 10 devices of which a third vanishes, Google's program gives each 4 neighbours and takes 2
    shares: 3 of 100 devices would have no 2 neighbours left."""
    k, t = degrees(devices, hostile, lost)
    gone = floor(lost * devices + 1e-9)
    ways = sum(comb(gone, k - left) * comb(devices - gone, left) for left in range(t))
    assert devices * ways / comb(devices, k) < 2**-20


def test_neighbours_are_mutual() -> None:
    order = [f"d{number}" for number in range(9)]
    found = {device: neighbours_of(at, order, 4) for at, device in enumerate(order)}
    assert found["d0"] == ["d7", "d8", "d1", "d2"]
    for device, others in found.items():
        assert len({*others}) == 4
        assert all(device in found[other] for other in others)


def test_too_few_devices() -> None:
    with pytest.raises(ValueError, match="4 devices are too few"):
        degrees(4, 0.4, 0.4)
    with pytest.raises(ValueError, match=r"hostile \+ 2 lost may be .9 at most"):
        degrees(100, 0.5, 0.3, consistent=False)


@pytest.mark.parametrize(
    ("devices", "hostile", "lost", "consistent", "k", "t"),
    [
        (1000, 0.05, 0.33, True, 72, 24),  # as ``degrees`` says
        (4, 0.05, 0.1, True, 3, 2),
        (10, 0.05, 0.2, True, 9, 4),  # 2 to 7
        (8, 0.4, 0.3, True, 7, 4),  # 4 to 5
        (8, 0.2, 0.1, False, 7, 5),  # 5 to 6
        (3, 0.0, 0.0, True, 2, 2),
    ],
)
def test_few_devices_are_all_neighbours(
    devices: int, hostile: float, lost: float, consistent: bool, k: int, t: int
) -> None:
    assert graph_of(devices, hostile, lost, consistent=consistent) == (k, t)
    order = [f"d{number}" for number in range(devices)]
    assert len({*neighbours_of(1, order, k)} - {"d1"}) == k


@pytest.mark.parametrize(
    ("devices", "hostile", "lost", "consistent", "text"),
    [
        (3, 0.05, 0.1, True, "2 neighbours of each device must stay to hide its update, and 1 do"),
        (6, 0.2, 0.34, False, "4 neighbours of each device must stay to hide its update, and 3 do"),
        (8, 1.0, 0.0, True, "hostile 1 and lost 0 were given"),
        (33, 0.6, 0.4, True, "hostile 0.6 and lost 0.4 were given"),
    ],
)
def test_devices_that_cannot_hide_their_updates(
    devices: int, hostile: float, lost: float, consistent: bool, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        graph_of(devices, hostile, lost, consistent=consistent)
