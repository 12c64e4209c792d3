"""How far what a page showed was behind, from the moments at which it showed it."""

from __future__ import annotations

from itertools import pairwise


def behind(shown: list[tuple[int, float]], made: dict[int, float]) -> list[float]:
    """Return how long each version waited that was shown after another one: since the first version
    that was not shown yet was made. ``shown``, ``made``: when, in Unix time."""
    steps = pairwise(shown)
    return [at - made[before + 1] for (before, _), (_, at) in steps if before + 1 in made]
