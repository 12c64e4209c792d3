"""An own selection strategy: a function of another package that chooses who is given tasks.

The engine knows nothing of packages and names: it is given the function. A strategy keeps no state.
What it goes by is what devices state and what the ledger has of them (device_memory.py), so that a
server that was killed chooses as if it had not been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from fleetlearn_protocol.user_errors import ANY_FAILURE, failure

from fleetlearn_coordinator.rounds.own_stop_rule import OwnRuleError
from fleetlearn_coordinator.rounds.selection_rules import Stated
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord


class WaitingDevice(NamedTuple):
    """A connected device that may be given a task."""

    name: str
    stated: Stated
    """What it said of itself when it checked in: examples, memory, labels of tier and tags."""
    record: DeviceRecord | None
    """Its tasks and its last report that counted. None: it was given no task yet."""


class Choice(NamedTuple):
    """What a selection strategy is asked. In a round it may be asked several times, each time about
    the devices that wait then."""

    devices: Sequence[WaitingDevice]
    """In the order of their names."""
    wanted: int
    """How many are to be chosen, at least 1."""
    round: int
    """The round's number, from 1."""
    random: Iterator[float]
    """As many random numbers in [0, 1) as are taken. They follow from the plan's seed, the round
    and how many tasks it had before, and from nothing else."""


SelectionStrategy: TypeAlias = Callable[[Choice], Sequence[str]]
"""Returns the names of the devices that are to be given tasks, the most wanted first. Fewer than
are wanted: the others wait. More: those for whom there is no slot wait."""


def choose(strategy: SelectionStrategy, choice: Choice) -> list[str]:
    """Return what the strategy chooses. Raises OwnRuleError."""
    try:
        returned = strategy(choice)
        listed = returned is not None and not isinstance(returned, str)
        chosen = [*returned] if listed else []
    except ANY_FAILURE as error:
        raise OwnRuleError(failure("selection.strategy", error)) from error
    if not listed:
        raise OwnRuleError(
            f"selection.strategy returned {returned!r}; expected a list of the chosen devices' "
            "names, which may be empty"
        )
    known = {device.name for device in choice.devices}
    wrong = [name for name in chosen if not isinstance(name, str) or name not in known]
    if wrong:
        raise OwnRuleError(
            f"selection.strategy chose {wrong[0]!r}, which is none of the {len(known)} devices "
            "that wait; expected their names"
        )
    if len({*chosen}) < len(chosen):
        twice = next(name for name in chosen if chosen.count(name) > 1)
        raise OwnRuleError(
            f"selection.strategy chose {twice} twice; a device has one task at a time"
        )
    return chosen


def fractions(numbers: Iterable[int]) -> Iterator[float]:
    """Yield numbers in [0, 1), multiples of 2**-53, made of 64 random bits each."""
    return ((number >> 11) / 2**53 for number in numbers)
