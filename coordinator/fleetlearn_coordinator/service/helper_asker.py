"""Asks the helper for what a run waits for, in a thread of its own, and again after pauses.

The thread may hang for as long as ``TIMEOUT``, and nobody waits for it: the run rolls back, stops
or ends meanwhile as it would without it. Between two questions no thread waits, but the event
loop's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread

from fleetlearn_coordinator.secure.helper_client import HelperError, ask_for_sum
from fleetlearn_coordinator.service.training_run.mask_sum import Answer, MaskQuestion, MaskSums

TIMEOUT = 300.0
"""Seconds for an answer. A sum of 16,384 masks of 1,000,000 elements takes the helper half a
minute."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds between two questions: each pause is twice the one before, up to the longest."""


class HelperAsker:
    """Asks a run's questions, one at a time."""

    def __init__(
        self,
        sums: MaskSums,
        loop: asyncio.AbstractEventLoop,
        answered: Callable[[MaskQuestion, Answer], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``answered``, ``failed``: called in the loop's thread with what the helper answered, or
        with an error that is no answer."""
        self._sums, self._loop, self._answered, self._failed = sums, loop, answered, failed
        self._asked: MaskQuestion | None = None
        """What is under way, or is to be asked again after a pause."""
        self._pause = FIRST_PAUSE
        self._again: asyncio.TimerHandle | None = None
        self._is_over = False
        sums.changed = self.look

    def look(self) -> None:
        """Ask what is to be asked now, unless it is being asked. Harmless when repeated."""
        if self._is_over or self._sums.question is self._asked:
            return
        self._stop_pausing()
        self._asked, self._pause = self._sums.question, FIRST_PAUSE
        if self._asked is not None:
            self._ask(self._asked)

    def _ask(self, question: MaskQuestion) -> None:
        # Not one of the loop's own threads: the process's end would wait for it.
        Thread(target=self._ask_in_thread, args=[question], name="helper", daemon=True).start()

    def _ask_in_thread(self, question: MaskQuestion) -> None:
        answer: Answer | Exception
        try:
            answer = ask_for_sum(question.helper, question.request, TIMEOUT)
        except HelperError as error:
            answer = error
        except Exception as error:
            answer = error
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._hand_in, question, answer)

    def _hand_in(self, question: MaskQuestion, answer: Answer | Exception) -> None:
        if self._is_over or question is not self._asked:
            return
        try:
            if isinstance(answer, Exception) and not isinstance(answer, HelperError):
                raise answer
            self._answered(question, answer)
            if self._sums.question is question:
                self._again = self._loop.call_later(self._pause, partial(self._ask, question))
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
        except Exception as error:
            self._failed(error)

    def _stop_pausing(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def end(self) -> None:
        """Ask nothing more. An answer that is under way is not heard."""
        self._is_over = True
        self._stop_pausing()
