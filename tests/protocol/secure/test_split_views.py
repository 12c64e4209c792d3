"""A coordinator that tells each device something else of who was lost, to open one update."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.secure import shamir
from fleetlearn_protocol.secure.graph import Degrees, graph_of, neighbours_of
from fleetlearn_protocol.secure.masks import MaskAdder
from fleetlearn_protocol.secure.pairwise import PairwiseDevice, mask_seed, sign_of

SESSION = b"s" * 32


def most_told_lost(devices: int, graph: Degrees) -> dict[str, set[str]]:
    """Return device -> which neighbours it is told were lost: together so many lists that the
    masking keys of the target's nearest neighbours can be put together, each as short as it can
    be."""
    names = names_of(devices)
    lists: dict[str, set[str]] = {name: set() for name in names}
    for name in nearest(names, graph):
        near = [each for each in neighbours(names, name, graph) if each != names[0]]
        for each in sorted(near, key=lambda one: len(lists[one]))[: graph.threshold]:
            lists[each].add(name)
    return lists


def names_of(devices: int) -> list[str]:
    return [f"d{number:03}" for number in range(devices)]


def neighbours(names: list[str], name: str, graph: Degrees) -> list[str]:
    return neighbours_of(names.index(name), names, graph.neighbours)


def nearest(names: list[str], graph: Degrees) -> list[str]:
    """The fewest neighbours that the first device masks with."""
    near = neighbours(names, names[0], graph)
    return sorted(near, key=lambda name: min(names.index(name), names[::-1].index(name)))[
        : graph.threshold
    ]


def opens_one(devices: int, graph: Degrees) -> bool:
    """Return whether the first device's update is opened; False where lists as long are refused."""
    lost = most_told_lost(devices, graph)
    if max(map(len, lost.values())) > graph.neighbours - graph.threshold:
        return False
    names = names_of(devices)
    near = {name: neighbours(names, name, graph) for name in names}
    few, (target, *others) = nearest(names, graph), names
    devices_ = {name: PairwiseDevice(name) for name in names}
    keys = {name: device.keys() for name, device in devices_.items()}
    sealed = {
        name: device.shares(SESSION, {each: keys[each] for each in near[name]}, graph.threshold)
        for name, device in devices_.items()
    }
    words = np.arange(7, 12, dtype=np.uint32)
    masked = {
        name: device.masked(
            words, {each: sealed[each][name] for each in (few if name == target else near[name])}
        )
        for name, device in devices_.items()
    }
    told = {
        name: devices_[name].unmasking(SESSION, {*near[name]} - lost[name], lost[name])
        for name in others
    }

    def secret(name: str, which: int) -> bytes:
        places = {each: place for place, each in enumerate(sorted(near[name]), 1)}
        found = [(places[each], told[each][which].get(name)) for each in near[name] if each in told]
        shares = [(place, share) for place, share in found if share is not None]
        return shamir.combine(dict(shares[: graph.threshold]))

    found, masks = masked[target].copy(), MaskAdder(len(words))
    masks.add(found, secret(target, 0), -1)
    for name in few:
        private = X25519PrivateKey.from_private_bytes(secret(name, 1))
        masks.add(found, mask_seed(private, keys[target].masking, SESSION), -sign_of(target, name))
    return bool((found == words).all())


@pytest.mark.parametrize("devices", [4, 6, 8, 20, 33, 60, 97])
@pytest.mark.parametrize(("hostile", "lost"), [(0.0, 0.1), (0.05, 0.1), (0.05, 0.25)])
def test_no_lists_open_one_update_where_the_plan_is_made_for_it(
    devices: int, hostile: float, lost: float
) -> None:
    try:
        graph = graph_of(devices, hostile, lost, consistent=False)
    except ValueError:
        assert (devices, lost) in {(4, 0.1), (4, 0.25), (6, 0.25), (8, 0.25)}, "too few of them"
        return
    assert not opens_one(devices, graph)


@pytest.mark.parametrize("devices", [7, 10, 31, 60, 97])
def test_nor_where_two_thirds_of_all_devices_must_stay(devices: int) -> None:
    """What an owner can demand (``secure.minimum``), whatever the graph."""
    threshold = 2 * devices // 3 + 1
    for neighbours in {threshold, devices - 1}:
        assert not opens_one(devices, Degrees(neighbours, threshold))


@pytest.mark.parametrize(
    ("devices", "graph"),
    [
        (33, Degrees(8, 5)),  # more than half of the neighbours give a secret
        (100, Degrees(26, 16)),
        (10, Degrees(9, 5)),
    ],
)
def test_in_other_graphs_they_do(devices: int, graph: Degrees) -> None:
    """The cheat is one: more than half of a device's neighbours are not enough. No device could
    have seen that anything was wrong."""
    assert opens_one(devices, graph)


def test_more_devices_are_not_all_neighbours() -> None:
    with pytest.raises(ValueError, match="at most 97 devices can be"):
        graph_of(98, 0.05, 0.1, consistent=False)
