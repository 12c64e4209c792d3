"""A process that the supervisor starts: again and again where it dies, and another in its place
where it is replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger("fleetlearn.coordinator")

PAUSES = 0.1, 10.0
"""Seconds between the death of a process and its next start: at first, and at most. Each death soon
after a start doubles them."""
STEADY = 30.0
"""Seconds after which a process that dies was not dying at its start."""
STOPPED_LIMIT = 60.0
"""Seconds after which a process that was stopped (SIGSTOP) is killed, and started again. Seconds in
which this process or the machine stood still do not count."""
LOOK = 1.0
"""Seconds between looks whether a process is stopped."""
READY_TIMEOUT = 60.0
"""Seconds that a gateway's replacement has to be ready."""
DRAIN_LIMIT = 40.0
"""Seconds that a replaced gateway has until it is killed: more than it needs (draining.py)."""


class ReplaceError(Exception):
    """A process was not replaced; the earlier one goes on. The text says why."""


class Child:
    """One process, which is started again and again."""

    end_signal = signal.SIGTERM

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """``name``: for people."""
        self.name = name
        self.process: Process
        self.ended: asyncio.Task[int]
        """Ends with the process, and has its status; cancelled once another has its place."""
        self.changes = asyncio.Lock()
        """Held while the process is being replaced."""
        self._command = command
        self._began = 0.0
        self._pause = PAUSES[0]

    async def start(self) -> None:
        """Start the process. A signal of the terminal does not reach it. Raises OSError."""
        self._have(await self._start(self._command))

    def _have(self, process: Process) -> None:
        self._began = time.monotonic()
        self.process, self.ended = process, asyncio.create_task(process.wait())

    async def _start(self, command: Sequence[str], descriptors: Sequence[int] = ()) -> Process:
        return await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=descriptors
        )

    def next_pause(self) -> float:
        """Return for how many seconds to wait before the next start."""
        if time.monotonic() - self._began > STEADY:
            self._pause = PAUSES[0]
        pause, self._pause = self._pause, min(2 * self._pause, PAUSES[1])
        return pause

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process. A process that a debugger has stopped is
        none, and where there is no /proc this returns False."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[:1] == [b"T"]

    async def kill_if_stopped(self) -> None:
        """Kill the process whenever it was stopped for STOPPED_LIMIT seconds: those who wait for it
        have waited long enough. Never returns."""
        stopped, last = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            stopped = stopped + min(now - last, 2 * LOOK) if self.is_stopped() else 0.0
            last = now
            if stopped > STOPPED_LIMIT:
                text = "%s (process %d) was stopped for %.0f s, and is killed"
                logger.error(text, self.name, self.process.pid, stopped)
                self.process.kill()
                await self.process.wait()
                stopped = 0.0

    async def end(self, timeout: float) -> None:
        """End the process in an orderly way, or at last by force."""
        await self._end(self.process, timeout, self.end_signal)

    async def _end(self, process: Process, timeout: float, number: signal.Signals) -> None:
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await process.wait()
        if process.returncode is None:
            logger.error("%s did not end within %.0f s, and is killed", self.name, timeout)
            process.kill()
            await process.wait()


class Gateway(Child):
    """A gateway, with its sockets. A replacement has another number, since the earlier gateway goes
    on for a while: two numbers in turns."""

    end_signal = signal.SIGINT  # at once: where all is ended, there is no other gateway

    def __init__(
        self, number: int, of: int, command: Sequence[str], sockets: Sequence[socket.socket]
    ) -> None:
        super().__init__(f"gateway {number}", command)
        self._numbers = number, number + of
        self._sockets = sockets
        self._draining: Process | None = None

    async def start(self) -> None:
        process, ready = await self._start_one()
        os.close(ready)  # nobody waits for it
        self._have(process)

    async def _start_one(self) -> tuple[Process, int]:
        """Return a new process, and a descriptor from which a line comes once it is ready."""
        ready, write = os.pipe()
        listening = [one.fileno() for one in self._sockets]
        words = ["--number", str(self._numbers[0]), "--ready", str(write)]
        words += ["--listening", ",".join(map(str, listening))] if listening else []
        try:
            return await self._start([*self._command, *words], [write, *listening]), ready
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(write)

    async def replace(self) -> None:
        """Start another process in place of this one, and then end this one, whose devices go on at
        others. Raises ReplaceError, OSError: the process goes on."""
        async with self.changes:
            self._numbers = self._numbers[::-1]
            try:
                process = await self._start_ready()
            except BaseException:
                self._numbers = self._numbers[::-1]
                raise
            self._draining, ended = self.process, self.ended
            self._have(process)
            ended.cancel()
            self.name = f"gateway {self._numbers[0]}"
        await self._end(self._draining, DRAIN_LIMIT, signal.SIGTERM)
        self._draining = None

    async def _start_ready(self) -> Process:
        """Return a new process that is ready. Raises ReplaceError, OSError."""
        process, ready = await self._start_one()
        try:
            with os.fdopen(ready, "rb", buffering=0) as line:
                status = await _first_byte(line)
            if not status:
                what = "ended" if status is not None else f"was not ready in {READY_TIMEOUT:.0f} s"
                raise ReplaceError(
                    f"{self.name} is not replaced: the process that was to take its place {what}"
                )
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        return process

    async def end(self, timeout: float) -> None:
        if self._draining is not None:
            await self._end(self._draining, timeout, self.end_signal)
        await super().end(timeout)

    def close(self) -> None:
        """Close its sockets: no process of it is left."""
        for one in self._sockets:
            one.close()


async def _first_byte(pipe: BinaryIO) -> bytes | None:
    """Return what comes first; b"" where the pipe ends; None where nothing came in
    READY_TIMEOUT."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe, came.set)
    try:
        async with asyncio.timeout(READY_TIMEOUT):
            await came.wait()
        return pipe.read(1)
    except TimeoutError:
        return None
    finally:
        loop.remove_reader(pipe)
