"""A bounded list of rows that grows at its end, and can say what came since somebody looked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any


class GrowingList:
    """The last rows of a list. Rows are values that JSON has, and are not changed once added."""

    def __init__(self, most: int) -> None:
        """``most``: rows that are kept."""
        self.rows: deque[Any] = deque(maxlen=most)
        self.count = 0
        """How many rows were added in all."""

    @property
    def most(self) -> int:
        """How many rows are kept at most."""
        assert self.rows.maxlen is not None
        return self.rows.maxlen

    def add(self, row: Any) -> None:
        """Add a row. The first one is forgotten where the list is full."""
        self.rows.append(row)
        self.count += 1

    def extend(self, rows: Iterable[Any]) -> None:
        """Add rows, one after the other."""
        for row in rows:
            self.add(row)

    def since(self, count: int) -> list[Any]:
        """Return the rows that were added after the first ``count``, as far as they are kept."""
        new = min(self.count - count, len(self.rows))
        return list(islice(self.rows, len(self.rows) - new, None))
