"""A process beside this one for what needs ONNX Runtime, which the coordinator does not load.

A job goes in as one line of JSON, which has the number of ``bytes`` that follow it; the answer
comes out in the same form. ``fleetlearn_device.worker`` is the other end. The process is started
with the first job, and again when it died; it ends with this one.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

import msgspec
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.storage.blobs import StoredBytes

MAX_DEATHS = 3
"""Processes that may die of one job. After that the job is given up."""
PIECE = 2**20
"""Bytes of a job's content that are read and sent at a time, and the longest line of an answer."""
PAUSE = 1.0
"""Seconds before a process that died is replaced."""

Content: TypeAlias = Sequence["bytes | StoredBytes"]
"""What follows a job's line, in this order. Stored bytes are read as they are sent."""


def check_installed(what: str, remedy: str) -> None:
    """Raise PlanError if no such process could run here. ``what``: needs it. ``remedy``: what else
    can be done than to install ONNX Runtime."""
    if find_spec("onnxruntime") is None:
        text = f'{what} needs ONNX Runtime: pip install "fleetlearn[evaluation]", or {remedy}'
        raise PlanError(Code.BAD_MESSAGE, text)


class WorkerAnswer(NamedTuple):
    """What a process answered to a job."""

    fields: dict[str, Any]
    """Of the answer's line. ``error``, a text, where the job failed."""
    content: bytes = b""
    """What followed the line."""


class WorkerProcess:
    """One process, which does one job after the other."""

    def __init__(self, module: str, *arguments: str) -> None:
        """``module``: of Python, which is started with these arguments, and whose main function
        calls ``fleetlearn_device.worker.serve_jobs``."""
        self._command = ("-m", module, *arguments)
        self._process: Process | None = None
        self._asking = asyncio.Lock()

    async def ask(
        self,
        job: Mapping[str, Any],
        content: Content = (),
        died: Callable[[int], None] = lambda death: None,
    ) -> WorkerAnswer:
        """Return the answer to a job. A process that dies of it is replaced after a pause, and
        asked the same; if ``MAX_DEATHS`` did so, the answer is an error. ``died``: called with the
        number of each death. Raises OSError (the content cannot be read, no process can start)."""
        for death in range(1, MAX_DEATHS + 1):
            if (answer := await self.ask_once(job, content)) is not None:
                return answer
            died(death)
            await asyncio.sleep(PAUSE)
        return WorkerAnswer({"error": f"{MAX_DEATHS} processes died"})

    async def ask_once(self, job: Mapping[str, Any], content: Content = ()) -> WorkerAnswer | None:
        """Return the answer to a job, or None if the process died of it. Raises OSError."""
        async with self._asking:
            try:
                return await self._ask(await self._running(), job, content)
            except BaseException:
                # It has half a job: whatever it answers belongs to nothing.
                await self.close()
                raise

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            # In its own session, so that Ctrl-C is for the coordinator alone.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                limit=PIECE,
            )
        return self._process

    async def _ask(
        self, process: Process, job: Mapping[str, Any], content: Content
    ) -> WorkerAnswer | None:
        assert process.stdin is not None
        assert process.stdout is not None
        size = sum(part.size if not isinstance(part, bytes) else len(part) for part in content)
        # It may have answered, with an error, and ended before it had read everything.
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode({**job, "bytes": size}) + b"\n")
            async for piece in _pieces(content):
                process.stdin.write(piece)
                await process.stdin.drain()
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            line = await process.stdout.readuntil(b"\n")
            fields: dict[str, Any] = msgspec.json.decode(line)
            return WorkerAnswer(fields, await process.stdout.readexactly(fields.pop("bytes", 0)))
        await process.wait()
        return None

    async def close(self) -> None:
        """End the process at once, whatever it does."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def _pieces(content: Content) -> AsyncIterator[bytes]:
    """Yield the content in pieces. Raises OSError, also where a stored part is shorter than its
    size."""
    for part in content:
        if isinstance(part, bytes):
            yield part
            continue
        for begin in range(0, part.size, PIECE):
            size = min(PIECE, part.size - begin)
            # In another thread: the store may be elsewhere, or its disk slow.
            piece = await asyncio.to_thread(part.read, begin, size)
            if len(piece) < size:
                raise OSError(f"{begin + len(piece)} of {part.size} bytes are there")
            yield piece
