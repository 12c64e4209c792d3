"""Writes a slow ledger's batches in a thread of their own, so that the event loop never waits for
them.

Batches are written in their order. Those that come while one is written are put together and
written as the next one: however many events there are, each waits for two writes at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from fleetlearn_coordinator.storage.ledger import Row

Action = Callable[[], None]


class BatchWriter:
    """The writer of one ledger. All but its own thread's work is for the thread of the event
    loop."""

    def __init__(
        self,
        write: Callable[[Sequence[Row]], None],
        call: Callable[[Action], object],
        failed: Callable[[BaseException], None],
    ) -> None:
        """``write``: writes a batch, in the writer's thread. ``call``: lets the event loop call
        something soon; safe in any thread. ``failed``: called there with the error that a batch
        ended with. Nothing is written after it."""
        self._write, self._call, self._failed = write, call, failed
        self._changed = threading.Condition()
        self._rows: list[Row] = []
        """What waits to be written."""
        self._submitted = self._safe = 0
        """How many batches were submitted, and how many of these are safe."""
        self._error: BaseException | None = None
        self._closed = False
        self._actions: deque[tuple[int, Action]] = deque()
        """How many batches must be safe, and what is done then."""
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> int:
        """Write a batch after all earlier ones. Returns its number, at once. Raises what an earlier
        batch ended with."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._rows += rows
            self._submitted += 1
            self._changed.notify_all()
            return self._submitted

    @property
    def safe(self) -> int:
        """The number of the last batch that is written. All before it are, too."""
        return self._safe

    @property
    def is_safe(self) -> bool:
        """Whether all batches so far are written, and what was to be done then is done."""
        return self._safe == self._submitted and not self._actions

    def when_safe(self, action: Action) -> None:
        """Call this once all batches so far are written: at once, where they are. Actions are
        called in the order in which they came here; never, where a batch fails."""
        if self.is_safe:
            action()
        else:
            self._actions.append((self._submitted, action))

    def wait(self) -> None:
        """Wait until all batches so far are written. Raises what one ended with."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._safe == self._submitted)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Write what waits, and end the thread. Does not raise: ``wait`` says whether all was
        written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._rows or self._safe < self._submitted
                )
                if self._safe == self._submitted:
                    return
                rows, self._rows, until = self._rows, [], self._submitted
            try:
                self._write(rows)
            except BaseException as error:
                self._end_with(error)
                return
            with self._changed:
                self._safe = until
                self._changed.notify_all()
            self._call(self._do_actions)

    def _end_with(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._call(lambda: self._failed(error))

    def _do_actions(self) -> None:
        while self._actions and self._actions[0][0] <= self._safe:
            self._actions.popleft()[1]()
