"""A helper that dies while it answers.

python crash_helper.py POINT N MISTAKE serve HELPER.toml
"""

from __future__ import annotations

import sys
from asyncio import StreamWriter
from typing import Any
from unittest.mock import patch

import h11
from dying import Point, signal_at
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.secure import helper
from fleetlearn_coordinator.secure.helper_store import HelperStore
from fleetlearn_coordinator.storage.database import Database


def commits(database: Database, statement: str, *values: Any) -> bool:
    """Not the commits of nothing, when the file is opened."""
    return statement == "COMMIT" and database.total_changes > 0


def is_a_sum(connection: h11.Connection, event: Any) -> bool:
    """Not the helper's card, which the test asks for to know that the helper listens."""
    return isinstance(event, h11.Data) and len(event.data) > SUM


def is_written(writer: StreamWriter, data: bytes) -> bool:
    return len(data) > SUM


SUM = 1000
"""Bytes: a sum has more of them."""
POINTS = {
    "nothing is checked": Point(helper, "check_bounds", False),
    "all is checked": Point(HelperStore, "on_record", False),
    "nothing is written": Point(HelperStore, "record", False),
    "half is written": Point(Database, "executemany", True),
    "all is written, and not committed": Point(HelperStore, "record", True),
    "the commit begins": Point(Database, "execute", False, commits),
    "the commit is over": Point(Database, "execute", True, commits),
    "the masks are added": Point(helper, "sum_of_masks", True),
    "the answer begins": Point(h11.Connection, "send", True, is_a_sum),
    "the answer is on its way": Point(StreamWriter, "write", True, is_written),
}
"""Where a helper dies -> in the order of one request."""


def remember_late() -> None:
    """Plant a mistake: what was answered is written at the next request."""
    right, late = HelperStore.record, list[tuple[Any, ...]]()

    def record(store: HelperStore, *arguments: Any) -> None:
        for before in late:
            right(store, *before)
        late[:] = [arguments]

    patch.object(HelperStore, "record", record).start()


def commit_never() -> None:
    """Plant a mistake: what was answered is not committed."""
    right = Database.execute

    def execute(database: Database, statement: str, values: Any = ()) -> Any:
        return right(database, "ROLLBACK" if statement == "COMMIT" else statement, values)

    patch.object(Database, "execute", execute).start()


MISTAKES = {"none": lambda: None, "remembers late": remember_late, "commits never": commit_never}


if __name__ == "__main__":
    MISTAKES[sys.argv[3]]()
    signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    app(["helper", *sys.argv[4:]])
