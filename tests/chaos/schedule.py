"""A schedule of faults: drawn from a seed, written to a file, read from there, shortened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.fault_kinds import KINDS, Abilities, Event
from tests.chaos.scenario import Scenario

BETWEEN = 1.5
"""Seconds from one fault to the next, in the mean."""
LONGEST = 8.0
"""Seconds that a fault lasts, at most."""


class Schedule(NamedTuple):
    """What happens to which fleet."""

    seed: int
    scenario: Scenario
    seconds: float
    """How long there are faults."""
    events: Sequence[Event]

    def write(self, path: Path) -> None:
        """Write one line of JSON for the fleet, and one for each fault."""
        head = {
            "seed": self.seed,
            "seconds": self.seconds,
            "scenario": self.scenario._asdict(),
        }
        lines = [json.dumps(row) for row in (head, *(event._asdict() for event in self.events))]
        path.write_text("\n".join(lines) + "\n")

    @staticmethod
    def read(path: Path) -> Schedule:
        """Raises ValueError, whose text names the file."""
        try:
            head, *rows = map(json.loads, path.read_text().splitlines())
            scenario = Scenario(**head["scenario"])
            events = [Event(**row) for row in rows]
            unknown = {event.kind for event in events} - KINDS.keys()
            if unknown:
                raise ValueError(f"no such faults: {', '.join(sorted(unknown))}")
            return Schedule(int(head["seed"]), scenario, float(head["seconds"]), events)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no schedule: {error}; it has a line of JSON for the fleet and one for "
                "each fault, as `make chaos` writes it"
            ) from None


def drawn(seed: int, scenario: Scenario, seconds: float, abilities: Abilities) -> Schedule:
    """Draw faults for so many seconds. Those that this machine cannot do are left out."""
    luck = random.Random(f"schedule {seed}")
    at, events = luck.expovariate(1 / BETWEEN), []
    while at < seconds:
        choices = {name: kind for name, kind in KINDS.items() if kind.targets(scenario)}
        weights = [kind.weight for kind in choices.values()]
        (name,) = luck.choices([*choices], weights)
        kind = choices[name]
        target = luck.choice(kind.targets(scenario))
        lasts = min(LONGEST, kind.seconds * luck.expovariate(1.0)) if kind.seconds else 0.0
        event = Event(round(at, 3), name, target, round(lasts, 3), kind.value(luck))
        if kind.needs is None or getattr(abilities, kind.needs):
            events.append(event)
        at += luck.expovariate(1 / BETWEEN)
    return Schedule(seed, scenario, seconds, events)


def shortened(schedule: Schedule, fails: Callable[[Schedule], bool], tries: int = 30) -> Schedule:
    """Return a schedule with fewer faults that still fails, by delta debugging (Zeller and
    Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002): parts are left out, halves
    at first, then quarters. ``tries``: how often ``fails`` may be called."""
    events, parts = list(schedule.events), 2
    while len(events) >= 1 and tries > 0:
        size = -(-len(events) // parts)
        for begin in range(0, len(events), size):
            rest = events[:begin] + events[begin + size :]
            tries -= 1
            if fails(schedule._replace(events=rest)):
                events, parts = rest, max(2, parts - 1)
                break
            if tries <= 0:
                break
        else:
            if parts >= len(events):
                break
            parts = min(len(events), 2 * parts)
    return schedule._replace(events=events)
