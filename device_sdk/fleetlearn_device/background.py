"""Runs the device in a new thread, for programs whose main thread does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundRun:
    """A coroutine function that runs in a new thread, with an event loop of its own.

    No signal handlers are set. The thread does not keep a process alive that ends.
    """

    def __init__(self, serve: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._serve = serve
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end, for at most ``seconds``. Returns whether it has come.

        Raises what ended the coroutine, once.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True
