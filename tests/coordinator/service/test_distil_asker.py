"""Who has the worker process distil: when it asks, when it asks again, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.service import distil_asker, worker_process
from fleetlearn_coordinator.service.distil_asker import DistilAsker
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.distilling import DistilQuestion
from fleetlearn_coordinator.service.worker_process import WorkerAnswer, WorkerProcess
from fleetlearn_protocol.distillation import DistillationJob

WORKER = """
import os, sys, time
from fleetlearn_device.worker import serve_jobs

def do_job(job, content):
    with open({folder!r} + "/jobs", "a") as file:
        print(job["seed"], file=file)
    if job["seed"] == 1 and len(open({folder!r} + "/jobs").readlines()) < 3:
        raise OSError("the file is gone")
    if job["seed"] == 2:
        time.sleep(600)
    return {{"seed": job["seed"]}}, content.read(content.left)

sys.exit(serve_jobs(lambda: do_job))
"""


class Waiting:
    """A run's distillation, as the asker knows it."""

    def __init__(self) -> None:
        self.question: DistilQuestion | None = None
        self.changed: Callable[[], None] = lambda: None

    def ask(self, seed: int | None) -> None:
        fields: dict[str, Any] = {"steps": 1, "batch_size": 1, "lr": 1.0, "temperature": 1.0}
        self.question = None
        if seed is not None:
            job = DistillationJob(seed=seed, students=(0,), teachers=(0,), **fields)
            self.question = DistilQuestion(1, job, [b"model"])
        self.changed()


class Asked:
    """An asker, and what it heard."""

    def __init__(self) -> None:
        self.waiting, self.heard = Waiting(), list[WorkerAnswer]()
        self.failed = list[Exception]()
        self.worker = WorkerProcess("distilling_worker")
        waiting: Any = self.waiting
        log, failed = RunLog(), self.failed.append
        self.asker = DistilAsker(waiting, self.worker, log, self._answered, failed)

    def _answered(self, question: DistilQuestion, answer: WorkerAnswer) -> None:
        self.heard.append(answer)
        if "error" not in answer.fields:
            self.waiting.ask(None)  # as a run does, which goes on

    async def hear(self, count: int) -> list[WorkerAnswer]:
        async with asyncio.timeout(60):
            while len(self.heard) < count:
                await asyncio.sleep(0.005)
        return self.heard


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the process writes which jobs it was given."""
    monkeypatch.setattr(worker_process, "PAUSE", 0.0)
    monkeypatch.setattr(distil_asker, "FIRST_PAUSE", 0.01)
    (tmp_path / "distilling_worker.py").write_text(WORKER.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "jobs"


def test_a_question_is_asked_once(jobs: Path) -> None:
    async def ask() -> None:
        asked = Asked()
        asked.waiting.ask(5)
        asked.asker.look()  # harmless
        (answer,) = await asked.hear(1)
        assert answer == ({"seed": 5}, b"model")
        asked.waiting.ask(6)
        assert (await asked.hear(2))[1] == ({"seed": 6}, b"model")
        await asked.asker.close()
        assert not asked.failed

    asyncio.run(ask())
    assert jobs.read_text().split() == ["5", "6"]


def test_what_could_not_be_done_is_asked_again(jobs: Path) -> None:
    async def ask() -> None:
        asked = Asked()
        asked.waiting.ask(1)
        answers = await asked.hear(3)
        errors = [answer.fields.get("error") for answer in answers]
        assert errors == ["the file is gone", "the file is gone", None]
        await asked.asker.close()

    asyncio.run(ask())
    assert jobs.read_text().split() == ["1", "1", "1"]


def test_a_question_that_is_not_wanted_any_more_ends_with_its_process(jobs: Path) -> None:
    """Such as when the run is rolled back. The next one has another process."""

    async def ask() -> None:
        asked = Asked()
        asked.waiting.ask(2)
        async with asyncio.timeout(60):
            while not jobs.exists():
                await asyncio.sleep(0.005)
        asked.waiting.ask(None)
        asked.waiting.ask(7)
        (answer,) = await asked.hear(1)
        assert answer.fields == {"seed": 7}
        asked.waiting.ask(8)
        asked.asker.end()
        await asyncio.sleep(0)
        await asked.asker.close()
        assert len(asked.heard) == 1, "nothing is heard after the end"

    asyncio.run(ask())
