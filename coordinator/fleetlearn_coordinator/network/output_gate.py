"""Holds back what is said to devices until what it promises is stored.

The coordinator decides at once, and hears devices on: only its words wait, in their order, for the
batches of rows that were being written when they were said. A store that writes within the call
never closes the gate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


class OutputGate:
    """The gate of one host, through which everything goes that its connections send."""

    def __init__(self) -> None:
        self._begun = 0
        """How many batches have begun to be written, of all runs together."""
        self._unsafe: dict[int, None] = {}
        """The numbers of those that are not safe yet, in order."""
        self._held: deque[tuple[int, Action]] = deque()
        """The last batch that each waits for, and what is then done."""

    @property
    def is_open(self) -> bool:
        """Whether something may be said at once."""
        return not self._unsafe and not self._held

    def hold(self, action: Action) -> None:
        """Do this once all batches that have begun are safe, after what is held already."""
        self._held.append((self._begun, action))

    def begin(self) -> Action:
        """A batch begins to be written. Returns what is to be called once it is safe."""
        self._begun += 1
        number = self._begun
        self._unsafe[number] = None
        return lambda: self._end(number)

    def _end(self, number: int) -> None:
        self._unsafe.pop(number, None)
        while self._held and (not self._unsafe or self._held[0][0] < next(iter(self._unsafe))):
            self._held.popleft()[1]()
