"""The loop of a process that does jobs for another one: jobs come in by standard input, answers go
out by standard output.

A job is one line, a JSON object, which has the number of ``bytes`` that follow the line. An answer
has the same form; without ``bytes`` nothing follows. ``error`` in an answer says why a job failed.
The process ends with its input, or when the process that started it is gone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from threading import Thread
from typing import Any, BinaryIO, TypeAlias

import msgspec

LOOK = 1.0
"""Seconds between looks whether the process that started this one is still there."""
SKIPPED = 2**20
"""Bytes that are read at a time of content that a job did not read."""


class JobContent:
    """The bytes that follow a job, to be read once, in order."""

    def __init__(self, source: BinaryIO, size: int) -> None:
        """``size``: how many bytes of ``source`` these are."""
        self._source, self.left = source, size

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes. Raises ValueError if the job has fewer left."""
        if size > self.left:
            raise ValueError(f"the job has {self.left} bytes left, {size} are expected")
        found = self._source.read(size)
        if len(found) < size:
            raise EOFError("the input ended within a job")
        self.left -= size
        return found

    def skip(self) -> None:
        """Read what is left."""
        while self.left:
            self.read(min(self.left, SKIPPED))


Answer: TypeAlias = "tuple[dict[str, Any], bytes]"
DoJob: TypeAlias = "Callable[[dict[str, Any], JobContent], Answer]"


def serve_jobs(prepare: Callable[[], DoJob]) -> int:
    """Do jobs until the input ends. Returns the process's exit status.

    ``prepare``: called once; returns what takes a job's line and its content, and returns the
    answer's line and what follows it. What either raises is the answer, as a text."""
    Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    answers, source = sys.stdout.buffer, sys.stdin.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    try:
        do_job = prepare()
    except Exception as error:
        _write(answers, {"error": _text_of(error)}, b"")
        return 1
    for line in source:
        if not line.endswith(b"\n"):
            return 1  # the input ended within a job
        job = msgspec.json.decode(line)
        content = JobContent(source, job.pop("bytes"))
        fields, reply = _done(do_job, job, content)
        try:
            content.skip()
        except EOFError:
            return 1
        _write(answers, fields, reply)
    return 0


def _done(do_job: DoJob, job: dict[str, Any], content: JobContent) -> Answer:
    try:
        return do_job(job, content)
    except Exception as error:
        return {"error": _text_of(error)}, b""


def _text_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _write(answers: BinaryIO, fields: dict[str, Any], content: bytes) -> None:
    answers.write(msgspec.json.encode({**fields, "bytes": len(content)}) + b"\n")
    answers.write(content)
    answers.flush()


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, in the middle of a job too."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)
