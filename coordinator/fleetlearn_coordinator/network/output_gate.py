"""Holds back what is said to devices until what it promises is stored.

The coordinator decides at once, and hears devices on: only its words wait, for the batches of rows
that were being written when they were said. Each run has a gate: one whose store is slow keeps only
its own devices waiting. A store that writes within the call never closes the gate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


class OutputGate:
    """The gate of one run."""

    def __init__(self) -> None:
        self.begun = 0
        """How many batches have begun to be written."""
        self._unsafe: dict[int, None] = {}
        """The numbers of those that are not safe yet, in order."""
        self._held: deque[tuple[int, HeldAction]] = deque()
        """The last batch that each waits for."""

    @property
    def is_open(self) -> bool:
        """Whether all that was decided is stored."""
        return not self._unsafe

    def hold(self, held: HeldAction) -> None:
        """Let this pass once all batches that have begun are safe, after what is held already."""
        self._held.append((self.begun, held))

    def begin(self) -> Action:
        """A batch begins to be written. Returns what is to be called once it is safe."""
        self.begun += 1
        number = self.begun
        self._unsafe[number] = None
        return lambda: self._end(number)

    def _end(self, number: int) -> None:
        self._unsafe.pop(number, None)
        while self._held and (not self._unsafe or self._held[0][0] < next(iter(self._unsafe))):
            self._held.popleft()[1].let_pass()

    def give_up(self) -> None:
        """What has begun will never be safe: nobody may hear of it."""
        self._unsafe.clear()
        lost = [held for _, held in self._held]
        self._held.clear()
        for held in lost:
            held.output.lose()


class OutputOrder:
    """What one connection sends, in the order in which it was said. A device may serve one run
    after another: what the later one says waits for what the earlier one said."""

    __slots__ = ("_cut", "_held")

    def __init__(self, cut: Action) -> None:
        """``cut``: ends the connection. Called where something that the device waits for is
        lost."""
        self._cut = cut
        self._held: deque[HeldAction] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._held

    def do(self, action: Action, gate: OutputGate | None) -> None:
        """Do this once the gate lets it pass, after what waits already. ``gate``: the run's that
        the device serves; None: it serves none, and nothing is promised."""
        if gate is None or gate.is_open:
            if not self._held:
                action()
                return
            self._held.append(HeldAction(self, action, is_safe=True))
            return
        held = HeldAction(self, action, is_safe=False)
        self._held.append(held)
        gate.hold(held)

    def go_on(self) -> None:
        """Do what waits, up to the first that is not safe."""
        while self._held and self._held[0].is_safe:
            self._held.popleft().action()

    def lose(self) -> None:
        """Something that waits will not be said: the connection ends, and the device asks again on
        the next one."""
        if self._held:
            self._held.clear()
            self._cut()


class HeldAction:
    """What a connection is to do, and whether what it promises is stored."""

    __slots__ = ("action", "is_safe", "output")

    def __init__(self, output: OutputOrder, action: Action, *, is_safe: bool) -> None:
        self.output, self.action, self.is_safe = output, action, is_safe

    def let_pass(self) -> None:
        """What it promises is stored."""
        self.is_safe = True
        self.output.go_on()
