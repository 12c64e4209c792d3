"""For state machines of tests: time that passes as a driver lets it pass."""

from __future__ import annotations

from typing import Any, Protocol


class Wakes(Protocol):
    """An engine or a series of exchanges."""

    def wake_at(self) -> float | None: ...

    def tick(self, now: float) -> Any: ...


class Drives(Protocol):
    """A state machine that owns one."""

    now: float

    def do(self, commands: Any) -> None: ...


def let_time_pass(driver: Drives, woken: Wakes, seconds: float) -> None:
    """Wake at each moment within these seconds that ``woken`` names, and carry out what it then
    commands. Raises AssertionError where it wants to be woken again and again."""
    until = driver.now + seconds
    for _ in range(200):
        wake = woken.wake_at()
        if wake is None or wake > until:
            break
        driver.now = max(driver.now, wake)
        driver.do(woken.tick(driver.now))
    else:
        raise AssertionError("it wants to be woken again and again")
    driver.now = until
