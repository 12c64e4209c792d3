"""What training came to, as columns: a round may have too many devices for an object each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat, takewhile
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator import aggregator
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray


class Outcome(NamedTuple):
    """Of one device."""

    update: Vector
    """The model after training minus the one before: float32, shape (P,). Where it diverged, anything."""
    metrics: dict[str, float]
    """Means over the examples seen; only those that are numbers."""
    examples: int
    steps: int
    seen: int
    """Examples, with repeats."""
    complete: bool
    loss: float
    """The mean over the examples seen."""
    largest: float
    """The greatest magnitude in the update."""
    diverged: bool = False


LARGE = aggregator.BLOCK
"""Elements of an update that is handed on where it is, and not copied to be beside others."""
COLUMNS: dict[str, Any] = {
    "examples": np.int64,
    "steps": np.int64,
    "seen": np.int64,
    "complete": np.bool_,
    "loss": np.float64,
    "largest": np.float64,
    "diverged": np.bool_,
}
"""What a device has one number of, and its dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Of n devices: columns of ``Outcome``, each with n rows."""

    updates: NDArray[np.float32]
    """Shape (n, P)."""
    metrics: dict[str, NDArray[np.float64]]
    """No number where a device has none."""
    examples: NDArray[np.int64]
    steps: NDArray[np.int64]
    seen: NDArray[np.int64]
    complete: NDArray[np.bool_]
    loss: NDArray[np.float64]
    largest: NDArray[np.float64]
    diverged: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, rows: Sequence[int]) -> Outcomes:
        """Those rows; itself, where they are all in order."""
        return self if list(rows) == list(range(len(self))) else _map(lambda column: column[rows], [self])

    def copy(self) -> Outcomes:
        """In memory of its own."""
        return _map(np.copy, [self])

    def table(self) -> NDArray[np.float64]:
        """All columns but the updates, as rows of one array, for ``from_table``."""
        # Exact: no count reaches 2^53.
        return np.array([*(getattr(self, name) for name in COLUMNS), *self.metrics.values()], np.float64)


Take = Callable[[Sequence[int]], Outcomes]
"""Called with some jobs' places: what came of the first of them, once it is there, and of as many after it as are there
by then. Each once only."""


def columns_of(rows: Sequence[Outcome], size: int, names: Iterable[str]) -> Outcomes:
    """Of rows whose updates have ``size`` elements, with metrics of these names."""
    updates = [row.update.reshape(1, size) for row in rows]
    return Outcomes(
        updates[0] if len(rows) == 1 else np.concatenate([np.empty((0, size), np.float32), *updates]),
        {name: np.array([row.metrics.get(name, np.nan) for row in rows], np.float64) for name in names},
        **{name: np.array([getattr(row, name) for row in rows], kind) for name, kind in COLUMNS.items()},
    )


def from_table(updates: NDArray[np.float32], table: NDArray[np.float64], names: Sequence[str]) -> Outcomes:
    """What ``Outcomes.table`` was made of, with the updates and the names of the metrics."""
    columns = {name: row.astype(kind) for (name, kind), row in zip(COLUMNS.items(), table, strict=False)}
    return Outcomes(updates, dict(zip(names, table[len(COLUMNS) :], strict=True)), **columns)


NONE = columns_of([], 0, [])
"""Of no devices."""


def joined(parts: Sequence[Outcomes]) -> Outcomes:
    """One part behind the other, at least one."""
    return parts[0] if len(parts) == 1 else _map(lambda *columns: np.concatenate(columns), parts)


def _map(function: Callable[..., Any], parts: Sequence[Outcomes]) -> Outcomes:
    """The outcomes whose columns the function makes of those of all ``parts``."""
    columns = {name: function(*(getattr(part, name) for part in parts)) for name in ("updates", *COLUMNS)}
    metrics = {name: function(*(part.metrics[name] for part in parts)) for name in parts[0].metrics}
    return Outcomes(metrics=metrics, **columns)


def whole(take: Take, count: int) -> Outcomes:
    """All of what comes of so many jobs."""
    parts: list[Outcomes] = []
    while (done := sum(map(len, parts))) < count:
        parts.append(take(range(done, count)))
    return joined(parts) if parts else NONE


MISSING: tuple[Any, int] = None, 0


class Pending:
    """What comes of the jobs of one call, by their places. Nobody waits for it any more when this is gone."""

    def __init__(self, bring: Callable[[Pending, int], None]) -> None:
        """``bring``: does something for the place to come in, perhaps not enough yet."""
        self.bring = bring
        self.found: dict[int, tuple[Any, int]] = {}
        """Place -> what came in with it, and its row there. Once only."""

    def put(self, places: Iterable[int], values: Any) -> None:
        """``values``: Outcomes or a list, with a row for each; or an exception, to be raised for each."""
        self.found.update(zip(places, zip(repeat(values), count()), strict=False))

    def value(self, place: int) -> Any:
        """Of a list. Raises what was put in its place."""
        while place not in self.found:
            self.bring(self, place)
        values, row = self.found.pop(place)
        if isinstance(values, BaseException):
            raise values
        return values[row]

    def take(self, places: Sequence[int]) -> Outcomes:
        """The first's, and of those after it as many as are there. Raises what was put in the first's place."""
        while places[0] not in self.found:
            self.bring(self, places[0])
        if isinstance(self.found[places[0]][0], BaseException):
            self.value(places[0])
        first = self.found[places[0]][0]
        found = [self.found.pop(place, MISSING) for place in places]
        if all(values is first for values, _ in found):
            together: Outcomes = first.take([row for _, row in found])
            return together
        # As many as are there; of large updates those alone that are where the first is.
        large = first.updates.shape[1] >= LARGE
        there = list(takewhile(lambda row: row[0] is first or (isinstance(row[0], Outcomes) and not large), found))
        back = zip(places[len(there) :], found[len(there) :], strict=True)
        self.found.update((place, row) for place, row in back if row is not MISSING)
        parts: dict[int, list[int]] = {}
        for number, (outcomes, _) in enumerate(there):
            parts.setdefault(id(outcomes), []).append(number)
        taken = joined([there[rows[0]][0].take([there[row][1] for row in rows]) for rows in parts.values()])
        return taken.take(np.argsort([*chain.from_iterable(parts.values())]).tolist())
