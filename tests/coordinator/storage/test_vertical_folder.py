"""A vertical run's data directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.vertical_folder import (
    VerticalFolder,
    VerticalStatus,
    newest_model,
    read_vertical_status,
)
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey

TERMS, BUNDLE = "a" * 64, "b" * 64


def part(step: int) -> KeptPart:
    return KeptPart(step, np.full(2, step, np.float32), np.zeros(0, np.float32))


def test_a_run_is_found_again_and_is_one_with_these_terms_alone(tmp_path: Path) -> None:
    folder = VerticalFolder(tmp_path / "data", TERMS)
    run = folder.record.run
    folder.record.alignment, folder.record.rows = "c" * 64, 7
    folder.save_record()
    with pytest.raises(StoreError, match="is in use by another coordinator"):
        VerticalFolder(tmp_path / "data", TERMS)
    folder.close()
    again = VerticalFolder(tmp_path / "data", TERMS)
    assert (again.record.run, again.record.rows) == (run, 7)
    again.close()
    with pytest.raises(StoreError, match="has a run with other terms"):
        VerticalFolder(tmp_path / "data", "d" * 64)
    VerticalFolder(tmp_path / "data", TERMS).close()  # the refusal has left no lock


def test_the_newest_two_tops_are_kept(tmp_path: Path) -> None:
    folder = VerticalFolder(tmp_path, TERMS)
    folder.record.alignment = "c" * 64
    folder.save_record()
    key = PartKey(folder.record.run, BUNDLE, "c" * 64)
    for step in (5, 10, 15):
        folder.keep(key, part(step))
    assert folder.checkpoints(key) == (10, 15)
    assert folder.load(key, 5) is None
    assert newest_model(tmp_path, BUNDLE).step == 15
    (tmp_path / "model-0000000015.part").write_bytes(b"damaged")
    assert folder.checkpoints(key) == (10,)
    assert newest_model(tmp_path, BUNDLE).step == 10
    with pytest.raises(StoreError, match="keeps no trained model of that bundle"):
        newest_model(tmp_path, "e" * 64)
    folder.close()


def test_status_says_who_is_there_while_the_run_is_served(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no run yet"):
        read_vertical_status(tmp_path)
    folder = VerticalFolder(tmp_path, TERMS)
    status = VerticalStatus("r", "training", 3, 9, 2, 7, 1, {"bank": True}, 0.5, {}, "")
    folder.write_status(status)
    assert read_vertical_status(tmp_path) == status
    folder.close()
    found = read_vertical_status(tmp_path)
    assert (found.served, found.parties) == (False, {"bank": False})
