"""Answers that come later: what a conversation asks of a run in another process.

A handler of a conversation that asks something is a generator. Where the run is in this process,
its port answers at once and the generator runs straight through. Where it is not, the port returns
a ``Pending``, and the handler stops until that is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from fleetlearn_protocol.errors import ProtocolError

T = TypeVar("T")


class Pending(Generic[T]):
    """One answer that is not here yet."""

    __slots__ = ("_error", "_then", "_value", "answered")

    def __init__(self) -> None:
        self.answered = False
        """Whether the answer, or the error in its place, is here."""
        self._value: T
        self._error: ProtocolError | None = None
        self._then: Callable[[float], None] | None = None

    def answer(self, value: T, now: float) -> None:
        """The answer came, at ``now`` on the clock of the conversation's owner. Whoever asked goes
        on before this returns. An error of that which is no ProtocolError (the disk is full) is
        raised here. Call ``answer`` or ``fail``, once."""
        self._value = value
        self._end(now)

    def fail(self, error: ProtocolError, now: float) -> None:
        """The question was refused, at ``now``; else as ``answer``."""
        self._error = error
        self._end(now)

    def then(self, go_on: Callable[[float], None]) -> None:
        """Have this called once, with the time at which the answer came. Call before it came, and
        once."""
        assert not self.answered
        assert self._then is None
        self._then = go_on

    def result(self) -> T:
        """Return the answer, which is here. Raises the ProtocolError with which it was refused."""
        if self._error is not None:
            raise self._error
        return self._value

    def _end(self, now: float) -> None:
        assert not self.answered
        self.answered = True
        go_on, self._then = self._then, None
        if go_on is not None:
            go_on(now)


Asking: TypeAlias = Generator[Pending[Any], None, T]
"""What asks questions and returns a ``T``: it yields each ``Pending`` that is not answered, and
goes on once it is."""


def ask(answer: T | Pending[T]) -> Asking[T]:
    """Return the answer, here or later. Raises ProtocolError where it was refused later."""
    if not isinstance(answer, Pending):
        return answer
    if not answer.answered:
        yield answer
    return answer.result()
