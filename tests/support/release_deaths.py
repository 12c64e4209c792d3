"""For tests: moments at which a process may die as it releases what a private round made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from fleetlearn_coordinator.aggregation.privacy import round_release
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.ledger import ModelMade, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger


class KilledError(Exception):
    """Stands for SIGKILL: the process writes nothing more."""


def a_release_dies(patch: pytest.MonkeyPatch) -> None:
    release = round_release.release

    def dying(*arguments: Any) -> Any:
        release(*arguments)
        raise KilledError

    patch.setattr(round_release, "release", dying)


def a_file_dies(patch: pytest.MonkeyPatch) -> None:
    save = FileBlobs.save_model

    def dying(*arguments: Any) -> Any:
        save(*arguments)
        raise KilledError

    patch.setattr(FileBlobs, "save_model", dying)


def a_batch_dies(patch: pytest.MonkeyPatch, after: bool) -> None:
    write = SqliteLedger.write

    def dying(ledger: SqliteLedger, rows: Sequence[Row]) -> None:
        closes = any(isinstance(row, ModelMade) for row in rows)
        if after or not closes:
            write(ledger, rows)
        if closes:
            raise KilledError

    patch.setattr(SqliteLedger, "write", dying)


DEATHS = {
    "the noise is drawn": a_release_dies,
    "the model's file is written": a_file_dies,
    "the rows are not written": partial(a_batch_dies, after=False),
    "the rows are written": partial(a_batch_dies, after=True),
}
"""Moment -> what makes the process die then."""
