"""A process beside the coordinator: what it is sent, what it answers, and what its deaths cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.service import worker_process
from fleetlearn_coordinator.service.worker_process import (
    MAX_DEATHS,
    PIECE,
    WorkerProcess,
    check_installed,
)

REVERSING = """
import sys, os
from fleetlearn_device.worker import serve_jobs

def do_job(job, content):
    with open({starts!r} + "/jobs", "a") as file:
        print(os.getpid(), job, file=file)
    deaths = job.get("deaths", 0)
    if len(open({starts!r} + "/jobs").readlines()) <= deaths:
        os.kill(os.getpid(), 9)
    return {{"job": job}}, content.read(content.left)[::-1]

sys.exit(serve_jobs(lambda: do_job))
"""


class Stored:
    """Bytes in the store that may have been cut short."""

    def __init__(self, content: bytes, size: int | None = None) -> None:
        self.content, self.size = content, len(content) if size is None else size

    def read(self, begin: int, size: int) -> bytes:
        return self.content[begin : begin + size]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], WorkerProcess]:
    monkeypatch.setattr(worker_process, "PAUSE", 0.0)
    program = REVERSING.format(starts=str(tmp_path))
    (tmp_path / "reversing_worker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda: WorkerProcess("reversing_worker")


def run(worker: WorkerProcess, work: Coroutine[Any, Any, Any]) -> Any:
    async def and_close() -> Any:
        try:
            return await work
        finally:
            await worker.close()

    return asyncio.run(and_close())


def test_content_goes_in_and_comes_out(make: Callable[[], WorkerProcess], tmp_path: Path) -> None:
    worker, large = make(), bytes(range(256)) * 4096 + b"end"
    assert len(large) > PIECE

    async def ask_twice() -> list[Any]:
        whole = await worker.ask({"name": "whole"}, [b"begin", Stored(large)])
        return [whole, await worker.ask({"name": "empty"})]

    whole, empty = run(worker, ask_twice())
    assert whole == ({"job": {"name": "whole"}}, (b"begin" + large)[::-1])
    assert empty == ({"job": {"name": "empty"}}, b"")
    pids = {line.split()[0] for line in (tmp_path / "jobs").read_text().splitlines()}
    assert len(pids) == 1, "one process did both"


def test_a_process_that_dies_is_replaced(make: Callable[[], WorkerProcess]) -> None:
    worker, deaths = make(), list[int]()
    job = {"deaths": MAX_DEATHS - 1}
    assert run(worker, worker.ask(job, [b"ab"], deaths.append)) == ({"job": job}, b"ba")
    assert deaths == [1, 2]


def test_a_job_of_which_each_process_dies_is_given_up(make: Callable[[], WorkerProcess]) -> None:
    worker, deaths = make(), list[int]()
    answer = run(worker, worker.ask({"deaths": MAX_DEATHS}, [b"ab"], deaths.append))
    assert answer.fields == {"error": "3 processes died"}
    assert deaths == [1, 2, 3]


def test_content_that_was_cut_short_ends_the_process(make: Callable[[], WorkerProcess]) -> None:
    """It has read half a job, and would take the next one for its rest."""
    worker = make()

    async def ask() -> Any:
        with pytest.raises(OSError, match="3 of 5 bytes are there"):
            await worker.ask({}, [Stored(b"abc", 5)])
        return await worker.ask({"name": "next"}, [b"ab"])

    assert run(worker, ask()) == ({"job": {"name": "next"}}, b"ba")


def test_onnx_runtime_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "find_spec", lambda name: None)
    text = r'walking needs ONNX Runtime: pip install "fleetlearn\[evaluation\]", or sit down'
    with pytest.raises(PlanError, match=text):
        check_installed("walking", "sit down")
