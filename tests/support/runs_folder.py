"""A run's folder as the simulator writes it, made of whole cloth: for tests of what is made from
it."""

from __future__ import annotations

import json
from math import exp, pi, sin
from pathlib import Path
from random import Random
from typing import Any

SCENARIO = """\
name = "{name}"
seed = {seed}

[plan]
recipe = "fedavg"
bundle = "/models/digits"

[plan.round]
goal = {goal}

[population]
size = 1000000
connected = {connected}

[data]
kind = "synthetic"
seed = {seed}

[availability]
kind = "diurnal"

[tiers.phone]
share = 3.0

[tiers.board]
share = 1.0
"""


def row(number: int, **values: Any) -> dict[str, Any]:
    """A round that was committed."""
    return {"round": number, "how": "committed", "time": 60.0 * number, "seconds": 60.0} | values


def write_rows(
    folder: Path, rows: list[dict[str, Any]], *, scenario: str = "", summary: Any = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows), "utf-8")
    if scenario:
        (folder / "scenario.toml").write_text(scenario, "utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
    return folder


def write_run(
    folder: Path, rounds: int, *, seed: int = 1, goal: int = 100, rate: float = 0.05
) -> Path:
    """A run with a bit of everything: some rounds are abandoned, a day's tide, causes, partial
    work, two tiers."""
    random = Random(seed)
    rows, time = [], 0.0
    for number in range(rounds):
        seconds = 300 + 200 * sin(2 * pi * time / 86400) + 60 * random.random()
        time += seconds
        abandoned = random.random() < 0.02
        reports = goal // 4 if abandoned else goal
        causes = {
            "train": random.randrange(goal // 4),
            "offline": random.randrange(goal // 8),
            "late": goal // 20,
        }
        loss = 2.3 * exp(-rate * number) + 0.3 + 0.05 * random.random()
        train = {"loss": loss, "accuracy": 1 - loss / 3}
        fast = round(0.8 * reports)
        rows.append(
            row(
                number,
                how="abandoned" if abandoned else "committed",
                time=time,
                seconds=seconds,
                connected=2 * goal - random.randrange(20),
                reports=reports,
                partial=reports // 10,
                train=train,
                evaluation={key: value + 0.02 for key, value in train.items()},
                metrics=train,
                **(
                    {}
                    if number % 2 or abandoned
                    else {"test": {"loss": loss + 0.1, "accuracy": 0.95 - loss / 3}}
                ),
                dropped={"vanished": sum(causes.values()) - goal // 20, "late": goal // 20},
                causes=causes,
                assigned={"0": fast + goal // 5, "1": reports - fast + goal // 5},
                accepted={"0": fast, "1": reports - fast},
                device_seconds={"useful": 40.0 * reports, "wasted": 25.0 * sum(causes.values())},
                bytes={"down": 520_000 * goal, "up": 400_000 * reports},
                change=exp(-rate * number),
            )
        )
    scenario = SCENARIO.format(name=folder.name, seed=seed, goal=goal, connected=2 * goal)
    summary = {
        "reason": f"{rounds} rounds",
        "backend": "bundle",
        "why": "chosen",
        "devices": min(90 * rounds, 999_000),
    }
    return write_rows(folder, rows, scenario=scenario, summary=summary)
