"""Who masks with whom: a random Harary graph, and how large its degree and threshold must be.

Bell, Bonawitz, Gascon, Lepoint and Raykova, "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead" (CCS 2020), eprint 2020/704. Devices stand in a circle in random order,
and each is a neighbour of the k / 2 devices on either side. Three things must hold except with a
tiny probability, whoever of the n devices is hostile (a share of them) or lost (another share):

* the graph of the honest devices that stay is connected: 2^-41. To cut a circle, k / 2 devices in a
  row must be missing at two places; at most n (n - k - 1) / 2 pairs of places are there;
* no device has as many hostile neighbours as its secrets' threshold t: 2^-41 for all n;
* each device has at least t neighbours that stay: 2^-20 for all n.

The last two are tails of the hypergeometric distribution. ``degrees`` is for a coordinator that
tells all devices the same of who was lost. One that does not can open a single update of a sparse
graph: it tells the device's neighbours that the device stayed, and the neighbours of these that
they were lost, so that it has the device's own seed and its neighbours' masking keys. Where all
devices are neighbours, a large threshold leaves it too few devices to tell so (``graph_of``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil, exp, floor, lgamma, log
from typing import NamedTuple

from fleetlearn_protocol.messages import MOST_NEIGHBOURS

HIDING = 41
"""- log2 of the probability of each of the first two failures."""
STAYING = 20
"""- log2 of the probability of the third."""
_MARGIN = 1e-14
"""Shares such as .3 are no floats: products that are whole numbers must not fall below them."""


class Degrees(NamedTuple):
    """How a graph of devices is made."""

    neighbours: int
    """k: of each device; even."""
    threshold: int
    """t: how many shares give a secret of a device."""


def degrees(devices: int, hostile: float, lost: float, *, consistent: bool = True) -> Degrees:
    """Return the smallest number of neighbours that suffices, with its threshold.

    Args:
        devices: n, at least 4.
        hostile: Largest share of the devices that may work together with the coordinator.
        lost: Largest share of the devices that may vanish.
        consistent: Whether the coordinator tells all devices the same. False: it may not.

    Raises ValueError where no number of neighbours does.
    """
    _check_shares(hostile, lost, consistent)
    for neighbours in range(2, devices - 1, 2):
        threshold = _threshold(devices, hostile, lost, neighbours, consistent)
        if threshold is not None:
            return Degrees(neighbours, threshold)
    raise ValueError(
        f"{devices} devices are too few for a share of {hostile:g} that may be hostile and "
        f"{lost:g} that may vanish"
    )


_MOST_ALL = MOST_NEIGHBOURS + 1
"""More devices cannot all be neighbours: what is said of them does not fit into a message."""
_ALL = 32
"""Most devices of a session in which all are neighbours of each other. That costs little; and of
few devices a share is one or two devices, and one more that vanishes must not end the session."""


def graph_of(devices: int, hostile: float, lost: float, *, consistent: bool = True) -> Degrees:
    """Return how the graph of these devices is made: as ``degrees`` says, or, where they are few,
    each a neighbour of all others. Then the graph is connected whoever is missing, and the
    threshold is half way between the least that hides the secrets and the most that stay, where a
    share above 0 is one device at least.

    devices: n, at least 2. consistent: whether the coordinator tells all devices the same of who
    was lost. False: it may not, and all devices are neighbours, however many they are. The other
    arguments: as for ``degrees``. Raises ValueError where this number of devices cannot hide their
    updates, or too few would be left to unmask the sum.
    """
    if consistent and devices > _ALL:
        return degrees(devices, hostile, lost)
    if devices > _MOST_ALL:
        raise ValueError(
            "where the coordinator may tell devices different things, all are neighbours, and at "
            f"most {_MOST_ALL} devices can be"
        )
    _check_shares(hostile, lost, consistent)
    bad = max(floor((hostile + _MARGIN) * devices), hostile > 0)
    gone = max(floor((lost + _MARGIN) * devices), lost > 0)
    others = devices - 1
    stay = others - gone
    least = max(2, bad + 1) if consistent else _least_for_any_lists(devices, bad)
    if least > stay:
        raise ValueError(
            f"of {devices} devices a share of {hostile:g} may be hostile and {lost:g} may vanish: "
            f"{least} neighbours of each device must stay to hide its update, and {max(0, stay)} do"
        )
    return Degrees(others, (least + stay) // 2)


def _least_for_any_lists(devices: int, bad: int) -> int:
    """Return the least threshold with which no update is opened by itself where all devices are
    neighbours, whatever each of them is told of who was lost.

    A device's own seed and its masking key would take two lists of t devices each, with only the
    hostile ones on both. So the masking keys of all that it masked with would be needed, t at
    least, of which the hostile ones are known. Each of the others takes t - bad honest devices that
    are told that it was lost, and each of these is told so of n - 1 - t at most.
    """
    others, least = devices - 1, 2
    while 2 * least <= others + bad or (least - bad) ** 2 <= (devices - bad) * (others - least):
        least += 1
    return least


def _check_shares(hostile: float, lost: float, consistent: bool) -> None:
    worst = hostile + (lost if consistent else 2 * lost)
    if not (0 <= hostile < 1 and 0 <= lost < 1 and worst <= 0.9):
        text = "hostile + lost" if consistent else "hostile + 2 lost"
        raise ValueError(
            f"hostile {hostile:g} and lost {lost:g} were given; {text} may be .9 at most"
        )


def _threshold(
    devices: int, hostile: float, lost: float, neighbours: int, consistent: bool
) -> int | None:
    bad = floor((hostile + _MARGIN) * devices)
    gone = floor((lost + _MARGIN) * devices)
    if _log_cut(devices, bad + gone, neighbours) >= -HIDING * log(2):
        return None
    hiding, staying = 2.0**-HIDING / devices, 2.0**-STAYING / devices
    least = _most_likely(devices, bad, neighbours, hiding)
    stay = ceil((1 - lost - _MARGIN) * devices)
    most = _fewest_likely(devices, stay, neighbours, staying)
    if not consistent:
        least = ceil((least + neighbours - 1.25) / 2)
    threshold = max(least + 1, 2)  # one share alone must never be a device's secret
    return threshold if threshold <= most else None


def _log_cut(devices: int, missing: int, neighbours: int) -> float:
    """Return the log of a bound on the probability that the graph falls apart where this many
    devices are missing."""
    if neighbours > missing:
        return float("-inf")
    places = log(devices) + log(devices - neighbours - 1) - log(2)
    return (
        places
        + lgamma(missing + 1)
        + lgamma(devices - neighbours + 1)
        - lgamma(devices + 1)
        - lgamma(missing - neighbours + 1)
    )


def _probabilities(devices: int, marked: int, drawn: int) -> Iterator[tuple[int, float]]:
    """Yield how many of the drawn devices are marked, and with which probability."""

    def log_choose(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    others, total = devices - marked, log_choose(devices, drawn)
    for found in range(max(0, drawn - others), min(drawn, marked) + 1):
        ways = log_choose(marked, found) + log_choose(others, drawn - found)
        yield found, exp(ways - total)


def _most_likely(devices: int, marked: int, drawn: int, tail: float) -> int:
    """Return the least number that more marked ones exceed with at most the probability
    ``tail``."""
    rows = [*_probabilities(devices, marked, drawn)][::-1]
    above = accumulate(chance for _, chance in rows)
    return next(found for (found, _), chance in zip(rows, above, strict=True) if chance > tail)


def _fewest_likely(devices: int, marked: int, drawn: int, tail: float) -> int:
    """Return the least number up to which the probability is at least ``tail``."""
    rows = [*_probabilities(devices, marked, drawn)]
    up_to = accumulate(chance for _, chance in rows)
    return next(found for (found, _), chance in zip(rows, up_to, strict=True) if chance >= tail)


def neighbours_of(place: int, order: Sequence[str], neighbours: int) -> list[str]:
    """Return the neighbours of the device at this place of the circle. ``neighbours``: how many;
    even, or all others."""
    half, count = neighbours // 2, len(order)
    if neighbours >= count - 1:
        return [name for at, name in enumerate(order) if at != place]
    return [order[(place + step) % count] for step in range(-half, half + 1) if step]
