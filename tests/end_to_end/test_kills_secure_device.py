"""A device with a masked task is killed with SIGKILL at each step, started again, and asked again
and again: one masked version of its update leaves it, or none, and then by name."""

from __future__ import annotations

import asyncio
import hashlib
import runpy
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol.messages import (
    Accepted,
    Failed,
    Report,
    SecureTask,
    Task,
    TaskFinished,
    TaskWeighing,
)
from line_bundle import line_data, write_line_bundle
from scripted import PATIENCE, Line, Served, scripted
from websockets.exceptions import ConnectionClosed

SCRIPT = Path(__file__).with_name("crash_secure_device.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SCRIPT.parent))
    POINTS = list(runpy.run_path(str(SCRIPT))["POINTS"])
SECURE = SecureTask("helper", 2, 20, helper="09" + "00" * 31)
"""The helper's key is X25519's base point: nobody opens anything here."""
LATE = msgspec.structs.replace(SECURE, least_factor=0.1)
AT_ONCE = [
    "the device's key is made",
    "it is masked at once and not counted",
    "the update is trained and not counted",
    "it is counted and not saved",
    "the masked update is being saved",
    "it is saved and nothing is said",
    "the masked update is being sent",
    "it is accepted and not forgotten",
    "it is forgotten",
]
WAITS = [
    point for point in POINTS if point not in ("nowhere", "it is masked at once and not counted")
]
LOST = {"it is counted and not saved", "the masked update is being saved"}
"""Where an update that is masked at once is counted and not on the disk: it is given back."""


class Left(NamedTuple):
    """What left the device."""

    versions: int
    """Different masked versions of the update."""
    ends: list[str]
    """How the coordinator saw the task end: ``accepted``, or the text of ``failed``."""


class Asking:
    """A coordinator that wants the task's update, and cuts the first upload's connection."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen: set[str] = set()
        self.ends: list[str] = []
        self.factors = 1.0
        self.uploads = 0
        self.over = asyncio.Event()

    async def serve(self, line: Line) -> None:
        try:
            await self._serve(line)
        except (ConnectionClosed, TimeoutError):
            pass
        finally:
            line.cut()

    async def _serve(self, line: Line) -> None:
        held = (await line.check_in()).held
        if held is None:
            if self.ends:
                self.over.set()
            else:
                await line.say(self.task)
        while True:
            message = await line.answer_fetches((Report, TaskFinished, Failed))  # type: ignore
            match message:
                case TaskFinished(task=task):
                    self.factors /= 2  # another one each time, as a coordinator that cheats says
                    await line.say(TaskWeighing(task, self.factors))
                case Failed(text=text):
                    self.ends.append(text)
                    self.over.set()
                case Report():
                    content = await line.take_upload(message)
                    sent = f"{message.sealed} {message.signature}".encode() + content
                    self.seen.add(hashlib.sha256(sent).hexdigest())
                    self.uploads += 1
                    if self.uploads == 1:
                        return
                    await line.say(Accepted(message.task))
                    self.ends.append("accepted")
                    # Another task, which the device must be free for.
                    other = msgspec.structs.replace(self.task, task="r1-2-1")
                    await line.say(msgspec.structs.replace(other, deadline=0.0))


async def lived(folder: Path, secure: SecureTask, point: str, turn: int, mistake: str) -> Left:
    """The life of one task: a process that dies at the point, and the next ones."""
    served = Served(write_line_bundle(folder / "line", buffer=False).path)
    x, y = line_data(20)
    np.savez(folder / "data.npz", x=x, y=y)
    task = served.task("r1-1-1", clip=0.5, secure=secure, parts={"update": "masked"})
    asking = Asking(task)

    async def answer_all() -> None:
        while True:
            serving.append(asyncio.create_task(asking.serve(await coordinator.line())))

    serving: list[asyncio.Task[None]] = []
    async with scripted(served.contents) as coordinator:
        answering = asyncio.create_task(answer_all())
        for number in range(4):
            words = [point, str(turn)] if number == 0 else ["nowhere", "1"]
            arguments = ["run", "--coordinator", coordinator.url, "--state", folder / "state"]
            arguments += ["--data", folder / "data.npz", "--name", "a"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, SCRIPT, *words, mistake, *arguments,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            ended = asyncio.create_task(process.wait())
            over = asyncio.create_task(asking.over.wait())
            try:
                async with asyncio.timeout(3 * PATIENCE):
                    await asyncio.wait([ended, over], return_when=asyncio.FIRST_COMPLETED)
                    if not ended.done():
                        process.terminate()
                        await ended
                    elif number == 0:
                        assert process.returncode == -signal.SIGKILL
            finally:  # also where the test is interrupted
                over.cancel()
                if process.returncode is None:
                    process.kill()
                await process.wait()
            if asking.over.is_set() and number:
                break
        for each in (answering, *serving):
            each.cancel()
        await asyncio.gather(answering, *serving, return_exceptions=True)
    return Left(len(asking.seen), asking.ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secure", "point"),
    [*((SECURE, point) for point in AT_ONCE), *((LATE, point) for point in WAITS)],
    ids=[f"at once: {point}" for point in AT_ONCE] + [f"late: {point}" for point in WAITS],
)
def test_one_masked_version_leaves_the_device(
    tmp_path: Path, secure: SecureTask, point: str
) -> None:
    left = asyncio.run(lived(tmp_path, secure, point, 1, "none"))
    assert left.versions <= 1
    assert left.ends, "the task ends by name"
    lost = "made a masked update for this task already" in left.ends[0]
    assert lost or left.ends[0] == "accepted"
    assert (left.versions == 0) == lost
    if secure is SECURE and point in LOST:
        assert lost


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["loses the update", "sends from memory"])
def test_planted_mistakes_are_found(tmp_path: Path, mistake: str) -> None:
    point = "the masked update is being sent"
    left = asyncio.run(lived(tmp_path, LATE, point, 2, mistake))
    assert left.versions > 1
