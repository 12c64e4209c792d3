"""The limits of held-out evaluation: how many models wait for it, and how many processes may die of
one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.service import worker_process
from fleetlearn_coordinator.service.held_out import MAX_WAITING, HeldOut, HeldOutMember
from fleetlearn_coordinator.service.worker_process import MAX_DEATHS
from fleetlearn_coordinator.storage.file_blobs import FileBlobs, model_path
from fleetlearn_coordinator.storage.file_held_out import FileHeldOutResults
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol import open_bundle
from peers import write_test_bundle

Make = Callable[[], HeldOut]
DYING = """#!/bin/sh
echo started >> {folder}/started
while read job; do
    head -c 16 > /dev/null  # four elements
    case "$job" in *{deadly}*) exit 1;; esac
    echo '{{"examples": 10, "loss_sum": 5.0, "metric_sums": {{"accuracy": 7.0}}}}'
done
"""
"""A process that dies when it is to measure one of the models."""


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[FileBlobs]:
    (tmp_path / "held_out").mkdir()
    with closing(FileBlobs(tmp_path)) as found:
        yield found


@pytest.fixture
def make(tmp_path: Path, blobs: FileBlobs) -> Make:
    bundle = open_bundle(write_test_bundle(tmp_path / "test.bundle", size=4))
    results, data = FileHeldOutResults(tmp_path), tmp_path / "data.npz"
    members = [HeldOutMember("", bundle, 0, str)]
    return lambda: HeldOut(members, results, data, blobs, lambda version: version > 0)


def save_models(blobs: FileBlobs, versions: range) -> None:
    for version in versions:
        blobs.save_model(version, {"parameters": np.zeros(4, np.float32)})


def test_no_more_than_so_many_models_wait(blobs: FileBlobs, make: Make) -> None:
    """Where training is faster than measuring, the oldest are passed over."""
    save_models(blobs, range(5))
    assert make().waiting() == [1, 2, 3, 4], "the initial model is not due"
    save_models(blobs, range(5, 31))
    assert make().waiting() == list(range(31 - MAX_WAITING, 31))


def test_a_model_that_so_many_processes_died_of_is_left_out(
    tmp_path: Path,
    blobs: FileBlobs,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_models(blobs, range(4))
    program = tmp_path / "dying.sh"
    program.write_text(DYING.format(folder=tmp_path, deadly=model_path(tmp_path, 2).name))
    program.chmod(0o755)
    monkeypatch.setattr(worker_process.sys, "executable", str(program))
    monkeypatch.setattr(worker_process, "PAUSE", 0.0)
    measured: list[dict[str, float]] = []

    async def measure() -> HeldOut:
        beside = make()
        beside.measured = lambda version, metrics: measured.append(metrics)
        try:
            await beside.measure_all()
        finally:
            await beside.close()
        return beside

    with caplog.at_level(logging.ERROR):
        beside = asyncio.run(measure())
    assert beside.waiting() == []
    assert (
        f"model version 2 is not measured on {tmp_path}/data.npz: {MAX_DEATHS} processes died"
        in caplog.text
    )
    assert sorted(find_storage(tmp_path).held_out.read_all()) == [1, 3]
    assert measured == [{"loss": 0.5, "accuracy": 0.7}] * 2
    starts = (tmp_path / "started").read_text().split()
    assert len(starts) == MAX_DEATHS + 1, (
        "one measured version 1 and died of 2, the last one measured 3"
    )
    assert make().waiting() == [2], "the next coordinator tries again"
