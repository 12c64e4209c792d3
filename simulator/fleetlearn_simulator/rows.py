"""Many rows at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

Row = TypeVar("Row", bound=tuple[Any, ...])


def rows_of(kind: type[Row], *columns: Iterable[Any]) -> list[Row]:
    """NamedTuples of that kind, from the columns of their fields: in less than half the time of calling it row by row.

    Columns may be endless (``itertools.repeat``), but for the first, which says how many rows there are.
    """
    return list(map(partial(tuple.__new__, kind), zip(*columns, strict=False)))
