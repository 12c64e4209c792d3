"""An order of computations in which a result's last steps come as early as they can.

A traced step computes all gradients, and then all new parameters. In this order each gradient
becomes a new parameter before the next gradient is made, so that they need not all be in memory at
once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence


def early_results(
    reads: Sequence[Collection[Hashable]], makes: Sequence[Collection[Hashable]]
) -> list[int]:
    """Return the places of computations in such an order, in which each comes behind those whose
    values it reads.

    reads, makes: the values that each computation reads and makes, in an order that is possible. A
    computation that makes none is no result.
    """
    maker = {value: index for index, values in enumerate(makes) for value in values}
    needed = [{maker[value] for value in values if value in maker} for values in reads]
    users = defaultdict(list)
    for index, others in enumerate(needed):
        for other in others:
            users[other].append(index)
    # computation -> the only one without users to which it leads
    results: dict[int, int | None] = {}
    for index in reversed(range(len(reads))):
        earliest = {results[user] for user in users[index] if makes[user]} or {index}
        results[index] = earliest.pop() if len(earliest) == 1 else None

    order: list[int] = []
    done: set[int] = set()
    for index in range(len(reads)):
        ready = [index]
        while ready:
            last = ready.pop()
            if last in done:
                continue
            done.add(last)
            order.append(last)
            soon = [user for user in users[last] if results[user] is not None or not makes[user]]
            ready += [user for user in soon if needed[user] <= done]
    return order
